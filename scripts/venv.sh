# Sourced by the launch and test scripts: after it, $PYTHON has what the project needs and finds the project's packages
# from any folder, so that relative paths on the command line mean what the caller means.
# PDSERVE_PYTHON=/path/to/python skips the venv (a GPU host that brings its own torch). PDSERVE_VENV names another folder.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# install_venv FOLDER STAMPS PIP_ARGUMENTS...: makes FOLDER and installs into it, once per content of the STAMPS files.
install_venv() {
    local folder=$1 want lock
    want=$(cd "$ROOT" && cat $2 | sha256sum)
    shift 2
    if [ "$(cat "$folder/.installed" 2>/dev/null)" = "$want" ]; then return; fi
    mkdir -p "$folder" && exec {lock}<"$folder" && flock "$lock" || exit 1  # of scripts that start together one installs
    if [ "$(cat "$folder/.installed" 2>/dev/null)" != "$want" ]; then
        # Only ever into a folder of our own, and never anew: workers may be running out of it.
        if [ ! -e "$folder/.installed" ] && [ -n "$(ls -A "$folder")" ]; then
            echo "$folder has other things in it than a venv that these scripts made: give PDSERVE_VENV an empty or a new folder" >&2
            exit 1
        fi
        echo "installing into $folder (first time, or the requirements changed) ..." >&2
        echo unfinished > "$folder/.installed"
        "${PDSERVE_BASE_PYTHON:-python3}" -m venv "$folder" || { echo "cannot make a venv in $folder: is python3-venv installed?" >&2; exit 1; }
        (cd "$ROOT" && "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@") || { echo "pip install failed" >&2; exit 1; }
        rm -rf "$ROOT"/build "$ROOT"/*.egg-info
        echo "$want" > "$folder/.installed"
    fi
    exec {lock}<&-
}

if [ -n "${PDSERVE_PYTHON:-}" ]; then
    PYTHON=$PDSERVE_PYTHON
else
    VENV=${PDSERVE_VENV:-$ROOT/.venv}
    install_venv "$VENV" "pyproject.toml constraints-cpu.txt" --constraint constraints-cpu.txt ".[dev]"
    PYTHON=$VENV/bin/python
fi
# Our packages, and never a folder of the caller's that happens to be called `model` or `router`.
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1
