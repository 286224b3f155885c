"""A job for Modal, which rents machines by the second: a batch on one node with eight GPUs.

Set the variables, then:

    modal run --detach jobs/modal_job.py                      from the checkout; with --options, those of the batch
    modal volume get speedrun-records / records/              fetches the records
"""

import shlex
import shutil
import subprocess
import time
from pathlib import Path

import modal  # pyright: ignore[reportMissingImports]

TRACK, NUM_GPUS = "main-8xh100", 8
OPTIONS = "--runs 6"
#: What the track grants for compiling, and twice what `speedrun plan --track` predicts.
LIMIT_S = 7800
HOME, RECORDS = Path("/root/speedrun"), Path("/records")

app = modal.App("speedrun")
volume = modal.Volume.from_name("speedrun-records", create_if_missing=True)
image = (
    modal.Image.debian_slim("3.12")
    .apt_install("git")
    .add_local_dir(".", str(HOME), copy=True, ignore=[".venv*", "build", "data/*/", "runs"])
    .run_commands(f"cd {HOME} && SPEEDRUN_ACCELERATOR=cuda12 scripts/install.sh run")
)


@app.function(
    image=image,
    gpu=f"H100!:{NUM_GPUS}",
    cpu=32,
    memory=2**17,
    timeout=LIMIT_S + 1800,
    volumes={str(RECORDS): volume},
)
def job(options: str) -> int:
    """Run a batch as `scripts/run_track.sh` does, and keep its folder, also if it failed; return the exit code."""
    argv = ["timeout", "--kill-after=120", str(LIMIT_S), "scripts/run_track.sh", TRACK, str(NUM_GPUS)]
    code = subprocess.run([*argv, *shlex.split(options)], cwd=HOME, check=False).returncode
    shutil.copytree(HOME / "runs", RECORDS / time.strftime("%Y%m%d-%H%M%S"))
    volume.commit()
    return code


@app.local_entrypoint()
def main(options: str = OPTIONS) -> None:
    """Start the job, and end with its exit code."""
    raise SystemExit(job.remote(options))  # pyright: ignore[reportFunctionMemberAccess]
