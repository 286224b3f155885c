"""A record run again: what is compared before, what the words mean, what a referee finds who comes back."""

import ctypes
import dataclasses
import json
import math
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import msgspec
import pytest
from forgeries import BROKE
from record_forge import LOCK, LOCK_RAW, SOFTWARE, Spec, both, change, forge, write_run
from scipy import stats
from small_run import files
from typed import invoke

from speedrun import cli
from speedrun.base import provenance, runlog, track
from speedrun.base.errors import NonFiniteError, SpeedrunError
from speedrun.record import reproduction
from speedrun.record.examine import reproduce, rerun, sandbox
from speedrun.record.examine.rerun import Rerun
from speedrun.record.layout import sha256
from speedrun.record.logged_run import Run, read_run
from speedrun.record.reader import decode, encode, load, read_files
from speedrun.record.reproduction import Difference, Reproduction, judged, point, verdict
from speedrun.record.statistics import compared
from speedrun.record.validate import validate


def test_intervals_are_those_of_scipy():
    first, second = [3.1, 3.4, 3.2, 3.3, 3.5], [3.0, 3.6, 3.3]
    pooled = reproduction.Noise(math.sqrt((4 * variance(first) + 2 * variance(second)) / 6), 6, "runs")
    found = reproduction.difference(first, second, pooled)
    tested: Any = stats.ttest_ind(second, first, equal_var=True)
    want = tested.confidence_interval(0.99)
    assert (found.low, found.high) == pytest.approx((want.low, want.high))
    found = reproduction.difference([1.0] * 4, [2.0] * 4, reproduction.Noise(0.1, None, "track"))
    assert found.half_width == pytest.approx(stats.norm.ppf(0.995) * 0.1 / math.sqrt(2))


SAME = (point("devices", "8 x cpu", "8 x cpu"), point("bench", "1", "1"))
OTHER = (point("devices", "8 x cpu", "8 x H100"), point("bench", "1", "1"))


@pytest.mark.parametrize(
    ("loss", "time", "points", "blown", "word"),
    [
        ((-0.1, 0.1), (1.001, 1.003), SAME, 0, "within"),
        ((-0.1, 0.1), (0.8, 0.9), SAME, 0, "faster"),
        ((-0.1, 0.1), (1.1, 1.2), SAME, 0, "slower"),
        ((-0.2, -0.1), (0.9, 1.1), SAME, 0, "loss mismatch"),
        ((-0.1, 0.1), (0.9, 1.1), SAME, 1, "loss mismatch"),
        ((-0.1, 0.1), (0.1, 0.2), OTHER, 0, "not the same hardware"),
        ((0.1, 0.2), (0.1, 0.2), OTHER, 0, "loss mismatch"),
    ],
)
def test_one_word(loss, time, points, blown, word):
    by_loss, by_time = [Difference(fmean((low, high)), low, high, "runs") for low, high in (loss, time)]
    assert verdict(by_loss, by_time, points, num_non_finite=blown) == word


@pytest.fixture
def record(forged, tmp_path, monkeypatch) -> Path:
    """A record of two runs with seeds 1 and 2, made by the packages that are here."""
    monkeypatch.setattr(provenance, "software", lambda: SOFTWARE)
    monkeypatch.setattr(provenance, "lock", lambda: provenance.Lock(LOCK, sha256(LOCK_RAW)))
    data = tmp_path / "data" / "forged"
    data.mkdir(parents=True)
    for name in ("t_train_1.bin", "t_train_2.bin", "t_val_0.bin"):
        (data / name).write_text(name)  # the digest that the forger gives a shard is that of its name
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path / "data"))
    return forge(tmp_path / "record")


@pytest.fixture
def reproduced(record, tmp_path, monkeypatch):
    """`speedrun reproduce` whose runs are forged by a function of their seed. Tells which seeds were run."""

    def reproduce(*args: str, make=lambda seed: Spec(seed=seed), out: str = "out"):
        ran: list[int] = []

        def run(self: Rerun, out: Path, *, seed: int, **_: object) -> None:
            ran.append(seed)
            made = make(seed)
            if isinstance(made, BaseException):
                raise made
            told = change(runlog.RunStart, seed=seed)
            step_s = tuple(seconds * (1 + 1e-6) for seconds in made.step_s)  # no run takes as long as another
            changes = {"step_s": step_s, "edit_log": both(made.edit_log, told)}
            write_run(out, dataclasses.replace(made, seed=1, attempt="r", **changes))
            if not load(out).finished:
                raise NonFiniteError("its loss became nan")

        monkeypatch.setattr(Rerun, "run", run)
        return invoke("reproduce", str(record), "--out", str(tmp_path / out), *args), ran

    return reproduce


