"""A job of SLURM: one task on each node, which has all of it."""

from speedrun.launch import shell
from speedrun.launch.job import Job, clock_time

#: The limit of time sends SIGTERM so long before the end: enough to write a checkpoint and the end of a record.
_LEAVE_S = 120

_STEPS = """
# 'scancel' and the time limit tell the tasks, which end by themselves; this script stays to bring the record home.
trap 'echo "launch: told to stop" >&2' TERM
program=$(declare -p {variables}; declare -f node prepare train)
code=0
srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 {options} \\
  bash -c "$program; node prepare" || code=$?
if ((code == 0)); then
  # The first process writes down the end when the others are gone: they wait for it, not it for them.
  srun --kill-on-bad-exit=0 --wait=600 {options} bash -c "$program; node train" || code=$?
fi
keep
exit "$code"
"""


def text(job: Job) -> str:
    """The script that `sbatch` takes. Words given to `sbatch` win over the lines of the script."""
    title, head = shell.title(job, "slurm", "Submit it with: sbatch FILE"), _directives(job)
    values = {"stage": job.stage, "out": job.out, "name": job.name, "run": job.words}
    values |= {"data": job.data} if job.data else {}
    values |= {"image": job.image} if job.image else {"checkout": job.checkout}
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
            shell.assigned(**values)
            + "record=$stage/$name-$SLURM_JOB_ID\n"
            + shell.functions(job)
            + shell.keep()
            + _STEPS.format(variables=shell.variables(job), options=options),
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
