#!/usr/bin/env bash
# Installs, then runs tests.
#
#   scripts/test.sh [ARGUMENTS OF PYTEST]             lints, checks formats and types, and runs the default group
#   scripts/test.sh --compile [ARGUMENTS OF PYTEST]   compilers for absent GPUs (0.6 GB more to install), and what else takes minutes
#   scripts/test.sh --page [ARGUMENTS OF PYTEST]      pages in a browser: needs Chromium on the PATH
#   scripts/test.sh --all [ARGUMENTS OF PYTEST]       all of these, with a limit of processor time for each test of the default group
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/help.sh" "${1:-}"
group=default
case ${1:-} in
  --compile | --page | --all) group=${1#--} && shift ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case $group in
  compile | all) scripts/install.sh compile ;;
  *) scripts/install.sh dev ;;
esac
export PATH="$PWD/.venv/bin:$PATH"
# Caches, also of bytecode, stay inside the checkout, and the type checker stays off the network.
export MPLCONFIGDIR="${MPLCONFIGDIR:-$PWD/.venv/matplotlib}"
export PYRIGHT_PYTHON_IGNORE_WARNINGS=1 PYTHONDONTWRITEBYTECODE=
# Programs that no test run has used for two weeks.
if [[ -d .venv/programs ]]; then find .venv/programs -type f -atime +14 -delete; fi

trap 'echo "test: ${SECONDS} s in all"' EXIT
if [[ $group != compile && $group != page ]]; then
  ruff check
  ruff format --check
  pyright --threads 2
  shellcheck scripts/*.sh tests/*.sh
  hadolint Dockerfile
fi
tests=(pytest -n 2 --dist loadfile) # fixtures and programs of a file are made once
case $group in
  default) "${tests[@]}" "$@" ;;
  all) "${tests[@]}" --processor-limit-s 60 "$@" && "${tests[@]}" -m "compile or page" "$@" ;;
  *) "${tests[@]}" -m "$group" "$@" ;;
esac
