"""Each moment of a run is in one phase, and setting the wall clock back changes no time."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from small_run import events, log_of

from speedrun.base import clock, runlog
from speedrun.base.clock import Phases
from speedrun.record.validate import validate
from speedrun.train.warmup import lost_s


def lines_of(record: Path) -> list[Any]:
    return list(runlog.read(log_of(record)))


def test_after_a_block_the_phase_is_the_one_before_also_if_it_raises():
    phases = Phases()
    with pytest.raises(KeyError), phases.within("evaluation"), phases.within("data"):
        raise KeyError
    assert phases.current()[0] == "start"
    assert phases.seconds().keys() == {"start", "evaluation", "data"}


def test_the_phases_of_a_run_add_up_and_are_what_was_measured(trained):
    lines, kept = lines_of(trained.out), [one.seconds for one in events(trained.out, runlog.Checkpoint)]
    end, phases_s = lines[-1].event, lines[-1].event.phases
    assert [*phases_s] == ["start", "compile", "warm-up", "checkpoint", "step", "evaluation", "data", "end"]
    scored = [line for line in lines if isinstance(line.event, runlog.Val)][-1]
    wall_s = end.cold_wall_s + (lines[-1].t_mono_ns - scored.t_mono_ns) / 1e9
    assert sum(phases_s.values()) == pytest.approx(wall_s, rel=0.01, abs=0.05)
    assert len(kept) == 12
    assert phases_s["compile"] >= end.compile_s
    assert phases_s["warm-up"] == pytest.approx(end.warmup_s, abs=0.05)
    assert phases_s["evaluation"] == pytest.approx(end.val_s, rel=0.1, abs=0.05)
    assert phases_s["checkpoint"] >= sum(kept)
    assert 0 <= phases_s["data"] - end.data_wait_s < 1  # threads that save take turns with this one
    in_clock_s = phases_s["step"] + phases_s["data"] + sum(kept[:-1])
    assert in_clock_s == pytest.approx(end.train_time_s, rel=0.05, abs=0.1)


def test_a_clock_on_the_wall_that_is_set_back_moves_no_time(trained):
    stamps = [datetime.fromisoformat(line.t_utc) for line in lines_of(trained.out)]
    assert min(stamps) < stamps[0] - timedelta(minutes=50)
    steps = [step.train_time_s for step in events(trained.out, runlog.Step)]
    assert steps == sorted(steps)
    assert 0 < steps[-1] < 60
    assert not validate(trained.out).having("failed")


def test_what_is_lost_is_what_came_after_the_checkpoint(tmp_path, monkeypatch):
    stamps = iter([1, 2, 4, 9, 20, 21, 23.5])
    start = "2026-11-21T00:00:00+00:00"
    monkeypatch.setattr(runlog, "now", lambda: clock.Stamp(int(next(stamps) * 1e9), start))
    written = runlog.Checkpoint(5, "", 0.1)
    resumed = runlog.Resume("a", 5, "", 1.0, 0, (0, 0))
    other, said = runlog.Checkpoint(3, "", 0.1), runlog.Warning("")
    for name, said_by in {"a": [other, said, written, said], "b": [said, resumed, said]}.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        with runlog.RunLog(tmp_path / "runs" / name / "metrics.jsonl") as log:
            for event in said_by:
                log.emit(event)
    assert lost_s(tmp_path, 5) == (9 - 4) + (23.5 - 21)
    assert lost_s(tmp_path, 4) == 0
