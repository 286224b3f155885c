"""`speedrun compare`: runs two records in turns on this node. Executes code from both."""

import sys
import tempfile
from pathlib import Path

import click
import msgspec

from speedrun.cli.options import Integer, data_option, example, json_option, out_option, unsafe_option
from speedrun.ground.errors import SpeedrunError, UsageError, translate_os_errors
from speedrun.ground.wholefile import write_whole
from speedrun.ledger.batch import seeds_from
from speedrun.ledger.run import Run
from speedrun.referee.rerun import Rerun
from speedrun.referee.sandbox import protections
from speedrun.study.comparison import Comparison, compare


@click.command(epilog=example("speedrun compare records/smoke-cpu/2026-11-21-first runs/mine --pairs 3"))
@click.argument("first", metavar="A", type=click.Path(path_type=Path))
@click.argument("second", metavar="B", type=click.Path(path_type=Path))
@click.option(
    "--pairs", type=Integer(2), default=3, show_default=True, help="Pairs of runs, one of A and one of B."
)
@unsafe_option
@data_option
@out_option("A new folder for the runs and the result.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    first: Path,
    second: Path,
    pairs: int,
    unsafe: bool,
    data: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run the records A and B in turns (A B, B A, ...), and report which is faster. EXECUTES CODE FROM BOTH.

    Both runs of a pair have the same seed, derived from the records. Exits with 0 if B is faster and its loss is not
    worse within the noise, with 1 if not, or if the difference is not resolved.
    """
    if out is not None and out.exists():
        raise UsageError(f"{out} exists already; need a new folder; remove it or pass another --out")
    sides = {"A": Rerun(first, unsafe=unsafe), "B": Rerun(second, unsafe=unsafe)}
    click.echo(protections(unsafe=unsafe), err=True)
    _check_alike(sides["A"].old, sides["B"].old)
    seeds = seeds_from(sides["A"].old.start.source_sha256, sides["B"].old.start.source_sha256, pairs)
    with tempfile.TemporaryDirectory() as scratch:
        folder = out or Path(scratch, "compare")
        with translate_os_errors(folder):
            folder.mkdir(parents=True)
        runs: dict[str, list[Run]] = {"A": [], "B": []}
        for pair, seed in enumerate(seeds, 1):
            for side in ("AB", "BA")[(pair - 1) % 2]:
                new = sides[side].run(folder / f"{pair}{side}", seed=seed, data=data, echo=sys.stderr)
                runs[side].append(new)
                click.echo(
                    f"pair {pair}/{pairs} {side}  {new.train_time_s:.2f} s, {new.val_loss:.5f}", err=True
                )
        try:
            found = compare(seeds, runs["A"], runs["B"])
        except ValueError as error:  # numbers that no honest run has
            raise SpeedrunError(f"the runs cannot be compared: {error}; 'speedrun validate' them") from None
        if out is not None:
            encoded = msgspec.json.format(msgspec.json.encode(found), indent=2)
            write_whole(out / "compare.json", encoded, b"\n")
    click.echo(msgspec.json.encode(found) if as_json else _text(found))
    ctx.exit(0 if found.time_ratio.high < 1 and found.loss_difference.low <= 0 else 1)


def _check_alike(a: Run, b: Run) -> None:
    """Raise UsageError for records of different tracks or hardware."""
    for what, one, other in (
        ("track", a.start.track, b.start.track),
        ("platform", a.preflight.platform, b.preflight.platform),
        ("number of devices", a.preflight.num_devices, b.preflight.num_devices),
    ):
        if one != other:
            raise UsageError(
                f"{what} of A is {one}, of B {other}; need the same for both; choose other records"
            )


def _text(found: Comparison) -> str:
    ratio, loss = found.time_ratio, found.loss_difference
    change = f"{ratio.mean - 1:+.2%} of A's time, 95 % between {ratio.low - 1:+.2%} and {ratio.high - 1:+.2%}"
    verdict = "not resolvable here"
    if found.is_resolved:
        verdict = "B is faster" if ratio.mean < 1 else "B is slower"
    return (
        f"time    {change}: {verdict}\n"
        f"loss    {loss.mean:+.5f} nats, 95 % between {loss.low:+.5f} and {loss.high:+.5f}\n"
        f"both    {found.equivalent_s:+.2f} s: with the loss counted as time, at {found.s_per_nat:.1f} s a nat\n"
        f"rate    {found.rate_from}"
    )
