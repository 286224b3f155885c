"""A task of SkyPilot, which rents machines and stops them when they are idle."""

import dataclasses
import json

from speedrun.ground.errors import unknown
from speedrun.launch import shell
from speedrun.launch.job import PORT, Job, is_bucket

STAGE = "/tmp/speedrun"
RECORDS = "/tmp/speedrun-records"
_OUT, _DATA = "/speedrun-records", "/speedrun-data"  #: where the template mounts buckets

#: SkyPilot's names, by the names of `speedrun plan`.
_ACCELERATORS = {
    **{kind: kind.upper() for kind in ("h100", "h200", "b200", "l40s")},
    **{"a100": "A100-80GB", "a100-40gb": "A100", "4090": "RTX4090"},
}


def text(job: Job) -> str:
    """Return the task file.

    Raises:
        UsageError: for a GPU whose name in SkyPilot is unknown.
    """
    if job.gpus and job.gpu not in _ACCELERATORS:
        raise unknown("GPU for SkyPilot", job.gpu, _ACCELERATORS)
    keeps, mounts_data = is_bucket(job.out), is_bucket(job.data)
    inside = dataclasses.replace(
        job, out=_OUT if keeps else job.out, data=_DATA if mounts_data else job.data, checkout=""
    )
    join = shell.render("skypilot_join.sh", port=PORT, meet_s=shell.MEET_S) if job.nodes > 1 else ""
    # SkyPilot ends idle machines only: a run needs a limit of its own.
    node = shell.node(
        inside,
        shell.limited(job),
        "$stage/$name-$SKYPILOT_TASK_ID",
        join=join,
        in_workdir=not job.image,
    )
    fetch = f"# The record stays on the first machine until you fetch it: rsync -Pa {job.name}:{job.out}/ records/"
    return shell.render(
        "skypilot.yaml",
        title=shell.title(job, "skypilot", f"Submit it with: sky launch --cluster {job.name} FILE"),
        fetch="" if keeps else fetch,
        name=json.dumps(job.name),
        nodes=job.nodes,
        down=json.dumps(keeps),
        accelerators=json.dumps(f"{_ACCELERATORS[job.gpu]}:{job.gpus}") if job.gpus else "",
        cloud=job.cloud and json.dumps(job.cloud),
        price=job.price,
        image=json.dumps(f"docker:{job.image}") if job.image else "",
        if_mounts=keeps or mounts_data,
        if_keeps=keeps,
        if_data=mounts_data,
        out=json.dumps(job.out),
        data=json.dumps(job.data),
        workdir="" if job.image else json.dumps(job.checkout, ensure_ascii=False),
        if_workdir=not job.image,
        script=shell.pod(node),
    )
