"""What a node does, as functions of bash that every cluster's file holds alike.

What was asked stands once, quoted, as variables at the top of a file; all below it is the same text for everybody, so
that no value can become code.
"""

import shlex
import textwrap

from speedrun.launch.job import Job, clock_time

_NODE = """
# On a node: where its things lie, and what its programs are told.
node() {{
  set -euo pipefail
{exports}
  "$@"
}}
"""

_IN_CHECKOUT = 'export PATH=$checkout/.venv/bin:$PATH\n  cd "$checkout"'
_IN_IMAGE = "export SPEEDRUN_IMAGE=$image"  # a record says which one it ran in, if its name holds its digest
_PLACES = "export SPEEDRUN_DATA=$stage/shards JAX_COMPILATION_CACHE_DIR=$stage/programs"
#: What NVIDIA recommends for JAX on such nodes; records name it.
_FOR_GPUS = "export CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_NVLS_ENABLE=1 XLA_PYTHON_CLIENT_MEM_FRACTION=0.9"

#: Compiled programs are code: a folder that somebody else made would be theirs to choose.
_PREPARE = """
# On each node, first: a bad machine found now costs a minute, and no more. The node's own disk must be ours.
prepare() {{
  (umask 077 && mkdir -p "$stage")
  if [[ ! -O $stage ]]; then
    echo "launch: $stage belongs to somebody else; pass another --stage" >&2
    return 2
  fi
  speedrun doctor{track}
"""

_COPY = """\
  # Anew each time: what an earlier job left here may be something else.
  shards=$SPEEDRUN_DATA/{folder}
  rm -rf -- "$shards"
  mkdir -p "$shards"
  (cd "$data" && cp -- \\
{shards} "$shards")
  if [[ -e $data/manifest.json ]]; then cp -- "$data/manifest.json" "$shards"; fi
  speedrun data verify --track {track} --full
}}
"""

_GET = """\
  {get}
}}
"""

_TRAIN = """
# On each node, then. In the place of the shell, so that a signal reaches the run.
train() {
  exec "${run[@]}" "$@" --out "$record"
}
"""

_KEEP = """
# At the end, also of a run that failed: the record leaves the node, whole under its name. One process writes one.
keep() {
  local folder partial home
  for folder in "$record" "$record.checkpoints"; do
    [[ -e $folder ]] || continue
    partial=$out/.${folder##*/}.partial
    home=$out/${folder##*/}
    # Of an earlier job of this name: both stay.
    if [[ -e $home ]]; then home+=-$(date -u +%Y%m%d-%H%M%S); fi
    rm -rf -- "$partial"
    cp -R -- "$folder" "$partial"
    mv -T -- "$partial" "$home"
    rm -rf -- "$folder"
    echo "record  $home"
  done
}
"""

#: On the machine that the record comes home to.
READY = """
# Before anything runs: where the record goes can be written.
if ! mkdir -p "$out" || [[ ! -w $out ]]; then
  echo "launch: $out cannot be written; pass another --out" >&2
  exit 2
fi
"""

#: For a shell that is the first process of a container: such a one passes no signal on by itself.
WORK = """
code=0 told=
(node prepare; node train) &
work=$!
trap 'told=yes; kill -TERM "$work" 2>/dev/null || true' TERM INT
wait "$work" || code=$?
# A signal ends a wait, not what was waited for.
while [[ $told ]]; do
  code=0 told=
  wait "$work" || code=$?
done
keep
exit "$code"
"""


def functions(job: Job) -> str:
    """`node`, with which each of the others is called on a node: `prepare` and `train`."""
    exports = [_IN_IMAGE if job.image else _IN_CHECKOUT, _PLACES, *[_FOR_GPUS] * (job.gpus > 0)]
    data, rules = job.track.data, job.track.rules
    # A node that has a part of the devices only is not one that could run the track.
    is_whole = job.nodes == 1 and job.gpus in (0, rules.num_devices)
    prepare = _PREPARE.format(track=f" --track {job.track.name}" if is_whole else "")
    if job.data:
        staged = _COPY.format(folder=data.folder, shards=_wrapped(job.shards), track=job.track.name)
    else:
        staged = _GET.format(get=data.get)
    return _NODE.format(exports="\n".join(f"  {line}" for line in exports)) + prepare + staged + _TRAIN


def _wrapped(words: list[str]) -> str:
    """Words on lines that can be read, each but the last with the sign that it goes on."""
    lines = textwrap.wrap(" ".join(words), 100, break_on_hyphens=False)
    return " \\\n".join(f"    {line}" for line in lines)


def variables(job: Job) -> list[str]:
    """The names of those that `functions` needs; whoever calls them in another shell hands these on."""
    return ["run", "stage", "record", *["data"] * bool(job.data), "image" if job.image else "checkout"]


def keep() -> str:
    """The function that brings the record where it stays; a place that cannot be written is told at once."""
    return _KEEP + READY


def title(job: Job, on: str, then: str) -> list[str]:
    """The first lines of a file, as comments: what it is, and what to type."""
    nodes = f"{job.nodes} node{'s' * (job.nodes > 1)}"
    size = f"{nodes} of {job.gpus} GPUs" if job.gpus else nodes
    rank = "the hardware of a rank" if job.is_ranked else "not ranked"
    return [
        f"# {job.track.id} on {size}, {clock_time(job.time_s)} at most; {rank}.",
        f"# Printed by 'speedrun launch --on {on}', and yours from here on. {then}",
    ]


def limit(job: Job, leave_s: int) -> tuple[str, ...]:
    """Words before a run that no cluster ends, so that it gets SIGTERM when its time is over.

    In the foreground `timeout` passes a signal on once. By default it does so twice, by process and by group, and a
    run takes the second one for haste: its end would not be written.
    """
    return ("timeout", "--foreground", f"--kill-after={leave_s}", str(job.time_s))


def asked(job: Job, words: tuple[str, ...]) -> str:
    """What was asked, as variables of bash, one a line, quoted.

    Args:
        job: what stands in it empty is left out.
        words: of `speedrun run` or `speedrun batch`, with what the cluster adds.
    """
    places = {
        "stage": job.stage,
        "out": job.out,
        "data": job.data,
        "checkout": job.checkout,
        "image": job.image,
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in {"name": job.name, **places}.items() if value]
    lines += [f"hosts=({shlex.join(job.hosts)})"] * bool(job.hosts)
    return "\n".join([*lines, f"run=({shlex.join(words)})\n"])
