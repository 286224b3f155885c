"""Hosts that are reached by ssh: a script of bash for your own machine, which stays until all of them are done."""

from speedrun.launch import shell
from speedrun.launch.job import PORT, Job

_MEET_S = 1800
_LEAVE_S = 120

#: On each host. A lost connection ends the run there: nothing stays behind.
_TETHERED = """
# On each host: until the work ends, or this connection does. Nothing stays behind there.
tethered() {{
  local work tether code=0
  set -m  # the work has a process group of its own
  (node prepare; node train "$@") </dev/null &
  work=$!
  {{ read -r _ || true; kill -TERM "$work" && sleep {leave_s} && kill -KILL "$work"; }} <&0 >/dev/null 2>&1 &
  tether=$!
  wait "$work" || code=$?
  kill -TERM -- "-$work" 2>/dev/null || true  # what a node was being prepared with
  kill -TERM -- "-$tether" 2>/dev/null || true
  exit "$code"
}}

# On the first host, at the end: the record, also of a run that failed.
sent() {{
  cd "${{record%/*}}"
  tar -cf - -- "${{record##*/}}"*
}}
"""

_START = r"""
# A program for bash, so that whatever shell a host has need not understand it.
told() {{ echo "exec bash -c \"\$(echo $(base64 <<<"$1" | tr -d '\n') | base64 -d)\""; }}
remote=(ssh -o BatchMode=yes -o ServerAliveInterval=15)
program=$(declare -p {variables}; declare -f node prepare train tethered sent)

# While this pipe has a writer the hosts work. When it has none, also because this script was killed, they stop.
scratch=$(mktemp -d)
trap 'rm -rf -- "$scratch"' EXIT
mkfifo "$scratch/open"
exec 3<>"$scratch/open"
trap 'echo "launch: stopping" >&2; exec 3>&-' INT TERM

clients=()
for i in "${{!hosts[@]}}"; do
  "${{remote[@]}}" "${{hosts[i]}}" "$(told "$program; tethered{process}")" <"$scratch/open" 3>&- &
  clients+=("$!")
done

# After the first failure the others have half a minute to write down their end; then they are stopped.
codes=() patience=999999999
while ((${{#codes[@]}} < ${{#hosts[@]}})); do
  for i in "${{!clients[@]}}"; do
    if kill -0 "${{clients[i]}}" 2>/dev/null; then continue; fi
    codes[i]=0
    wait "${{clients[i]}}" || codes[i]=$?
    unset "clients[i]"
    if ((codes[i] && SECONDS + 30 < patience)); then patience=$((SECONDS + 30)); fi
  done
  if ((SECONDS >= patience)); then exec 3>&-; fi
  sleep 0.5
done
exec 3>&-

name=${{record##*/}}
mkdir -p "$out/.$name.partial"
if "${{remote[@]}}" "${{hosts[0]}}" "$(told "$program; sent")" </dev/null | tar -C "$out/.$name.partial" -xf -; then
  mv -- "$out/.$name.partial"/* "$out/"
  rmdir -- "$out/.$name.partial"
  echo "record  $out/$name"
else
  rm -rf -- "$out/.$name.partial"
  echo "launch: no record came from ${{hosts[0]}}; if one was begun, it lies there: $record" >&2
  codes+=(1)
fi
for code in "${{codes[@]}}"; do
  if ((code)); then exit "$code"; fi
done
"""


def text(job: Job) -> str:
    """The script. It needs bash 4.3 or newer; hosts need ssh without a password, the checkout, and nothing else."""
    words = (*shell.limit(job, _LEAVE_S), *job.words)
    if job.nodes > 1:
        first = f"{job.hosts[0].rpartition('@')[2]}:{PORT}"  # as the others must be able to reach it
        words += ("--coordinator", first, "--processes", str(job.nodes), "--meet-within", str(_MEET_S))
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *shell.title(job, "ssh", "Start it with: bash FILE"),
            "set -euo pipefail",
            "",
            shell.asked(job, words)
            + "record=$stage/$name-$(date -u +%Y%m%d-%H%M%S)\n"
            + shell.functions(job)
            + _TETHERED.format(leave_s=_LEAVE_S)
            + shell.READY
            + _START.format(
                variables=" ".join(shell.variables(job)), process=" --process $i" if job.nodes > 1 else ""
            ),
        ]
    )
