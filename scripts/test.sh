#!/usr/bin/env bash
# Installs, then lints, checks formats and types, and runs the tests.
#
#   scripts/test.sh [--quick] [ARGUMENTS OF PYTEST]    for instance -k stream
#
# --quick installs no compiler for GPUs (0.6 GB) and skips the tests that need it. Tests of pages need Chromium on the PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

want=dev
if [[ ${1:-} == --quick ]]; then
  want=quick
  shift
fi
scripts/install.sh $want
export PATH="$PWD/.venv/bin:$PATH"
# Caches stay inside the checkout, and the type checker stays off the network.
export MPLCONFIGDIR="${MPLCONFIGDIR:-$PWD/.venv/matplotlib}"
export PYRIGHT_PYTHON_IGNORE_WARNINGS=1

if ! command -v chromium chromium-browser google-chrome >/dev/null; then
  echo "test: found no chromium, chromium-browser or google-chrome; tests of pages in a browser are skipped"
fi
trap 'echo "test: ${SECONDS} s in all"' EXIT
ruff check
ruff format --check
pyright
shellcheck scripts/*.sh
hadolint Dockerfile
pytest -n 2 --dist loadfile "$@" # fixtures and programs of a file are made once
