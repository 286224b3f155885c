"""Importing other people's logs: every dialect, broken files, hostile bytes, and the public runs."""

import csv
import gzip
import json
import math
from pathlib import Path
from statistics import fmean, stdev

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typed import invoke

from speedrun.base.errors import UsageError
from speedrun.board import foreign_logs
from speedrun.board.foreign_logs import Context, Point

ROOT = Path(__file__).parents[2]
PUBLIC = ROOT.parent / "shared" / "upstream-runs.csv.gz"

#: Invented, in the order of a real log: script, versions, table, lines.
HEAD = """\
import torch
print0(f"step:{step}/{train_steps} val_loss:{val_loss:.4f} train_time:{training_time_ms:.0f}ms")
# step:9/9 val_loss:1.0000 train_time:9ms is what it prints
====================================================================================================
Running Python 3.12.7 (main, Jan  1 2025, 00:00:00) [GCC 13.2.0]
Running PyTorch 2.7.0.dev20250125+cu126 compiled for CUDA 12.6
| NVIDIA-SMI 550.1                 Driver Version: 550.1         CUDA Version: 12.6     |
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:61:00.0 Off |                    0 |
|   1  NVIDIA H100 80GB HBM3          On  |   00000000:62:00.0 Off |                    0 |
====================================================================================================
"""


def read(text: str | bytes, name: str = "a/b.txt") -> Context:
    raw = text.encode() if isinstance(text, str) else text
    return foreign_logs.import_bytes(raw, name, source="b.txt", digest="0" * 64)


def curve(*points: tuple[int, float | None, float | None]) -> tuple[Point, ...]:
    return tuple(Point(*point) for point in points)


@pytest.mark.parametrize(
    ("line", "step", "num_steps", "loss", "train_time_s"),
    [
        ("step:0/6000 val_loss:11.0149 train_time:305ms step_avg:nanms", 0, 6000, 11.0149, 0.305),
        ("step:125/3350 val_loss:4.66393 train_time:22.870s step_avg:182.95ms", 125, 3350, 4.66393, 22.870),
        ("step:5/9 val_loss:4.5 val_ema_loss:4.7 train_time:4s step_avg:3ms ema_beta:0", 5, 9, 4.5, 4.0),
        ("step:2/9 val_loss:4.5 train_time:1ms extrap_rel:0.000e+00 handoff:none", 2, 9, 4.5, 0.001),
        ("s:250 tel:6.1710", 250, None, 6.1710, None),
        ("[rank0]: step:125/1770 val_loss:4.6539 train_time:12051ms", 125, 1770, 4.6539, 12.051),
        ("\x1b[32mstep:125/1770 val_loss:4.6539 train_time:12051ms\x1b[0m\r", 125, 1770, 4.6539, 12.051),
        ("step:5/9 val_loss:4.5 train_time:4s step_avg:800ms tokens/sec:1234567.8", 5, 9, 4.5, 4.0),
        ("[METRICS (latest)] step: 1674  |  val_loss: 3.2750809192657", 1674, None, 3.2750809192657, None),
        ("[METRICS] step: 7  |  val_loss: 4.5  |  tokens/sec: 1.2e6", 7, None, 4.5, None),
        ("step: 7  |  val_loss: 4.5  |  note: two words", 7, None, 4.5, None),
        ("50%|### | 7/9\rstep:7.0/9 val_loss:4.5\r99%", 7, 9, 4.5, None),
        ("\0\0 12: step:7/9 val_loss:4.5", 7, 9, 4.5, None),
        ("[1,0]<stdout>:step:7/9 val_loss:4.5", 7, 9, 4.5, None),
        ("[2026-11-28 12:00:01,123] INFO | s:7 tel:4.5", 7, None, 4.5, None),
        ("2026-11-28T12:00:01.123Z step:7/9 val_loss:4.5", 7, 9, 4.5, None),
    ],
)
def test_every_dialect_of_a_validation_is_read(line, step, num_steps, loss, train_time_s):
    (run,) = read(HEAD + line + "\n").runs
    assert run.validations == (Point(step, loss, train_time_s),)
    assert (run.num_steps, run.final_loss, run.train_time_s) == (num_steps, loss, train_time_s)


