#!/usr/bin/env bash
# Starts one decode process; every flag is passed on (--help lists them).
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
exec "$PYTHON" -m decode "$@"
