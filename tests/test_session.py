"""Parts measured in one sitting: a hang or a crash costs one part, and nothing that was measured is lost."""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from speedrun import cli
from speedrun.bench import rival, session, suite, summary
from speedrun.bench.parts import FULL, TINY, Part, chosen, parts
from speedrun.bench.session import Result
from speedrun.doctor import cuda
from speedrun.ground import provenance
from speedrun.ground.errors import SpeedrunError, UsageError
from speedrun.science.recipes import record21

ROOT = Path(__file__).parent.parent

#: Commands that end in every way. `count` tells how many came before it in the same process.
FAKE = """
import os, signal, sys, time
import click
from speedrun.cli import warm
from speedrun.ground.errors import UsageError

before = []

@click.group()
def command():
    before.append(0)

@command.command()
def count():
    click.echo('{"before": %d, "rows": [{"a": 1, "b": 2.5}]}' % (len(before) - 1))

@command.command()
def fail():
    click.echo("error: it was not to be", err=True)
    sys.exit(1)

@command.command()
def refuse():
    click.echo("error: nothing here to measure", err=True)
    sys.exit(2)

@command.command()
def hang():
    click.echo("runs: the kernel of doom", err=True)
    os.system("sleep 600 & echo $! > %s" % os.environ["SLEEPER"])
    time.sleep(600)

@command.command()
def die():
    click.echo("runs: the kernel of death", err=True)
    os.kill(os.getpid(), signal.SIGSEGV)

@command.command()
def crash():
    raise RuntimeError("CUDA error: misaligned address")

warm.serve(command)
"""


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Result]]:
    """Runs fake parts into one folder, as often as it is called."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    out = tmp_path / "out"
    out.mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SLEEPER": str(tmp_path / "sleeper")}

    def run(*asked: Part, most_s: float = 60.0) -> dict[str, Result]:
        ended: list[Result] = []
        worker = [sys.executable, str(script)]
        session.run(asked, out, worker, env=env, most_s=most_s, ended=ended.append)
        return {one.name: one for one in ended}

    return run


def part(name: str, *argv: str, limit_s: float = 30.0, **named) -> Part:
    return Part(name, argv or (name,), limit_s, **named)


def test_each_end_of_a_part_is_told_and_the_others_go_on(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "_GRACE_S", 1.0)
    found = measured(
        part("one", "count"), part("two", "count"), part("fail"), part("refuse"), part("three", "count"),
        part("hang", limit_s=1.0), part("after", "count"), part("die"), part("crash"), part("last", "count"),
    )  # fmt: skip
    assert {name: one.status for name, one in found.items()} == {
        **dict.fromkeys(("one", "two", "three", "after", "last"), "ok"),
        **{"fail": "failed", "refuse": "refused", "hang": "killed", "die": "died", "crash": "died"},
    }
    assert found["fail"].reason == "it was not to be"
    assert found["refuse"].reason == "nothing here to measure"
    assert found["hang"].reason == "beyond its limit of 1 s; last it said: runs: the kernel of doom"
    assert found["die"].reason == "signal 11; last it said: runs: the kernel of death"
    assert found["crash"].reason.endswith("RuntimeError: CUDA error: misaligned address")
    said = {
        path.stem: json.loads(path.read_text())
        for path in tmp_path.glob("out/parts/*.out")
        if path.stat().st_size
    }
    assert [said[name]["before"] for name in ("one", "two", "three", "after", "last")] == [0, 1, 4, 0, 0]
    assert "in hang" in (tmp_path / "out/parts/hang.err").read_text(), "its stacks are kept"
    sleeper = int((tmp_path / "sleeper").read_text())
    state = Path(f"/proc/{sleeper}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z", "what a part started ends with it"


def test_a_part_may_ask_for_a_process_of_its_own_and_end_in_other_ways(measured, tmp_path):
    made = tmp_path / "out" / "record"
    made.mkdir()
    found = measured(
        part("one", "count"),
        part("alone", "count", alone=True, makes="record"),
        part("fail", ends_well=(0, 1)),
    )
    said = [
        json.loads((tmp_path / f"out/parts/{name}.out").read_text())["before"] for name in ("one", "alone")
    ]
    assert said == [0, 0]
    assert (found["fail"].status, found["fail"].reason) == ("ok", "exit code 1")
    assert not made.exists()


def test_time_that_is_up_leaves_the_rest_for_another_slice(measured, monkeypatch):
    monkeypatch.setattr(session, "_GRACE_S", 0.5)
    found = measured(part("hang"), part("count"), most_s=1.0)
    assert list(found) == ["hang"]
    assert found["hang"].status == "cut"
    assert found["hang"].reason.startswith("the slice was over after 1 s")


def test_a_worker_that_cannot_start_is_a_reason(tmp_path):
    ended: list[Result] = []
    worker = [sys.executable, "-c", "import a_package_that_is_not_here"]
    session.run([part("count")], tmp_path, worker, env={}, most_s=30.0, ended=ended.append)
    assert ended[0].status == "died"
    assert ended[0].reason.endswith("No module named 'a_package_that_is_not_here'")


def test_slices_meet_in_one_summary(measured, tmp_path):
    out, all_parts = tmp_path / "out", [part("one", "count"), part("fail"), part("never")]
    measured(part("one", "count"), part("fail"))
    measured(part("fail", "count"))
    text = summary.text(["one GPU"], all_parts, out)
    assert "- one GPU" in text
    assert "| one | ok |" in text
    assert "| fail | ok |" in text, "a part that ran again has its newest result"
    assert "Not run: never." in text
    assert "- before: 0" in text
    assert "| 1 | 2.5 |" in text
    (out / "parts" / "one.out").write_text('{"mean_ms": 812.25, "mfu": null, "peak_bytes": 28800000000}')
    text = summary.text([], all_parts, out)
    assert "| mean_ms 812.2, peak_bytes 28800000000 |" in text
    (out / "parts" / "one.out").write_text('[{"verdict": "right", "o": 0.1}, {"verdict": "wrong", "o": 0.2}]')
    assert "| 1 of 2 cases right |" in summary.text([], all_parts, out)


def test_parts_are_chosen_by_name_in_their_own_order():
    known = [part("a"), part("b"), part("c")]
    assert chosen(known, "c,a") == [known[0], known[2]]
    with pytest.raises(UsageError, match="unknown part 'd'; choose one of: a, b, c"):
        chosen(known, "a,d")


def test_an_archive_stays_below_its_limit_and_names_what_it_leaves_out(tmp_path):
    for name, size in {"small": 1_000, "large": 40_000, "larger": 90_000}.items():
        (tmp_path / name).write_bytes(os.urandom(size))
    assert summary.archive(tmp_path, most_bytes=50_000) == ["larger"]
    packed = tmp_path / "outputs.tar.gz"
    assert packed.stat().st_size <= 50_000
    with tarfile.open(packed) as tar:
        assert tar.getnames() == ["small", "large"]
    assert summary.archive(tmp_path) == [], "an archive holds no archive"


@pytest.mark.parametrize("size", [FULL, TINY], ids=["full", "tiny"])
def test_all_parts_are_commands_with_names_of_their_own(size, tmp_path):
    made = parts(size, tmp_path, tmp_path, tmp_path)
    names = [one.name for one in made]
    assert len(set(names)) == len(names)
    for one in made:
        done = CliRunner().invoke(cli.command, [*one.argv, "--help"])
        assert done.exit_code == 0, one


def test_the_windows_that_are_timed_are_those_of_the_schedule():
    for name, step in FULL.windows.items():
        assert f"w{int(record21.RECIPE.inputs_at(step)['window_blocks'])}" == name


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("exit 9", "no GPU: nvidia-smi fails"),
        ("exit 0", "no GPU: nvidia-smi names none; need one, or --rehearse on a CPU"),
        ("echo 'NVIDIA H200, 470.82.01, 143771, 16, 16, Disabled'", "too old for CUDA"),
    ],
)
def test_a_machine_that_cannot_measure_is_a_line(answer, said, tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{answer}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    whole = {"jax-cuda13-plugin": "0.11.2", "jax-cuda13-pjrt": "0.11.2", "jaxlib": "0.11.2"}
    monkeypatch.setattr(provenance, "installed", lambda: whole)
    monkeypatch.setattr(cuda, "_libraries", lambda _: [])
    done = CliRunner().invoke(cli.command, ["bench", "all", "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_gpu_that_jax_cannot_use_ends_the_session_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda, "described", lambda: ["a GPU, driver 580"])
    monkeypatch.setattr(suite.Suite, "_provide", lambda _: None)
    script = tmp_path / "fake.py"
    script.write_text(FAKE.replace("def die", "def bench"))
    monkeypatch.setattr(suite, "_worker", lambda: [sys.executable, str(script)])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ["bench", "all", "--out", str(tmp_path / "out"), "--work", str(tmp_path)]
    done = CliRunner().invoke(cli.command, words)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: JAX cannot use this GPU: ")
    assert list(session.results(tmp_path / "out")) == ["target"]
    assert "Not run: agree-triton, " in (tmp_path / "out" / "summary.md").read_text()


RIVAL = """#!/bin/sh
echo warming up
i=0; while [ $i -lt $4 ]; do echo "{\\"step\\": $i, \\"time_s\\": 0.$((i + 1)), \\"loss\\": 5.0}"; i=$((i + 1)); done
"""


def stranger(folder: Path, text: str) -> list[str]:
    path = folder / "run"
    path.write_text(text)
    path.chmod(0o755)
    return [str(rival.executable(folder)), "--shards", "x", "--steps", "4"]


def test_a_rival_is_read_line_by_line(tmp_path):
    curve = rival.read(stranger(tmp_path, RIVAL), 4)
    assert curve.ms == pytest.approx([100.0] * 4)
    assert curve.losses == [5.0] * 4
    ours = rival.Curve("ours", [90.0, 80.0, 80.0, 500.0], [5.0] * 4)
    slower = rival.Curve("ours", [120.0] * 4, [5.0] * 4)
    found = rival.compared([ours, curve, curve, slower])
    assert found.ratio == pytest.approx((85 + 120) / 200)
    assert (found.ratio_least, found.ratio_most) == pytest.approx((0.85, 1.2))
    assert [row["step"] for row in found.curve] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "#!/bin/sh\necho torch: no kernel image >&2; exit 3\n",
            "exit code 3; it said last: torch: no kernel image",
        ),
        ("#!/bin/sh\necho hello\n", "printed 0 steps, need 4"),
    ],
)
def test_a_rival_that_fails_is_a_line(text, said, tmp_path):
    with pytest.raises(SpeedrunError, match=said):
        rival.read(stranger(tmp_path, text), 4)


def test_a_rival_is_a_program(tmp_path):
    with pytest.raises(UsageError, match="run is no executable file"):
        rival.executable(tmp_path)


# --- the whole script on a machine without a network --------------------------------------------------------


def gpu_image() -> str:
    """The Python of an environment like a GPU machine's: JAX for CUDA 13, and no msgspec."""
    python = os.environ.get("SPEEDRUN_GPU_IMAGE", "")
    if not python:
        pytest.skip("$SPEEDRUN_GPU_IMAGE names no Python like a GPU machine's; see CONTRIBUTING.md")
    if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("this user may make no network namespace (unshare -n)")
    return python


