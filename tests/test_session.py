"""Parts measured in one sitting: a hang or a crash costs one part, and nothing that was measured is lost."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import click.testing
import pytest
from click.testing import CliRunner

from speedrun import cli
from speedrun.bench import rival, session
from speedrun.bench.session import FULL, TINY, Part, Result, parts
from speedrun.ground.errors import SpeedrunError, UsageError
from speedrun.science.recipes import record21

ROOT = Path(__file__).parent.parent


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Result]]:
    """Runs parts that are lines of shell, into one folder, as often as it is called."""
    monkeypatch.setattr(session, "COMMAND", ("sh", "-c"))
    env = {**os.environ, "SLEEPER": str(tmp_path / "sleeper")}

    def run(*asked: Part, most_s: float = 60.0) -> dict[str, Result]:
        return {one.name: one for one in session.run(asked, tmp_path / "out", env, most_s)}

    return run


def part(name: str, line: str = "echo 1", limit_s: float = 30.0) -> Part:
    return Part(name, (line,), limit_s)


#: A command that has started another, which holds its output open.
HANGS = "echo runs: the kernel of doom >&2; sleep 600 & echo $! > $SLEEPER; wait"


def is_gone(sleeper: Path) -> bool:
    state = Path(f"/proc/{sleeper.read_text().strip()}/stat")
    return not state.exists() or state.read_text().split()[2] == "Z"


ENDS = {
    "well": ("echo '{\"mean_ms\": 812.25, \"mfu\": null}'", "ok", "mean_ms 812.25"),
    "rows": ("echo '[{\"name\": \"ours\", \"median_ms\": 2.5}]'", "ok", "ours 2.5"),
    "no": ("echo '{\"ready\": false}'; exit 1", "ok", ""),
    "refuse": ("echo '{\"error\": \"no GPU\", \"exit_code\": 2}'; exit 2", "refused", "no GPU"),
    "fail": ("echo '{\"error\": \"no such shard\", \"exit_code\": 3}'; exit 3", "failed", "no such shard"),
    "crash": ("echo some; echo RuntimeError: CUDA error >&2; exit 1", "failed", "said last: RuntimeError: CUDA error"),
    "silent": ("true", "failed", "exit code 0 (done); it said last: nothing"),
    "die": ("echo the kernel of death >&2; kill -SEGV $$", "failed", "(signal 11); it said last: the kernel of death"),
    "hang": (HANGS, "failed", "beyond its limit; it said last: runs: the kernel of doom"),
}  # fmt: skip


def test_each_end_of_a_part_is_told_and_the_others_go_on(measured, tmp_path):
    asked = [
        part(name, line, 2.0 if name == "hang" else 30.0) for name, (line, _, _) in reversed(ENDS.items())
    ]
    found = measured(*asked)
    assert list(found) == [*reversed(ENDS)]
    for name, (_, status, said) in ENDS.items():
        assert (found[name].status, said in str(found[name])) == (status, True), name
    assert is_gone(tmp_path / "sleeper"), "what a part started ends with it"
    assert session.results(tmp_path / "out") == found
    session.report([*asked, part("never")], tmp_path / "out")
    text = (tmp_path / "out" / "summary.md").read_text()
    assert all(f"    {one}\n" in text for one in found.values())
    assert "Not run: never." in text


def test_slices_go_on_where_the_last_one_stopped(measured, tmp_path):
    out, asked = tmp_path / "out", [part("one"), part("fail", "false"), part("hang", HANGS), part("last")]
    measured(*asked[:2])
    assert session.chosen(asked, None, out) == asked[2:], "a failure is a result, too"
    assert measured(*asked[2:], most_s=1.0) == {}, "the end of a slice is not"
    assert is_gone(tmp_path / "sleeper")
    assert session.chosen(asked, None, out) == asked[2:]
    (out / "parts" / "hang").mkdir()  # what an earlier try left
    torn = out / "parts" / "one.json"
    torn.write_bytes(torn.read_bytes()[:-9])
    assert session.chosen(asked, None, out) == [asked[0], *asked[2:]]
    assert measured(part("hang", "echo 2"))["hang"].figures == 2
    assert not (out / "parts" / "hang").exists()
    assert session.chosen(asked, "last,hang", out) == asked[2:], "in their own order, also again"
    with pytest.raises(UsageError, match="fail, hang, last, one"):
        session.chosen(asked, "hang,d", out)


@pytest.mark.parametrize("size", [FULL, TINY], ids=["full", "tiny"])
def test_all_parts_are_commands_with_names_of_their_own(size, tmp_path):
    made = parts(size, tmp_path, tmp_path, tmp_path)
    names = [one.name for one in made]
    assert len(set(names)) == len(names)
    for one in made:
        done = CliRunner().invoke(cli.command, [*one.argv, "--help"])
        assert done.exit_code == 0, one


def test_the_windows_that_are_timed_are_those_of_the_schedule():
    for name in ("w1", "w7", "w14"):
        step = int(FULL[name].removeprefix("--first-step "))
        assert f"w{int(record21.RECIPE.inputs_at(step)['window_blocks'])}" == name


@pytest.fixture
def bench_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., click.testing.Result]:
    """Calls the command with parts that run one line of shell."""
    monkeypatch.setattr(session, "imitated", lambda folder: folder)

    def run(line: str, *words: str) -> click.testing.Result:
        monkeypatch.setattr(session, "COMMAND", ("sh", "-c", line))  # $0 is the first word of a part
        words = ("bench", "all", "--out", str(tmp_path / "out"), *words)
        return CliRunner().invoke(cli.command, words)

    return run


def test_a_gpu_that_jax_cannot_use_ends_the_session_at_once(bench_all, tmp_path):
    done = bench_all("echo CUDA_ERROR_SYSTEM_NOT_READY >&2; exit 1")
    assert done.exit_code == 2
    assert "said last: CUDA_ERROR_SYSTEM_NOT_READY; " in done.stderr
    assert list(session.results(tmp_path / "out")) == ["target"]
    assert "Not run: step-triton-w1, " in (tmp_path / "out" / "summary.md").read_text()


def test_a_command_measures_what_is_missing_or_asked_for(bench_all, tmp_path):
    fails = '[ "$0" != plan ] || exit 3; echo "{}"'
    done = bench_all(fails)
    assert done.exit_code == 1
    listed = [one.name for one in parts(FULL, tmp_path, tmp_path, None)]
    assert done.stderr == f"error: 1 of {len(listed)} parts gave no figures: plan\n"
    assert [line.split()[1] for line in done.stdout.splitlines()[:-1]] == listed
    again = bench_all(fails)
    assert again.exit_code == 0
    assert [line.split()[1] for line in again.stdout.splitlines()[:-1]] == ["target"], "in every slice"
    asked = bench_all(fails, "--parts", "plan,norm", "--rehearse")
    assert [line.split()[:2] for line in asked.stdout.splitlines()[:-1]] == [
        ["ok", "norm"],
        ["failed", "plan"],
    ]
    late = bench_all("sleep 600", "--parts", "norm,plan", "--minutes", "0.001", "--rehearse")
    assert "time is up before norm, plan; the same command continues there" in late.stdout


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
    for text in ("#!/bin/sh\necho torch: no kernel image >&2; exit 3\n", "#!/bin/sh\necho hello\n"):
        with pytest.raises(SpeedrunError, match=r"no kernel image|printed 0 steps"):
            rival.read(stranger(tmp_path, text), 4)
    (tmp_path / "run").unlink()
    with pytest.raises(UsageError, match="no executable"):
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


REFUSED = r"target|(step|rank)-(triton|flash3)-w\d+"  #: by a CPU


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
    done = subprocess.run(["unshare", "-n", script, *words], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    found = session.results(out)
    wrong = [
        str(one)
        for name, one in found.items()
        if one.status != ("refused" if re.fullmatch(REFUSED, name) else "ok")
    ]
    assert not wrong
    assert "Not run: none" in (out / "summary.md").read_text()
