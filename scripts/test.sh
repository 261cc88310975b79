#!/usr/bin/env bash
# Sets the environment up if needed, then runs every check and test. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
scripts/setup.sh "$venv"
. "$venv/bin/activate"
ruff check .
ruff format --check .
pyright
OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadfile "$@"
