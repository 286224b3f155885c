#!/usr/bin/env bash
@@title
set -euo pipefail

@@node

# Runs on each host until the work ends or this connection does. Leaves no process there.
tethered() {
  local work tether code=0
  set -m  # the work has a process group of its own
  (node prepare; node train "$@") </dev/null &
  work=$!
  { read -r _ || true; kill -TERM "$work" && sleep 120 && kill -KILL "$work"; } <&0 >/dev/null 2>&1 &
  tether=$!
  wait "$work" || code=$?
  kill -TERM -- "-$work" 2>/dev/null || true  # what prepare started
  kill -TERM -- "-$tether" 2>/dev/null || true
  exit "$code"
}

# Sends the record from the first host, also that of a failed run.
send_record() {
  cd "${record%/*}"
  tar -cf - -- "${record##*/}"*
}

@@check

# Encodes a bash program for whatever login shell a host has.
encoded() { echo "exec bash -c \"\$(echo $(base64 <<<"$1" | tr -d '\n') | base64 -d)\""; }
remote=(ssh -o BatchMode=yes -o ServerAliveInterval=15)
program=$(declare -p @@variables; declare -f node prepare train tethered send_record)

# The hosts work while this pipe has a writer. When it has none, also because this script was killed, they stop.
scratch=$(mktemp -d)
trap 'rm -rf -- "$scratch"' EXIT
mkfifo "$scratch/open"
exec 3<>"$scratch/open"
trap 'echo "launch: stopping" >&2; exec 3>&-' INT TERM

clients=()
for i in "${!hosts[@]}"; do
  "${remote[@]}" "${hosts[i]}" "$(encoded "$program; @@tethered")" <"$scratch/open" 3>&- &
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

name=${record##*/}
mkdir -p "$out/.$name.partial"
if "${remote[@]}" "${hosts[0]}" "$(encoded "$program; send_record")" </dev/null | tar -C "$out/.$name.partial" -xf -; then
  mv -- "$out/.$name.partial"/* "$out/"
  rmdir -- "$out/.$name.partial"
  echo "record  $out/$name"
else
  rm -rf -- "$out/.$name.partial"
  echo "launch: no record came from ${hosts[0]}; if one was begun, it lies there: $record" >&2
  codes+=(1)
fi
for code in "${codes[@]}"; do
  if ((code)); then exit "$code"; fi
done
