"""`speedrun bench all`: everything that only a GPU can tell, in one sitting that can be cut into slices."""

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from speedrun.bench import loading as pace
from speedrun.bench import session
from speedrun.bench.parts import FULL, TINY, Size, parts
from speedrun.bench.rival import compared, executable, ours, theirs
from speedrun.cli.options import Integer, Number, attention_option, example, json_option, settings_option
from speedrun.data import imitation, stream
from speedrun.doctor import cuda, nvidia
from speedrun.ground import provenance, signals
from speedrun.ground import track as tracks
from speedrun.ground.clock import today
from speedrun.ground.errors import SpeedrunError, UsageError, refusals_told
from speedrun.ground.wholefile import write_whole

if TYPE_CHECKING:
    from speedrun.bench.session import Part, Result

_FOLDER = click.Path(path_type=Path, file_okay=False)
_PACKAGES = ("jax", "jaxlib", "numpy", "optax")


@click.command(
    epilog=example(
        "speedrun bench all --out measured --minutes 8",
        "speedrun bench all --out measured --parts health,profile-w14",
        "speedrun bench all --rehearse --out rehearsed",
    )
)
@click.option("--out", type=_FOLDER, metavar="DIR", help="Default: docs/benchmarks/<date>-<gpu>.")
@click.option(
    "--parts", "names", metavar="NAME,...", help="Only these, again if need be. Default: all not yet ok."
)
@click.option("--list", "listed", is_flag=True, help="Name the parts in their order, and stop.")
@click.option("--minutes", type=Number(0), default=30, show_default=True, help="For all parts together.")
@click.option(
    "--shards", type=_FOLDER, metavar="DIR", help="Real tokens. Default: made, as long as FineWeb's."
)
@click.option("--rival", "rival_folder", type=_FOLDER, metavar="DIR", help="A program to run beside ours.")
@click.option("--work", type=_FOLDER, default=".gpu", show_default=True, help="Keeps compiled programs.")
@click.option("--rehearse", is_flag=True, help="On the CPU, tiny: the same parts in a few minutes.")
def everything(
    *,
    out: Path | None,
    names: str | None,
    listed: bool,
    minutes: float,
    shards: Path | None,
    rival_folder: Path | None,
    work: Path,
    rehearse: bool,
) -> None:
    """Run all benches in one process, hangs and crashes contained: results, a summary, one archive.

    Parts of an earlier slice keep their results. Exits with 1 if a part that ran now failed.
    """
    size = TINY if rehearse else FULL
    machine = ["rehearsal on a CPU: no figure here says anything of a GPU"] if rehearse else _gpus()
    if rival_folder is not None:
        executable(rival_folder)
    kind = "rehearsal" if rehearse else machine[0].partition(",")[0].replace(" ", "-")
    out = (out or Path("docs", "benchmarks", f"{today()}-{kind}")).absolute()
    tokens = (shards or work / ("tokens-tiny" if rehearse else "tokens")).absolute()
    known = parts(size, out, tokens, rival_folder and rival_folder.absolute())
    chosen = session.chosen(known, names) if names is not None else known
    if listed:
        click.echo("\n".join(part.name for part in known))
        return
    _provide(tokens, size, given=shards is not None)
    with refusals_told(out):
        out.mkdir(parents=True, exist_ok=True)
    before = session.results(out)
    if names is None:
        chosen = [part for part in chosen if part.name not in before or before[part.name].status == "cut"]
    if not rehearse:  # first in every slice: it starts CUDA, and where it fails all others would
        chosen = [known[0], *(part for part in chosen if part != known[0])]
    head = [*machine, _software(), f"tokens: {shards or 'synthetic, with the document lengths of FineWeb'}"]
    ended: list[Result] = []

    def tell(result: "Result") -> None:
        ended.append(result)
        click.echo(f"{result.status:<8} {result.name:<28} {result.seconds:6.1f} s  {result.reason}")
        _write(head, known, out)
        if result.name == known[0].name and result.status != "ok" and not rehearse:
            raise UsageError(
                f"JAX cannot use this GPU: {result.reason}; {out}/parts/{result.name}.err tells more"
            )

    with signals.handled_by(signals.stop):
        session.run(
            chosen, out, _worker(), env=_environment(work, rehearse=rehearse), most_s=60 * minutes, ended=tell
        )
    for choices in sorted((work / "programs").glob("*autotune*")):
        shutil.copytree(choices, out / "autotune", dirs_exist_ok=True)
    left_out = _write(head, known, out)
    late = [part.name for part in chosen[len(ended) :]]
    if late:
        click.echo(f"time is up before {', '.join(late)}; the same command goes on there")
    if left_out:
        click.echo(f"too large for the archive: {', '.join(left_out)}")
    click.echo(f"summary in {out}/summary.md, everything in {out}/outputs.tar.gz")
    if bad := [result.name for result in ended if result.status in ("failed", "died", "killed")]:
        raise SpeedrunError(
            f"{len(bad)} of {len(ended)} parts gave no figures: {', '.join(bad)}; see the summary"
        )