def mounted(script: str) -> None:
    """Give this process, which has one thread, mounts of its own."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None).unshare(0x10020000):  # CLONE_NEWUSER and CLONE_NEWNS
        raise PermissionError("no namespaces")
    texts = {"setgroups": "deny", "uid_map": f"0 {user} 1", "gid_map": f"0 {group} 1"}
    for name, text in texts.items():
        Path("/proc/self", name).write_text(text)
    subprocess.run(["sh", "-ec", script], check=True)


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_reproduction_is_written_into_a_mount_in_a_folder_that_is_read_only(reproduced, tmp_path):
    """As docs/containers.md does it: /out is a mount, and / is root's."""
    (tmp_path / "again").mkdir()
    (tmp_path / "root" / "out").mkdir(parents=True)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            root = shlex.quote(str(tmp_path / "root"))
            bind = f"mount --bind {root} {root}; mount --bind {root}/../again {root}/out"
            mounted(f"{bind}; mount -o remount,ro,bind {root}")
            result, _ = reproduced("--by", "A. Referee", out="root/out")
            code = result.exit_code
            sys.stderr.write(result.output)
        except (OSError, subprocess.CalledProcessError):
            code = 77
        finally:
            os._exit(code)
    if (code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) == 77:
        pytest.skip("this machine gives no mounts to a process")
    assert code == 0
    made = {path.name for path in (tmp_path / "again").iterdir()}
    assert {"plan.json", "reproduction.json"} < made
    assert not {".lock", ".partial"} & made
    assert not list((tmp_path / "root" / "out").iterdir())


def told(result) -> str:
    return next(line for line in result.stdout.splitlines() if line.startswith("verdict  ")).split(":")[0][9:]


def test_an_honest_record_holds(reproduced, record, tmp_path):
    result, ran = reproduced("--by", "A. Referee")
    assert (result.exit_code, told(result)) == (0, "within"), result.output
    assert len(ran) == 2
    assert not {1, 2} & set(ran), "fresh seeds"
    packages = ", ".join(SOFTWARE)
    assert f"same     checks, {packages}, lock, devices, bench" in result.stdout
    found = msgspec.json.decode((tmp_path / "out" / "reproduction.json").read_bytes(), type=Reproduction)
    assert [run.seed for run in found.runs] == ran
    judgement: Any = judged(found, load(record).finished, 0.01)
    assert (found.by, judgement.verdict, judgement.num_same_bits) == ("A. Referee", "within", None)
    assert judgement.loss_difference.noise_from == "track"


@pytest.mark.parametrize(("step_s", "word"), [(0.05, "faster"), (0.2, "slower")])
def test_what_differs_has_a_word(reproduced, step_s, word):
    result, _ = reproduced("--json", make=lambda seed: Spec(seed=seed, step_s=(step_s,) * 10))
    assert (result.exit_code, json.loads(result.stdout)["verdict"]) == (word != "faster", word), result.output


slow_bench = change(runlog.Preflight, matmul_gflops=20.0)


def test_a_machine_of_another_speed_is_other_hardware(reproduced):
    result, _ = reproduced(make=lambda seed: Spec(seed=seed, edit_log=slow_bench, step_s=(0.3,) * 10))
    assert (result.exit_code, told(result)) == (1, "not the same hardware")
    assert "differs  bench: the record has 50 Gflop/s, here is 20 Gflop/s" in result.stdout


def test_the_same_seeds_tell_of_bits(reproduced):
    result, ran = reproduced("--same-seeds", "--runs", "1", make=lambda seed: Spec(seed=seed))
    assert ran == [1]
    assert "bits     1 of 1 run ended in exactly the state" in result.stdout
    assert "10 of 10 losses are equal, the largest difference is 0" in result.stdout
    result, _ = reproduced("--same-seeds", "--runs", "3", out="other")
    assert (result.exit_code, "the record has 2 finished runs" in result.stderr) == (2, True)


