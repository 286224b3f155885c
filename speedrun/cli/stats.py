"""`speedrun stats`: what the runs of a record prove, and how many more it would take."""

import math
from pathlib import Path
from statistics import fmean, stdev

import click
import msgspec

from speedrun.cli.options import Number, example, json_option
from speedrun.ground.errors import UsageError
from speedrun.ledger import statistics
from speedrun.ledger.batch import standing
from speedrun.ledger.record import Record, load
from speedrun.ledger.statistics import Interval


class Stats(msgspec.Struct, frozen=True):
    """The answer."""

    track: str
    target: float
    num_runs: int  #: finished
    losses: tuple[float, ...]
    loss: Interval | None  #: mean, with the 95 % interval
    sd: float | None
    train_times_s: tuple[float, ...]
    train_time_s: Interval | None
    cold_walls_s: tuple[float, ...]
    cold_wall_s: Interval | None
    declared: bool
    rule: str
    p: float | None  #: None without a run
    alpha: float
    passed: bool
    runs_needed: int | None  #: in one batch with one look, for 90 % power at this mean and this noise
    equivalent: statistics.Equivalence | None  #: to the parent that was named


@click.command(
    epilog=example(
        "speedrun stats records/smoke-cpu/2026-11-21-first", "speedrun stats RECORD --against PARENT --json"
    )
)
@click.argument("record", type=click.Path(path_type=Path))
@click.option("--target", type=Number(0), help="Another one than the track's.")
@click.option("--alpha", type=Number(0, 1, min_open=True), help="Another level than the rule's.")
@click.option(
    "--against", type=click.Path(path_type=Path), metavar="RECORD", help="Test whether its loss is the same."
)
@click.option(
    "--margin", type=Number(0, min_open=True), default=0.001, show_default=True, help="Of the same."
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    record: Path,
    target: float | None,
    alpha: float | None,
    against: Path | None,
    margin: float,
    as_json: bool,
) -> None:
    """Test the mean loss of the finished runs of RECORD against the target.

    A declared batch is tested at its declared looks; other runs as if they had been declared, which they were not.
    Exits with 0 if the target is proven, with 1 if not.
    """
    found = _stats(_loaded(record), target, alpha, None if against is None else _loaded(against), margin)
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        click.echo("\n".join(_lines(found, None if against is None else str(against))))
    ctx.exit(0 if found.passed else 1)


def _loaded(folder: Path) -> Record:
    record = load(folder)
    if not record.finished or record.track is None:
        raise UsageError(
            f"{folder} holds no finished run of a known track; 'speedrun validate {folder}' says why"
        )
    return record


def _stats(
    record: Record, target: float | None, alpha: float | None, parent: Record | None, margin: float
) -> Stats:
    rules, runs = record.rules, record.finished
    aim, sigma = rules.target.loss if target is None else target, rules.target.sigma
    losses = [run.val_loss for run in runs]
    test = None
    if record.declaration is not None and target is None and alpha is None:
        test = standing(record.declaration, record.runs, aim, sigma).test
    declared = test is not None
    blown_up = [math.inf for run in record.runs if run.file.outcome == "non-finite"]
    test = test or statistics.mean_below([*losses, *blown_up], aim, known_sigma=sigma, alpha=alpha)
    sd = stdev(losses) if len(losses) > 1 else None
    noise = max(sigma or 0.0, sd or 0.0) if test.rule == "z" else sd
    needed, margin_now = None, aim - fmean(losses)
    if noise and alpha is None:
        needed = statistics.batch_needed(margin_now, noise, known_sigma=sigma)
    elif noise:
        needed = statistics.runs_needed(margin_now, noise, rule=test.rule, alpha=test.alpha)
    parents = [run.val_loss for run in parent.finished] if parent else []
    if parent and min(len(parents), len(losses)) < 2:
        raise UsageError(
            f"--against compares {len(losses)} runs with {len(parents)}; need two finished ones on each side"
        )
    times_s, walls_s = ([getattr(run.end, name) for run in runs] for name in ("train_time_s", "cold_wall_s"))
    return Stats(
        track=rules.id,
        target=aim,
        num_runs=len(runs),
        losses=tuple(losses),
        loss=statistics.mean_interval(losses),
        sd=sd,
        train_times_s=tuple(times_s),
        train_time_s=statistics.mean_interval(times_s),
        cold_walls_s=tuple(walls_s),
        cold_wall_s=statistics.mean_interval(walls_s),
        declared=declared,
        rule=test.rule,
        p=test.p,
        alpha=test.alpha,
        passed=test.passed,
        runs_needed=needed,
        equivalent=statistics.equivalent(parents, losses, margin=margin) if parent else None,
    )


def _lines(found: Stats, against: str | None) -> list[str]:
    names = {"t": "Student's t", "z": "z with the track's known noise"}
    declared = "declared" if found.declared else "not declared: this counts for nothing"
    lines = [
        f"runs    {found.num_runs} finished on {found.track} ({declared})",
        f"loss    {_interval(found.loss, found.losses, 5)} nats | sd {_number(found.sd, 5)}",
        f"time    {_interval(found.train_time_s, found.train_times_s, 2)} s of training",
        f"wall    {_interval(found.cold_wall_s, found.cold_walls_s, 2)} s, cold",
        f"test    mean below {found.target:g} by {names[found.rule]}: p = {_number(found.p, 5)}, need less than "
        f"{found.alpha:g}: {'proven' if found.passed else 'not proven'}",
    ]
    if found.runs_needed:
        lines.append(
            f"power   at this mean and noise {found.runs_needed} runs pass with a probability of 90 %"
        )
    elif found.sd is None and found.rule == "t":
        lines.append("power   noise needs at least two runs")
    elif not found.passed:
        lines.append("power   no number of runs proves this mean")
    if found.equivalent:
        same = found.equivalent
        lines.append(
            f"same    {same.difference:+.5f} against {against}; p = {same.p:.2g} that they differ by {same.margin:g} "
            f"or more: {'equivalent' if same.passed else 'not shown to be equivalent'}"
        )
    return lines


def _interval(interval: Interval | None, alone: tuple[float, ...], digits: int) -> str:
    if interval is None:
        return f"{alone[0]:.{digits}f}"
    return f"{interval.mean:.{digits}f} +- {interval.half_width:.{digits}f}"


def _number(number: float | None, digits: int) -> str:
    return "none" if number is None else f"{number:.{digits}g}"
