"""The board: status and rank from the logs alone, and escaped text."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest
from forgeries import RECIPE, broken_off, other_config, reproduced, resumed, with_file
from msgspec.structs import replace
from record_forge import CONFIG, Spec, alone, edit_track, forge, programs_of, shard
from typed import invoke

from speedrun.board import leaderboard as board
from speedrun.board import leaderboard as board_pages
from speedrun.record.examine.reproduce import Repetition
from speedrun.record.examine.rerun import Rerun
from speedrun.record.reader import encode, load
from speedrun.record.summary import assemble

ROOT = Path(__file__).parents[2]
CONTEXT = """
[[published]]
name = "theirs"
track = "forged"
hardware = "8 X"
minutes = 3.0
link = "https://example.org/a"
caveat = "another clock"
"""
HOSTILE = "a|b<img src=x onerror=1>](javascript:x)\n| x | @all `c` ***"


@pytest.fixture
def records(forged, monkeypatch) -> Path:
    """A slow and a fast batch, an unproven one, a single run, an edited record, and one that was aborted."""
    monkeypatch.chdir(forged)
    folder = forged / "records"
    home = folder / "forged"
    home.mkdir(parents=True)
    (folder / "context.toml").write_text(CONTEXT)
    forge(home / "slow", step_s=(0.2,) * 10)
    forge(home / "fast", seeds=(3, 4))
    forge(home / "unproven", seeds=(5, 6), step_s=(0.05,) * 10, val_losses=(5.5, 4.0, 3.4, 3.279))
    forge(home / "single", seeds=(7,), step_s=(0.01,) * 10)
    edited = forge(home / "edited", seeds=(8, 9), step_s=(0.02,) * 10) / "source.txt"
    edited.write_text(edited.read_text().replace("SIZE = 1", "SIZE = 2"))
    resumed(seed=10)(home / "doubtful")
    alone(home / "broke", Spec(edit_log=broken_off))
    return folder


def test_only_qualified_batches_are_ranked_and_only_by_time(records):
    found = board.read(records)
    assert [(row.path, row.status, row.rank) for row in found.rows] == [
        ("forged/fast", "qualified", 1),
        ("forged/slow", "qualified", 2),
        ("forged/single", "provisional", None),
        ("forged/unproven", "provisional", None),
        ("forged/doubtful", "provisional", None),
        ("forged/broke", "no result", None),
        ("forged/edited", "refused", None),
    ]
    assert found.rows[-1].failed == ("V003",)
    text = board_pages.markdown(found)
    assert "| rank | train time |" in text
    (fast,) = [line for line in text.splitlines() if "forged/fast" in line]
    assert fast.startswith("| 1 | 1.00 ± 0.00 s | 3.2500 (p = "), "times have intervals"
    (theirs,) = [line for line in text.splitlines() if "theirs" in line]
    assert "| *published* |" in theirs
    assert "[theirs](https://example.org/a)" in theirs
    places = [text.index(one) for one in ("forged/slow", "## Elsewhere", theirs)]
    assert places == sorted(places), "a table of their own, below ours"
    unranked = replace(found, rows=tuple(replace(row, rank=None) for row in found.rows))
    text = board_pages.markdown(unranked)
    assert not re.search(r"\| rank \||lines changed", text), "a column without entries"
    assert "train time" in text


@pytest.mark.parametrize(
    ("by", "more", "status"),
    [("ada", 0.0, "reproduced"), ("", 0.0, "qualified"), ("me", 0.0, "qualified"), ("ada", 0.2, "qualified")],
)
def test_new_seeds_of_somebody_else_with_the_same_loss_are_a_status(records, by, more, status):
    shutil.rmtree(records / "forged")
    (folder := records / "forged" / "one").mkdir(parents=True)
    reproduced(by=by)(folder)
    assemble(folder, authors=["me"])
    found = load(folder).reproduction
    assert found is not None
    runs = tuple(replace(run, val_loss=(run.val_loss or 0.0) + more) for run in found.runs)
    (folder / "reproduction.json").write_bytes(encode(replace(found, runs=runs)))
    assert [(row.status, row.rank) for row in board.read(records).rows] == [(status, 1)]


def test_a_track_may_rank_by_steps(records):
    edit_track("ranked = true", 'ranked = true\nrank_by = "steps"')
    shutil.rmtree(records / "forged")
    nine = other_config({**CONFIG, "recipe": {**CONFIG["recipe"], "stages": [{"num_steps": 9}]}})
    shards = (shard("t_train_1.bin", 0, 600), shard("t_train_2.bin", 0, 300))
    fewer = {"step_s": (0.9,) * 9, "shards": shards, "programs": programs_of(9), "edit_log": nine}
    for name, seeds, spec in (("ten", (1, 2), {}), ("nine", (3, 4), fewer), ("ten-later", (5, 6), {})):
        (records / "forged" / name).mkdir(parents=True)
        forge(records / "forged" / name, seeds=seeds, **spec)
    found = board.read(records)
    costs = [(row.path.removeprefix("forged/"), row.rank, row.cost) for row in found.rows]
    assert costs == [("nine", 1, 9), ("ten", 2, 10), ("ten-later", 3, 10)]
    nine, ten, _ = (row.train_time_s or 0.0 for row in found.rows)
    assert nine > 2 * ten > 0
    assert "| rank | steps | train time |" in board_pages.markdown(found)


def test_changed_lines_are_counted_against_the_parent(records):
    child = forge(
        records / "forged" / "child", seeds=(12, 13), edit_source=with_file(RECIPE, "a = 1\n\nb = 2\n")
    )
    assemble(child, parent_record="forged/fast")
    assemble(records / "forged" / "slow", parent_record="forged/child")
    assemble(records / "forged" / "single", parent_record="../elsewhere")
    assemble(records / "forged" / "fast", parent_record="forged/fast")
    changed = {row.path: row.changed_lines for row in board.read(records).rows}
    others = {
        f"forged/{name}": None for name in ("fast", "single", "unproven", "broke", "edited", "doubtful")
    }
    assert changed == {"forged/child": 2, "forged/slow": 0, **others}
    text = board_pages.markdown(board.read(records))
    (line,) = [line for line in text.splitlines() if "forged/child" in line]
    assert "| tokens | lines changed | memory |\n" in text
    assert line.endswith("| 2 | at most 27.7259 nats |"), "5,000 bytes, by 1,000 tokens"


def test_a_bad_record_is_left_out_and_named_and_the_others_stay(records):
    bad = records / "forged" / "slow" / "about.json"
    bad.write_text("{}")
    for log in (records / "forged" / "single").glob("runs/*/metrics.jsonl"):
        log.write_bytes(re.sub(rb'"cold_wall_s":[\d.]+', b'"cold_wall_s":1e308', log.read_bytes()))
    built = invoke("leaderboard", "build")
    assert built.exit_code == 1
    assert "left out forged/single: V001: " in built.stderr
    assert "Expected `float` <= 1000000000.0 - at `$.event.cold_wall_s`" in built.stderr
    assert built.stderr.splitlines()[-1].startswith("error: 1 records cannot be judged")
    built_rows = json.loads((records / "leaderboard.json").read_text())["rows"]
    rows = {row["path"]: row["status"] for row in built_rows}
    assert rows["forged/fast"] == "qualified"
    assert rows["forged/slow"] == "refused"
    assert "forged/single" not in rows


@pytest.mark.parametrize(
    "value", [b"NaN", *(pytest.param(value, marks=pytest.mark.compile) for value in (b"1e308", b"-1"))]
)
def test_no_number_in_a_record_causes_a_traceback(records, value, monkeypatch):
    """Some numbers of each file in turn, under each command that reads a record."""
    monkeypatch.setattr(Rerun, "check_data", lambda *_: records)
    monkeypatch.setattr(Repetition, "run_one", lambda self, *_: self.record.finished[0])
    draw, fast = random.Random(value), records / "forged" / "fast"
    for path in (records / "forged").iterdir():
        if path != fast:
            shutil.rmtree(path)
    for pattern in ("batch.json", "runs/*/metrics.jsonl"):
        shutil.rmtree(records / "forged" / "odd", ignore_errors=True)
        odd = shutil.copytree(fast, records / "forged" / "odd")
        file = draw.choice(sorted(odd.glob(pattern)))
        raw = file.read_bytes()
        shape = rb"(?<=[:\[,] )-?\d[\d.e+-]*|(?<=[:\[,])-?\d[\d.e+-]*(?=[,}\]])"
        number = draw.choice([*re.finditer(shape, raw)])
        file.write_bytes(raw[: number.start()] + value + raw[number.end() :])
        name = str(odd)
        for args in (
            ["validate", name],
            ["leaderboard", "build"],
            ["stats", name, "--against", str(fast)],
            ["reproduce", name, "--against", str(fast), "--out", str(odd.with_name("out"))],
            ["plot", name],
            ["export", name, "--to", "csv", "--out", str(odd.with_name("out"))],
            ["describe", name, "--title", "odd"],
        ):
            shutil.rmtree(odd.with_name("out"), ignore_errors=True)
            found = invoke(*args)
            told = isinstance(found.exception, SystemExit) or found.exception is None
            assert told, f"{args} of {file.name} with {value} for {number}: {found.exc_info}"


def test_build_then_check(records):
    assert invoke("leaderboard", "check").exit_code == 1, "nothing was built yet"
    built = invoke("leaderboard", "build")
    assert built.exit_code == 0, built.output
    assert invoke("leaderboard", "check").stdout == "board   up to date\n"
    assert json.loads((records / "leaderboard.json").read_text())["rows"][0]["path"] == "forged/fast"
    shutil.rmtree(records / "forged" / "slow")
    stale = invoke("leaderboard", "check")
    assert stale.exit_code == 1
    assert "run 'speedrun leaderboard build'" in stale.stderr


def test_hostile_text_is_escaped(records):
    """A name of a folder adds no cell or link to the text."""
    calm = board_pages.markdown(board.read(records))
    assemble(records / "forged" / "fast", title=HOSTILE, authors=[HOSTILE], changes=[HOSTILE])
    assert len(board_pages.markdown(board.read(records)).splitlines()) == len(calm.splitlines())
    for name in ("javascript:alert(1)", "a) | 1 | [x](https:"):
        shutil.copytree(records / "forged" / "fast", records / name / "b) | 1")
    text = board_pages.markdown(board.read(records))
    assert not re.search(r"(?<!\\)<", text), "nothing of the words became a tag"
    pipes = [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")]
    assert set(pipes) == {12, 5}, "ours, and below them those of others"
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert all(re.fullmatch(r"https://example\.org/a|[\w./%-]+", link) for link in links)


def test_the_board_is_up_to_date_and_has_a_record_of_the_smoke_track(monkeypatch):
    assert [*(ROOT / "records" / "smoke-cpu").iterdir()]
    monkeypatch.chdir(ROOT)
    result = invoke("leaderboard", "check")
    assert result.exit_code == 0, result.output
