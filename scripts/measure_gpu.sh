#!/usr/bin/env bash
# Everything that only a GPU can tell, in one command and about ten minutes, on a machine with one or more of them:
# kernels against their definitions, their times, the full-size step, and a short run on real tokens.
#
#   scripts/measure_gpu.sh [OUT]     OUT: a folder for raw outputs; default docs/benchmarks/<date>-<gpu>
#
# Environment, all optional:
#   SPEEDRUN_PYTHON   a Python with JAX for CUDA to use as it is; without it, scripts/install.sh makes .venv
#   SPEEDRUN_SHARDS   a folder of GPT-2 shards for the short run; without it there is none
#
# A part that fails is told in summary.txt, and the others go on.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

if [[ -n ${SPEEDRUN_PYTHON:-} ]]; then
  python=$SPEEDRUN_PYTHON
  export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
else
  scripts/install.sh dev || exit 1
  python=.venv/bin/python
fi
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | tr ' ' '-')
if [[ -z $gpu ]]; then
  echo "measure_gpu: nvidia-smi found no GPU; need one" >&2
  exit 1
fi
out=${1:-docs/benchmarks/$(date +%F)-$gpu}
mkdir -p "$out"
# Programs and the choices of the autotuner are kept between the parts; the choices are an output, too.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$(mktemp -d)}"
speedrun=("$python" -m speedrun)

# Runs a command, keeps what it says in a file of its own, and says how it ended.
part() {
  local name=$1 began=$SECONDS
  shift
  echo "== $name: $*"
  "$@" >"$out/$name.txt" 2>&1
  local code=$?
  ((code == 0)) || ((failed += 1))
  echo "$name: exit $code, $((SECONDS - began)) s" | tee -a "$out/summary.txt"
  tail -n 12 "$out/$name.txt"
}

: >"$out/summary.txt"
failed=0
part machine nvidia-smi
part target "$python" -c 'import jax
from jax._src.lib import xla_client
print(xla_client.get_topology_for_devices(jax.devices()).target_config)'
part doctor "${speedrun[@]}" doctor --json
part estimate "${speedrun[@]}" attempt --track single-gpu --dry-run
part health "${speedrun[@]}" bench health --json
part kernels env SPEEDRUN_TEST_PLATFORM=gpu "$python" -m pytest -q -p no:cacheprovider tests/test_gpu.py
# The whole step: first the form that runs by itself, with the narrowest and the widest window, then the others.
full=(--recipe record21 --devices 1 --steps 5)
part step-w1 "${speedrun[@]}" bench step "${full[@]}" --json
part step-w14 "${speedrun[@]}" bench step "${full[@]}" --first-step 1769 --json
part profile-w14 "${speedrun[@]}" profile --recipe record21 --devices 1 --steps 2 --first-step 1769 --top 40
for form in mosaic flash3 banded; do
  part "step-w14-$form" "${speedrun[@]}" bench step "${full[@]}" --first-step 1769 --attention $form --json
done
part norm "${speedrun[@]}" bench norm --tokens 49152 --heads 6 --dim 128 --json
part muon "${speedrun[@]}" bench muon --recipe record21 --devices 1 --json
part head "${speedrun[@]}" bench head --tokens 49152 --dim 768 --json
for window in 1 2 4 7 10 14; do
  part "attention-w$window" "${speedrun[@]}" bench attention \
    --tokens 49152 --heads 6 --dim 128 --block 128 --window "$window" --json
done
if [[ -n ${SPEEDRUN_SHARDS:-} ]]; then
  part run "${speedrun[@]}" run --track webmini --recipe record21 --devices 1 --data "$SPEEDRUN_SHARDS" \
    --out "$out/record" --set stages.0.num_steps=20 --set eval_seq_len=16384
fi
find "$JAX_COMPILATION_CACHE_DIR" -path '*autotune*' -type f -exec tar -czf "$out/autotune.tar.gz" {} +
echo "measure_gpu: outputs in $out; commit them with a table and the date"
if ((failed)); then
  echo "measure_gpu: $failed parts failed: see $out/summary.txt" >&2
  exit 1
fi
