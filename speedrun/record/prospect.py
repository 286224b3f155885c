"""What `validate` would say of a run that has not begun: asks the checks that are decided before the clock."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from speedrun.base import runlog
from speedrun.base.clock import now
from speedrun.base.errors import UsageError
from speedrun.base.track import Track
from speedrun.record.checks import CHECKS
from speedrun.record.layout import SOURCE
from speedrun.record.logged_run import Run
from speedrun.record.reader import About, Record
from speedrun.record.validate import Result, ask

_RUN = "this run"
_NOTHING = runlog.DataRead((), runlog.ShardRange("", "", 0, 0, 0), "")


def end(data: runlog.DataRead = _NOTHING, throttled_s: float | None = None) -> runlog.RunEnd:
    """Return the end of a log of which only the data and whether throttling is counted are known."""
    spent = dict.fromkeys(
        ("train_time_s", "cold_wall_s", "compile_s", "warmup_s", "val_s", "data_wait_s"), 0.0
    )
    known: dict[str, Any] = {"data": data, "throttled_s": throttled_s, **spent}
    return runlog.RunEnd(status="finished", val_loss=None, peak_bytes=0, final_hash="", **known)


def problems(
    rules: Track, source: str, events: Sequence[runlog.AnyEvent], num_runs: int | None = None
) -> list[Result]:
    """Return the checks that a run with this log would fail, or be warned by.

    Args:
        rules: the track.
        source: text of `source.txt`.
        events: the log as far as it is known; up to the preflight, for what `doctor` sees. The last is from `end`.
        num_runs: declared runs of its batch; None: it is no batch.
    """
    lines = tuple(runlog.Line(i, i, now().utc, "", event) for i, event in enumerate(events))
    run, raw = Run((), lines, _RUN), {SOURCE: source.encode()}
    one = Record(Path(), raw, {}, (), (run,), About(), None, None, rules, whole=True)
    batch = replace(one, runs=(run,) * num_runs) if num_runs else None
    records = {"machine": one, "run": one if run.of(runlog.Plan) else None, "batch": batch}
    found = (ask(check, record) for check in CHECKS if (record := records.get(check.before)))
    return [result for result in found if result.status in ("failed", "warning")]


def told(results: Sequence[Result]) -> str:
    """Return problems and what to do in one line."""
    said = ((one, "; ".join(text.removeprefix(f"{_RUN}: ") for text in one.messages)) for one in results)
    return "; ".join(f"{one.check.id}: {text} ({one.check.hint})" for one, text in said)


def require(rules: Track, results: Sequence[Result], purpose: runlog.Purpose) -> list[str]:
    """Raise UsageError if no ranked record could hold the run, unless it says that it does not count.

    That needs a track that ranks. Otherwise, return a warning about all problems.
    """
    fatal = [one for one in results if one.status == "failed" or one.check.before == "batch"]
    if fatal and rules.rules.ranked and not purpose:
        found = f"no ranked record on {rules.id} could hold this run: {told(fatal)}"
        raise UsageError(f"{found}; mend that, or pass --unranked")
    return [f"validate will not pass this run: {told(results)}"] if results else []
