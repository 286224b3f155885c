"""The numbers of a record, derived from its logs."""

from collections.abc import Sequence
from statistics import fmean, stdev

from speedrun.base import console
from speedrun.record.batch import standing
from speedrun.record.layout import Strict
from speedrun.record.reader import Record
from speedrun.record.statistics import MeanTest


class Summary(Strict, frozen=True, omit_defaults=True):
    """Means are over finished runs; an sd needs two of them. Losses are nats per token."""

    num_runs: int
    num_finished: int
    broke_off: tuple[str, ...]  #: where and why each unfinished run broke off
    target_loss: float
    target_reached: bool
    val_loss_mean: float | None
    val_loss_sd: float | None
    train_time_s_mean: float | None
    train_time_s_sd: float | None
    cold_wall_s_mean: float | None
    compile_s_mean: float | None
    num_steps: int
    num_tokens: int
    step_p50_ms: float
    step_p95_ms: float
    step_max_ms: float
    data_wait_share: float | None  #: of the train time
    test: MeanTest | None = None  #: None without a declared batch, or before its first look


def summarize(record: Record) -> Summary:
    """Derive the summary from the logs, with losses from the exact sums. The track must be known."""
    runs, done, target, promised = record.runs, record.finished, record.rules.target, record.declaration
    val_loss = _mean([run.val_loss for run in done])
    train_time_s = _mean([run.train_time_s for run in done])
    data_wait_s = _mean([run.end.data_wait_s for run in done])
    p50_ms, p95_ms, max_ms = console.quantiles_ms([second for run in done for second in run.step_s])
    none_blew_up = all(run.outcome != "non-finite" for run in runs)
    return Summary(
        num_runs=len(runs),
        num_finished=len(done),
        broke_off=tuple(run.broke_off for run in runs if not run.finished),
        target_loss=target.loss,
        target_reached=none_blew_up and val_loss is not None and val_loss <= target.loss,
        val_loss_mean=val_loss,
        val_loss_sd=_sd([run.val_loss for run in done]),
        train_time_s_mean=train_time_s,
        train_time_s_sd=_sd([run.train_time_s for run in done]),
        cold_wall_s_mean=_mean([run.end.cold_wall_s for run in done]),
        compile_s_mean=_mean([run.end.compile_s for run in done]),
        num_steps=max((run.origin.step + len(run.steps) for run in done), default=0),
        num_tokens=max((at.tokens_seen for run in done for at in (run.origin, *run.steps[-1:])), default=0),
        step_p50_ms=p50_ms,
        step_p95_ms=p95_ms,
        step_max_ms=max_ms,
        data_wait_share=data_wait_s / train_time_s if data_wait_s is not None and train_time_s else None,
        test=promised and standing(promised, runs, target.loss, target.sigma).test,
    )


def _mean(numbers: Sequence[float]) -> float | None:
    return fmean(numbers) if numbers else None


def _sd(numbers: Sequence[float]) -> float | None:
    return stdev(numbers) if len(numbers) > 1 else None
