"""`speedrun bench all` and `rival`: what is measured on a rented GPU."""

import os
import sys
from importlib import metadata
from pathlib import Path

import click

from speedrun.bench import rival as rivals
from speedrun.bench import session
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
from speedrun.ground import signals
from speedrun.ground.clock import now
from speedrun.ground.errors import SpeedrunError, UsageError

_FOLDER = click.Path(path_type=Path, file_okay=False)
_WORK = Path(".gpu")  #: keeps compiled programs and tokens


@click.command(
    "all",
    epilog=example(
        "speedrun bench all --out measured --minutes 8",
        "speedrun bench all --out measured --parts norm,profile-w14",
        "speedrun bench all --rehearse --out rehearsed",
    ),
)
@click.option("--out", type=_FOLDER, metavar="DIR", help="Default: docs/benchmarks/<date>-<gpu>.")
@click.option(
    "--parts", "names", metavar="NAME,...", help="Run only these, also again. Default: all without a result."
)
@click.option("--minutes", type=Number(0), default=30, show_default=True, help="For all parts together.")
@click.option(
    "--shards", type=_FOLDER, metavar="DIR", help="Real tokens. Default: imitated, as long as FineWeb's."
)
@click.option("--rival", type=_FOLDER, metavar="DIR", help="A program to time in turns with ours.")
@click.option("--rehearse", is_flag=True, help="Run the same parts tiny on the CPU, in a few minutes.")
def everything(
    *,
    out: Path | None,
    names: str | None,
    minutes: float,
    shards: Path | None,
    rival: Path | None,
    rehearse: bool,
) -> None:
    """Run all benchmarks, with hangs and crashes contained: results and a summary.

    Parts of an earlier slice keep their results. Exits with 1 if a part failed in this one.
    """
    machine = ["rehearsal on a CPU: no figure here says anything of a GPU"] if rehearse else cuda.described()
    if rival is not None:
        rivals.executable(rival)
    kind = "rehearsal" if rehearse else machine[0].partition(",")[0].replace(" ", "-")
    out = (out or Path("docs", "benchmarks", f"{now().utc[:10]}-{kind}")).absolute()
    tokens = (shards or _WORK / "tokens").absolute()
    parts = session.parts(session.TINY if rehearse else session.FULL, out, tokens, rival and rival.absolute())
    wanted, first = session.chosen(parts, names, out), parts[0]
    if not rehearse:  # it starts CUDA: where it fails, all others would
        wanted = [first, *(part for part in wanted if part != first)]
    session.provide(tokens, made=shards is None)
    machine += [", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "jaxlib", "numpy", "optax"))]
    machine += [f"tokens: {shards or 'synthetic, with the document lengths of FineWeb'}"]
    env = {
        "JAX_COMPILATION_CACHE_DIR": str((_WORK / "programs").absolute()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **os.environ,
        "JAX_PLATFORMS": "cpu" if rehearse else "cuda",  # with both, JAX would fall back to the CPU silently
    }
    ended = list[session.Result]()
    with signals.handled_by(signals.stop):
        for result in session.run(wanted, out, machine, env, 60 * minutes):
            ended.append(result)
            click.echo(session.row(result))
            session.report(parts, out)
            if not rehearse and result.name == first.name and result.status != "ok":
                raise UsageError(
                    f"JAX cannot use this GPU: {result.reason}; see {out}/parts/{first.name}.err"
                )
    if late := [part.name for part in wanted[len(ended) :]]:
        click.echo(f"time is up before {', '.join(late)}; the same command continues there")
    click.echo(f"summary in {out}/summary.md")
    if bad := [result.name for result in ended if result.status == "failed"]:
        raise SpeedrunError(f"{len(bad)} of {len(ended)} parts gave no figures: {', '.join(bad)}")


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
