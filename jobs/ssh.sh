#!/usr/bin/env bash
# A job for hosts that you reach by ssh without a password: a batch on one host with eight GPUs, or one run on several.
# Set the three variables, then, on your own machine (bash 4.3 or newer):
#
#   bash jobs/ssh.sh batch --runs 6
#   bash jobs/ssh.sh run --devices 16 --set stages.0.num_sequences=16 --set eval_sequences=16
#
# Arguments go to speedrun. It runs until all hosts are done, and then fetches the record into ./runs. Ctrl-C stops all
# hosts, and so does a lost connection.
set -euo pipefail

hosts=(me@node1)           # the others must reach port 12355 of the first by its name
checkout=/home/me/speedrun # on each host, with its .venv
track=main-8xh100

(($#)) || set -- batch --runs 6
limit_s=7800 # what the track grants for compiling, and twice what `speedrun plan --track` predicts
name=$track-$(date -u +%Y%m%d-%H%M%S)
words=("$@")
if ((${#hosts[@]} > 1)); then
  words+=(--coordinator "${hosts[0]##*@}:12355" --processes "${#hosts[@]}" --meet-within 1800)
fi

# Goes to the checkout of a host. Compiled programs are code, so their folder must be ours.
enter() {
  set -euo pipefail
  stage=/tmp/speedrun-$(id -un)
  (umask 077 && mkdir -p "$stage")
  [[ -O $stage ]] || { echo "ssh.sh: $stage belongs to somebody else; choose another folder" >&2; exit 2; }
  cd "$checkout"
  export PATH=$checkout/.venv/bin:$PATH SPEEDRUN_DATA=$stage/data JAX_COMPILATION_CACHE_DIR=$stage/programs
  export CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_NVLS_ENABLE=1 XLA_PYTHON_CLIENT_MEM_FRACTION=0.9
}

# Checks a host, gets the shards, runs. Hosts with fewer GPUs than the track needs: doctor without --track. Without
# --foreground timeout signals a run twice.
work() {
  speedrun doctor --track "$track"
  speedrun data get --track "$track"
  exec timeout --foreground --kill-after=120 "$limit_s" \
    speedrun "${words[0]}" --track "$track" --out "$stage/$name" "${words[@]:1}" "$@"
}

# Works on a host until the work ends or this connection does. Leaves no process there.
tethered() {
  local work tether code=0
  set -m # the work has a process group of its own
  work "$@" </dev/null &
  work=$!
  { read -r _ || true; kill -TERM "$work" && sleep 120 && kill -KILL "$work"; } <&0 >/dev/null 2>&1 &
  tether=$!
  wait "$work" || code=$?
  kill -TERM -- "-$work" 2>/dev/null || true # what it started
  kill -TERM -- "-$tether" 2>/dev/null || true
  exit "$code"
}

# Sends the record, also that of a failed run.
send() {
  cd "$stage"
  tar -cf - -- "$name"*
}

# on HOST COMMAND...: runs these functions there, whatever its login shell is.
on() {
  local program
  program="$(declare -p checkout track limit_s name words); $(declare -f enter work tethered send); enter; ${*:2}"
  ssh -o BatchMode=yes -o ServerAliveInterval=15 "$1" \
    "exec bash -c \"\$(echo $(base64 <<<"$program" | tr -d '\n') | base64 -d)\""
}

# The hosts work while this pipe has a writer. When it has none, also because this script was killed, they stop.
scratch=$(mktemp -d)
trap 'rm -rf -- "$scratch"' EXIT
mkfifo "$scratch/open"
exec 3<>"$scratch/open"
trap 'echo "ssh.sh: stopping" >&2; exec 3>&-' INT TERM
clients=()
for i in "${!hosts[@]}"; do
  if ((${#hosts[@]} > 1)); then number=(--process "$i"); else number=(); fi
  on "${hosts[i]}" tethered "${number[@]}" <"$scratch/open" 3>&- &
  clients+=("$!")
done

# After the first failure the others have half a minute to end by themselves, then they are stopped.
codes=() deadline=999999999
while ((${#codes[@]} < ${#hosts[@]})); do
  for i in "${!clients[@]}"; do
    if kill -0 "${clients[i]}" 2>/dev/null; then continue; fi
    codes[i]=0
    wait "${clients[i]}" || codes[i]=$?
    unset "clients[i]"
    if ((codes[i] && SECONDS + 30 < deadline)); then deadline=$((SECONDS + 30)); fi
  done
  if ((SECONDS >= deadline)); then exec 3>&-; fi
  sleep 0.5
done
exec 3>&-

mkdir -p runs "$scratch/record"
if on "${hosts[0]}" send </dev/null | tar -C "$scratch/record" -xf -; then
  mv -- "$scratch/record"/* runs/
  echo "record  runs/$name"
else
  echo "ssh.sh: no record came from ${hosts[0]}; if one was begun, it is in its /tmp/speedrun-*/$name" >&2
  codes+=(1)
fi
for code in "${codes[@]}"; do
  if ((code)); then exit "$code"; fi
done
