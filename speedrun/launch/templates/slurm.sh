#!/usr/bin/env bash
#SBATCH --job-name=@@name
#SBATCH --nodes=@@nodes
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=@@gpus
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=@@time
#SBATCH --signal=TERM@120
#SBATCH --no-requeue
#SBATCH --output=%x-%j.log
#SBATCH --partition=@@partition
#SBATCH --account=@@account
#
@@title
set -euo pipefail

@@node

@@keep

# 'scancel' and the time limit signal the tasks, which end by themselves. This script stays to copy the record.
trap 'echo "launch: told to stop" >&2' TERM
program=$(declare -p @@variables; declare -f node prepare train)
once=(--nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1)
# Without --cpu-bind=none a task gets one core.
task=(--cpu-bind=none)
@@{if_image}task+=(--container-image="$image" --container-mounts="@@mounts")
code=0
@@{if_image}srun "${once[@]}" mkdir -p -m 700 "$stage"
srun "${once[@]}" "${task[@]}" bash -c "$program; node prepare" || code=$?
if ((code == 0)); then
  # The first process writes the end of the log when the others are gone, so a failed task must not kill it.
  srun --kill-on-bad-exit=0 --wait=600 "${task[@]}" bash -c "$program; node train" || code=$?
fi
keep
exit "$code"
