"""A task of SkyPilot: it rents the machines, and stops them when they have nothing to do."""

import dataclasses
from typing import Any

from speedrun.ground.errors import unknown
from speedrun.launch import shell
from speedrun.launch.job import PORT, Job, is_bucket
from speedrun.launch.kubernetes import dumped

STAGE = "/tmp/speedrun"
RECORDS = "/tmp/speedrun-records"
_OUT, _DATA = "/speedrun-records", "/speedrun-data"  #: where buckets are mounted
_IDLE_MINUTES = 10
_MEET_S = 1800
_LEAVE_S = 120

#: What SkyPilot calls them, by the names of `speedrun plan`.
_ACCELERATORS = {"h100": "H100", "h200": "H200", "a100": "A100-80GB", "a100-40gb": "A100", "4090": "RTX4090"}

_JOIN = """\
# Which node this one is, SkyPilot says.
run+=(--coordinator "${{SKYPILOT_NODE_IPS%%$'\\n'*}}:{port}" --processes "$SKYPILOT_NUM_NODES")
run+=(--process "$SKYPILOT_NODE_RANK" --meet-within {meet_s})
"""


def text(job: Job) -> str:
    """The task file."""
    keeps = is_bucket(job.out)
    title = shell.title(job, "skypilot", f"Submit it with: sky launch --cluster {job.name} FILE")
    if not keeps:
        title.append(
            f"# The record stays on the first machine until you fetch it: rsync -Pa {job.name}:{job.out}/ records/"
        )
    resources: dict[str, Any] = {"autostop": {"idle_minutes": _IDLE_MINUTES, "down": keeps}}
    if job.gpus:
        if job.gpu not in _ACCELERATORS:
            raise unknown("GPU for SkyPilot", job.gpu, _ACCELERATORS)
        resources["accelerators"] = f"{_ACCELERATORS[job.gpu]}:{job.gpus}"
    if job.cloud:
        resources["infra"] = job.cloud
    if job.price is not None:
        resources["max_hourly_cost"] = job.price
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    task: dict[str, Any] = {"name": job.name, "num_nodes": job.nodes, "resources": resources}
    mounts: dict[str, Any] = {}
    if keeps:
        mounts[_OUT] = {"source": job.out, "mode": "MOUNT_CACHED"}  # the other kind cannot rename folders
    if is_bucket(job.data):
        mounts[_DATA] = {"source": job.data, "mode": "MOUNT"}
    task |= {"file_mounts": mounts} if mounts else {}
    if not job.image:
        task |= {"workdir": job.checkout, "setup": "scripts/install.sh run\n"}
    return dumped(title, task | {"run": _script(job)})


def _script(job: Job) -> str:
    words = (*shell.limit(job, _LEAVE_S), *job.words)  # SkyPilot ends idle machines only
    inside = dataclasses.replace(
        job,
        out=_OUT if is_bucket(job.out) else job.out,
        data=_DATA if is_bucket(job.data) else job.data,
        checkout="",  # known there only
    )
    return (
        "set -euo pipefail\n"
        + shell.asked(inside, words)
        + "record=$stage/$name-$SKYPILOT_TASK_ID\n"
        + ("" if job.image else "checkout=$PWD\n")
        + (_JOIN.format(port=PORT, meet_s=_MEET_S) if job.nodes > 1 else "")
        + shell.functions(inside)
        + shell.keep()
        + shell.WORK
    )
