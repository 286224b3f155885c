#!/usr/bin/env bash
# Makes a validated record from a bare checkout: installs, checks the machine, trains on the smoke track.
# Only the install needs a network. Says at the end how long each part took. Arguments go to `speedrun run`, for instance --seed 1.
set -euo pipefail
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/help.sh" "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install.sh run
install_s=$SECONDS
export PATH="$PWD/.venv/bin:$PATH"
# Keep the font cache of the first plot inside the checkout.
export MPLCONFIGDIR="${MPLCONFIGDIR:-$PWD/.venv/matplotlib}"

echo "quickstart: checks this machine, then trains for about two minutes on idle cores"
speedrun data synth --track smoke-cpu >/dev/null
data_s=$((SECONDS - install_s))
speedrun doctor --track smoke-cpu
doctor_s=$((SECONDS - install_s - data_s)) code=0
speedrun run --track smoke-cpu "$@" || code=$?
run_s=$((SECONDS - install_s - data_s - doctor_s))

echo "quickstart: $SECONDS s: install $install_s, data $data_s, doctor $doctor_s, run $run_s"
echo "by hand: source .venv/bin/activate"
exit "$code"
