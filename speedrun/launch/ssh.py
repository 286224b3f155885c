"""Hosts that are reached by ssh: a bash script for the user's own machine, which runs until all hosts are done."""

from speedrun.launch import shell
from speedrun.launch.job import PORT, Job


def text(job: Job) -> str:
    """Return the script. It needs bash 4.3 or newer; hosts need ssh without a password and the checkout."""
    first = f"{job.hosts[0].rpartition('@')[2]}:{PORT}"  # as the others must be able to reach it
    words = (*shell.limited(job), *shell.meeting(job, first))
    return shell.render(
        "ssh.sh",
        title=shell.title(job, "ssh", "Start it with: bash FILE"),
        node=shell.node(job, words, "$stage/$name-$(date -u +%Y%m%d-%H%M%S)"),
        check=shell.check(),
        variables=shell.variables(job),
        tethered="tethered --process $i" if job.nodes > 1 else "tethered",
    )
