#!/usr/bin/env bash
# Sets up and runs every test; arguments go to pytest. The independent clients get a venv of their own.
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
CLIENTS=${PDSERVE_CLIENTS_VENV:-$ROOT/.venv-clients}
install_venv "$CLIENTS" tests/clients-requirements.txt --requirement tests/clients-requirements.txt
export PDSERVE_CLIENTS_PYTHON=$CLIENTS/bin/python
cd "$ROOT"
exec "$PYTHON" -m pytest "$@"
