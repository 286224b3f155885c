"""`speedrun import-log`: read other people's logs and results, for comparison."""

from pathlib import Path

import click

from speedrun.base.console import clean
from speedrun.board import foreign_logs
from speedrun.board.foreign_logs import Context
from speedrun.cli import options as cli
from speedrun.lab import noise
from speedrun.lab.noise import Group

_MOST_SHOWN = 5  #: problems of a file


@cli.new_command(
    "speedrun import-log logs/*.txt --json",
    "speedrun import-log runs.csv.gz --match track_1_short/2026 --mean 3.27 3.29",
    "speedrun import-log runs.csv.gz --steps 1770",
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=cli.PATH)
@cli.option("--match TEXT", str, "Only runs with TEXT in their name.", name="texts", multiple=True)
@cli.option("--steps N", cli.COUNT, "Only runs that planned this number of steps.")
@cli.option("--mean LOW HIGH", (float, float), "Only groups with a mean loss in this range.")
def command(
    *, files: tuple[Path, ...], texts: tuple[str, ...], steps: int | None, mean: tuple[float, float] | None
) -> cli.Answer:
    """Read the logs of other people's runs, and show how much equal runs differ.

    A FILE is a text log of modded-nanogpt, of its port to JAX or of llm.c, or a CSV with the columns
    log,step,num_steps,val_loss,train_time_ms; either may be compressed by gzip. Runs of one folder that end at the
    same step form a group; copies of a run count once. Imported runs have no seed and no chain of hashes, so they are
    never ranked. Nothing in a FILE is executed.
    """
    names = foreign_logs.names(files)
    contexts = tuple(foreign_logs.import_file(path, name) for path, name in zip(files, names, strict=True))
    runs = (run for one in contexts for run in one.runs if steps is None or run.num_steps == steps)
    chosen = noise.distinct(run for run in runs if not texts or any(text in run.name for text in texts))
    groups = tuple(noise.groups(chosen))
    if mean is not None:
        groups = tuple(group for group in groups if mean[0] <= group.mean <= mean[1])
    spread = noise.noise(groups)
    facts = {"files": contexts, "num_chosen": len(chosen), "groups": groups, "noise": spread}
    lines = [line for one in contexts for line in _of_file(one)] + [*map(_of_group, groups)]
    if spread is not None:
        lines.append(
            f"noise   sd {spread.pooled_sd:.5f} (95 %: {spread.low:.5f} to {spread.high:.5f}), pooled over "
            f"{spread.num_groups} groups with {spread.num_runs:,} of {len(chosen):,} runs; median "
            f"{spread.median_sd:.5f}"
        )
    return cli.Answer(facts, lines)


def _of_file(one: Context) -> list[str]:
    lines = [f"file    {one.source}: {len(one.runs):,} runs, {one.num_problems:,} problems"]
    lines += [f"        line {problem.line}: {problem.message}" for problem in one.problems[:_MOST_SHOWN]]
    if one.num_problems > _MOST_SHOWN:
        lines.append(f"        and {one.num_problems - _MOST_SHOWN:,} more")
    return lines


def _of_group(group: Group) -> str:
    steps = f"{group.step}/{group.num_steps}" if group.num_steps else f"{group.step}"
    sd = "none" if group.sd is None else f"{group.sd:.4f}"
    step = "" if group.step_ms is None else f"  step {group.step_ms:.2f} ms"
    where = clean(group.folder) or "no folder"
    return f"group   {where}  {steps}  n {len(group.losses)}  mean {group.mean:.4f}  sd {sd}{step}"
