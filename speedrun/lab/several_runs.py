"""Several runs that are declared before the first one: a batch of equal runs, or the arms of an experiment.

Each run is a child process, so that this process holds no device.

python -m speedrun.lab.several_runs PROMISE.json      declares: checks everything, then writes `batch.json`
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import msgspec

from speedrun.base import children, clock, provenance, signals
from speedrun.base import track as tracks
from speedrun.base.console import Printer, duration
from speedrun.base.errors import NonFiniteError, UsageError
from speedrun.base.output import reported
from speedrun.base.track import Track
from speedrun.base.wholefile import lock_record, make_folder, write_whole
from speedrun.board import ghost as ghosts
from speedrun.board.plots import plot
from speedrun.data import generated
from speedrun.lab import effects, trials
from speedrun.lab.effects import TITLES, count, forest
from speedrun.lab.trials import EXPERIMENT, Experiment, Runs, Trial
from speedrun.record import layout, statistics
from speedrun.record.about import Summary, assemble
from speedrun.record.batch import Standing, seeds_from, standing
from speedrun.record.batch import looks as looks_of
from speedrun.record.reader import load
from speedrun.record.salvage import salvage
from speedrun.train import local_processes
from speedrun.train.request import RunConfig, decoded


def _train(declared: layout.Declaration | Experiment, printer: Printer, lock: int, **more: Any) -> int:
    """Train once as declared, in a child that holds the lock, too; return its exit code."""
    same = {name: getattr(declared, name) for name in ("num_devices", "microbatches", "attention")}
    config = RunConfig(track=declared.track.id.rpartition("@")[0], **same, **more)
    with printer:
        return local_processes.trained(config, printer, keep_open=(lock,))[0]


# --- a batch ----------------------------------------------------------------------------------------------


def num_runs(rules: Track, expect: float | None, *, num_looks: int = 1) -> int:
    """Return the number of runs that prove a mean loss of `expect` with a probability of 90 % at the first look.

    Raises:
        UsageError: if it does not follow: no mean, no known noise, or a mean that no number of runs can prove.
    """
    sigma, target = rules.target.sigma, rules.target.loss
    if expect is None or sigma is None:
        missing = "number of runs missing" if expect is None else f"the noise of {rules.id} is not known"
        raise UsageError(f"{missing}; pass --runs N, or --expect LOSS on a track with a known noise")
    needed = statistics.batch_needed(target - expect, sigma, known_sigma=sigma, num_looks=num_looks)
    if needed is None:
        raise UsageError(
            f"got a mean of {expect} with sd {sigma}; {statistics.MOST_RUNS:,} runs would not show that it is below "
            f"{target}; need a lower mean"
        )
    return max(needed, rules.rules.min_runs, 2)


class Promise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A batch to declare."""

    config: RunConfig  #: of every run; its seed is ignored
    num_runs: int
    then: int | None = None  #: total number of runs at a second look
    seeds: tuple[int, ...] = ()  #: empty: derived from source and config
    expected_loss: float | None = None


def declare(promise: Promise) -> layout.Declaration:
    """Write `batch.json` and `source.txt` into a new folder.

    Raises:
        SpeedrunError: if `prepare` refuses the config; for seeds that are too few, repeated or out of range.
    """
    from speedrun.train.preflight import prepare  # JAX comes with it

    ready = prepare(promise.config)
    looks = looks_of(promise.num_runs, promise.then, ready.track.target.sigma)
    num_runs, config_sha256 = looks[-1].num_runs, layout.config_sha256(ready.described)
    seeds = promise.seeds or seeds_from(ready.source_sha256, config_sha256, num_runs)
    if len(set(seeds)) != num_runs or len(seeds) != num_runs:
        raise UsageError(f"got {len(set(seeds))} different seeds; need {num_runs}, one for each run")
    if not all(0 <= seed < 2**31 for seed in seeds):
        raise UsageError(f"got seeds {min(seeds)} to {max(seeds)}; need 0 to {2**31 - 1}")
    declaration = layout.Declaration(
        track=layout.TrackRef(ready.track.id, tracks.sha256(ready.track.name)),
        recipe=layout.Recipe(ready.recipe.name, ready.recipe.revision, promise.config.overrides),
        config_sha256=config_sha256,
        source_sha256=ready.source_sha256,
        num_devices=ready.program.num_devices,
        microbatches=ready.program.microbatches,
        attention=ready.program.attention,
        num_steps=ready.recipe.num_steps,
        seeds=seeds,
        seeds_chosen=bool(promise.seeds),
        looks=looks,
        expected_loss=promise.expected_loss,
        created_utc=clock.now().utc,
    )
    out = promise.config.out
    with lock_record(out):
        make_folder(out, {"source.txt": ready.source.encode(), layout.BATCH: layout.encode(declaration)})
    return declaration


