"""Time: every moment of a run is in one phase, and a clock on the wall that is set back moves nothing."""

import time
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_run import SMALL, events, log_of

from speedrun.base import clock, processes, runlog
from speedrun.base.clock import Phases
from speedrun.data.stream import Prefetch
from speedrun.record.summary import assemble
from speedrun.record.validate import validate
from speedrun.train import device_benchmark
from speedrun.train.compile import lost_s
from speedrun.train.recorded import train
from speedrun.train.run_config import RunConfig

PHASES = ["start", "compile", "warm-up", "step", "data", "evaluation", "checkpoint", "end"]


@pytest.fixture(scope="module")
def record(tmp_path_factory, smoke_data) -> Path:
    """A run during which the wall's clock is set back by an hour, at the fifth stamp of a step."""
    out = tmp_path_factory.mktemp("records") / "small"

    class SetBack(datetime):
        calls = 0

        @classmethod
        def now(cls, tz=None):
            cls.calls += 1
            return super().now(tz) - timedelta(hours=cls.calls > 15)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "datetime", SetBack)
        train(RunConfig("smoke-cpu", out, overrides=SMALL, data=smoke_data, checkpoint_every=5))
    assert SetBack.calls > 20
    assemble(out, title="small")
    return out


def lines_of(record: Path) -> list[Any]:
    return list(runlog.read(log_of(record)))


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 10**12))))
def test_phases_add_up_whatever_follows_whatever(entered):
    with pytest.MonkeyPatch.context() as patch:
        now_ns, expected = clock._IMPORT_NS, {"start": 0.0}
        patch.setattr(time, "monotonic_ns", lambda: now_ns)
        phases, current = Phases(), "start"
        for phase, spent_ns in entered:
            now_ns += spent_ns
            expected[current] = expected.get(current, 0) + spent_ns / 1e9
            assert phases.enter(phase) == current
            current = phase
        expected.setdefault(current, 0.0)
        assert phases.seconds() == pytest.approx(expected)
        assert sum(phases.seconds().values()) == pytest.approx((now_ns - clock._IMPORT_NS) / 1e9)


def test_after_a_block_the_phase_is_the_one_before_also_if_it_raises():
    phases = Phases()
    with pytest.raises(KeyError), phases.within("evaluation"), phases.within("data"):
        raise KeyError
    assert phases.current()[0] == "start"
    assert phases.seconds().keys() == {"start", "evaluation", "data"}


def test_the_phases_of_a_run_add_up_and_are_what_was_measured(record):
    last, kept = lines_of(record)[-1], [one.seconds for one in events(record, runlog.Checkpoint)]
    end, phases_s = last.event, last.event.phases
    assert list(phases_s) == [
        "start",
        "compile",
        "warm-up",
        "checkpoint",
        "step",
        "evaluation",
        "data",
        "end",
    ]
    # Only order is compared, for a busy machine may stop a thread between any two readings of the clock.
    wall_s = (last.t_mono_ns - clock._IMPORT_NS) / 1e9
    assert end.cold_wall_s <= sum(phases_s.values()) <= wall_s
    assert len(kept) == 3
    assert phases_s["compile"] >= end.compile_s
    assert phases_s["warm-up"] >= end.warmup_s
    assert phases_s["evaluation"] >= end.val_s
    assert phases_s["checkpoint"] >= sum(kept)
    in_clock_s = phases_s["step"] + phases_s["data"]
    assert in_clock_s >= end.data_wait_s
    assert in_clock_s + phases_s["checkpoint"] >= end.train_time_s >= end.data_wait_s + sum(kept[:2])


def test_before_the_clock_starts_pauses_and_stops_devices_are_done_and_nothing_is_read(tmp_path, smoke_data):
    """Else work would be done while no time counts."""
    told = list[str]()

    def telling(holder: Any, name: str) -> None:
        real = getattr(holder, name)

        def tell(*args, **named):
            told.append(type(args[1]).__name__ if name == "emit" else name)
            return real(*args, **named)

        patch.setattr(holder, name, tell)

    with pytest.MonkeyPatch.context() as patch:
        telling(processes, "barrier")
        telling(Prefetch, "drain")
        telling(runlog.RunLog, "emit")
        train(RunConfig("smoke-cpu", tmp_path / "out", overrides=SMALL, data=smoke_data))
    clocked = [one for one in told if one in ("barrier", "drain") or one.startswith("Clock")]
    pause = ["drain", "barrier", "ClockPause"]
    after = clocked[clocked.index("ClockPause") + 1 :]
    assert clocked[:5] == ["barrier", "ClockStart", *pause]
    assert after == ["barrier", "ClockResume", "barrier", "ClockStop"]


@given(st.lists(st.floats(0.001, 9), min_size=device_benchmark._TRIALS, max_size=device_benchmark._TRIALS))
def test_a_benchmark_is_its_fastest_trial(times_s):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_benchmark, "Stopwatch", lambda: SimpleNamespace(seconds=times_s[next(count)]))
        count = iter(range(len(times_s)))
        assert device_benchmark.best_s(lambda: jnp.zeros(())) == min(times_s)


def test_a_clock_on_the_wall_that_is_set_back_moves_no_time(record):
    stamps = [datetime.fromisoformat(line.t_utc) for line in lines_of(record)]
    assert min(stamps) < stamps[0] - timedelta(minutes=50)
    steps = [step.train_time_s for step in events(record, runlog.Step)]
    assert steps == sorted(steps)
    assert 0 < steps[-1] < 60
    assert not validate(record).having("failed")


def test_what_is_lost_is_what_came_after_the_checkpoint(tmp_path, monkeypatch):
    """Of two processes that stood at step 5: the one that wrote it, and one that went on from it."""
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
    assert lost_s(tmp_path, 0) == (9 - 1) + (23.5 - 20), "all, if no checkpoint is left"
