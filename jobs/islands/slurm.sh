#!/usr/bin/env bash
#SBATCH --job-name=islands
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --time=1:00:00
#
# Islands for SLURM, one on each node; the first also drives. Submit it from a checkout that all nodes see, with its .venv:
#
#   sbatch --nodes 8 jobs/islands/slurm.sh --outer-lr 0.7
set -euo pipefail
export PATH=$PWD/.venv/bin:$PATH RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | sha256sum | cut -d ' ' -f 1)
export RAY_AUTH_TOKEN
head=$(hostname):6380
speedrun data synth --track islands-cpu
ray start --head --port=6380 --num-cpus=1 --include-dashboard=false
trap 'ray stop' EXIT
if ((SLURM_NNODES > 1)); then
  srun --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --exclude="$SLURMD_NODENAME" --no-kill --wait=0 \
    ray start --address="$head" --num-cpus=1 --block &
fi
speedrun islands run --address "$head" --islands "$SLURM_NNODES" --out "runs/islands-$SLURM_JOB_ID" "$@"
