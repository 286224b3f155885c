"""Runs a declared experiment. Each run is a child process, so that this process holds no device."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from speedrun.base import children, provenance
from speedrun.base import track as tracks
from speedrun.base.console import Printer, duration
from speedrun.base.errors import NonFiniteError, UsageError
from speedrun.base.wholefile import write_whole
from speedrun.board.plots import plot
from speedrun.data import generated
from speedrun.lab import trials
from speedrun.lab.effects import Summary, summary, winner
from speedrun.lab.report import TITLES, count, forest
from speedrun.lab.trials import EXPERIMENT, Runs, Trial
from speedrun.record import layout
from speedrun.record.about import assemble
from speedrun.train import child_run
from speedrun.train.request import RunConfig


class Outcome(NamedTuple):
    """An experiment that is complete."""

    summary: Summary
    plots: list[Path]


@dataclass
class Runner:
    """An experiment in its folder.

    Raises:
        UsageError: if there is no plan, or none that can be read.
    """

    folder: Path
    data: Path | None  #: folder of shards; None: the track's
    say: Callable[[str], None]  #: called with lines of progress

    def __post_init__(self) -> None:
        self._plan = trials.read(self.folder)
        self._sha256 = layout.sha256((self.folder / EXPERIMENT).read_bytes())
        self._track = self._plan.track.id.rpartition("@")[0]

    def run(self) -> Outcome:
        """Run what is missing: every arm with the first seeds, then the best arm with fresh seeds.

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
            found = summary(plan, self._sha256, runs)
            if best := winner(found.findings) if plan.confirming else None:
                self.say(f"confirm {best.arm!r} against {best.against!r}: {fresh}")
                pair = [plan.arm(best.against), plan.arm(best.arm)]
                runs |= self._run_missing([*trials.trials(pair, plan.confirming)], lock)
                found = summary(plan, self._sha256, runs)
            write_whole(self.folder / "summary.json", trials.encode(found))
            title = f"{plan.arms[-1].recipe} on {plan.track.id}: {TITLES[plan.kind]}"
            return Outcome(found, forest(found, self.folder, title))

    def _check_source(self) -> None:
        rules = [tracks.TRACKS_DIR / f"{self._track}.toml"]
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
        for number, trial in enumerate(wanted, 1):
            if (trial.arm.name, trial.seed) in runs:
                continue
            left = len(wanted) - len(runs)
            self.say(
                f"run {number} of {len(wanted)}  {trial.arm.name}  seed {trial.seed}  {left} left, {_eta(runs, left)}"
            )
            out = trials.new_folder(self.folder, self._plan, trial)
            generated.ensure(tracks.load(self._track), self.data, self.say)
            with Printer(sys.stderr) as printer:
                code, _ = child_run.trained(self._request(trial, out), printer, keep_open=(lock,))
            runs |= trials.completed(self.folder, self._plan, [trial])
            run = runs.get((trial.arm.name, trial.seed))
            if run is not None:
                self._assemble(trial, out, drawn=run.finished)
            if run is None or code not in (0, NonFiniteError.exit_code):
                raise children.run_error(code, "sweep", self.folder, self.data)
        return runs

    def _request(self, trial: Trial, out: Path) -> RunConfig:
        return RunConfig(
            track=self._track,
            out=out,
            recipe=trial.arm.recipe,
            seed=trial.seed,
            overrides=trial.arm.overrides,
            data=self.data,
            num_devices=self._plan.num_devices,
            microbatches=self._plan.microbatches,
            attention=self._plan.attention,
        )

    def _assemble(self, trial: Trial, out: Path, *, drawn: bool) -> None:
        """Write the record of one run."""
        change = f"One run of the experiment with sha256 {self._sha256[:16]}: {self._plan.standing}."
        assemble(out, title=f"{trial.arm.recipe}, {trial.arm.name}", changes=[change])
        if drawn:
            plot(out)


def _eta(runs: Runs, left: int) -> str:
    walls_s = [run.end.cold_wall_s for run in runs.values() if run.finished]
    return f"eta {duration(fmean(walls_s) * left)}" if walls_s else "eta unknown before the first run ends"