FIGURES = (
    *("agree-triton", "agree-qk-norm", "agree-head-bf16", "agree-head-fp8", "agree-banded", "step-banded-w1"),
    *(
        "step-banded-w3",
        "run",
        "rival",
        "profile-w1",
        "profile-w3",
        "step-auto-w3-no-command-buffers",
        "health",
    ),
    *("doctor", "norm", "muon", "head", "attention-w1", "attention-w4", "loader", "plan", "estimate"),
)


@pytest.mark.compile
def test_the_rehearsal_gives_figures_without_a_network(tmp_path):
    """Three minutes, and one to fetch the wheels where there is a network."""
    python, script = gpu_image(), str(ROOT / "scripts" / "measure_gpu.sh")
    wheels, out, folder = tmp_path / "wheels", tmp_path / "out", tmp_path / "rival"
    packed = subprocess.run([script, "--wheels", str(wheels)], capture_output=True, text=True)
    if packed.returncode:
        pytest.skip(f"no wheels: {packed.stderr.strip()}")
    assert sum(path.stat().st_size for path in wheels.iterdir()) <= 60 * 2**20
    folder.mkdir()
    stranger(folder, RIVAL)
    env = {**os.environ, "SPEEDRUN_PYTHON": python, "HOME": str(tmp_path)}
    env = {name: value for name, value in env.items() if not name.startswith(("JAX_", "XLA_"))}
    words = ["--from", str(wheels), "--rehearse", "--out", str(out), "--rival", str(folder)]
    done = subprocess.run(
        ["unshare", "-n", script, *words, "--work", str(tmp_path / "work")],
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = session.results(out)
    assert {name: found[name].reason for name in FIGURES if found[name].status != "ok"} == {}
    assert {one.status for one in found.values()} == {"ok", "refused"}
    assert all(one.reason for one in found.values() if one.status == "refused")
    assert "Not run" not in (out / "summary.md").read_text()
    assert 0 < (out / "outputs.tar.gz").stat().st_size <= summary.MOST_ARCHIVE_BYTES
