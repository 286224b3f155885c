"""`speedrun import-log`: curves that others made, as context."""

import os
from pathlib import Path

import click
import msgspec

from speedrun.cli.options import Integer, example, json_option
from speedrun.exchange import context, foreign
from speedrun.exchange.context import Context, ContextRun
from speedrun.ground.console import clean
from speedrun.ground.errors import UsageError
from speedrun.ground.wholefile import write_whole
from speedrun.study import noise
from speedrun.study.noise import Band, Group, Noise

_MOST_SHOWN = 5  #: problems of a file


class Imported(msgspec.Struct, frozen=True):
    """The answer."""

    files: tuple[Context, ...]
    num_chosen: int  #: runs that options left, each counted once
    groups: tuple[Group, ...]
    noise: Noise | None
    bands: tuple[Band, ...]


@click.command(
    epilog=example(
        "speedrun import-log logs/*.txt --out context",
        "speedrun import-log runs.csv.gz --match track_1_short/2026 --mean 3.27 3.29",
        "speedrun import-log runs.csv.gz --steps 1770 --bands",
    )
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Write one context file for each FILE."
)
@click.option(
    "--match", "texts", multiple=True, metavar="TEXT", help="Only runs with TEXT in their name. Repeatable."
)
@click.option("--steps", type=Integer(1), help="Only runs that were planned for so many steps.")
@click.option(
    "--mean", type=(float, float), metavar="LOW HIGH", help="Only groups with a mean loss in this range."
)
@click.option("--bands", "with_bands", is_flag=True, help="Show the losses of the chosen runs step by step.")
@json_option
def command(
    *,
    files: tuple[Path, ...],
    out: Path | None,
    texts: tuple[str, ...],
    steps: int | None,
    mean: tuple[float, float] | None,
    with_bands: bool,
    as_json: bool,
) -> None:
    """Read the logs of other people's runs, and say how much equal runs differ.

    A FILE is a text log of modded-nanogpt, of its port to JAX or of llm.c, in any of their dialects, or a CSV with the
    columns log,step,num_steps,val_loss,train_time_ms; either may be compressed by gzip. Runs of one folder that end
    at the same step are one group; a run that lies in two places counts once. What is read is context: it has no seed
    and no chain of hashes, so it is never ranked, and nothing of it is executed.
    """
    contexts = tuple(foreign.import_file(path, name) for path, name in zip(files, _names(files), strict=True))
    if out is not None:
        _write(contexts, out)
    chosen = noise.distinct(run for one in contexts for run in one.runs if _fits(run, texts, steps))
    groups = tuple(noise.groups(chosen))
    if mean is not None:
        groups = tuple(group for group in groups if mean[0] <= group.mean <= mean[1])
    bands = tuple(noise.bands(chosen)) if with_bands else ()
    found = Imported(contexts, len(chosen), groups, noise.noise(groups), bands)
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        click.echo("\n".join(_lines(found)))


def _names(files: tuple[Path, ...]) -> list[str]:
    """Names of runs: the paths below the last folder that all files share, and that folder. None tells of a machine."""
    paths = [Path(os.path.abspath(path)) for path in files]
    shared = Path(os.path.commonpath([path.parent for path in paths])).parent
    return [path.relative_to(shared).as_posix() for path in paths]


def _fits(run: ContextRun, texts: tuple[str, ...], steps: int | None) -> bool:
    named = not texts or any(text in run.name for text in texts)
    return named and (steps is None or run.num_steps == steps)


def _write(contexts: tuple[Context, ...], folder: Path) -> None:
    """One file each; nothing that is there is written over.

    Raises:
        UsageError: if a name is taken, or the folder cannot be written.
    """
    for one in contexts:
        stem = "".join(char if char.isalnum() or char in "._-" else "_" for char in one.source).lstrip(".")
        path = folder / f"{stem[:80]}-{one.sha256[:8]}.json"
        if path.exists():
            raise UsageError(f"{path} is already there; give another --out, or move it away")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}; give another --out") from None
        write_whole(path, context.encode(one))


def _lines(found: Imported) -> list[str]:
    lines: list[str] = []
    for one in found.files:
        lines.append(
            f"file    {one.source}: {len(one.runs):,} runs, {one.num_problems:,} problems{_machine(one)}"
        )
        lines += [f"        line {problem.line}: {problem.message}" for problem in one.problems[:_MOST_SHOWN]]
        if one.num_problems > _MOST_SHOWN:
            lines.append(f"        and {one.num_problems - _MOST_SHOWN:,} more")
    for group in found.groups:
        steps = f"{group.step}/{group.num_steps}" if group.num_steps else f"{group.step}"
        lines.append(
            f"group   {clean(group.folder) or 'no folder'}  {steps}  n {len(group.losses)}  mean {group.mean:.4f}"
            f"  sd {_sd(group.sd)}{'' if group.step_ms is None else f'  step {group.step_ms:.2f} ms'}"
        )
    lines += [
        f"band    {band.step:>6}  n {band.num_runs}  mean {band.mean:.4f}  sd {_sd(band.sd)}"
        f"  {band.least:.4f}..{band.most:.4f}"
        for band in found.bands
    ]
    if (all_ := found.noise) is not None:
        lines.append(
            f"noise   sd {all_.pooled_sd:.5f} (95 %: {all_.low:.5f} to {all_.high:.5f}), pooled over {all_.num_groups} "
            f"groups with {all_.num_runs:,} of {found.num_chosen:,} runs; median {all_.median_sd:.5f}"
        )
    return lines


def _machine(one: Context) -> str:
    """What the first run of a file tells of hardware and software."""
    run = one.runs[0]
    said = [f"{run.num_devices or '?'} x {run.device}"] if run.device else []
    said += [f"{name} {version}" for name, version in run.software.items()]
    return f" | {', '.join(said)}" if said else ""


def _sd(sd: float | None) -> str:
    return "none" if sd is None else f"{sd:.4f}"
