#!/usr/bin/env bash
# The whole system on one host: router, prefill pool, decode pool. Prints `ready http://127.0.0.1:8000` when a request
# has been served; Ctrl-C or SIGTERM stops everything. Without --model it serves the model bundled with the project.
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
exec "$PYTHON" -m scripts.launch_local "$@"
