"""Runs what `lab.declare_experiment` declared: the arms of an experiment."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from speedrun.base import provenance, subprocesses
from speedrun.base import track as tracks
from speedrun.base.atomic_files import lock_record, write_whole
from speedrun.base.budget import Purse, purse_of
from speedrun.base.console import Printer, clean, duration
from speedrun.base.errors import NonFiniteError, SpeedrunError, UsageError
from speedrun.commands import pictures
from speedrun.lab import effects, experiments, sequential
from speedrun.lab.effects import count
from speedrun.lab.experiments import Experiment, Runs, Trial
from speedrun.lab.sequential import Answer
from speedrun.record import layout
from speedrun.record.reader import encode
from speedrun.record.summary import assemble
from speedrun.train.batch import Say, Trainer, here
from speedrun.train.run_config import RunConfig, source_roots


def run_sweep(
    folder: Path, data: Path | None, say: Say, trained: Trainer | None, budget: str | None = None
) -> effects.Summary | Answer:
    """Run what is missing of an experiment: every arm with the first seeds, then the best arm with fresh seeds.

    A try ends at its verdict, or when its budget is spent. Without `trained`, the runs follow each other on this
    machine. Without `budget`, they have the one of before.
    """
    plan, plan_sha256 = experiments.read(folder)
    purse = purse_of(folder, budget, plan.budget, elsewhere=trained is not None)
    with lock_record(folder, layout.RUNNING):
        fresh = count(len(plan.confirming), "fresh seed")
        say(
            f"{plan.kind:<8}{plan.track.id} | {len(plan.arms)} arms x {count(len(plan.seeds), 'seed')}"
            f"{f', then {fresh} for the best' * bool(plan.confirming)} | {plan.status} | {folder}"
        )
        for reason in plan.left_out:
            say(f"left out  {reason}")
        rules = [tracks.files()[plan.track.id.rpartition("@")[0]]]
        for recipe, sha256 in sorted({(arm.recipe, arm.source_sha256) for arm in plan.arms}):
            if layout.sha256(provenance.closure(source_roots(recipe), rules).encode()) != sha256:
                raise UsageError(
                    f"the source of {recipe} changed since {folder} was designed, or is not in $SPEEDRUN_RECIPES; "
                    f"restore it, or start a new {plan.kind}"
                )
        train = trained or here(lambda: Printer(sys.stderr), purse)
        run_missing = partial(_run_missing, folder, data, say, train)
        if plan.kind == "try":
            write_whole(folder / "summary.json", encode(tried := _tried(plan, run_missing, purse, say)))
            return tried

        def so_far() -> effects.Summary:
            declared = [*experiments.trials(plan.arms, (*plan.seeds, *plan.confirming))]
            found = effects.summary(plan, plan_sha256, experiments.completed(folder, plan, declared))
            write_whole(folder / "summary.json", encode(found))
            return found

        try:
            run_missing([*experiments.trials(plan.arms, plan.seeds)])
            if best := effects.winner(so_far().findings) if plan.confirming else None:
                say(f"confirm {best.arm!r} against {best.against!r}: {fresh}")
                pair = [plan.arm(best.against), plan.arm(best.arm)]
                run_missing([*experiments.trials(pair, plan.confirming)])
        except SpeedrunError:
            for line in effects.table(found) if (found := so_far()).num_runs else ():
                say(clean(line))
            raise
        return so_far()


def _tried(plan: Experiment, run_missing: Callable[..., Runs], purse: Purse | None, say: Say) -> Answer:
    """Run pairs until their test decides."""
    rules = tracks.load(plan.track.id.rpartition("@")[0])
    say(f"try     {sequential.promise(rules, len(plan.seeds))}")
    order, differences = [*experiments.trials(plan.arms, plan.seeds)], list[float]()
    found = sequential.answer([], plan.levels)
    for place, seed in enumerate(plan.seeds):
        try:
            runs = run_missing(order[2 * place : 2 * place + 2])
        except SpeedrunError as error:
            if purse is None or sum(purse.costs()) < purse.budget.limit:
                raise
            say(f"budget  {error}")
            break
        parent, recipe = (runs[arm.name, seed] for arm in plan.arms)
        if not (parent.finished and recipe.finished):
            return Answer("non-finite", place + 1, len(plan.seeds))
        differences.append(recipe.val_loss - parent.val_loss)
        found = sequential.answer(differences, plan.levels)
        say(f"look    {found}")
        if found.verdict != "unresolved":
            break
    return found


def _run_missing(folder: Path, data: Path | None, say: Say, train: Trainer, wanted: Sequence[Trial]) -> Runs:
    """Run the unfinished trials of an experiment; return all runs."""
    plan, sha256 = experiments.read(folder)
    runs = experiments.completed(folder, plan, wanted)
    under_way: dict[Path, Trial] = {}
    rules = tracks.load(plan.track.id.rpartition("@")[0])
    same = {name: getattr(plan, name) for name in ("num_devices", "microbatches", "attention")}

    def requests() -> Iterator[RunConfig]:
        for number, (arm, seed) in enumerate(wanted, 1):
            if (arm.name, seed) in runs:
                continue
            left = len(wanted) - len(runs)
            walls_s = [run.end.cold_wall_s for run in runs.values() if run.finished]
            eta = duration(fmean(walls_s) * left) if walls_s else "unknown before the first run ends"
            say(f"run {number} of {len(wanted)}  {arm.name}  seed {seed}  {left} left, eta {eta}")
            out = experiments.new_folder(folder, plan, arm, seed)
            under_way[out] = arm, seed
            chosen = {"recipe": arm.recipe, "overrides": arm.overrides, "data": data}
            yield RunConfig(rules.name, out, seed=seed, purpose="sweep", **same, **chosen)

    for config, code in train(rules, requests(), runs.values()):
        arm, seed = under_way.pop(config.out)
        runs |= experiments.completed(folder, plan, [(arm, seed)])
        run = runs.get((arm.name, seed))
        if run is not None:
            change = f"One run of the experiment with sha256 {sha256[:16]}: {plan.status}."
            assemble(config.out, title=f"{arm.recipe}, {arm.name}", changes=[change])
            if run.finished:
                pictures(config.out)
        if run is None or code not in (0, NonFiniteError.exit_code):
            raise subprocesses.run_error(code, "try" if plan.levels else "sweep", folder, data)
    return runs