def test_what_is_no_validation_is_left_out():
    """Invented, in the order of real logs. The wall clock of the port to JAX runs through validations."""
    found = read(
        "step:0/20 val_loss:11.0 train_time:3ms\nstep:1/20 train_loss:10.5 train_time:35679ms step_avg:nanms\n"
        "step:12/20 train_time:200ms step_avg:1.0ms\ns:0 trl:10.9 lr:0.000001 norm:15.37\ns:0 eval:0.26\n"
        "[MESSAGE] Starting training...\n"
        "[METRICS (1 step stale)] step: 19  |  time: 2025-08-20 13:50:51.5  |  loss: 6.25\n"
        "[METRICS (1 step stale)] step: 20  |  val_loss: 6.125\n"
        "[METRICS (latest)] step: 30  |  val_bpb: 1.5\n"
        "[METRICS (latest)] step: 31  |  val_loss\n"
    )
    (run,) = found.runs
    assert run.validations == curve((0, 11.0, 0.003), (20, 6.125, None))
    assert [problem.line for problem in found.problems] == [10]
    first, eleventh = "step:1/20 val_loss:10.5 train_time:35679ms", "step:11/20 val_loss:9.5 train_time:100ms"
    assert not read(f"{first}\n{eleventh}\n").problems, "the first scripts restarted their clock"


def test_one_file_may_hold_several_runs():
    curve = {0: 9, 10: 5, 20: 4}
    one = "".join(f"step:{at}/20 val_loss:{loss} train_time:{at}ms\n" for at, loss in curve.items())
    found = read(one + one.replace(":4 ", ":3 ") + one)
    ends = [("a/b.txt", 4.0), ("a/b.txt#2", 3.0), ("a/b.txt#3", 4.0)]
    assert [(run.name, run.final_loss) for run in found.runs] == ends
    assert [(run.name, run.final_loss) for run in foreign_logs.distinct(found.runs)] == ends[:2]
    twice = "".join(2 * line for line in one.splitlines(keepends=True))  # a console and its log file
    assert read(twice).runs == read(one).runs


@pytest.mark.parametrize(
    ("bad", "said", "left"),
    [
        ("step:20/30 val_loss:nan train_time:20ms", "is nan", curve((20, None, 0.02))),
        ("step:5/30 val_loss:4.0 train_time:20ms", "step 5 comes after step 10", ()),
        ("step:20/30 val_loss:4.0 train_time:9ms", "goes back", curve((20, 4.0, None))),
        ("step:20/30 val_loss:4.0 train_ti", "cut off", ()),
        ("step:20/30 val_loss:4.0 train_time:20m", "cannot be read", ()),
        ("step:\N{FULLWIDTH DIGIT TWO}0/30 val_loss:4.0", "cannot be read", ()),
        ("(Worker pid=7) step:20/30 val_loss:4.0", "not the form of a validation", ()),
        ("step:20/30 val_loss:-4.0 train_time:20ms", "out of range", ()),
        ("step:20/30 val_loss:4.0 " + "x:1 " * 500, "characters", ()),
        ("step:20/30 val_loss:NaN train_time:20ms", "is nan", curve((20, None, 0.02))),
        ("step:20/30 val_loss:3.2\0\0", "cannot be read", ()),
        ("50%|### | 20/30 step:20/30 val_loss:4.0", "not the form of a validation", ()),
    ],
)
def test_impossible_lines_are_reported_by_number(bad, said, left):
    found = read(f"step:0/30 val_loss:9.0 train_time:0ms\nstep:10/30 val_loss:5.0 train_time:10ms\n{bad}\n")
    (run,) = found.runs
    assert run.validations == curve((0, 9.0, 0.0), (10, 5.0, 0.01)) + left
    assert [problem.line for problem in found.problems] == [3]
    assert said in found.problems[0].message


