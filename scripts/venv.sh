# Sourced by the launch and test scripts: after it, we stand in the repository root and $PYTHON has what the project needs.
# PDSERVE_PYTHON=/path/to/python skips the venv (a GPU host that brings its own torch). PDSERVE_VENV names another folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# install_venv FOLDER STAMP COMMAND...: makes FOLDER and runs COMMAND in it, once per content of STAMP.
install_venv() {
    local folder=$1 stamp=$2 want
    shift 2
    want=$(cat $stamp | sha256sum)
    if [ "$(cat "$folder/.installed" 2>/dev/null)" = "$want" ]; then return; fi
    echo "installing into $folder (first time, or the requirements changed) ..." >&2
    rm -rf "$folder" build ./*.egg-info
    "${PDSERVE_BASE_PYTHON:-python3}" -m venv "$folder" || { echo "cannot make a venv in $folder: is python3-venv installed?" >&2; exit 1; }
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@" || { echo "pip install failed" >&2; exit 1; }
    echo "$want" > "$folder/.installed"
}

if [ -n "${PDSERVE_PYTHON:-}" ]; then
    PYTHON=$PDSERVE_PYTHON
else
    VENV=${PDSERVE_VENV:-.venv}
    install_venv "$VENV" "pyproject.toml constraints-cpu.txt" --constraint constraints-cpu.txt ".[dev]"
    PYTHON=$VENV/bin/python
fi

# libzmq mallocs every frame it receives; with glibc's defaults each large one is mapped and unmapped again (10k page
# faults per 64 MiB). These keep the memory, and must be set before the process starts.
export MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_MMAP_THRESHOLD_=1073741824
