#!/usr/bin/env bash
# Installs, then lints, checks formats and types, and runs the tests. Arguments go to pytest, for instance -k stream.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install.sh dev
export PATH="$PWD/.venv/bin:$PATH"
# Caches stay inside the checkout, and the type checker stays off the network.
export MPLCONFIGDIR="${MPLCONFIGDIR:-$PWD/.venv/matplotlib}"
export PYRIGHT_PYTHON_IGNORE_WARNINGS=1

trap 'echo "test: ${SECONDS} s in all"' EXIT
ruff check
ruff format --check
pyright
pytest -n 2 "$@"
