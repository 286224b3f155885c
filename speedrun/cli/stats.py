"""`speedrun stats`: what the runs of a record prove, and how many more it would take."""

from pathlib import Path

import click

from speedrun.cli import options as cli
from speedrun.lab.proof import Stats, stats
from speedrun.record.statistics import Interval

_RULES = {"t": "Student's t", "z": "z with the track's known noise"}


@cli.new_command("speedrun stats runs/first", "speedrun stats RECORD --against PARENT --json")
@click.argument("record", type=cli.PATH)
@cli.option("--target LOSS", cli.Number(0), "Instead of the track's.")
@cli.option("--against RECORD", cli.PATH, "Test whether its loss is the same.")
def command(*, record: Path, target: float | None, against: Path | None) -> cli.Answer:
    """Test the mean loss of the finished runs of RECORD against the target.

    A declared batch is tested at its declared looks. Other runs are tested as well, but prove nothing for the board.
    Exits with 0 if the target is proven, with 1 if not.
    """
    found = stats(record, target=target, parent=against)
    return cli.Answer(found, _lines(found, against), 0 if found.passed else 1)


def _lines(found: Stats, against: Path | None) -> list[str]:
    declared = "declared" if found.declared else "not declared: no proof for the board"
    test = "one run has no p; declare several: speedrun batch --runs N"
    if found.p is not None:
        verdict = "proven" if found.passed else "not proven"
        test = f"p = {_number(found.p)}, need less than {found.alpha:g}: {verdict}"
    lines = [
        f"runs    {found.num_runs} finished on {found.track} ({declared})",
        f"loss    {_interval(found.loss, found.losses, 5)} nats | sd {_number(found.sd)}",
        f"time    {_interval(found.train_time_s, found.train_times_s, 2)} s of training",
        f"wall    {_interval(found.cold_wall_s, found.cold_walls_s, 2)} s, cold",
        f"test    mean below {found.target:g} by {_RULES[found.rule]}: {test}",
    ]
    if found.runs_needed:
        lines.append(f"power   {found.runs_needed} runs with this mean and noise pass 9 times of 10")
    elif found.sd is None and found.rule == "t":
        lines.append("power   noise needs at least two runs")
    elif not found.passed:
        lines.append("power   no number of runs proves this mean")
    if same := found.equivalent:
        verdict = "equivalent" if same.passed else "not shown to be equivalent"
        lines.append(
            f"same    {same.difference:+.5f} against {against}; p = {same.p:.2g} that they differ by {same.margin:g} "
            f"or more: {verdict}"
        )
    return lines


def _interval(interval: Interval | None, values: tuple[float, ...], digits: int) -> str:
    if interval is None:
        return f"{values[0]:.{digits}f}"
    return f"{interval.mean:.{digits}f} +- {interval.half_width:.{digits}f}"


def _number(number: float | None) -> str:
    return "none" if number is None else f"{number:.5g}"
