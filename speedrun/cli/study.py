"""The commands that study runs: `plot`, `stats`, `sweep` and `import-log`."""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import click

from speedrun.base.children import say
from speedrun.base.console import clean
from speedrun.base.errors import UsageError
from speedrun.board import foreign_logs, plots
from speedrun.cli import options as cli
from speedrun.cli import requests
from speedrun.lab import proof, trials
from speedrun.lab.effects import table
from speedrun.lab.trials import Kind, Request
from speedrun.record.statistics import Interval


@cli.command(
    "speedrun plot records/smoke-cpu/2026-11-25-first",
    "speedrun plot runs/first --kind all",
)
def plot(
    records: Annotated[tuple[Path, ...], "RECORD..."],
    *,
    kind: Literal[plots.Kind, "all"] = "loss",
) -> cli.Answer:
    """Draw records as PNG, into RECORD/plots.

    Options:
        kind: Loss against train time, loss against tokens, a histogram of step times, or all three.
    """
    kinds: list[plots.Kind] = [known for known in plots.KINDS if kind in (known, "all")]
    paths = [str(path) for record in records for path in plots.plot(record, kinds)]
    return cli.Answer({"plots": paths}, paths)


_RULES = {"t": "Student's t", "z": "z with the track's known noise"}


@cli.command("speedrun stats runs/first", "speedrun stats RECORD --against PARENT --json")
def stats(
    record: Path,
    *,
    against: Annotated[Path | None, "--against RECORD", "Test whether its loss is the same."] = None,
) -> cli.Answer:
    """Test the mean loss of the finished runs of RECORD against the target.

    A declared batch is tested at its declared looks. Tests of other runs prove nothing for the board. Exits with 0 if
    the target is proven, else with 1.
    """
    found = proof.stats(record, against)
    return cli.Answer(found, _lines(found, against), 0 if found.passed else 1)


def _lines(found: proof.Stats, against: Path | None) -> list[str]:
    declared = "declared" if found.declared else "not declared: no proof for the board"
    test = "one run has no p; declare several: speedrun batch --runs N"
    if found.p is not None:
        verdict = "proven" if found.passed else "not proven"
        test = f"p = {_number(found.p)}, need less than {found.alpha:g}: {verdict}"
    lines = [
        f"runs    {found.num_runs} finished on {found.track} ({declared})",
        f"loss    {_interval(found.loss, found.losses, 5)} nats | sd {_number(found.sd)}",
        f"time    {_interval(found.train_time_s, found.train_times_s, 2)} s of training",
        f"test    mean below {found.target:g} by {_RULES[found.rule]}: {test}",
    ]
    if found.runs_needed:
        lines.append(f"power   {found.runs_needed} runs with this mean and noise pass 9 times of 10")
    elif found.sd is None and found.rule == "t":
        lines.append("power   noise needs at least two runs")
    elif not found.passed:
        lines.append("power   the mean is too high for a proof: more runs cannot help")
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


class Variants(NamedTuple):
    """The variants of a recipe, and the number of runs.

    Options:
        features: Instead, turn off one feature at a time: 'all', or names in speedrun/lab/design.py.
        confirm: Fresh seeds for the best arm and its baseline. Default: as many as --runs.
    """

    features: Annotated[str | None, "--features NAME,..."] = None
    ladder: Annotated[bool, "Instead, compare the recipe and its ancestors, each with its parent."] = False
    runs: Annotated[cli.Count | None, "Runs of each arm, all with the same N seeds."] = None
    confirm: cli.Natural | None = None


@cli.command(
    "speedrun sweep --set optimizer.muon_lr=0.025,0.05,0.1 --set schedule.momentum_end=0.9,0.95 --runs 2",
    "speedrun sweep --features all --runs 4",
    "speedrun sweep --features value-embeddings,cooldown --runs 2 --set stages.0.num_steps=140",
    "speedrun sweep --track docs-cpu --ladder --runs 3 --set config.vocab_size=4096 --set config.head_size=4096",
    "speedrun sweep --resume runs/2026-11-21-smoke-cpu-sweep-1",
)
def sweep(
    ctx: click.Context,
    variants: Variants,
    config: requests.RunOptions,
    dry: requests.DryRun,
    *,
    resume: Annotated[Path | None, "--resume DIR", "Run what is missing."] = None,
    on: cli.On = None,
) -> cli.Answer:
    """Run a recipe and its variants with the same seeds, and report which are better.

    A variant has other settings, lacks a feature (--features), or is an ancestor (--ladder). --set takes the values to
    try, separated by commas; a single value applies to every arm.

    Loss and time are compared in pairs of equal seeds, p is adjusted for the number of arms, and the best arm runs
    again with fresh seeds. Nothing of this is ranked.
    """
    from speedrun.lab.several_runs import run_sweep  # NumPy comes with it

    if dry.is_asked():
        return dry.answer(ctx, _request(variants, config))
    trained = cli.on_nodes(ctx, on, say)
    folder = requests.begun(ctx, "speedrun.lab.design", lambda: _request(variants, config), "data", "on")
    found = run_sweep(folder, config.data, say, trained)
    return cli.Answer({"experiment": str(folder), "summary": found}, map(clean, table(found)))


