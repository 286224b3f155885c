#!/usr/bin/env bash
# Runs `speedrun bench all`, everything to be measured on a GPU, in half an hour. The GPU machine needs no network:
# missing packages are brought along.
#
#   scripts/measure_gpu.sh --wheels DIR                  with a network: fetches missing packages, about 4 MiB
#   scripts/measure_gpu.sh [--from DIR] [OPTIONS]        on the GPU machine: installs them into .gpu/packages, measures
#   scripts/measure_gpu.sh [--from DIR] --rehearse       the same parts tiny on a CPU, in a few minutes
#
#   --out DIR             results; default docs/benchmarks/<date>-<gpu>. Earlier results stay
#   --minutes N           time limit of this slice; the same command continues with the parts that have no result
#   --parts NAME,...      only these, also again; a wrong name lists them all
#   --shards DIR          3 million real tokens (*_train_*.bin) and 131,073 to score (*_val_*.bin), in llm.c's format;
#                         default: synthetic ids with the document lengths of FineWeb
#   --rival DIR           another program, DIR/run, timed in turns with ours: see speedrun/bench/rival.py
#
# Environment, all optional:
#   SPEEDRUN_PYTHON       the Python with JAX for CUDA; default python3. Nothing is installed into it
#   SPEEDRUN_WHEELS       the same as --from
#
# Compiled programs stay in .gpu for the next try. Exits with 1 if a part gave no figures; the summary says why. Whether the
# kernels are right is a test: SPEEDRUN_TEST_PLATFORM=gpu pytest tests/test_gpu.py
set -euo pipefail
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/help.sh" "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${SPEEDRUN_PYTHON:-python3}
wheels=${SPEEDRUN_WHEELS:-}
case ${1:-} in
  --wheels)
    (($# == 2)) || { echo "measure_gpu: --wheels needs a folder, and nothing else" >&2; exit 2; }
    exec "$python" scripts/gpu_wheels.py pack "$2"
    ;;
  --from)
    (($# >= 2)) || { echo "measure_gpu: --from needs the folder that --wheels filled" >&2; exit 2; }
    wheels=$2
    shift 2
    ;;
esac
if [[ -n $wheels ]]; then "$python" scripts/gpu_wheels.py install "$wheels" .gpu/packages; fi
export PYTHONPATH="$PWD:$PWD/.gpu/packages${PYTHONPATH:+:$PYTHONPATH}"
if ! missing=$("$python" -c 'import click, flatbuffers, jax, msgspec, optax' 2>&1); then
  echo "measure_gpu: $python lacks a package (${missing##*$'\n'}); need --from DIR with the wheels of --wheels" >&2
  exit 2
fi
exec "$python" -m speedrun bench all "$@"
