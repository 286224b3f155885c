"""`speedrun reproduce`: run a record again, or two in turns, and judge the result. Executes code from the record."""

import sys
from pathlib import Path

import click
import msgspec

from speedrun.cli.options import (
    COUNT,
    PATH,
    data_option,
    flag,
    json_option,
    new_command,
    option,
    out_option,
    show,
    unsafe_option,
)
from speedrun.ground.children import locked
from speedrun.ground.console import clean
from speedrun.ground.errors import SpeedrunError, UsageError
from speedrun.ground.wholefile import write_whole
from speedrun.ledger.record import Record
from speedrun.ledger.reproduction import REPRODUCTION
from speedrun.referee import circumstances, reproduce
from speedrun.referee.rerun import Rerun
from speedrun.referee.sandbox import protections
from speedrun.study.comparison import Comparison, compare

_RECORD = "runs/first"
_NUM_PAIRS = 3


@new_command(
    f"speedrun reproduce {_RECORD} --runs 1",
    f"speedrun reproduce {_RECORD} --same-seeds --runs 1",
    f"speedrun reproduce {_RECORD} --against runs/mine",
)
@click.argument("record", type=PATH)
@option(
    "--runs N",
    COUNT,
    f"Number of runs. Default: as many as the record has; with --against {_NUM_PAIRS} of each.",
)
@option(
    "--against RECORD",
    PATH,
    "Run this one in turns with it, with the same fresh seeds, and report which is faster.",
    name="rival",
)
@flag("--same-seeds", "Use the record's seeds, to compare bits. Default: fresh ones.")
@option("--by NAME", str, "Your name, for the result.", "")
@data_option
@out_option(
    "For runs and reproduction.json; the same command continues there. Default: a folder below runs/."
)
@flag("--into-record", "Also put reproduction.json into the record.")
@unsafe_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    record: Path,
    runs: int | None,
    rival: Path | None,
    same_seeds: bool,
    by: str,
    data: Path | None,
    out: Path | None,
    into_record: bool,
    unsafe: bool,
    as_json: bool,
) -> None:
    """Run RECORD again from its own source, and say whether its result holds. EXECUTES CODE FROM THE RECORD.

    First compares what the record names (data, packages, lock) with this machine, and says which promise each
    difference costs. The verdict is within, faster, slower, loss mismatch or not the same hardware. Exits with 0 if it
    is within or faster, else with 1; with 2 or 3, before anything runs, if the record or the data cannot be used.

    With --against, exits with 0 if the rival is faster and its loss is not worse within the noise, else with 1.
    """
    if rival is not None and (same_seeds or into_record or runs == 1):
        raise UsageError("--against takes 2 runs or more with fresh seeds, here; leave the other options out")
    found = circumstances.read(record)
    folder = out or Path("runs") / f"reproduction-{found.id[:12]}{'-same-seeds' * same_seeds}"
    pair = [(record, folder), *([(rival, folder / reproduce.RIVAL)] if rival is not None else [])]
    sides = [_side(*one, data, unsafe=unsafe) for one in pair]
    if rival is not None:
        _check_alike(*(side.record for side in sides))
    click.echo(protections(unsafe=unsafe), err=True)
    num_runs = runs or (len(found.finished) if rival is None else _NUM_PAIRS)
    exit_code = _reproduced(sides, num_runs, by, same_seeds=same_seeds, as_json=as_json)
    if into_record:
        write_whole(record / REPRODUCTION, (folder / REPRODUCTION).read_bytes())
        click.echo(f"wrote {clean(str(record / REPRODUCTION))}", err=True)
    ctx.exit(exit_code)


def _side(record: Path, folder: Path, data: Path | None, *, unsafe: bool) -> reproduce.Repetition:
    """Check a record and its data; execute nothing yet."""
    found = circumstances.read(record)
    rerun = Rerun(record, found.lead.folder, unsafe=unsafe)
    circumstances.require_our_logs(found)
    points = tuple(circumstances.points(found))
    shards = rerun.check_data(data, sys.stderr)
    for line in reproduce.differences(points):
        click.echo(line, err=True)
    return reproduce.Repetition(folder, found, rerun, shards, points)


def _reproduced(
    sides: list[reproduce.Repetition], num_runs: int, by: str, *, same_seeds: bool, as_json: bool
) -> int:
    """Run one or two records again, print the result, and return the exit code."""
    folder = sides[0].folder
    plan = reproduce.planned(folder, [side.record for side in sides], num_runs, same_seeds=same_seeds)
    with locked(folder / reproduce.PLAN):
        runs = reproduce.run_in_turns(sides, plan.seeds, sys.stderr)
        results = [side.judge(plan, ended, by) for side, ended in zip(sides, runs, strict=True)]
    facts: dict[str, object] = results[0].facts
    lines = [line for result in results for line in reproduce.table(result)]
    good = results[0].judgement.verdict in ("within", "faster")
    if len(sides) > 1:
        try:
            found = compare([*zip(plan.seeds, *runs, strict=True)])
        except ValueError as error:  # too few finished, or numbers that no honest run has
            raise SpeedrunError(f"the runs cannot be compared: {error}; 'speedrun validate' them") from None
        good = found.time_ratio.high < 1 and found.loss_difference.low <= 0
        facts = {"record": facts, "rival": results[1].facts, "comparison": msgspec.to_builtins(found)}
        lines += _lines(found)
        raw = msgspec.json.format(msgspec.json.encode(found), indent=2)
        write_whole(folder / "comparison.json", raw, b"\n")
    wrote = f"wrote    {clean(str(folder / REPRODUCTION))}"
    show(facts, [*lines, wrote], as_json=as_json)
    return 0 if good else 1


def _check_alike(record: Record, rival: Record) -> None:
    """Raise UsageError for records of different tracks or hardware."""
    ours, theirs = record.lead.preflight, rival.lead.preflight
    for fact, one, other in (
        ("track", record.rules.id, rival.rules.id),
        ("platform", ours.platform, theirs.platform),
        ("number of devices", ours.num_devices, theirs.num_devices),
    ):
        if one != other:
            raise UsageError(
                f"{fact} of the record is {one}, of its rival {other}; need the same for both; choose other records"
            )


def _lines(found: Comparison) -> list[str]:
    ratio, loss = found.time_ratio, found.loss_difference
    change = f"{ratio.mean - 1:+.2%} of its time, 95 % between {ratio.low - 1:+.2%} and {ratio.high - 1:+.2%}"
    verdict = "not resolvable here"
    if found.is_resolved:
        verdict = "the rival is faster" if ratio.mean < 1 else "the rival is slower"
    return [
        f"rival    {change}: {verdict}",
        f"loss     {loss.mean:+.5f} nats, 95 % between {loss.low:+.5f} and {loss.high:+.5f}",
        f"both     {found.equivalent_s:+.2f} s: with the loss counted as time, at {found.s_per_nat:.1f} s a nat",
        f"rate     {found.rate_from}",
    ]
