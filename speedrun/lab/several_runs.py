"""Runs what `lab.design` declared: a batch of equal runs, or the arms of an experiment.

Each run is a child process, so that this process holds no device.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from speedrun.base import children, provenance, runlog
from speedrun.base import track as tracks
from speedrun.base.console import Printer, duration
from speedrun.base.errors import NonFiniteError, UsageError
from speedrun.base.track import Track
from speedrun.base.wholefile import lock_record, write_whole
from speedrun.board import ghost as ghosts
from speedrun.board.plots import plot
from speedrun.data import generated
from speedrun.lab import effects, trials
from speedrun.lab.effects import count
from speedrun.lab.trials import Experiment, Runs, Trial
from speedrun.record import layout
from speedrun.record.about import Summary, assemble
from speedrun.record.batch import Declaration, Standing, standing
from speedrun.record.logged_run import Run
from speedrun.record.reader import encode, load
from speedrun.record.salvage import salvage
from speedrun.train import local_processes
from speedrun.train.request import RunConfig, source_roots

Say = Callable[[str], None]  #: takes lines of progress


#: Trains each request on a track; yields it with its exit code. Also gets the earlier runs of a batch or sweep.
Trainer = Callable[[Track, Iterable[RunConfig], Iterable[Run]], Iterator[tuple[RunConfig, int]]]


def _request(declared: Declaration | Experiment, **more: Any) -> RunConfig:
    """Return the request for a run as declared."""
    same = {name: getattr(declared, name) for name in ("num_devices", "microbatches", "attention")}
    purpose: runlog.Purpose = declared.purpose if isinstance(declared, Declaration) else "sweep"
    return RunConfig(track=declared.track.id.rpartition("@")[0], purpose=purpose, **same, **more)


def _here(say: Say, printer: Callable[[], Printer]) -> Trainer:
    """Return what trains one after the other in children, which end with this process."""

    def trained(
        rules: Track, configs: Iterable[RunConfig], _: Iterable[Run]
    ) -> Iterator[tuple[RunConfig, int]]:
        for config in configs:
            generated.ensure(rules, config.data, say)
            with printer() as shown:
                code = local_processes.trained(config, shown)[0]
            yield config, code

    return trained


class Outcome(NamedTuple):
    """A complete batch."""

    rules: Track
    standing: Standing
    summary: Summary
    plots: list[Path]


def run_batch(
    folder: Path,
    *,
    data: Path | None,
    title: str | None,
    ghost: str | None,
    say: Say,
    to_stderr: bool,
    trained: Trainer | None = None,
) -> Outcome:
    """Run the missing seeds of a declared batch, and write its record after each.

    Without `data`, the runs read the track's. Without `title`, the record keeps its own. Without `trained`, they run
    one after the other on this machine.
    """
    path = folder / layout.BATCH
    declared, sha256 = trials.declared(path, Declaration, "speedrun batch --runs N")
    recipe, rules = declared.recipe, tracks.load(declared.track.id.rpartition("@")[0])
    rival, told = ghosts.chosen(ghost, rules.id), set[str]()

    def assembled() -> Summary:
        return assemble(folder, title=title, default_title=f"{recipe.name} on {rules.id}")

    def standing_now() -> Standing:
        """Salvage killed runs, and write the record."""
        for run_id in {*salvage(folder)} - told:
            told.add(run_id)
            sys.stderr.write(
                f"warning: {run_id} was killed; its log is kept as that of a run that broke off\n"
            )
        if list(folder.glob("runs/*")):
            assembled()
        now = standing(declared, load(folder).runs, rules.target.loss, rules.target.sigma)
        say(progress(declared, now))
        return now

    with lock_record(folder, layout.RUNNING):
        now = standing_now()
        same = {"recipe": recipe.name, "overrides": recipe.overrides, "batch_sha256": sha256, "data": data}
        train = trained or _here(say, lambda: Printer(sys.stderr if to_stderr else sys.stdout, rival))
        while now.missing:
            configs = [_request(declared, out=folder, seed=seed, **same) for seed in now.missing]
            for config, code in train(rules, configs, load(folder).runs):
                now = standing_now()
                if config.seed in now.missing or code not in (0, NonFiniteError.exit_code):
                    raise children.run_error(code, "batch", folder, data)
                if not now.missing:  # decided by a loss that is not finite
                    break
        summary = assembled()
        return Outcome(rules, now, summary, plot(folder) if summary.num_finished else [])


def progress(declared: Declaration, now: Standing) -> str:
    """Return a line with the number of runs, their mean, and the test at the last look."""
    num_wanted = len(now.losses) + len(now.missing)
    counts = (look.num_runs for look in declared.looks)
    total = next((count for count in counts if count >= num_wanted), len(declared.seeds))
    parts = [f"batch   {len(now.losses)} of {total} runs"]
    if math.inf in now.losses:
        parts.append("one became non-finite, which fails the batch")
    elif len(now.losses) > 1:
        parts.append(f"mean {fmean(now.losses):.5f}, sd {stdev(now.losses):.5f}")
    if now.test is not None:
        verdict = "proven" if now.test.passed else "not proven"
        parts.append(f"p = {now.test.p:.2g}, need less than {now.test.alpha:g}: {verdict}")
    return " | ".join(parts)


def run_sweep(folder: Path, data: Path | None, say: Say, trained: Trainer | None) -> effects.Summary:
    """Run what is missing of an experiment: every arm with the first seeds, then the best arm with fresh seeds.

    Without `trained`, the runs follow each other on this machine.
    """
    plan, plan_sha256 = trials.read(folder)
    with lock_record(folder, layout.RUNNING):
        fresh = count(len(plan.confirming), "fresh seed")
        say(
            f"sweep   {plan.track.id} | {len(plan.arms)} arms x {count(len(plan.seeds), 'seed')}, then {fresh} for "
            f"the best | {plan.standing} | {folder}"
        )
        for reason in plan.left_out:
            say(f"left out  {reason}")
        rules = [tracks.TRACKS_DIR / f"{plan.track.id.rpartition('@')[0]}.toml"]
        for recipe, sha256 in sorted({(arm.recipe, arm.source_sha256) for arm in plan.arms}):
            if layout.sha256(provenance.closure(source_roots(recipe), rules).encode()) != sha256:
                raise UsageError(
                    f"the source of {recipe} changed since {folder} was designed, or is not in $SPEEDRUN_RECIPES; "
                    "restore it, or start a new sweep"
                )
        train = trained or _here(say, lambda: Printer(sys.stderr))
        run_missing = partial(_run_missing, folder, data, say, train)
        runs = run_missing([*trials.trials(plan.arms, plan.seeds)])
        found = effects.summary(plan, plan_sha256, runs)
        if best := effects.winner(found.findings) if plan.confirming else None:
            say(f"confirm {best.arm!r} against {best.against!r}: {fresh}")
            pair = [plan.arm(best.against), plan.arm(best.arm)]
            runs |= run_missing([*trials.trials(pair, plan.confirming)])
            found = effects.summary(plan, plan_sha256, runs)
        write_whole(folder / "summary.json", encode(found))
        return found


def _run_missing(folder: Path, data: Path | None, say: Say, train: Trainer, wanted: Sequence[Trial]) -> Runs:
    """Run the unfinished trials of an experiment; return all runs."""
    plan, sha256 = trials.read(folder)
    runs = trials.completed(folder, plan, wanted)
    under_way: dict[Path, Trial] = {}

    def requests() -> Iterator[RunConfig]:
        for number, (arm, seed) in enumerate(wanted, 1):
            if (arm.name, seed) in runs:
                continue
            left = len(wanted) - len(runs)
            walls_s = [run.end.cold_wall_s for run in runs.values() if run.finished]
            eta = duration(fmean(walls_s) * left) if walls_s else "unknown before the first run ends"
            say(f"run {number} of {len(wanted)}  {arm.name}  seed {seed}  {left} left, eta {eta}")
            out = trials.new_folder(folder, plan, arm, seed)
            under_way[out] = arm, seed
            same = {"recipe": arm.recipe, "overrides": arm.overrides, "data": data}
            yield _request(plan, out=out, seed=seed, **same)

    rules = tracks.load(plan.track.id.rpartition("@")[0])
    for config, code in train(rules, requests(), runs.values()):
        arm, seed = under_way.pop(config.out)
        runs |= trials.completed(folder, plan, [(arm, seed)])
        run = runs.get((arm.name, seed))
        if run is not None:
            change = f"One run of the experiment with sha256 {sha256[:16]}: {plan.standing}."
            assemble(config.out, title=f"{arm.recipe}, {arm.name}", changes=[change])
            if run.finished:
                plot(config.out)
        if run is None or code not in (0, NonFiniteError.exit_code):
            raise children.run_error(code, "sweep", folder, data)
    return runs
