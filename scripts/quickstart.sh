#!/usr/bin/env bash
# Makes a validated record from a bare checkout: installs, checks the machine, trains on the smoke track, and shows the
# picture of the run where there is a screen. Only the install needs a network. Arguments go to `speedrun run`, for
# instance --seed 1.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/help.sh" "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install.sh run
export PATH="$PWD/.venv/bin:$PATH"
# Keep the font cache of the first plot inside the checkout.
export MPLCONFIGDIR="${MPLCONFIGDIR:-$PWD/.venv/matplotlib}"

echo "quickstart: checks this machine, then trains for half a minute on idle cores"
speedrun data synth --track smoke-cpu >/dev/null
speedrun doctor --track smoke-cpu
code=0
touch .venv/quickstart
speedrun run --track smoke-cpu "$@" || code=$?

picture=$(find runs -name loss.png -newer .venv/quickstart -print -quit 2>/dev/null) || true
if [[ -t 1 && -n $picture && (-n ${DISPLAY:-}${WAYLAND_DISPLAY:-} || $OSTYPE == darwin*) ]]; then
  python -m webbrowser "file://$PWD/$picture" >/dev/null 2>&1 & # the record is good without it
fi
cat <<END
quickstart: $SECONDS s. By hand: source .venv/bin/activate
A model that answers, in two minutes on two idle cores:
  speedrun run --track docs-cpu --checkpoint-every 1000 --out runs/talk
  speedrun sample runs/talk --prompt 'Return the'
END
exit "$code"
