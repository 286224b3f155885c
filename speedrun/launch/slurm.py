"""A job of SLURM: one task on each node, which has all of it."""

from speedrun.ground.errors import UsageError
from speedrun.launch import shell
from speedrun.launch.job import Job, clock_time


def text(job: Job) -> str:
    """Return the script for `sbatch`, whose own arguments override the `#SBATCH` lines.

    Raises:
        UsageError: for a path that cannot be mounted into a container.
    """
    if job.image and set(job.data + job.stage) & set(":,"):
        raise UsageError(
            f"--data {job.data}, --stage {job.stage}: mounts of a container know no : or , in a path"
        )
    return shell.render(
        "slurm.sh",
        name=job.name,
        nodes=job.nodes,
        gpus=job.gpus,
        time=clock_time(job.time_s),
        partition=job.partition,
        account=job.account,
        title=shell.title(job, "slurm", "Submit it with: sbatch FILE"),
        node=shell.node(job, job.words, "$stage/$name-$SLURM_JOB_ID"),
        keep=shell.keep(),
        variables=shell.variables(job),
        if_image=bool(job.image),
        mounts="$stage:$stage" + (",$data:$data" if job.data else ""),
    )