class Outcome(NamedTuple):
    """A batch that is complete."""

    rules: Track
    standing: Standing
    summary: Summary
    plots: list[Path]


@dataclass
class Batch:
    """A declared batch in its folder; raise UsageError if there is no declaration, or none that can be read."""

    folder: Path
    data: Path | None  #: folder of shards; None: the track's
    title: str | None  #: None: keep the one that the record has
    ghost: str | None  #: as in `--ghost`
    say: Callable[[str], None]  #: called with a line of progress after each run
    to_stderr: bool  #: where the runs print

    def __post_init__(self) -> None:
        path = self.folder / layout.BATCH
        self._declared, self._sha256 = trials.declared(path, layout.Declaration, "speedrun batch --runs N")
        self._told: set[str] = set()  # runs that were killed
        self._rules = tracks.load(self._declared.track.id.rpartition("@")[0])
        self._ghost = ghosts.chosen(self.ghost, self._rules.id)

    def run(self) -> Outcome:
        """Run the missing seeds, and write the record after each.

        Raises:
            UsageError: if another process runs this batch.
            SpeedrunError: if a run breaks off.
        """
        with children.locked(self.folder / layout.BATCH) as lock:
            now = self._standing()
            if now.missing:
                generated.ensure(self._rules, self.data, self.say)
            while now.missing:
                seed = now.missing[0]
                printer = Printer(sys.stderr if self.to_stderr else sys.stdout, self._ghost)
                recipe = self._declared.recipe
                code = _train(
                    self._declared,
                    printer,
                    lock,
                    out=self.folder,
                    recipe=recipe.name,
                    overrides=recipe.overrides,
                    seed=seed,
                    data=self.data,
                    batch_sha256=self._sha256,
                )
                now = self._standing()
                if seed in now.missing or code not in (0, NonFiniteError.exit_code):
                    raise children.run_error(code, "batch", self.folder, self.data)
            summary = self._assemble()
            return Outcome(self._rules, now, summary, plot(self.folder) if summary.num_finished else [])

    def _standing(self) -> Standing:
        """Salvage killed runs, write the record, and report its standing."""
        for run_id in {*salvage(self.folder)} - self._told:
            self._told.add(run_id)
            sys.stderr.write(f"warning: {run_id} was killed; its log stays, as of a run that broke off\n")
        if list(self.folder.glob("runs/*")):
            self._assemble()
        target = self._rules.target
        now = standing(self._declared, load(self.folder).runs, target.loss, target.sigma)
        self.say(progress(self._declared, now))
        return now

    def _assemble(self) -> Summary:
        default = f"{self._declared.recipe.name} on {self._declared.track.id}"
        return assemble(self.folder, title=self.title, default_title=default)


def progress(declared: layout.Declaration, now: Standing) -> str:
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


# --- an experiment ----------------------------------------------------------------------------------------


