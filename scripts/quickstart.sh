#!/usr/bin/env bash
# Makes a validated record from a bare checkout: installs, checks the machine, trains on the smoke track.
# Only the install needs a network. Says at the end where the seconds went. Arguments go to `speedrun run`, for instance --seed 1.
set -euo pipefail
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/help.sh" "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install.sh run
install_s=$SECONDS
export PATH="$PWD/.venv/bin:$PATH"
# Keep the font cache of the first plot inside the checkout.
export MPLCONFIGDIR="${MPLCONFIGDIR:-$PWD/.venv/matplotlib}"

echo "quickstart: checks this machine, then trains for about two minutes in all"
speedrun data synth --track smoke-cpu >/dev/null
data_s=$((SECONDS - install_s))
speedrun doctor --track smoke-cpu
doctor_s=$((SECONDS - install_s - data_s)) code=0
speedrun run --track smoke-cpu "$@" || code=$?
run_s=$((SECONDS - install_s - data_s - doctor_s))

# The newest record knows how long it compiled and trained. After its last validation come plots and checks.
parts=$(python -c 'import json, pathlib, sys, time
newest = max(pathlib.Path("runs").glob("*/about.json"), key=lambda path: path.stat().st_mtime)
one, run_s = json.loads(newest.read_text()), float(sys.argv[1])
assert time.time() - newest.stat().st_mtime < run_s + 1, "a record of another folder or run"
compile_s, train_s, cold_s = one["compile_s_mean"], one["train_time_s_mean"], one["cold_wall_s_mean"]
print(f"compile {compile_s:.0f}, train {train_s:.0f}, start, warm-up and validations {cold_s - compile_s - train_s:.0f},",
      f"plots and checks {run_s - cold_s:.0f}")' "$run_s" 2>/dev/null) || parts="run $run_s"
echo "quickstart: $SECONDS s: install $install_s, data $data_s, doctor $doctor_s, $parts"
echo "by hand: source .venv/bin/activate"
exit "$code"
