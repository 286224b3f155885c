#!/usr/bin/env bash
# Makes a record ready to submit, from a bare checkout. For scripts/run_8gpu.sh and scripts/run_1gpu.sh.
#
#   scripts/run_track.sh TRACK GPUS [ARGUMENTS OF speedrun attempt]      GPUS may be 0: scripts/run_track.sh smoke-cpu 0
#
# Installs, then runs `speedrun attempt`: doctor, data, batch, stats, validate, submit. After an interruption the same
# command continues. It first prints what this takes. `--dry-run` stops there; it needs no GPU, writes no log, and installs
# nothing: without packages it says what would be installed.
#
# Environment, all optional:
#
#   SPEEDRUN_DOLLARS   price of one GPU for an hour; default 2.50
#   SPEEDRUN_DATA      folder for data; default ./data
#   SPEEDRUN_PYTHON    a Python with all packages; default: scripts/install.sh makes .venv
#
# All output is also in runs/TRACK.log.
set -euo pipefail
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/help.sh" "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

track=${1:?need a track} gpus=${2:?need a number of GPUs}
shift 2
dry=
if [[ " $* " == *" --dry-run "* ]]; then dry=yes; fi
if [[ -z $dry ]]; then
  mkdir -p runs
  # A signal to the process group must not end the log before the run.
  exec > >(trap '' INT TERM && exec tee -a "runs/$track.log") 2>&1
fi

found=0
if command -v nvidia-smi >/dev/null; then
  found=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l) || found=0
fi
if ((found < gpus)) && [[ -z $dry ]]; then
  echo "run_track: found $found GPUs, $track needs $gpus; choose another script, or a machine with more" >&2
  exit 2
fi

# NVIDIA recommends the first two for JAX on such nodes; records name them. The cache keeps compiled programs and
# choices of the autotuner, so that a second run compiles in seconds; its log says so.
if ((gpus > 0)); then
  export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
  export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-1}"
  export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.9}"
fi
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/speedrun/programs}"

python=${SPEEDRUN_PYTHON:-.venv/bin/python}
if [[ -n $dry && -z ${SPEEDRUN_PYTHON:-} && ! -x .venv/bin/speedrun ]]; then
  echo "dry run: would install, scripts/install.sh run, then: speedrun attempt --track $track $*"
  echo "dry run: time, disk space and cost need the packages; install them, and type this again"
  exit
elif [[ -z $dry && -z ${SPEEDRUN_PYTHON:-} ]]; then
  echo "== $(date -u +%FT%TZ) install: scripts/install.sh run"
  scripts/install.sh run
fi
# exec, so that a signal to this script reaches the run.
exec "$python" -m speedrun attempt --track "$track" "$@"
