"""V301, V308 to V311, V404: there is a result; it is plausible, and was measured on the track's hardware."""

from collections.abc import Iterator
from statistics import fmean
from typing import NamedTuple

from speedrun.base import runlog
from speedrun.record.about import summarize
from speedrun.record.checks.table import Skip, check, check_run
from speedrun.record.logged_run import Run, loss_of
from speedrun.record.reader import Record

#: Nats; a stated loss is stored in full, so it may differ from its sum by rounding only.
_ROUNDING = 1e-6
#: Upper bound of a loss in nats: a larger one would need logits that far apart, which no finished run had.
_MOST_NATS = 1e4
#: Nats below the reference. At the end of record 21, 0.1 nats take a fifth of its steps.
_SUSPICIOUS = 0.1


class Point(NamedTuple):
    """A validation loss in nats per token, after a number of training tokens."""

    tokens: int
    loss: float


_RECORD_21_STEP = 393_216  #: tokens
#: Means of ten public runs of record 21, by step; they differ by 0.002 to 0.007 nats (modded-nanogpt, 2025).
_RECORD_21 = {
    0: 10.8258, 125: 4.6488, 250: 4.1033, 375: 3.9003, 500: 3.7505, 625: 3.6642, 750: 3.6007, 875: 3.5510,
    1000: 3.5129, 1125: 3.4724, 1250: 3.4249, 1375: 3.3813, 1500: 3.3435, 1625: 3.3092, 1750: 3.2823, 1770: 3.2793,
}  # fmt: skip
_FINEWEB = tuple(Point(step * _RECORD_21_STEP, loss) for step, loss in _RECORD_21.items())

#: Reference loss curves of honest runs, by the name of the track. That of smoke-cpu is the record 2026-11-25-first.
CURVES: dict[str, tuple[Point, ...]] = {
    "main-8xh100": _FINEWEB,
    "single-gpu": _FINEWEB,
    "smoke-cpu": (Point(0, 5.5452), Point(204_800, 4.1498), Point(409_600, 3.2569), Point(573_440, 3.1705)),
}


@check(
    "V301 a run finished",
    why="a run that broke off is worth keeping, but it is no result",
    hint="find the reason in the log of the run that broke off, and run again into a new folder",
)
def enough_runs(record: Record) -> Iterator[str]:
    """If none finished, say why each broke off."""
    if not record.finished:
        yield f"0 of {len(record.runs)} runs finished"
        yield from summarize(record).broke_off


@check(
    "V308 no loss is far below the reference",
    severity="warning",
    why="a loss that falls much faster than any known one is a discovery or a leak, and a replay shows which",
    hint="replay it (`speedrun validate RECORD --replay`); once confirmed, its curve becomes the reference",
)
def no_wonder(record: Record) -> Iterator[str]:
    """Compare every validation with the reference after as many tokens."""
    curve = CURVES.get(record.rules.name)
    if curve is None:
        raise Skip(f"{record.rules.name} has no reference curve")
    for run in record.finished:
        seen = {run.origin.step: run.origin.tokens_seen}
        seen |= {step.step + 1: step.tokens_seen for step in run.steps}
        for val in run.vals:
            tokens, loss = seen.get(val.step, 0), loss_of(val)
            # The next point, or the last. Curves are convex, so honest runs would lie below a straight line.
            usual = next((point for point in curve if point.tokens >= tokens), curve[-1]).loss
            if loss < usual - _SUSPICIOUS:
                yield f"{run.folder}: loss {loss:.4f} after {tokens:,} tokens, the reference has {usual:.4f}"


@check(
    "V309 the loss is possible",
    why="no honest model gets below the entropy rate of its stream; NaN is no loss",
    hint="look for a leak, a shifted target or a broken mean; for NaN, lower the learning rate",
)
def possible(record: Record) -> Iterator[str]:
    """Losses are finite, not absurdly large, and not below the entropy rate if the track declares it."""
    rate = record.rules.target.entropy_rate
    for run in record.runs:
        if run.outcome == "non-finite":
            yield f"{run.folder}: the loss became non-finite"
        for val in run.vals:
            if (loss := loss_of(val)) < rate:
                yield f"{run.folder}: loss {loss:.4f} before step {val.step}; the entropy rate is {rate:.4f}"
        losses = [(step.step, step.loss) for step in run.steps]
        losses += [(val.step, loss_of(val)) for val in run.vals]
        for step, loss in [(step, loss) for step, loss in losses if not 0 <= loss <= _MOST_NATS][:1]:
            yield f"{run.folder}: loss {loss:g} at step {step}; a model gives 0 to {_MOST_NATS:,.0f} nats"


@check(
    "V310 the stated result is the measured one",
    why="the stated loss is for people; the exact sum in the log is the measurement",
    hint="restore the log and assemble again: the loss is the last validation's sum over its tokens",
)
def stated(record: Record) -> Iterator[str]:
    """Compare each loss with its exact sum."""
    for run in record.finished:
        for val in run.vals:
            if abs(val.loss - (loss := loss_of(val))) > _ROUNDING:
                yield f"{run.folder}: val before step {val.step} says {val.loss:.6f}, its sum {loss:.6f}"
            possible_R = [0 <= x <= _MOST_NATS for x in val.sequences]
            if val.sequences and (val.tokens % len(val.sequences) or not all(possible_R)):
                yield f"{run.folder}: validation at {val.step} has sequences of no equal length, or no loss"
            elif val.sequences and not abs(fmean(val.sequences) - loss) <= _ROUNDING:
                yield f"{run.folder}: validation at {val.step} has sequences of another mean than its loss {loss}"
        if run.end.val_loss != run.vals[-1].loss:
            yield f"{run.folder}: run_end says {run.end.val_loss}, the last validation {run.vals[-1].loss}"


@check_run(
    "V311 the run was made in one piece",
    severity="warning",
    why="a run resumed from a checkpoint may have waited, or tried again, while no clock ran",
    hint="keep it, since it is a result; for a rank, run again without a break",
)
def in_one_piece(run: Run, _record: Record) -> Iterator[str]:
    """Resumed runs are shown, but not ranked."""
    if run.resumed:
        yield f"resumes {run.origin.run_id} after step {run.origin.step}"


@check(
    "V404 the hardware is the track's, and the config's",
    why="times and losses of other hardware belong to another board",
    hint="run on the hardware the track names, without --devices",
)
def hardware(record: Record) -> Iterator[str]:
    """Compare platform and number of devices with the track, the config, and between runs."""
    rules = record.rules.rules
    # A run that was killed before its preflight has no hardware yet.
    runs = [run for run in record.runs if run.of(runlog.Preflight)]
    for run in runs:
        if rules.platform not in ("any", run.preflight.platform):
            yield f"{run.folder}: ran on {run.preflight.platform}, the track wants {rules.platform}"
        if rules.num_devices not in (0, run.preflight.num_devices):
            yield f"{run.folder}: ran on {run.preflight.num_devices} devices, the track wants {rules.num_devices}"
        if rules.device_kind not in ("", run.preflight.device_kind):
            yield f"{run.folder}: ran on {run.preflight.device_kind}, the track wants {rules.device_kind}"
        if (stated := run.start.config.get("num_devices")) != run.preflight.num_devices:
            yield f"{run.folder}: ran on {run.preflight.num_devices} devices, its config says {stated!r}"
    if len({(run.preflight.device_kind, run.preflight.num_devices) for run in runs}) > 1:
        yield "the runs of one record ran on different hardware"