def test_a_log_that_is_cut_anywhere_names_its_step_or_says_so():
    """A loss from a cut line would look like a result."""
    text = "step:0/20 val_loss:9.25 train_time:1ms\nstep:20/20 val_loss:3.279 train_time:50ms\n"
    for raw in (
        text.encode(),
        text.encode("utf-16"),
        b"log,step,num_steps,val_loss\na,0,20,9.25\na,20,20,3.279\n",
    ):
        (whole,) = read(raw).runs
        assert whole.final_loss == 3.279
        for end in range(len(raw)):
            found = read(raw[:end])
            for run in found.runs:
                last = run.validations[-1]
                assert last == whole.validations[0]
                assert found.problems or raw[:end].rstrip(b"\0").endswith(b"\n")


def test_a_table_gives_the_same_runs_as_logs():
    table = "log,step,num_steps,val_loss,train_time_ms\nx/a.txt,0,9,9.5,0\nx/a.txt,9,9,3.25,1500.5\nx/b.txt,9,,nan,\n"
    found = read(table)
    assert [run.name for run in found.runs] == ["x/a.txt", "x/b.txt"]
    assert found.runs[0].validations == curve((0, 9.5, 0.0), (9, 3.25, 1.5005))
    assert found.runs[1].validations == curve((9, None, None))
    assert found == read(table.replace("\n", "\r\n"))
    assert found == read(table.replace("\n", "\r"))
    head, *rows = table.splitlines(keepends=True)
    assert found.runs == read("".join([head, *reversed(rows)])).runs, "sorted by any column"
    assert not read(table.replace("num_steps", "step", 1)).runs, "no telling which column counts"
    assert found == read(table.replace(",", " ; "))
    assert found == read(table.replace("log,step", f'{"x" * 300},"log", "step"').replace("x/", "0,x/"))


@pytest.mark.parametrize(
    "row",
    ["a,x,9,3.0,1", "a,1,9,,1", "a,1,9,3.0,1,2", "a,-1,9,3.0,1", "a"],
)
def test_rows_that_cannot_be_read_are_reported(row):
    found = read(f"log,step,num_steps,val_loss,train_time_ms\na,0,9,9.0,0\n{row}\na,9,9,3.0,10\n")
    assert [len(run.validations) for run in found.runs] == [2]
    assert [problem.line for problem in found.problems] == [3]


def test_an_open_quote_does_not_swallow_rows_in_silence():
    found = read('log,step,val_loss,note\na,0,9.0,\na,1,8.0,"oops\na,9,3.0,\n')
    assert [problem.message for problem in found.problems] == ["unexpected end of data; the rest is left out"]


_WORDS = ["step:", "s:", "1", "125", "/", "1770", " ", "val_loss:", "train_loss:", "tel:", "4.5", "nan", "-", "e", "\n",
          "train_time:", "ms", "s", "\x1b[2J", "\u202e", "\0", "|", "[METRICS] ", "loss: ",
          "Running ", "On", ",", '"', "9" * 400]  # fmt: skip


@given(st.lists(st.sampled_from(_WORDS), max_size=80).map("".join) | st.text(max_size=200), st.binary())
def test_no_text_crashes_and_nothing_unprintable_comes_out(text, raw):
    for head in ("", "log,step,num_steps,val_loss,train_time_ms\n"):
        found = read((head + text).encode(errors="surrogatepass") + raw, name=text[:50])
        assert msgspec.json.decode(msgspec.json.encode(found), type=Context) == found
        for run in found.runs:
            assert run.name.isprintable()
            assert all(point.loss is None or math.isfinite(point.loss) for point in run.validations)
        assert all(problem.message.isprintable() for problem in found.problems)