def _request(asked: Variants, config: requests.RunOptions) -> Request:
    settings = {key: trials.values(text) for key, text in cli.parse_settings(config.settings).items()}
    fixed = {key: values[0] for key, values in settings.items() if len(values) == 1}
    free = {key: values for key, values in settings.items() if key not in fixed}
    if (asked.features is not None) + asked.ladder + bool(free) > 1:
        raise UsageError("--features, --ladder and several values in --set exclude each other; keep one")
    if asked.runs is None:
        raise UsageError("no number of runs; the noise takes at least two; pass --runs N")
    kind: Kind = "ladder" if asked.ladder else "features"
    variants: list[dict[str, str]] = []
    if asked.features is None and not asked.ladder:
        if not free:
            raise UsageError("nothing to sweep; pass --features, --ladder or --set optimizer.muon_lr=0.1,0.2")
        kind = "sweep"
        variants = trials.grid(free)
    return Request(
        config=config.request(config.out or cli.new_folder(f"{config.track}-sweep"), fixed),
        kind=kind,
        num_runs=asked.runs,
        num_confirming=asked.runs if asked.confirm is None else asked.confirm,
        features=tuple(name for name in (asked.features or "").split(",") if name not in ("", "all")),
        variants=tuple(variants),
    )


_MOST_SHOWN = 5  #: problems of a file


@cli.command(
    "speedrun import-log logs/*.txt --json",
    "speedrun import-log runs.csv --match track_1_short/2026",
)
def import_log(
    files: Annotated[tuple[Path, ...], "FILE..."],
    *,
    match: Annotated[tuple[str, ...], "Only runs with TEXT in their name."] = (),
) -> cli.Answer:
    """Read the logs of other people's runs, and show how much equal runs differ.

    A FILE is a text log of modded-nanogpt, of its port to JAX or of llm.c, or a CSV with the columns
    log,step,num_steps,val_loss,train_time_ms. Runs of one folder that end at the same step form a group; a copy of a
    run counts once. Imported runs have no seed and no hashes, and are never ranked. Nothing in a FILE is executed.
    """
    names = foreign_logs.names(files)
    contexts = tuple(foreign_logs.import_file(path, name) for path, name in zip(files, names, strict=True))
    runs = (run for one in contexts for run in one.runs)
    chosen = proof.distinct(run for run in runs if not match or any(text in run.name for text in match))
    if match and not chosen:
        raise UsageError(f"no run has {' or '.join(match)} in its name; choose with another --match")
    groups = tuple(proof.groups(chosen))
    spread = proof.noise(groups)
    facts = {"files": contexts, "num_chosen": len(chosen), "groups": groups, "noise": spread}
    lines = [line for one in contexts for line in _of_file(one)] + [*map(_of_group, groups)]
    if spread is not None:
        lines.append(
            f"noise   sd {spread.pooled_sd:.5f} (95 %: {spread.low:.5f} to {spread.high:.5f}), pooled over "
            f"{spread.num_groups} groups with {spread.num_runs:,} of {len(chosen):,} runs"
        )
    return cli.Answer(facts, lines)


def _of_file(one: foreign_logs.Context) -> list[str]:
    lines = [f"file    {one.source}: {len(one.runs):,} runs, {len(one.problems):,} problems"]
    return lines + [
        f"        line {problem.line}: {problem.message}" for problem in one.problems[:_MOST_SHOWN]
    ]


def _of_group(group: proof.Group) -> str:
    steps = f"{group.step}/{group.num_steps}" if group.num_steps else f"{group.step}"
    sd = "none" if group.sd is None else f"{group.sd:.4f}"
    step = "" if group.step_ms is None else f"  step {group.step_ms:.2f} ms"
    where = clean(group.folder) or "no folder"
    return f"group   {where}  {steps}  n {len(group.losses)}  mean {group.mean:.4f}  sd {sd}{step}"
