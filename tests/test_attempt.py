"""An attempt: which stages are done, and which come again; and the scripts that go on where they stopped."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from record_forge import Spec, declaration, declare, forge, install_track

from speedrun import cli
from speedrun.doctor import nvidia
from speedrun.ground import children, devices, track
from speedrun.ground.lock import lock_folder
from speedrun.study.attempt import STAGES

ROOT = Path(__file__).parent.parent


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli.command, ["attempt", "--track", "forged", *args], prog_name="speedrun")


class Stages:
    """In the place of the stages' processes: what was typed, and how each is to end."""

    def __init__(self) -> None:
        self.typed: list[list[str]] = []
        self.codes: dict[str, int] = {}
        self.broken = False  #: whether a batch breaks off before its first run ends
        self.losses = (5.5, 4.0, 3.4, 3.25)  #: of each run

    def __call__(self, argv: list[str], **_: object) -> int:
        argv = argv[2:]
        self.typed.append(argv)
        match argv[1:]:
            case ["data", *_]:
                Path("data/forged").mkdir(parents=True, exist_ok=True)
                Path("data/forged/forged_train_1.bin").touch()
            case ["batch", "--resume", record, *_]:
                shutil.rmtree(record)
                forge(Path(record), val_losses=self.losses)
            case ["batch", *_]:
                record = Path(argv[argv.index("--out") + 1])
                record.parent.mkdir(exist_ok=True)
                if self.broken:
                    declare(record, declaration(Spec(), (1, 2)))
                else:
                    forge(record, val_losses=self.losses)
        return self.codes.get(argv[1], 0)

    @property
    def names(self) -> list[str]:
        """Without the plan, which stands before each attempt."""
        named, self.typed[:] = [argv[1] for argv in self.typed if argv[1] != "plan"], []
        return named


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    install_track(tmp_path)
    rules = tmp_path / "forged.toml"
    rules.write_text(rules.read_text().replace('"none"', '"speedrun data synth --track forged"'))
    monkeypatch.setattr(track, "TRACKS_DIR", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPEEDRUN_DATA", raising=False)
    monkeypatch.setattr(nvidia, "gpus", list)
    stages = Stages()
    monkeypatch.setattr(children, "run", stages)
    return stages


def record() -> str:
    (found,) = Path("runs").glob("*/batch.json")
    return str(found.parent)


def test_all_stages_once_and_none_again(stages: Stages):
    first = invoke("--runs", "2")
    assert first.exit_code == 0, first.output
    assert stages.names == list(STAGES)
    assert (
        first.stdout.splitlines()[-1]
        == f"attempt forged@1: all is done; the record is {record()}, which proves its target"
    )
    again = invoke("--runs", "2")
    assert (again.exit_code, stages.names) == (0, [])
    assert again.stdout.splitlines()[0] == "attempt forged@1: all is done"


def test_it_says_what_it_takes_before_anything_starts(stages: Stages, monkeypatch: pytest.MonkeyPatch):
    h200 = devices.load("h200").name
    monkeypatch.setattr(nvidia, "gpus", lambda: [nvidia.Gpu(h200, "580.1", 0, None, None, mig=False)])
    words = ("--runs", "2", "--dollars", "3", "--recipe", "values", "--set", "a=1")
    result = invoke(*words, "--dry-run", "--json")
    assert json.loads(result.stdout) == {
        "track": "forged@1",
        "record": None,
        "exit_code": 0,
        "left": list(STAGES),
    }
    plan = "plan --track forged --runs 2 --dollars 3.0 --recipe values --set a=1 --device-kind h200"
    assert stages.typed == [["speedrun", *plan.split()]]
    assert not Path("runs", "forged.attempt").exists(), "a dry run writes nothing"


@pytest.mark.parametrize(
    ("stage", "code"),
    [("doctor", 1), ("data", 3), ("batch", 75), ("batch", 1), ("batch", 0), ("validate", 1), ("submit", 1)],
)
def test_it_ends_as_the_stage_that_fails_and_goes_on_there(stages: Stages, stage: str, code: int):
    stages.codes, stages.broken = {stage: code}, stage == "batch"
    failed = invoke("--runs", "2")
    code = code or 1  # a batch without its runs has failed, whatever it says
    assert failed.exit_code == code
    assert stages.names == list(STAGES[: STAGES.index(stage) + 1])
    assert failed.stderr.startswith(f"attempt: {stage} ended with exit code {code} (")
    stages.codes = {}
    assert invoke("--runs", "2").exit_code == 0
    assert stages.names == list(STAGES[STAGES.index(stage) :])


def test_a_batch_that_was_stopped_is_resumed(stages: Stages):
    stages.codes, stages.broken = {"batch": 75}, True
    stopped = invoke("--runs", "2", "--title", "of two", "--again", "batch")
    assert stopped.stderr.rstrip().endswith("; to continue, run the same command without --again batch")
    stages.codes, _ = {}, stages.names
    invoke("--runs", "2", "--title", "of two")
    (resumed,) = [argv for argv in stages.typed if argv[1] == "batch"]
    assert resumed[2:] == ["--resume", record(), "--title", "of two"]


def test_a_batch_that_proves_nothing_is_told_and_not_sent(stages: Stages):
    stages.losses, stages.codes = (5.5, 4.0, 3.4, 3.3), {"batch": 1, "stats": 1, "submit": 1}
    assert invoke("--runs", "2").exit_code == 1
    assert stages.names == list(STAGES)
    stages.codes = {}  # as on a track that does not rank
    packed = invoke("--runs", "2")
    assert (packed.exit_code, stages.names) == (1, ["submit"])
    assert packed.stdout.splitlines()[-1].endswith(", which does not prove its target")
    assert (invoke("--runs", "2").exit_code, stages.names) == (1, [])


def test_other_data_come_again_and_nothing_else(stages: Stages):
    invoke("--runs", "2")
    _ = stages.names
    Path("data/forged/forged_train_1.bin").write_bytes(b"more")
    invoke("--runs", "2")
    assert stages.names == ["data"]


def test_a_record_that_was_described_is_checked_and_packed_anew(stages: Stages):
    invoke("--runs", "2")
    _ = stages.names
    manifest = Path(record(), "manifest.json")
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    invoke("--runs", "2")
    assert stages.names == ["stats", "validate", "submit"], "the batch would write its own title over"


def test_a_stage_again(stages: Stages):
    invoke("--runs", "2")
    _ = stages.names
    invoke("--runs", "2", "--again", "doctor")
    assert stages.names == ["doctor"]
    old = record()
    invoke("--runs", "3", "--again", "batch")
    assert stages.names == ["batch", "stats", "validate", "submit"]
    assert json.loads(Path("runs/forged.attempt/state.json").read_text())["record"] != old
    assert Path(old, "batch.json").exists(), "the old one stays"


def test_a_stage_again_is_not_forgotten_when_an_earlier_one_fails(stages: Stages):
    invoke("--runs", "2")
    old = record()
    Path("data/forged/forged_train_1.bin").unlink()
    stages.codes = {"data": 3}
    assert invoke("--runs", "3", "--again", "batch").exit_code == 3
    stages.codes, _ = {}, stages.names
    assert invoke("--runs", "3").exit_code == 0, "the same command without --again batch, as it was told"
    assert stages.names == ["data", "batch", "stats", "validate", "submit"]
    assert json.loads(Path("runs/forged.attempt/state.json").read_text())["record"] != old


def test_another_batch_is_not_begun_by_mistake(stages: Stages):
    invoke("--runs", "2", "--set", "a=1")
    result = invoke("--runs", "2")
    assert result.exit_code == 2
    told = (
        "was started with --runs 2 --set a=1; pass the same to continue, or --again batch to start a new one"
    )
    assert result.stderr == f"error: {record()} {told}\n"


def test_two_attempts_take_no_turns(stages: Stages):
    with lock_folder(Path("runs/forged.attempt")):
        result = invoke("--runs", "2")
    assert (result.exit_code, stages.typed) == (2, [])
    assert "another program writes into it" in result.stderr


def test_a_state_that_cannot_be_read_is_told(stages: Stages):
    Path("runs/forged.attempt").mkdir(parents=True)
    Path("runs/forged.attempt/state.json").write_bytes(b'{"record": "\xff"}')
    result = invoke("--runs", "2")
    assert result.exit_code == 2
    assert "state.json: " in result.stderr
    assert "delete it" in result.stderr


def test_shards_of_ones_own_are_verified(stages: Stages):
    Path("mine").mkdir()
    invoke("--runs", "2", "--data", "mine", "--dry-run")
    invoke("--runs", "2", "--data", "mine")
    assert ["speedrun", "data", "verify", "--track", "forged", "--data", "mine"] in stages.typed


def test_a_track_without_shards_of_its_own_is_told_before_anything(stages: Stages, tmp_path: Path):
    rules = tmp_path / "forged.toml"
    rules.write_text(rules.read_text().replace('"speedrun data synth --track forged"', '"pass a folder"'))
    result = invoke("--runs", "2", "--dry-run")
    assert (result.exit_code, stages.typed) == (2, [])
    assert result.stderr == "error: track forged takes anybody's shards; pass a folder\n"


# --- the scripts -------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The scripts and the code, with data and runs of their own."""
    for name in ("scripts", "speedrun", "requirements", "records"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def script(checkout: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """One of the scripts, with this Python in the place of an install."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("XLA_", "SPEEDRUN_", "PYTHONPATH"))
    }
    env = {**kept, "SPEEDRUN_PYTHON": sys.executable, "HF_HUB_OFFLINE": "1", **variables}
    env["JAX_COMPILATION_CACHE_DIR"] = str(checkout / "programs")
    argv = ["bash", str(checkout / "scripts" / words[0]), *words[1:]]
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize(
    ("name", "need"), [("run_8gpu.sh", "main-8xh100 needs 8"), ("run_1gpu.sh", "single-gpu needs 1")]
)
def test_a_wrong_number_of_gpus_is_one_line(checkout: Path, name: str, need: str):
    none = checkout / "bin"
    none.mkdir()
    tool = none / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    tool.chmod(0o755)
    run = script(checkout, name, PATH=f"{none}:{os.environ['PATH']}")
    said, _ = run.communicate(timeout=60)
    want = f"run_track: found 0 GPUs, {need}; choose another script, or a machine with more\n"
    assert (run.returncode, said) == (2, want)
    assert not (checkout / ".venv").exists()


def test_a_dry_run_needs_no_gpu(checkout: Path):
    """What it takes is said on any machine, and nothing is installed; a stand-in for Python shows what is asked."""
    stand_in = checkout / "python"
    stand_in.write_text('#!/bin/sh\necho "$@"\n')
    stand_in.chmod(0o755)
    for name, goal in (("run_8gpu.sh", "main-8xh100"), ("run_1gpu.sh", "single-gpu")):
        run = script(checkout, name, "--recipe", "values", "--dry-run", SPEEDRUN_PYTHON=str(stand_in))
        said, _ = run.communicate(timeout=60)
        want = f"-m speedrun attempt --track {goal} --recipe values --dry-run\n"
        assert (run.returncode, said) == (0, want)
        run = script(checkout, name, "--dry-run", SPEEDRUN_PYTHON="")
        said, _ = run.communicate(timeout=60)
        assert (run.returncode, said.splitlines()[0]) == (
            0,
            f"dry run: would install, scripts/install.sh run, then: speedrun attempt --track {goal} --dry-run",
        )
    assert not {"runs", ".venv", ".venv.lock"} & {path.name for path in checkout.iterdir()}, (
        "nothing is written"
    )


def test_a_disk_without_room_is_one_line_and_nothing_is_begun(checkout: Path):
    tools = checkout / "bin"
    tools.mkdir()
    (tools / "df").write_text("#!/bin/sh\necho header\necho /dev/x 10 9 1500000 90% /\n")
    (tools / "df").chmod(0o755)
    variables = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SPEEDRUN_PYTHON": "",
        "SPEEDRUN_ACCELERATOR": "cuda13",
    }
    run = script(checkout, "run_track.sh", "smoke-cpu", "0", PYTHON=sys.executable, **variables)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    last = said.splitlines()[-1]
    assert last.startswith(
        f"install: found 1 GB free in {checkout}, cuda13 needs 8; free some, or put the checkout"
    )
    assert not (checkout / ".venv").exists()


@pytest.mark.compile
def test_the_script_goes_all_the_way_and_on_after_a_signal(checkout: Path):
    """Two minutes: two runs of forty steps, stopped in the first. They prove nothing: code 1."""
    words = ("run_track.sh", "smoke-cpu", "0", "--runs", "2", "--set", "stages.0.num_steps=40")
    lines = []
    with script(checkout, *words) as stopped:
        assert stopped.stdout is not None
        for line in stopped.stdout:
            lines.append(line)
            if "---- clock start" in line:
                stopped.send_signal(signal.SIGTERM)
    assert stopped.returncode == 75, "".join(lines)
    told = (
        "attempt: batch ended with exit code 75 (stopped by SIGTERM or Ctrl-C; log and checkpoints are kept)"
    )
    assert lines[-1].startswith(told)
    assert [line.split()[2] for line in lines if line.startswith("== ")] == ["doctor:", "data:", "batch:"]

    went_on = script(checkout, *words)
    said, _ = went_on.communicate(timeout=400)
    assert went_on.returncode == 1, said
    stages = [line.split()[2] for line in said.splitlines() if line.startswith("== ")]
    assert stages == ["batch:", "stats:", "validate:", "submit:"]
    assert "batch   2 of 2 runs" in said
    assert said.splitlines()[-1].endswith(", which does not prove its target")

    assert len(list(checkout.glob("runs/*.tar.gz"))) == 1

    (record,) = checkout.glob("runs/*/manifest.json")
    outcomes = [run["outcome"] for run in json.loads(record.read_text())["batch"]["runs"]]
    assert sorted(outcomes) == ["aborted", "finished", "finished"]
    log = (checkout / "runs" / "smoke-cpu.log").read_text()
    assert log == "".join(lines) + said

    nothing_left = script(checkout, *words)
    said, _ = nothing_left.communicate(timeout=60)
    assert (nothing_left.returncode, "==" in said) == (1, False)