def test_hostile_names_are_escaped(tmp_path):
    path = tmp_path / "a\x1b[2J.txt"
    path.write_text("step:0/9 val_loss:1.0\nstep:1/9 val_loss:\x1b[2J\n")
    shown = run_cli(path)
    assert "a\\x1b[2J.txt: 1 runs, 1 problems" in shown
    assert shown.replace("\n", "").isprintable()


def test_files_that_are_no_logs_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(foreign_logs, "MAX_BYTES", 1000)
    for raw in (b"x" * 1001, b"hello\n"):
        (tmp_path / "file").write_bytes(raw)
        with pytest.raises(UsageError):
            foreign_logs.import_file(tmp_path / "file", "a")
    with pytest.raises(UsageError):
        foreign_logs.import_file(tmp_path / "none", "a")


def run_cli(*args: object) -> str:
    result = invoke("import-log", *map(str, args))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_groups_runs_by_folder_and_end(tmp_path):
    for folder, name, loss in [("x", "a", 3.0), ("x", "b", 3.2), ("y", "c", 5.0), ("y", "copy of a", 3.0)]:
        path = tmp_path / folder / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        first = f"{HEAD}step:0/9 val_loss:9.0 train_time:1ms\n"
        path.write_text(f"{first}step:9/9 val_loss:{loss} train_time:50ms\n")
    files = sorted(tmp_path.rglob("*.txt"))
    found = json.loads(run_cli(*files, "--json"))
    top = tmp_path.name
    groups = {group["folder"]: group["losses"] for group in found["groups"]}
    assert groups == {f"{top}/x": [3.0, 3.2], f"{top}/y": [5.0]}, "a copy counts once"
    assert found["groups"][0]["step_ms"] == pytest.approx(50 / 9)
    assert found["noise"]["pooled_sd"] == pytest.approx(0.02**0.5)
    assert len([msgspec.convert(one, Context) for one in found["files"]]) == 4
    assert str(tmp_path) not in json.dumps(found), "no path of this machine"
    shown = run_cli(files[0])
    assert "x  9/9  n 1  mean 3.0000  sd none  step 5.56 ms" in shown
    assert "no run has zebra in its name" in invoke("import-log", str(files[0]), "--match", "zebra").output


def test_pooling_leaves_the_means_of_groups_aside():
    losses = {"x": (1.0, 3.0), "y": (101.0, 103.0), "z": (7.0,)}
    deviations = {"x": stdev(losses["x"]), "y": stdev(losses["y"]), "z": None}
    groups = [
        foreign_logs.Group(name, 9, 9, of, fmean(of), deviations[name], None) for name, of in losses.items()
    ]
    found = foreign_logs.noise(groups)
    assert found is not None
    assert (found.pooled_sd, found.num_groups) == (pytest.approx(2**0.5), 2)
    assert foreign_logs.noise(groups[2:]) is None, "nothing can be pooled"


def test_equal_single_losses_are_not_copies():
    runs = read("log,step,val_loss\na,9,3.1\nb,9,3.1\nc,9,3.2\n").runs
    (group,) = foreign_logs.groups(foreign_logs.distinct(runs))
    assert group.losses == (3.1, 3.1, 3.2)


public = pytest.mark.skipif(not PUBLIC.exists(), reason="needs ../shared/upstream-runs.csv.gz")


@pytest.fixture(scope="module")
def public_log(tmp_path_factory):
    table = tmp_path_factory.mktemp("public") / "runs.csv"
    table.write_bytes(gzip.decompress(PUBLIC.read_bytes()))
    return foreign_logs.import_file(table, "")


@public
def test_every_public_line_is_read_or_reported(public_log):
    with gzip.open(PUBLIC, "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    taken = sum(len(run.validations) for run in public_log.runs)
    assert (len(rows), taken, len(public_log.problems)) == (33_982, 33_961, 21)
    names = {run.name.partition("#")[0] for run in public_log.runs}
    assert len({row["log"] for row in rows}) == len(names) == 1504
    assert len(public_log.runs) == 1689, "some logs hold several runs"
