"""Render files from `templates/`, and the part that all of them share: what a node does.

User input appears once, quoted, as variables at the top of a file. The rest of a script is the same for everybody, so
no value can become code.
"""

import re
import shlex
import textwrap
from importlib import resources
from string import Template

from speedrun.launch.job import Job, clock_time

LEAVE_S = 120  #: from SIGTERM to SIGKILL: time to end a record and copy it
MEET_S = 1800  #: nodes pull images and copy shards at their own pace
_TEMPLATES = resources.files("speedrun.launch") / "templates"


class _Template(Template):
    """A `$` belongs to the shell."""

    delimiter = "@@"


def render(file: str, /, **values: object) -> str:
    """Fill in a template.

    A line is left out if one of its values is empty. A value alone on its line takes the indentation of that line;
    True stands for no text.

    Args:
        file: of `templates/`.
        values: by placeholder; inserted as they are.
    """
    lines = []
    for line in (_TEMPLATES / file).read_text().splitlines():
        template = _Template(line)
        used = {key: values[key] for key in template.get_identifiers()}
        if not all(used.values()):
            continue
        if alone := re.fullmatch(r"( *)@@(\w+)", line):
            lines.append(textwrap.indent(str(used[alone[2]]).rstrip("\n"), alone[1]))
        else:
            lines.append(
                template.substitute({key: "" if value is True else value for key, value in used.items()})
            )
    return "\n".join(lines) + "\n"


def node(job: Job, words: tuple[str, ...], record: str, *, join: str = "", in_workdir: bool = False) -> str:
    """Variables with what was asked, and the functions `node`, `prepare` and `train`.

    Args:
        job: its empty fields are left out.
        words: the command, with what the cluster adds.
        record: the folder of the record on the node, as text of a shell.
        join: lines that add to the command at run time.
        in_workdir: the checkout is the working directory of the job.
    """
    data, rules = job.track.data, job.track.rules
    # A node with a part of the devices cannot run the track by itself.
    is_whole = job.nodes == 1 and job.gpus in (0, rules.num_devices)
    files = textwrap.wrap(" ".join(job.shards), 100, break_on_hyphens=False)
    copy = render(
        "copy.sh", folder=data.folder, files="\n".join(f"{line} \\" for line in files), track=job.track.name
    )
    places = {key: getattr(job, key) for key in ("name", "stage", "out", "data", "checkout", "image")}
    return render(
        "node.sh",
        **{key: shlex.quote(value) if value else "" for key, value in places.items()},
        hosts=shlex.join(job.hosts),
        run=shlex.join(words),
        record=record,
        join=join,
        if_in_workdir=in_workdir,
        if_image=bool(job.image),
        if_checkout=not job.image,
        if_gpus=job.gpus > 0,
        doctor=f"speedrun doctor --track {job.track.name}" if is_whole else "speedrun doctor",
        shards=copy if job.data else data.get,
    )


def check() -> str:
    """Lines that end a script if `$out` cannot be written."""
    return render("out.sh")


def keep() -> str:
    """The function `keep`, which copies the record to `$out`, after `check`."""
    return render("keep.sh", check=check())


def pod(node: str) -> str:
    """The script of a container that does all of the work."""
    return render("pod.sh", node=node, keep=keep())


def variables(job: Job) -> str:
    """Names of the variables that the functions of `node` need in another shell."""
    data, code = ["data"] * bool(job.data), "image" if job.image else "checkout"
    return " ".join(["run", "stage", "record", *data, code])


def title(job: Job, on: str, submit: str) -> str:
    """Comments at the top of a file: what it runs, and how to submit it."""
    nodes = f"{job.nodes} node{'s' * (job.nodes > 1)}"
    size = f"{nodes} of {job.gpus} GPUs" if job.gpus else nodes
    rank = "the hardware of a rank" if job.is_ranked else "not ranked"
    return (
        f"# {job.track.id} on {size}, {clock_time(job.time_s)} at most; {rank}.\n"
        f"# Printed by 'speedrun launch --on {on}', and yours from here on. {submit}"
    )


def limited(job: Job) -> tuple[str, ...]:
    """The command under a time limit, for clusters that have none. The run gets SIGTERM.

    Without --foreground `timeout` signals a run twice, by process and by group, and a second signal ends a run without
    its log.
    """
    return ("timeout", "--foreground", f"--kill-after={LEAVE_S}", str(job.time_s), *job.words)


def meeting(job: Job, first: str) -> tuple[str, ...]:
    """Options with which the processes of a run find each other, the `first` by its address; none for a single node."""
    if job.nodes == 1:
        return ()
    return ("--coordinator", first, "--processes", str(job.nodes), "--meet-within", str(MEET_S))
