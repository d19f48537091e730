#!/usr/bin/env bash
# Starts one router process; every flag is passed on (--help lists them).
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
exec "$PYTHON" -m router "$@"
