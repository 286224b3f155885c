"""The ghost: known differences, other batch sizes, and records that cannot be read."""

import io
import re
from pathlib import Path

import pytest
from record_forge import Spec, chain, change, forge, moments
from small_run import log_of
from typed import invoke

from speedrun.base import runlog, track
from speedrun.base.console import Printer, render
from speedrun.base.errors import UsageError
from speedrun.base.runlog import Step
from speedrun.board import ghost


@pytest.fixture
def folder(forged, monkeypatch) -> Path:
    monkeypatch.chdir(forged)
    return forged


def step(tokens: int, time_s: float, loss: float, batch_tokens: int = 100) -> Step:
    return Step(tokens // batch_tokens - 1, time_s, loss, batch_tokens, tokens, (0, tokens))


def numbers(text: str) -> tuple[float, float]:
    found = re.fullmatch(r"ghost ([+-]\d+\.\d) s ([+-]\d\.\d{3})", text)
    assert found, text
    return float(found[1]), float(found[2])


def test_a_run_is_level_with_the_mean_of_its_own_record(folder):
    other = ghost.read(forge(folder / "record"), "forged@1")
    for line in chain(moments(Spec(seed=1))):
        if isinstance(line.event, Step):
            assert numbers(other(line.event)) == (0.0, pytest.approx(-0.005, abs=6e-4))


@pytest.mark.parametrize("batch_tokens", [50, 100, 200, 125])
def test_another_batch_size_is_compared_at_equal_tokens(folder, batch_tokens):
    """Losses that fall linearly with tokens, as in the record; 0.2 nats and 1 s above it."""
    other = ghost.read(forge(folder / "record", seeds=(1, 2), step_s=(0.5,) * 10), "forged@1")
    for tokens in range(batch_tokens, 1001, batch_tokens):
        # The record's step n says 5.015 - n / 10 for a hundred tokens: that is the mean of these.
        seen = [5.015 - 0.1 * (token // 100) for token in range(tokens - batch_tokens, tokens)]
        shown = other(step(tokens, 1 + tokens * 0.005, 0.2 + sum(seen) / batch_tokens, batch_tokens))
        behind_s, behind = numbers(shown)
        assert behind_s == 1.0
        # Inside a larger batch nobody knows which token cost what.
        assert behind == pytest.approx(0.2, abs=1e-3 if batch_tokens <= 100 else 0.06)


def test_a_resumed_run_is_compared_from_its_start_to_the_records_end(folder):
    other = ghost.read(forge(folder / "record"), "forged@1")
    assert numbers(other(step(700, 0.9, 4.415)))[0] == pytest.approx(0.2)
    assert numbers(other(step(800, 1.0, 4.315))) == (0.2, 0.0)
    assert other(step(1000, 1.0, 4.0)) != "ghost done"
    assert other(step(1100, 1.1, 4.0)) == "ghost done"
    other = ghost.read(folder / "record", "forged@1")
    assert numbers(other(step(720, 0.9, 4.315, batch_tokens=20)))[1] == 0.0


def test_the_ghost_is_on_the_step_lines_and_in_no_log(folder):
    lines, stream = chain(moments(Spec())), io.StringIO()
    other = ghost.read(forge(folder / "record"), "forged@1")
    with Printer(stream, other) as live:
        assert not stream.getvalue(), "what refuses the run comes first"
        for line in lines:
            live(line)
    legend, *shown = stream.getvalue().splitlines()
    assert legend.startswith(f"ghost {folder / 'record'} (2 runs, 1.00 s) | below zero: ahead")
    raced = [line for line in shown if "  ghost " in line]
    assert len(raced) == 10
    assert all(re.search(r"eta \d+s  ghost [+-]0\.0 s -0\.005$", line) for line in raced)
    assert re.sub(r"  ghost .*", "", "\n".join(shown) + "\n") == render(lines)


def test_the_default_comes_from_the_built_board(folder, capsys):
    (folder / "records" / "forged").mkdir(parents=True)
    forge(folder / "records" / "forged" / "slow", step_s=(0.2,) * 10)
    forge(folder / "records" / "forged" / "fast", seeds=(3, 4))
    assert invoke("leaderboard", "build").exit_code == 0
    other = ghost.chosen("best", "forged@1")
    assert other is not None
    assert other.record == Path("records/forged/fast")
    assert ghost.best(Path("records"), "forged@2") is None
    assert ghost.best(folder, "forged@1") is None, "there is no board"
    chosen = ghost.chosen("records/forged/slow", "forged@1")
    assert chosen is not None
    assert "(2 runs, 2.00 s)" in chosen.legend
    assert capsys.readouterr().err == ""


def broken(record: Path, what: str) -> Path:
    log = log_of(record)
    match what:
        case "no record":
            return record / "plots"
        case "text":
            log.write_bytes(b"\x1b[31m\n")
        case "unfinished":
            log.write_text(log.read_text().replace('"status":"finished"', '"status":"aborted"'))
        case "of another track":
            rules = track.TRACKS_DIR / "forged.toml"
            rules.with_name("other.toml").write_text(rules.read_text().replace('"forged"', '"other"'))
            return forge(
                record.parent / "other", seeds=(1,), edit_log=change(runlog.RunStart, track="other@1")
            )
        case "standing still":
            return forge(record.parent / "still", seeds=(1,), edit_log=change(Step, tokens_seen=100))
    return record


@pytest.mark.parametrize("what", ["no record", "text", "unfinished", "of another track", "standing still"])
def test_a_bad_ghost_is_one_warning_and_the_run_continues(folder, capsys, what):
    record = broken(forge(folder / "record", seeds=(1,)), what)
    with pytest.raises(UsageError):
        ghost.read(record, "forged@1")
    assert ghost.chosen(str(record), "forged@1") is None
    said = capsys.readouterr().err
    assert said.startswith("warning: no ghost: ")
    assert (said.count("\n"), said.strip().isprintable()) == (1, True)


def test_a_bad_board_is_one_warning(folder, capsys):
    (folder / "records").mkdir()
    (folder / "records" / "leaderboard.json").write_text("{\x1b")
    assert ghost.chosen("best", "forged@1") is None
    assert capsys.readouterr().err.startswith("warning: no ghost: records/leaderboard.json: ")