def test_a_loss_is_compared_with_that_of_its_own_seed(record, tmp_path):
    pairs = {1: 3.2, 2: 3.26}
    made = [Spec(seed=seed, val_losses=(5.5, 4.0, 3.4, loss)) for seed, loss in pairs.items()]
    folders = [write_run(tmp_path / "unlike", spec).name for spec in made]
    first, second = (read_run(read_files(tmp_path / "unlike")[0], name) for name in folders)
    ours = [reproduction.outcome_of(second)]
    assert reproduction.loss_difference([first, second], ours, 0.01, same_seeds=True).mean == 0
    fresh = reproduction.loss_difference([first, second], ours, 0.01, same_seeds=False)
    assert fresh.mean == pytest.approx(0.03)
    assert fresh.noise_from == "runs", "the record's own runs scatter more than the track knows"


def test_fresh_seeds_are_none_of_the_record(reproduced, monkeypatch):
    monkeypatch.setattr(reproduce, "seeds_from", lambda *_: (2, 7, 1, 8))
    assert reproduced()[1] == [7, 8]


def test_other_packages_are_told_with_what_is_lost(reproduced, monkeypatch):
    monkeypatch.setattr(provenance, "software", lambda: {"jax": "0.0.1", "python": "3.11.2"})
    result, _ = reproduced()
    assert result.exit_code == 0
    lost = "no longer promised: equal bits and equal times"
    assert f"differs  jax: the record has {SOFTWARE['jax']}, here is 0.0.1; {lost}" in result.stdout
    assert "differs  jax: " in result.stderr, "before anything runs"


def test_whoever_comes_back_finds_what_was_run(reproduced, tmp_path):
    stop = SpeedrunError("stopped by SIGTERM")
    stop.exit_code = 75
    first = []
    result, _ = reproduced(make=lambda seed: stop if first else (first.append(seed), Spec(seed=seed))[1])
    assert (result.exit_code, "run the same command again to continue" in result.stderr) == (75, True)
    result, ran = reproduced()
    assert result.exit_code == 0, result.output
    assert len(ran) == 1
    assert ran[0] != first[0]
    (tmp_path / "out" / f"{ran[0]}-0.stacks.txt").write_text("what a run that hung leaves behind")
    result, ran = reproduced()
    assert (result.exit_code, ran) == (0, []), "told again, not run again"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("")
    (tmp_path / "file").touch()
    for args, out in ((["--runs", "5"], "out"), ([], "mine"), ([], "file"), ([], "file/new")):
        result, ran = reproduced(*args, out=out)
        assert (result.exit_code, ran, result.stderr.count("error: ")) == (2, [], 1), result.output


def blown(log):
    place = next(i for i, moment in enumerate(log) if isinstance(moment.event, runlog.ClockStop))
    return [*log[:place], log[place]._replace(event=runlog.Error("NonFiniteError", "block0"))]


def test_a_run_that_becomes_non_finite_is_an_answer(reproduced):
    result, _ = reproduced("--runs", "1", make=lambda seed: Spec(seed=seed, edit_log=blown))
    assert (result.exit_code, told(result)) == (1, "loss mismatch"), result.output
    assert "1 of 1 runs became non-finite" in result.stdout


def test_a_run_of_something_else_is_not_compared(reproduced):
    other = change(runlog.RunStart, config_sha256="0" * 64)
    result, _ = reproduced(make=lambda seed: Spec(seed=seed, edit_log=other))
    told = result.exit_code, "has another config than the record" in result.stderr
    assert told == (3, True), result.output


