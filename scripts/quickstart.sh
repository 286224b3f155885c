#!/usr/bin/env bash
# Makes a validated record from a bare checkout: installs, checks the machine, trains on the smoke track.
# Only the install needs a network. Arguments go to `speedrun run`, for instance --seed 1.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/help.sh" "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install.sh run
export PATH="$PWD/.venv/bin:$PATH"
# Keep the font cache of the first plot inside the checkout.
export MPLCONFIGDIR="${MPLCONFIGDIR:-$PWD/.venv/matplotlib}"

echo "quickstart: checks this machine, then trains for about two minutes on idle cores"
speedrun data synth --track smoke-cpu >/dev/null
speedrun doctor --track smoke-cpu
code=0
speedrun run --track smoke-cpu "$@" || code=$?

echo "quickstart: $SECONDS s; by hand: source .venv/bin/activate"
exit "$code"
