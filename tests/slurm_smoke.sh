#!/usr/bin/env bash
# Starts SLURM with one node on this machine, submits `jobs/slurm.sh` for a run with two tasks, and keeps its
# record. Everything else is in a temporary folder; nothing keeps running.
#
#   tests/slurm_smoke.sh OUT [ARGUMENTS OF speedrun run]
#
# Needs slurmctld, slurmd, sbatch and munged (Debian, Ubuntu: apt install slurmctld slurmd slurm-client munge), and a
# `speedrun` on the PATH. Ends with the exit code of the job; $OUT then holds job.sh, job.log and the record.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/help.sh" "${1:-}"

out=$(realpath -m "${1:?need a new folder for the record}")
shift
for program in munged slurmctld slurmd sbatch speedrun; do
  PATH=$PATH:/usr/sbin command -v "$program" >/dev/null || {
    echo "slurm_smoke: $program not found; need SLURM, munge and an activated environment" >&2
    exit 2
  }
done
export PATH=$PATH:/usr/sbin
[[ ! -e $out ]] || {
  echo "slurm_smoke: $out exists already; need a new folder" >&2
  exit 2
}
mkdir -p "$out"

scratch=$(mktemp -d)
daemons=()
# In reverse order of their start, as the controller still needs munge.
# shellcheck disable=SC2329 # the trap calls it
leave() {
  for ((i = ${#daemons[@]} - 1; i >= 0; i--)); do
    kill "${daemons[i]}" 2>/dev/null || true
    wait "${daemons[i]}" 2>/dev/null || true
  done
  rm -rf -- "$scratch"
}
trap leave EXIT
trap 'exit 130' INT TERM

free_port() {
  python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

export SLURM_CONF=$scratch/slurm.conf
mkdir "$scratch/state" "$scratch/spool"
chmod 711 "$scratch"
(umask 077 && head -c 1024 /dev/urandom >"$scratch/munge.key")
# The tasks must be able to resolve the name of the node: JAX meets at the first one.
cat >"$SLURM_CONF" <<END
ClusterName=smoke
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$scratch/munge.sock
StateSaveLocation=$scratch/state
SlurmdSpoolDir=$scratch/spool
SlurmctldPidFile=$scratch/slurmctld.pid
SlurmdPidFile=$scratch/slurmd.pid
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=localhost NodeAddr=127.0.0.1 NodeHostname=$(hostname -s) CPUs=2 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END

# Daemons run in the foreground, as children of this script; each is ready when it answers.
start() {
  "$@" >>"$scratch/daemons.log" 2>&1 &
  daemons+=("$!")
}
until_true() {
  for _ in {1..50}; do
    if "$@" >/dev/null 2>&1; then return; fi
    sleep 0.2
  done
  echo "slurm_smoke: gave up after 10 s on: $*" >&2
  tail -n 20 "$scratch/daemons.log" >&2
  exit 1
}
# shellcheck disable=SC2329 # until_true calls it
is_idle() { [[ $(sinfo --noheader --format=%t) == idle ]]; }
start munged --foreground --force --socket="$scratch/munge.sock" --key-file="$scratch/munge.key" \
  --pid-file="$scratch/munged.pid" --log-file="$scratch/munged.log" --seed-file="$scratch/munged.seed"
until_true test -S "$scratch/munge.sock"
start slurmctld -D -i
until_true sinfo
start slurmd -D -N localhost
until_true is_idle

SPEEDRUN_DATA=$scratch/data speedrun data synth --track smoke-cpu
sed "s|^track=.*|track=smoke-cpu|; s|^data=.*|data=$scratch/data/smoke|; s|^out=.*|out=$out|" \
  "$(dirname "${BASH_SOURCE[0]}")/../jobs/slurm.sh" >"$out/job.sh"

# Arguments of sbatch override the lines of the file: here both tasks are on the one node.
here=(--nodes=1 --ntasks-per-node=2 --gpus-per-node=0 --time=0:20:00 --output="$out/job.log")
sbatch --test-only "${here[@]}" "$out/job.sh" run "$@"
code=0
sbatch --wait "${here[@]}" "$out/job.sh" run "$@" || code=$?
cat "$out/job.log"
exit "$code"
