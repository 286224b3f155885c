"""A job for Modal, which rents machines by the second: a batch on one node with eight GPUs.

Set the variables, then:

modal run --detach jobs/modal_job.py                      from the checkout; with --words, another command
modal volume get speedrun-records / records/              fetches the records
"""

import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import modal  # pyright: ignore[reportMissingImports]

TRACK = "main-8xh100"
WORDS = "batch --runs 6"  # for speedrun
GPUS = "H100!:8"  # with the mark, never an H200 in its place

#: What the track grants for compiling, and twice what `speedrun plan --track` predicts.
LIMIT_S = 7800
HOME, RECORDS = Path("/root/speedrun"), Path("/records")
RUNTIME = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_NVLS_ENABLE": "1",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
}

app = modal.App("speedrun")
volume = modal.Volume.from_name("speedrun-records", create_if_missing=True)
image = (
    modal.Image.debian_slim("3.12")
    .apt_install("git")
    .add_local_dir(".", str(HOME), copy=True, ignore=[".venv*", "build", "data/*/", "runs"])
    .run_commands(f"cd {HOME} && SPEEDRUN_ACCELERATOR=cuda12 scripts/install.sh run")
)


@app.function(
    image=image, gpu=GPUS, cpu=32, memory=2**17, timeout=LIMIT_S + 1800, volumes={str(RECORDS): volume}
)
def job(words: str) -> int:
    """Check the machine, get the shards, run, and keep the record, also of a failed run; return the exit code."""
    record = Path(f"/tmp/speedrun/{TRACK}-{time.strftime('%Y%m%d-%H%M%S')}")
    record.parent.mkdir(exist_ok=True)
    path = f"{HOME}/.venv/bin:{os.environ['PATH']}"
    env = {**os.environ, **RUNTIME, "PATH": path, "SPEEDRUN_DATA": str(record.parent / "data")}
    command, *more = shlex.split(words)
    ours = ["speedrun", command, "--track", TRACK, "--out", str(record), *more]
    steps = [["speedrun", "doctor", "--track", TRACK], ["speedrun", "data", "get", "--track", TRACK]]
    code = 0
    for argv in [*steps, ["timeout", "--kill-after=120", str(LIMIT_S), *ours]]:
        code = code or subprocess.run(argv, cwd=HOME, env=env, check=False).returncode
    for kept in record.parent.glob(f"{record.name}*"):
        shutil.copytree(kept, RECORDS / kept.name)
    volume.commit()
    return code


@app.local_entrypoint()
def main(words: str = WORDS) -> None:
    """Start the job, and end with its exit code."""
    raise SystemExit(job.remote(words))  # pyright: ignore[reportFunctionMemberAccess]
