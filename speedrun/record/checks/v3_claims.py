"""V301, V308 to V311, V313, V314: there is a result, and it is plausible."""

import math
from collections.abc import Iterator
from statistics import fmean

from speedrun.base import runlog
from speedrun.record.checks.table import Skip, check, check_run, if_ranked, same
from speedrun.record.logged_run import Run, loss_of
from speedrun.record.reader import Record
from speedrun.record.summary import summarize

_ROUNDING = 1e-6  #: nats between a stated loss and its exact sum
_MOST_NATS = 1e4  #: a larger loss would need logits that far apart
_HELD_NOISE = 6.0  #: standard errors
_SUSPICIOUS = 0.1  #: nats below the reference; at the end of record 21 they take a fifth of its steps


_RECORD_21_STEP = 393_216  #: tokens
#: Mean losses of ten public runs of record 21 (modded-nanogpt, 2025) by step; the runs differ by 0.002 to 0.007 nats.
_RECORD_21 = {
    0: 10.8258, 125: 4.6488, 250: 4.1033, 375: 3.9003, 500: 3.7505, 625: 3.6642, 750: 3.6007, 875: 3.5510,
    1000: 3.5129, 1125: 3.4724, 1250: 3.4249, 1375: 3.3813, 1500: 3.3435, 1625: 3.3092, 1750: 3.2823, 1770: 3.2793,
}  # fmt: skip
_FINEWEB = {step * _RECORD_21_STEP: loss for step, loss in _RECORD_21.items()}

#: Validation losses of honest runs by trained tokens, by track. For smoke-cpu: the record 2026-11-29-first.
CURVES: dict[str, dict[int, float]] = {
    "main-8xh100@2": _FINEWEB,
    "single-gpu@2": _FINEWEB,
    "smoke-cpu@2": {0: 5.5452, 204_800: 3.3122, 409_600: 3.1336, 573_440: 3.0812},
}


@check(
    "V301 a run finished",
    why="a run that crashed is worth keeping, but it is no result",
    hint="find the reason in its log, and run again into a new folder",
)
def _enough_runs(record: Record) -> Iterator[str]:
    if not record.finished:
        yield f"0 of {len(record.runs)} runs finished"
        yield from summarize(record).crashed


@check(
    "V308 no loss is far below the reference",
    severity="warning",
    why="a loss that falls much faster than any known one is a discovery or a leak; a replay shows which",
    hint="replay it (`speedrun validate RECORD --replay`); once confirmed, its curve becomes the reference",
)
def _no_wonder(record: Record) -> Iterator[str]:
    curve = CURVES.get(record.rules.id)
    if curve is None:
        raise Skip(f"{record.rules.name} has no reference curve")
    for run in record.finished:
        seen = {run.origin.step: run.origin.tokens_seen}
        seen |= {step.step + 1: step.tokens_seen for step in run.steps}
        for val in run.vals:
            tokens, loss = seen.get(val.step, 0), loss_of(val)
            # Not interpolated: loss curves are convex, so honest runs lie below straight lines.
            usual = next((usual for place, usual in curve.items() if place >= tokens), min(curve.values()))
            if loss < usual - _SUSPICIOUS:
                yield f"{run.folder}: loss {loss:.4f} after {tokens:,} tokens, the reference has {usual:.4f}"


@check_run(
    "V309 the loss is possible",
    of="runs",
    why="no honest model gets below the entropy rate of its stream; NaN is no loss",
    hint="look for a leak, a shifted target or a broken mean; for NaN, lower the learning rate",
)
def _possible(run: Run, record: Record) -> Iterator[str]:
    rate, vals = record.rules.target.entropy_rate, [(val.step, loss_of(val)) for val in run.vals]
    if run.outcome == "non-finite":
        yield "the loss became non-finite"
    for step, loss in vals:
        if loss < rate:
            yield f"loss {loss:.4f} before step {step}; the entropy rate is {rate:.4f}"
    for step, loss in [*((step.step, step.loss) for step in run.steps), *vals]:
        if not 0 <= loss <= _MOST_NATS:
            yield f"loss {loss:g} at step {step}; a model gives 0 to {_MOST_NATS:,.0f} nats"
            return


@check_run(
    "V310 the stated result is the measured one",
    of="finished",
    why="people read the stated loss, but the exact sum in the log is the measurement",
    hint="restore the log and assemble again: the loss is the last validation's sum over its tokens",
)
def _stated(run: Run, _record: Record) -> Iterator[str]:
    held = [one.val for one in run.of(runlog.HeldOut)]
    for val in (*run.vals, *held):
        where, loss, each = f"validation before step {val.step}", loss_of(val), val.sequences
        yield same(f"{where}: its loss, by its sum", val.loss, loss, _ROUNDING)
        if each and (val.tokens % len(each) or not all(0 <= x <= _MOST_NATS for x in each)):
            yield f"{where} has sequences of unequal lengths, or impossible losses"
        elif each:
            yield same(f"{where}: the mean of its sequences", fmean(each), loss, _ROUNDING)
    each = [len(val.sequences) / val.tokens for val in (run.vals[-1], *held)]
    yield same("sequences a token, of held-out text", each[1:], each[:1] * len(held))
    yield same("the loss in run_end", run.end.val_loss, run.vals[-1].loss)


@check_run(
    "V314 held-out text has the same loss",
    of="finished",
    severity="warning",
    why="text that was drawn after the result was tuned on by nobody; a model that knows only the scored text shows it",
    hint="replay it (`speedrun validate RECORD --replay`); the batch proves nothing; the shard's text may also change",
)
def _held_out(run: Run, _record: Record) -> Iterator[str]:
    if run.held_out is None:
        raise Skip("the track has no held-out text")
    gap, error = run.held_gap or (0.0, 0.0)  # without losses of sequences, V601 refuses it
    if gap > _HELD_NOISE * error:
        yield f"held-out text loses {gap:.4f} nats more, {gap / error if error else math.inf:.1f} standard errors"


_PURPOSES = {"unranked": "it was started with --unranked", "sweep": "it is a run of a sweep"}


@check_run(
    "V313 the run was made for a rank",
    why="who says beforehand that a run does not count may repeat it until it suits",
    hint="declare a batch without --unranked",
)
def _counts(run: Run, record: Record) -> Iterator[str]:
    if run.start.purpose:
        yield if_ranked(record, _PURPOSES[run.start.purpose])


@check_run(
    "V311 the run was made in one piece",
    severity="warning",
    why="a run resumed from a checkpoint may have waited, or tried again, while no clock ran",
    hint="keep it, since it is a result; to be ranked, run again without a break",
)
def _in_one_piece(run: Run, _record: Record) -> Iterator[str]:
    if run.resumed:
        yield f"resumes {run.origin.run_id} after step {run.origin.step}"
