"""The scripts from a bare checkout to a record: their steps, and that the same command goes on after any end."""

import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typed import program

from speedrun.base import accelerators
from speedrun.cli.train import batch
from speedrun.record.reader import load

ROOT = Path(__file__).parents[2]
STEPS = ("install", "plan", "doctor", "data", "batch")

#: In place of scripts/install.sh and of the Python that it makes: notes what is asked, and does what `fault-*` says.
INSTALL = f"""#!/usr/bin/env bash
if [[ -f fault-install ]]; then source ./fault-install; fi
mkdir -p .venv/bin
cat >.venv/bin/python <<'PYTHON'
#!/usr/bin/env bash
if [[ $1 == -c ]]; then PYTHONPATH={ROOT} exec {sys.executable} "$@"; fi
echo "${{*:3}}" >>typed
if [[ $* == *--dry-run* ]]; then exit; fi
if [[ $3 == batch ]]; then
  record=$(sed -E 's/.*--(out|resume) ([^ ]+).*/\\2/' <<<"$*")
  if [[ -f fault-declare ]]; then source ./fault-declare; fi
  mkdir -p "$record" && touch "$record/batch.json"
fi
if [[ -f fault-$3 ]]; then source "./fault-$3"; fi
if [[ $3 == batch ]]; then touch "$record/about.json"; fi
PYTHON
chmod +x .venv/bin/python
ln -sf python .venv/bin/speedrun
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The scripts, with that stand-in, and the rules of tracks. There is no GPU."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copytree(ROOT / "speedrun" / "tracks", tmp_path / "speedrun" / "tracks")
    (tmp_path / "scripts" / "install.sh").write_text(INSTALL)
    gpus(tmp_path, "echo NVIDIA-SMI has failed; exit 9")
    return tmp_path


def gpus(checkout: Path, does: str) -> None:
    program(checkout / "bin" / "nvidia-smi", f"#!/bin/sh\n{does}\n")


def start(checkout: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    ours = ("XLA_", "SPEEDRUN_", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env = {**kept, "PATH": f"{checkout / 'bin'}:{kept['PATH']}", "HF_HUB_OFFLINE": "1", **variables}
    env["JAX_COMPILATION_CACHE_DIR"] = str(checkout / "programs")
    argv = ["bash", str(checkout / "scripts" / words[0]), *words[1:]]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def ended(checkout: Path, *words: str, **variables: str) -> tuple[int, str]:
    with start(checkout, *words, **variables) as run:
        said, _ = run.communicate(timeout=600)
    return run.returncode, said


def smoke(checkout: Path, *options: str, **variables: str) -> tuple[int, str]:
    return ended(checkout, "run_track.sh", "smoke-cpu", "0", *options, **variables)


def steps(said: str) -> dict[str, list[str]]:
    lines = [line.partition(": ") for line in said.splitlines() if line.startswith("== ")]
    return {head.split()[2]: shlex.split(command) for head, _, command in lines}


def typed(checkout: Path) -> list[str]:
    path = checkout / "typed"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def test_all_steps_in_order(checkout):
    code, said = smoke(checkout, "--recipe=values", "--set", "a=1", SPEEDRUN_DOLLARS="3")
    assert (code, tuple(steps(said))) == (0, STEPS)
    assert typed(checkout) == [
        "batch --track smoke-cpu --recipe values --set a=1 --out runs/smoke-cpu --dry-run --dollars 3",
        "doctor --track smoke-cpu",
        "data synth --track smoke-cpu",
        "batch --track smoke-cpu --recipe values --set a=1 --out runs/smoke-cpu",
        "stats runs/smoke-cpu",
    ]
    *_, first, then = said.splitlines()
    assert first == "next: .venv/bin/python -m speedrun validate --strict runs/smoke-cpu"
    assert then == "then: .venv/bin/python -m speedrun submit runs/smoke-cpu"
    assert (checkout / "runs" / "smoke-cpu.log").read_text() == said


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("exit 3", 3),
        ("kill -9 $PPID; exit", -9),
        ("trap 'sleep 0.2; echo saved; exit 0' TERM; kill $PPID; (sleep 9; echo late)", 75),
    ],
)
@pytest.mark.parametrize("step", ["install", "data", "declare", "batch"])
def test_the_same_command_goes_on_after_any_end(checkout, step, how, code):
    """A step that fails; a script that is killed; one that is stopped, and stops what runs, and waits for it."""
    fault = checkout / f"fault-{step}"
    fault.write_text(how)
    stopped, said = smoke(checkout, "--title", "of two")
    name = "batch" if step == "declare" else step
    assert (stopped, list(steps(said))[-1]) == (code, name)
    told = f"run_track: {name} ended with exit code {code}; to go on, mend what it says and type the command again"
    assert code < 0 or said.splitlines()[-1] == told
    assert "late" not in said
    fault.unlink()
    typed(checkout)
    code, said = smoke(checkout, "--title", "of two")
    assert (code, list(steps(said))[-1]) == (0, "batch"), said
    new = "--track smoke-cpu --out runs/smoke-cpu"
    begun = "--resume runs/smoke-cpu" if step == "batch" else new
    assert f"batch {begun} --title of two" in typed(checkout)


@pytest.mark.parametrize("step", ["doctor", "batch"])
def test_only_a_batch_may_answer_no_and_it_is_told(checkout, step):
    (checkout / f"fault-{step}").write_text("exit 1")
    code, said = smoke(checkout)
    assert (code, list(steps(said))[-1]) == (1, step)
    told = said.splitlines()[-1].endswith(" -m speedrun submit --missed runs/smoke-cpu")
    assert (typed(checkout)[-1] == "stats runs/smoke-cpu", told) == (step == "batch",) * 2


def test_what_was_described_since_is_kept(checkout):
    for _ in range(2):
        assert smoke(checkout, "--title", "of two", "--data", "mine")[0] == 0
    lines = typed(checkout)
    assert "data verify --track smoke-cpu --data mine" in lines
    assert "batch --resume runs/smoke-cpu --data mine" in lines
    assert len([line for line in lines if "--dry-run" in line]) == 1


def test_another_batch_is_not_begun_by_mistake(checkout):
    smoke(checkout, "--set", "a=1")
    typed(checkout)
    begun = "--track smoke-cpu --set a=1 --out runs/smoke-cpu"
    told = f"was begun with {begun} ; pass the same to go on, or another --out to begin another\n"
    assert smoke(checkout) == (2, f"run_track: runs/smoke-cpu {told}")
    assert smoke(checkout, "--set", "a=1", "--dry-run")[0] == 0  # has nothing to price
    assert typed(checkout) == []
    (checkout / "runs" / "smoke-cpu.typed").unlink()
    code, said = smoke(checkout)
    assert (code, typed(checkout)) == (2, [])
    assert "was begun with options that are not known" in said
    assert smoke(checkout, "--out", "runs/more/another")[0] == 0
    assert "batch --track smoke-cpu --out runs/more/another" in typed(checkout)


def test_two_at_once_and_a_place_that_cannot_be_written_end_before_anything(checkout):
    (checkout / "runs" / "mount.typed").mkdir(parents=True)
    with (checkout / "runs" / "smoke-cpu.typed").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, said = smoke(checkout)
        assert (code, "another run_track.sh works on runs/smoke-cpu; wait" in said) == (2, True)
    assert (
        smoke(checkout, SPEEDRUN_PYTHON="none")[1]
        == "run_track: SPEEDRUN_PYTHON=none lacks packages; unset it\n"
    )
    code, said = smoke(checkout, "--out", "runs/mount")
    assert (code, said.count("\n"), "cannot write runs/mount.typed; " in said) == (2, 1, True)
    assert typed(checkout) == []


def test_it_knows_every_option_of_a_batch(checkout):
    options = {option for one in batch.params for option in one.opts if option.startswith("--")}
    priced = {"--dry-run", "--device-kind", "--dollars"}  # by itself
    known = sorted(
        options - priced - {"--track", "--resume", "--json", "--on", "--unranked"}
    )  # it prepares this machine alone
    words = ["--unranked", *(word for option in known for word in (option, "a 'b'"))]
    code, said = smoke(checkout, *words, "--dry-run")
    assert code == 0, said
    _, *told = steps(said)["batch"][4:]
    assert sorted(told[1:]) == sorted(words)


@pytest.mark.parametrize(
    "words",
    [
        *(f"run_track.sh smoke-cpu 0 {word}" for word in ("--track x", "--json", "--runs")),
        "run_track.sh smoke-cpu --dry-run",  # how many GPUs?
        "run_8gpu.sh",  # there is no GPU
        "run_track.sh webmini 0",  # anybody's shards
        "run_track.sh smoke 0",  # no track
    ],
)
def test_what_cannot_run_here_is_one_line_before_anything(checkout, words):
    code, said = ended(checkout, *words.split())
    assert (code, said.count("\n"), said[:11]) == (2, 1, "run_track: ")
    assert not {"runs", ".venv"} & {path.name for path in checkout.iterdir()}


@pytest.mark.parametrize(
    ("words", "goal"),
    [(("run_8gpu.sh",), "main-8xh100"), (("run_track.sh", "single-gpu", "1"), "single-gpu")],
)
def test_a_dry_run_needs_no_gpu_and_writes_nothing(checkout, words, goal):
    before = sorted(checkout.rglob("*"))
    code, said = ended(checkout, *words, "--dry-run")
    assert (code, list(steps(said))) == (0, ["install", "doctor", "data", "batch"])
    assert "time, disk space and cost need the packages: type this again after scripts/install.sh run" in said
    assert sorted(checkout.rglob("*")) == before
    subprocess.run(["bash", "scripts/install.sh"], cwd=checkout, check=True)
    gpus(checkout, f"echo {shlex.quote(accelerators.load('h200').name)}; echo another")
    code, said = ended(checkout, *words, "--dry-run")
    assert (code, tuple(steps(said))) == (0, STEPS)
    plan = f"batch --track {goal} --out runs/{goal} --dry-run --dollars 2.50 --device-kind h200"
    assert typed(checkout) == [plan], "nothing else is run"
    assert sorted(path for path in checkout.rglob("*") if ".venv" not in path.parts) == before


@pytest.mark.compile
def test_the_script_goes_all_the_way_and_on_after_a_signal(checkout):
    """Two minutes: two runs of forty steps, stopped in the first. They prove nothing: code 1."""
    shutil.rmtree(checkout / "speedrun")
    for name in ("speedrun", "records"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    words = ("run_track.sh", "smoke-cpu", "0", "--runs", "2", "--set", "stages.0.num_steps=40")
    lines = []
    with start(checkout, *words, SPEEDRUN_PYTHON=sys.executable) as stopped:
        assert stopped.stdout is not None
        for line in stopped.stdout:
            lines.append(line)
            if "---- clock start" in line:
                stopped.send_signal(signal.SIGTERM)
    assert stopped.returncode == 75, "".join(lines)
    assert lines[-1].startswith("run_track: batch ended with exit code 75; to go on, ")
    assert list(steps("".join(lines))) == ["plan", "doctor", "data", "batch"]

    with start(checkout, *words, SPEEDRUN_PYTHON=sys.executable) as went_on:
        said, _ = went_on.communicate(timeout=600)
    assert went_on.returncode == 1, said
    assert list(steps(said)) == ["doctor", "data", "batch"]
    assert "batch   2 of 2 runs" in said
    assert ": not proven" in said
    assert said.splitlines()[-1].endswith("submit --missed runs/smoke-cpu")

    (about,) = checkout.glob("runs/*/about.json")
    assert sorted(run.outcome for run in load(about.parent).runs) == ["aborted", "finished", "finished"]
    assert (checkout / "runs" / "smoke-cpu.log").read_text() == "".join(lines) + said