@dataclass
class Sweep:
    """An experiment in its folder; raise UsageError if there is no plan, or none that can be read."""

    folder: Path
    data: Path | None  #: folder of shards; None: the track's
    say: Callable[[str], None]  #: called with lines of progress

    def __post_init__(self) -> None:
        self._plan = trials.read(self.folder)
        self._sha256 = layout.sha256((self.folder / EXPERIMENT).read_bytes())
        self._rules = tracks.load(self._plan.track.id.rpartition("@")[0])

    def run(self) -> tuple[effects.Summary, list[Path]]:
        """Run what is missing: every arm with the first seeds, then the best arm with fresh seeds.

        Returns:
            The summary, and the plots.

        Raises:
            UsageError: if another process runs this experiment, or the source changed since it was designed.
            SpeedrunError: if a run breaks off.
        """
        plan = self._plan
        with children.locked(self.folder / EXPERIMENT) as lock:
            fresh = count(len(plan.confirming), "fresh seed")
            self.say(
                f"sweep   {plan.track.id} | {len(plan.arms)} arms x {count(len(plan.seeds), 'seed')}, then {fresh} for "
                f"the best | {plan.standing} | {self.folder}"
            )
            for reason in plan.left_out:
                self.say(f"left out  {reason}")
            self._check_source()
            runs = self._run_missing([*trials.trials(plan.arms, plan.seeds)], lock)
            found = effects.summary(plan, self._sha256, runs)
            if best := effects.winner(found.findings) if plan.confirming else None:
                self.say(f"confirm {best.arm!r} against {best.against!r}: {fresh}")
                pair = [plan.arm(best.against), plan.arm(best.arm)]
                runs |= self._run_missing([*trials.trials(pair, plan.confirming)], lock)
                found = effects.summary(plan, self._sha256, runs)
            write_whole(self.folder / "summary.json", layout.encode(found))
            title = f"{plan.arms[-1].recipe} on {plan.track.id}: {TITLES[plan.kind]}"
            return found, forest(found, self.folder, title)

    def _check_source(self) -> None:
        rules = [tracks.TRACKS_DIR / f"{self._rules.name}.toml"]
        for recipe, sha256 in sorted({(arm.recipe, arm.source_sha256) for arm in self._plan.arms}):
            roots = [f"speedrun.recipes.{recipe}", "speedrun.train.run"]
            if layout.sha256(provenance.closure(roots, rules).encode()) != sha256:
                raise UsageError(
                    f"the source of {recipe} changed since {self.folder} was designed, or is not in $SPEEDRUN_RECIPES; "
                    "restore it, or start a new sweep"
                )

    def _run_missing(self, wanted: Sequence[Trial], lock: int) -> Runs:
        """Run unfinished trials; return all finished ones."""
        runs = trials.completed(self.folder, self._plan, wanted)
        for number, (arm, seed) in enumerate(wanted, 1):
            if (arm.name, seed) in runs:
                continue
            left = len(wanted) - len(runs)
            walls_s = [run.end.cold_wall_s for run in runs.values() if run.finished]
            eta = duration(fmean(walls_s) * left) if walls_s else "unknown before the first run ends"
            self.say(f"run {number} of {len(wanted)}  {arm.name}  seed {seed}  {left} left, eta {eta}")
            out = trials.new_folder(self.folder, self._plan, arm, seed)
            generated.ensure(self._rules, self.data, self.say)
            code = _train(
                self._plan,
                Printer(sys.stderr),
                lock,
                out=out,
                recipe=arm.recipe,
                overrides=arm.overrides,
                seed=seed,
                data=self.data,
            )
            runs |= trials.completed(self.folder, self._plan, [(arm, seed)])
            run = runs.get((arm.name, seed))
            if run is not None:
                change = f"One run of the experiment with sha256 {self._sha256[:16]}: {self._plan.standing}."
                assemble(out, title=f"{arm.recipe}, {arm.name}", changes=[change])
                if run.finished:
                    plot(out)
            if run is None or code not in (0, NonFiniteError.exit_code):
                raise children.run_error(code, "sweep", self.folder, self.data)
        return runs


if __name__ == "__main__":
    with reported(), signals.handled_by(signals.stop):
        declare(decoded(Path(sys.argv[1]).read_bytes(), Promise))