def edited(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def no_time(record: Path) -> None:
    shutil.rmtree(record)
    forge(record, step_s=(0.0,) * 10)


#: What cannot be used, with its exit code.
SPOILED: dict[str, tuple[Callable[[Path], object], int]] = {
    "newer": (lambda record: edited(record / "batch.json", "speedrun.batch/1", "speedrun.batch/2"), 2),
    "no time": (no_time, 2),
    "source": (lambda record: edited(record / "source.txt", "SIZE = 1", "SIZE = 2"), 2),
    "track": (lambda _: edited(track.TRACKS_DIR / "forged.toml", "\n", "\n# easier\n"), 2),
    "no shard": (lambda record: (record.parent / "data" / "forged" / "t_train_2.bin").unlink(), 3),
    "other shard": (lambda record: edited(record.parent / "data" / "forged" / "t_val_0.bin", "t", "o"), 3),
}


@pytest.mark.parametrize(("spoil", "code"), SPOILED.values(), ids=SPOILED)
def test_what_cannot_be_used_is_one_line_and_nothing_is_run(reproduced, record, tmp_path, spoil, code):
    spoil(record)
    result, ran = reproduced()
    assert (result.exit_code, ran) == (code, []), result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert not (tmp_path / "out").exists()


def test_times_that_nobody_can_divide_by_are_told(reproduced, record):
    reproduced("--into-record")
    found = decode((record / "reproduction.json").read_bytes(), Reproduction)
    shutil.rmtree(record)
    again = load(forge(record, step_s=(0.0,) * 10))
    raw = encode(msgspec.structs.replace(found, record_id=again.id))
    (record / "reproduction.json").write_bytes(raw)
    (result,) = (one for one in validate(record).results if one.check.id == "V009")
    assert "a run of the record took no time" in result.messages[0]


def test_a_record_is_left_alone_unless_asked(reproduced, record):
    before = files(record)
    reproduced()
    assert files(record) == before
    result, _ = reproduced("--into-record")
    after = files(record)
    assert after.keys() - before.keys() == {"reproduction.json"}
    statuses = {one.check.id: one.status for one in validate(record).results}
    assert (statuses["V009"], "failed" in statuses.values()) == ("ok", False), result.output


@pytest.fixture
def raced(record, tmp_path, monkeypatch):
    """`speedrun reproduce record --against baseline`, whose steps take a share of the record's. Tells what was run."""
    forge(tmp_path / "candidate", seeds=(3, 4))

    def race(share: float, *args: str):
        ran: list[tuple[str, int]] = []

        def run(self: Rerun, out: Path, *, seed: int, **_: object) -> None:
            is_candidate = self.old.start.seed == 3
            ran.append(("B" if is_candidate else "A", seed))
            step_s = 0.1 * (1 + 0.001 * (len(ran) % 3)) * (share if is_candidate else 1.0)
            write_run(out, Spec(seed=1, step_s=(step_s,) * 10, edit_log=change(runlog.RunStart, seed=seed)))

        monkeypatch.setattr(Rerun, "run", run)
        words = ["--against", str(tmp_path / "candidate"), "--out", str(tmp_path / "out"), *args]
        return invoke("reproduce", str(record), *words), ran

    return race


def test_pairs_alternate_and_share_a_fresh_seed(raced, tmp_path):
    result, ran = raced(0.8, "--json")
    assert (result.exit_code, [side for side, _ in ran]) == (0, list("ABBAAB")), result.output
    seeds = [seed for _, seed in ran]
    assert seeds[::2] == seeds[1::2]
    assert len({*seeds} - {1, 2, 3, 4}) == 3
    found = json.loads(result.stdout)
    assert found["comparison"] == json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert found["comparison"]["log_time"]["high"] < 0
    assert (found["record"]["verdict"], found["candidate"]["verdict"]) == ("within", "faster")
    again, ran = raced(0.8)
    assert (again.exit_code, ran, "the candidate is faster" in again.stdout) == (0, [], True)


@pytest.mark.parametrize(("share", "said"), [(1.0, "not resolvable here"), (1.2, "the candidate is slower")])
def test_a_candidate_that_is_not_faster_is_told(raced, share, said):
    result, _ = raced(share)
    assert (result.exit_code, said in result.stdout) == (1, True), result.output


@pytest.mark.parametrize("words", [["--same-seeds"], ["--runs", "1"], []])
def test_what_cannot_race_is_refused(raced, tmp_path, words):
    if not words:
        shutil.rmtree(tmp_path / "candidate")
        forge(tmp_path / "candidate", edit_log=change(runlog.Preflight, num_devices=2))
    result, ran = raced(1.0, *words)
    assert (result.exit_code, ran, result.stderr.count("need the same for both")) == (2, [], not words)


def made(folder: Path, *, step_s: float = 0.1, seed: int = 1) -> Run:
    spec = Spec(seed=seed, step_s=(step_s,) * 10)
    write_run(folder, spec)
    return read_run(read_files(folder)[0], spec.run_id)


def test_runs_that_took_no_time_are_not_compared(record, tmp_path):
    with pytest.raises(ValueError, match="took no time"):
        compared("b", "a", {1: (made(tmp_path / "a", step_s=0.0), made(tmp_path / "b"))})


@pytest.fixture
def foreign(record, monkeypatch, tmp_path):
    """`speedrun reproduce` of a source that ends with a code and does something to its new record's folder."""

    def reproduce(code: int = 0, leave: Callable[[Path], object] = lambda out: None):
        def child(argv: list[str], *_: object, **__: object) -> int:
            leave(Path(json.loads(Path(argv[-1]).read_bytes())["out"]))
            return code

        monkeypatch.setattr(sandbox, "run", child)
        monkeypatch.setattr(sandbox, "problem", lambda: None)
        words = ["--same-seeds", "--runs", "1", "--out", str(tmp_path / "new")]
        return invoke("reproduce", str(record), *words)

    return reproduce


NAN = runlog.Error("NonFiniteError", "block0")


@pytest.mark.parametrize(
    "leave",
    [
        lambda out: None,
        lambda out: write_run(out, Spec(edit_log=lambda log: [log[0], log[1]._replace(event=NAN)])),
        lambda out: (out / "runs" / "x").mkdir(parents=True),
        lambda out: [made(out, seed=seed) for seed in (1, 2)],
        lambda out: (made(out), next(out.glob("runs/*/metrics.jsonl")).write_text("{}")),
        lambda out: write_run(out, BROKE[0]),
        lambda out: write_run(out, Spec(seed=1)),
    ],
    ids=[
        *("nothing", "no hardware", "an empty run", "two runs", "a damaged run", "a run that crashed"),
        "a clock that nobody heard",
    ],
)
def test_what_a_foreign_source_leaves_is_not_trusted(foreign, leave):
    result = foreign(0, leave)
    assert result.exit_code == 1, result.exception
    assert re.search("need one|nothing was judged", result.stderr)


@pytest.mark.parametrize(("code", "seen"), [(75, 75), (77, 1), (-9, 1)])
def test_a_foreign_source_that_ends_badly_ends_as_ours_would(foreign, code, seen):
    result = foreign(code)
    assert (result.exit_code, f"ended with exit code {code}" in result.stderr) == (seen, True)


def test_the_source_of_the_record_runs_in_a_process_of_its_own(record, tmp_path, capfd, monkeypatch):
    made, folder = tmp_path / "made", tmp_path / "again"
    copy = f"shutil.copytree({str(made)!r}, json.load(open(sys.argv[1]))['out'])"
    script = f"import json, shutil, sys\n{copy}\n"
    forge(folder, seeds=(1,), edit_source=lambda files: {**files, "speedrun/train/recorded.py": script})
    shutil.copytree(folder / "runs", made / "runs")
    shutil.copy(folder / "source.txt", made)
    monkeypatch.setattr(sandbox, "problem", lambda: "its source reads a folder of this test")
    monkeypatch.setattr(rerun, "_SLACK_S", math.inf)  # it trains nothing
    words = ["reproduce", str(folder), "--same-seeds", "--unsafe-here", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as end:
        cli.command.main(words, prog_name="speedrun")
    said = capfd.readouterr().out
    assert (end.value.code, "verdict  within" in said) == (0, True), said
    assert "checks: the record has all pass, here is V" in said, "no harness: told, and run all the same"
    assert "bits     1 of 1 run" in said


def test_a_new_run_of_the_same_kind_is_inside_99_of_100_times():
    """With six runs in the record, as many as are committed."""
    draw, inside, num = random.Random(0).gauss, 0, 2000
    for _ in range(num):
        six = [draw(0, 1) for _ in range(6)]
        found = reproduction.difference(six, [draw(0, 1)], reproduction.noise(six, 0.0, "assumed"))
        inside += found.low <= 0 <= found.high
    assert inside / num == pytest.approx(0.99, abs=0.007)