def _gpus() -> list[str]:
    """What is here: a line for each GPU, and one for CUDA.

    Raises:
        UsageError: without a GPU, or with a driver that is too old.
    """
    try:
        found = nvidia.gpus()
    except nvidia.NoAnswerError as error:
        raise UsageError(f"no GPU: {error}; need one, or --rehearse on a CPU") from None
    if not found:
        raise UsageError("no GPU: nvidia-smi names none; need one, or --rehearse on a CPU")
    checks = {check.name: check for check in cuda.checks(found, provenance.installed(), needed=True)}
    if not checks["driver"].ok:
        raise UsageError(f"driver {checks['driver'].found}")
    # Packages are only noted: those of the system may stand in for what is missing, and the first part will tell.
    here = [f"{gpu.name}, driver {gpu.driver}, {gpu.memory_bytes / 2**30:.0f} GiB" for gpu in found]
    return [*here, checks["cuda"].found]


def _software() -> str:
    python = ".".join(map(str, sys.version_info[:3]))
    return ", ".join([f"python {python}", *(f"{name} {metadata.version(name)}" for name in _PACKAGES)])


def _provide(folder: Path, size: Size, *, given: bool) -> None:
    """Makes tokens, or checks that those given are enough.

    Raises:
        DataError: if they are not.
    """
    rules = tracks.load("webmini").data
    need = size.text_steps * size.text_tokens
    if not given and not folder.is_dir():
        imitation.write(
            folder,
            train_tokens=2 * need,
            val_tokens=rules.val_tokens + 1,
            vocab_size=rules.vocab_size,
            document_token=rules.document_token,
        )
    stream.require_steps(pace.folder_shards(folder, None), [size.text_tokens] * size.text_steps)


def _worker() -> list[str]:
    return [sys.executable, "-m", "speedrun.cli.warm"]


def _environment(work: Path, *, rehearse: bool) -> dict[str, str]:
    """Of the worker. Programs are kept from slice to slice."""
    programs = {
        "JAX_COMPILATION_CACHE_DIR": str((work / "programs").absolute()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cpu"
        if rehearse
        else "cuda",  # with the CPU beside it JAX falls back, and says nothing
    }
    return {**programs, **os.environ, "JAX_PLATFORMS": programs["JAX_PLATFORMS"]}


def _write(head: list[str], known: "list[Part]", out: Path) -> list[str]:
    """Summary and archive anew, so that a session that is cut off leaves both."""
    write_whole(out / "summary.md", session.summary(head, known, out).encode())
    return session.archive(out)


@click.command(epilog=example("speedrun bench rival ../rival --data DIR --recipe record21 --steps 60"))
@click.argument("folder", type=_FOLDER)
@click.option("--data", type=_FOLDER, required=True, metavar="DIR", help="Shards that both train on.")
@click.option("--recipe", metavar="NAME", default="record21", show_default=True, help="Ours.")
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
    devices: int,
    microbatches: int,
    attention: str,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run our step and another program's in turns, ABBA, on the same tokens; FOLDER/run is that program.

    It is called with --shards DIR --steps N --first-step I --sequences N --seq-len N, and writes a line of JSON for
    each step: {"step": i, "time_s": seconds since the first began, "loss": nats}.
    """
    from speedrun.cli.options import parse_settings
    from speedrun.science import recipes

    program = executable(folder)
    chosen = recipes.load(recipe).override(parse_settings(settings))
    stage = chosen.stages[chosen.stage_of(first_step)]
    same = ["--steps", str(steps), "--first-step", str(first_step)]
    us = [
        sys.executable,
        "-m",
        "speedrun",
        "bench",
        "step",
        *same,
        "--recipe",
        recipe,
        "--data",
        str(data),
        "--json",
    ]
    us += ["--devices", str(devices), "--microbatches", str(microbatches), "--attention", attention]
    us += [word for text in settings for word in ("--set", text)]
    shape = ["--sequences", str(stage.num_sequences), "--seq-len", str(stage.seq_len)]
    them = [str(program), "--shards", str(data), *same, *shape]
    runs = []
    for turn in "ABBA":
        runs.append(ours(us) if turn == "A" else theirs(them, steps))
        click.echo(f"{runs[-1].who}: {steps} steps, last loss {runs[-1].losses[-1]:.4f}", err=True)
    found = compared(runs)
    if as_json:
        click.echo(msgspec.json.encode(found))
        return
    click.echo(
        f"ours / rival: {found['ratio']:.3f} ({found['ratio_least']:.3f} to {found['ratio_most']:.3f})"
    )
    for row in found["curve"]:
        click.echo(f"step {row['step']:>5}  ours {row['ours']:.4f}  rival {row['rival']:.4f}")


@click.command(epilog=example("speedrun bench target"))
@json_option
def target(*, as_json: bool) -> None:
    """Print what XLA must be told of this GPU to compile for it elsewhere (`speedrun/ground/devices.py`)."""
    import jax
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    from speedrun.ground import mesh

    mesh.prepare("any")
    try:
        kind = jax.devices()[0].platform
    except (RuntimeError, AssertionError) as error:  # what JAX raises where it may use CUDA only, and cannot
        raise UsageError(
            f"JAX starts no device ({error or 'no CUDA backend'}); 'speedrun doctor' may know why"
        ) from None
    if kind == "cpu":
        raise UsageError("this is a cpu; only a GPU has such a description; run it where there is one")
    said = str(xla_client.get_topology_for_devices(jax.devices()).target_config)
    click.echo(msgspec.json.encode({"target": said}) if as_json else said)
