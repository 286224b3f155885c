#!/usr/bin/env bash
#SBATCH --job-name=speedrun
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=5:35:00
#SBATCH --signal=TERM@120
#SBATCH --no-requeue
#SBATCH --output=%x-%j.log
#
# A job for SLURM: a batch on one node with eight GPUs, or one run on several nodes. Set the three variables below, then
# submit it from a checkout that all nodes see, with its .venv:
#
#   sbatch jobs/slurm.sh                    a batch with as many runs as a proof takes; or: batch --runs 6
#   sbatch --nodes 2 jobs/slurm.sh run --devices 16 --set stages.0.num_sequences=16 --set eval_sequences=16
#
# Arguments of the script go to speedrun. Those of sbatch override the lines above, as --partition and --account do; for
# --time, `--dry-run` among the arguments prints a limit. With pyxis, give both srun a --container-image and
# --container-mounts=/tmp:/tmp,$data:$data, and export SPEEDRUN_IMAGE.
set -euo pipefail

track=main-8xh100
data=/shared/fineweb10B # its shards and no others, on a disk that all nodes see: speedrun data get --out DIR
out=$PWD/runs           # the record is copied into this folder

(($#)) || set -- batch
stage=/tmp/speedrun-$(id -un) # on each node's own disk; compiled programs stay for the next job
record=$stage/$SLURM_JOB_NAME-$SLURM_JOB_ID
export PATH=$PWD/.venv/bin:$PATH JAX_COMPILATION_CACHE_DIR=$stage/programs
export CUDA_DEVICE_MAX_CONNECTIONS=1 XLA_PYTHON_CLIENT_MEM_FRACTION=0.9

mkdir -p "$out"
[[ -w $out ]] || { echo "slurm.sh: $out cannot be written; choose another folder" >&2; exit 2; }

# Checks a node, and copies the shards to its disk. Nodes with fewer GPUs than the track needs: doctor without --track.
# shellcheck disable=SC2329 # srun calls it
prepare() {
  set -euo pipefail
  # Compiled programs are code, so the folder must be ours.
  (umask 077 && mkdir -p "$stage")
  [[ -O $stage ]] || { echo "slurm.sh: $stage belongs to somebody else; choose another folder" >&2; exit 2; }
  speedrun doctor --track "$track"
  rm -rf -- "$stage/shards" # those of an earlier job may differ
  cp -R -- "$data" "$stage/shards"
  speedrun data verify --track "$track" --data "$stage/shards" --full
}
export -f prepare
export track data stage

# `scancel` and the time limit signal the tasks, which end by themselves. This script stays to copy the record.
trap 'echo "slurm.sh: told to stop" >&2' TERM
# Without --cpu-bind=none a task gets one core.
code=0
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 bash -c prepare || code=$?
if ((code == 0)); then
  # The first process writes the end of the log when the others are gone, so a failed task must not kill it.
  srun --cpu-bind=none --kill-on-bad-exit=0 --wait=600 \
    speedrun "$1" --track "$track" --data "$stage/shards" --out "$record" "${@:2}" || code=$?
fi
# Also of a failed run. The first process runs on this node.
if [[ -e $record ]]; then
  cp -R -- "$record"* "$out"
  rm -rf -- "$record"*
  echo "record  $out/${record##*/}"
fi
exit "$code"
