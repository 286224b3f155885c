#!/usr/bin/env bash
# What scripts/run_8gpu.sh and scripts/run_1gpu.sh do: one process, all GPUs of this machine.
#
#   scripts/run_track.sh TRACK GPUS [ARGUMENTS OF speedrun run]      GPUS may be 0: scripts/run_track.sh smoke-cpu 0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

track=${1:?need a track} gpus=${2:?need a number of GPUs}
shift 2
mkdir -p runs
exec > >(tee -a "runs/$track.log") 2>&1

# One line in the log before each part: what it is and when it began.
part() { echo "== $(date -u +%FT%TZ) $*"; }

found=0
if command -v nvidia-smi >/dev/null; then found=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l); fi
if ((found < gpus)); then
  echo "run_track: found $found GPUs, $track needs $gpus; choose another script, or a machine with more" >&2
  exit 2
fi

# The first two are what NVIDIA recommends for JAX on such nodes; records name them. Compiled programs and the choices
# of the autotuner stay with the user, so that a second run compiles in seconds; its log says so.
if ((gpus > 0)); then
  export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
  export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-1}"
  export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.9}"
fi
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/speedrun/programs}"

part install
scripts/install.sh run
export PATH="$PWD/.venv/bin:$PATH"
part doctor
speedrun doctor
if ((gpus > 0)); then
  part data
  speedrun data get --track "$track"
fi
part run
# In the place of this script, so that a signal to it reaches the run.
exec speedrun run --track "$track" "$@"
