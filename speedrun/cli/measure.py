"""`speedrun bench all` and `rival`: what is measured on a rented GPU."""

import sys
from pathlib import Path

import click

from speedrun.bench import rival as rivals
from speedrun.bench.suite import Suite
from speedrun.cli.options import (
    Integer,
    Number,
    attention_option,
    example,
    json_option,
    parse_settings,
    recipe_option,
    settings_option,
)
from speedrun.cli.program import show
from speedrun.doctor import cuda
from speedrun.ground.clock import now

_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command(
    "all",
    epilog=example(
        "speedrun bench all --out measured --minutes 8",
        "speedrun bench all --out measured --parts health,profile-w14",
        "speedrun bench all --rehearse --out rehearsed",
    ),
)
@click.option("--out", type=_FOLDER, metavar="DIR", help="Default: docs/benchmarks/<date>-<gpu>.")
@click.option(
    "--parts", "names", metavar="NAME,...", help="Run only these, also again. Default: all not yet ok."
)
@click.option("--list", "listed", is_flag=True, help="List the names of the parts, and stop.")
@click.option("--minutes", type=Number(0), default=30, show_default=True, help="For all parts together.")
@click.option(
    "--shards", type=_FOLDER, metavar="DIR", help="Real tokens. Default: imitated, as long as FineWeb's."
)
@click.option("--rival", type=_FOLDER, metavar="DIR", help="A program to time in turns with ours.")
@click.option("--work", type=_FOLDER, default=".gpu", show_default=True, help="Keeps compiled programs.")
@click.option("--rehearse", is_flag=True, help="Run the same parts tiny on the CPU, in a few minutes.")
def everything(
    *,
    out: Path | None,
    names: str | None,
    listed: bool,
    minutes: float,
    shards: Path | None,
    rival: Path | None,
    work: Path,
    rehearse: bool,
) -> None:
    """Run all benchmarks, with hangs and crashes contained: results, a summary, one archive.

    Parts of an earlier slice keep their results. Exits with 1 if a part failed in this one.
    """
    machine = ["rehearsal on a CPU: no figure here says anything of a GPU"] if rehearse else cuda.described()
    if rival is not None:
        rivals.executable(rival)
    kind = "rehearsal" if rehearse else machine[0].partition(",")[0].replace(" ", "-")
    out = (out or Path("docs", "benchmarks", f"{now().utc[:10]}-{kind}")).absolute()
    suite = Suite(machine, out, work, shards, rival, rehearse)
    if listed:
        click.echo("\n".join(part.name for part in suite.parts))
        return
    suite.run(names, minutes, click.echo)


@click.command(epilog=example("speedrun bench rival ../rival --data DIR --recipe record21 --steps 60"))
@click.argument("folder", type=_FOLDER)
@click.option("--data", type=_FOLDER, required=True, metavar="DIR", help="Shards that both read.")
@recipe_option("record21", "Ours.")
@click.option("--steps", type=Integer(1), default=60, show_default=True, help="Of each run.")
@click.option("--first-step", type=Integer(0), default=0, show_default=True, help="Of the schedule.")
@click.option("--devices", type=Integer(1), default=1, show_default=True)
@click.option(
    "--microbatches", type=Integer(1), default=1, show_default=True, help="Parts of a step's batch."
)
@attention_option
@settings_option
@json_option
def rival(
    *,
    folder: Path,
    data: Path,
    recipe: str,
    steps: int,
    first_step: int,
    settings: tuple[str, ...],
    as_json: bool,
    **same: object,
) -> None:
    """Time our step and another program's in turns, ABBA, on the same tokens; FOLDER/run is that program.

    It is called with --shards DIR --steps N --first-step I --sequences N --seq-len N, and writes a line of JSON for
    each step: {"step": i, "time_s": seconds since the first began, "loss": nats}.
    """
    from speedrun.science import recipes

    program = rivals.executable(folder)
    chosen = recipes.load(recipe).override(parse_settings(settings))
    stage = chosen.stages[chosen.stage_of(first_step)]
    which = ["--steps", str(steps), "--first-step", str(first_step)]
    options = {"recipe": recipe, "data": data, **same}
    ours = [sys.executable, "-m", "speedrun", "bench", "step", "--json", *which]
    ours += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    ours += [word for text in settings for word in ("--set", text)]
    shape = ["--sequences", str(stage.num_sequences), "--seq-len", str(stage.seq_len)]
    theirs = [str(program), "--shards", str(data), *which, *shape]
    show(rivals.compare(ours, theirs, steps, lambda line: click.echo(line, err=True)), as_json=as_json)
