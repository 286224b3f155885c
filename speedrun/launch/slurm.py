"""A job of SLURM: one task on each node, which has all of it."""

from speedrun.ground.errors import UsageError
from speedrun.launch import shell
from speedrun.launch.job import Job, clock_time

#: The limit of time sends SIGTERM so long before the end: enough to write a checkpoint and the end of a record.
_LEAVE_S = 120

_STEPS = """
# 'scancel' and the time limit tell the tasks, which end by themselves; this script stays to bring the record home.
trap 'echo "launch: told to stop" >&2' TERM
program=$(declare -p {variables}; declare -f node prepare train)
once=(--nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1)
task=({options})
code=0
{mounted}srun "${{once[@]}}" "${{task[@]}}" bash -c "$program; node prepare" || code=$?
if ((code == 0)); then
  # The first process writes down the end when the others are gone: they wait for it, not it for them.
  srun --kill-on-bad-exit=0 --wait=600 "${{task[@]}}" bash -c "$program; node train" || code=$?
fi
keep
exit "$code"
"""


def text(job: Job) -> str:
    """The script that `sbatch` takes. Words given to `sbatch` win over the lines of the script.

    Raises:
        UsageError: for a path that a container cannot be given.
    """
    title, head = shell.title(job, "slurm", "Submit it with: sbatch FILE"), _directives(job)
    if job.image and set(job.data + job.stage) & set(":,"):
        raise UsageError(
            f"--data {job.data}, --stage {job.stage}: mounts of a container know no : or , in a path"
        )
    # pyxis mounts what is there.
    mounted = 'srun "${once[@]}" mkdir -p -m 700 "$stage"\n' if job.image else ""
    # By default one task is given one core, and has to share it with all threads of XLA.
    options = "--cpu-bind=none"
    if job.image:
        mounts = "$stage:$stage" + (",$data:$data" if job.data else "")
        options += f' --container-image="$image" --container-mounts="{mounts}"'
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *(f"#SBATCH --{line}" for line in head),
            "#",
            *title,
            "set -euo pipefail",
            "",
            shell.asked(job, job.words)
            + "record=$stage/$name-$SLURM_JOB_ID\n"
            + shell.functions(job)
            + shell.keep()
            + _STEPS.format(variables=" ".join(shell.variables(job)), options=options, mounted=mounted),
        ]
    )


def _directives(job: Job) -> list[str]:
    lines = [f"job-name={job.name}", f"nodes={job.nodes}", "ntasks-per-node=1"]
    lines += [f"gpus-per-node={job.gpus}"] if job.gpus else []
    lines += ["exclusive", "mem=0", f"time={clock_time(job.time_s)}", f"signal=TERM@{_LEAVE_S}"]
    # Run again after a node was lost, it would be another run under the same name.
    lines += ["no-requeue", "output=%x-%j.log"]
    lines += [f"partition={job.partition}"] if job.partition else []
    lines += [f"account={job.account}"] if job.account else []
    return lines
