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
from uuid import uuid4

import modal  # pyright: ignore[reportMissingImports]

TRACK, NUM_GPUS = "main-8xh100", 8
OPTIONS = ""  # as many runs as a proof takes; or "--runs 6"; --out must be below runs/, which is kept
#: The limit that `speedrun batch --track TRACK OPTIONS --dry-run` prints, rounded up.
LIMIT_S = 20_100
HOME, RECORDS = Path("/opt/speedrun"), Path("/records")  # not below /root, which Modal imports from

app = modal.App("speedrun")
volume = modal.Volume.from_name("speedrun-records", create_if_missing=True)
image = (
    modal.Image.debian_slim("3.12")
    .apt_install("git")
    .add_local_dir(
        ".", str(HOME), copy=True, ignore=[".venv*", "build", "data/*/", "runs", ".env*", ".git/config"]
    )
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
def job(options: str = OPTIONS) -> None:
    """Run a batch as `scripts/run_track.sh` does, and keep its folder, also if it failed."""
    # Without --foreground timeout signals a run twice.
    script = f"scripts/run_track.sh {TRACK} {NUM_GPUS} {options}"
    argv = shlex.split(f"timeout --foreground --preserve-status --kill-after=120 {LIMIT_S} {script}")
    code = subprocess.run(argv, cwd=HOME, check=False).returncode
    if (HOME / "runs").exists():
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid4().hex[:4]}"  # jobs may end in one second
        shutil.copytree(HOME / "runs", RECORDS / name, symlinks=True)
    volume.commit()
    if code:
        raise SystemExit(code)
