#!/usr/bin/env bash
# Runs `speedrun bench all`, everything to be measured on a GPU, in half an hour. The GPU machine needs no network:
# missing packages are brought along.
#
#   scripts/measure_gpu.sh --wheels DIR                  with a network: fetches missing packages, about 4 MiB
#   scripts/measure_gpu.sh [--from DIR] [OPTIONS]        on the GPU machine: installs them into .gpu/packages, measures
#   scripts/measure_gpu.sh [--from DIR] --rehearse       the same parts tiny on a CPU, in a few minutes
#
#   --out DIR             results; default ./measured. Earlier results stay
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

# Fetches what Python 3.12 with JAX for CUDA 13 lacks on Linux x86-64, by the digests of the lock files. Of FlashAttention
# only version 3 is kept, which is called: the whole wheel has 74 MiB.
fetch() {
  "$python" -m pip download --quiet --no-deps --require-hashes --only-binary=:all: --python-version=3.12 \
    --implementation=cp --platform=manylinux_2_28_x86_64 --platform=manylinux2014_x86_64 --dest "$1" \
    --requirement <(sed -n '/^\(flatbuffers\|msgspec\)==/,/[^\\]$/p' requirements/run.lock) \
    --requirement requirements/attention-cuda13.lock
  "$python" - "$1"/dew_flash_attn*.whl <<'END'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    kept = {name: wheel.read(name) for name in wheel.namelist() if "attn3.so" in name or ".dist-info/" in name}
with zipfile.ZipFile(sys.argv[1], "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
    for name, raw in kept.items():
        wheel.writestr(name, raw)
END
}

wheels=${SPEEDRUN_WHEELS:-}
case ${1:-} in
  --wheels) fetch "${2:?--wheels needs a folder}" && exit ;;
  --from) wheels=${2:?--from needs the folder that --wheels filled} && shift 2 ;;
esac
if [[ -n $wheels ]]; then
  "$python" -m pip install --quiet --no-index --no-deps --upgrade --target .gpu/packages "$wheels"/*.whl
fi
export PYTHONPATH="$PWD:$PWD/.gpu/packages${PYTHONPATH:+:$PYTHONPATH}"
if ! missing=$("$python" -c 'import click, flatbuffers, jax, msgspec, optax' 2>&1); then
  echo "measure_gpu: $python lacks a package (${missing##*$'\n'}); need --from DIR with the wheels of --wheels" >&2
  exit 2
fi
exec "$python" -m speedrun bench all "$@"
