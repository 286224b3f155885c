"""Runs a declared batch. Each run is a child process, so that this process holds no device."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import msgspec

from speedrun.base import children
from speedrun.base import track as tracks
from speedrun.base.errors import NonFiniteError, UsageError
from speedrun.base.track import Track
from speedrun.base.wholefile import read_regular
from speedrun.board.record_plot import plot
from speedrun.data import generated
from speedrun.lab import race
from speedrun.record import layout, statistics
from speedrun.record.about import assemble
from speedrun.record.batch import Standing, standing
from speedrun.record.logged_run import FormatError
from speedrun.record.reader import decode, load
from speedrun.record.salvage import salvage
from speedrun.record.summary import Summary
from speedrun.train import child_run
from speedrun.train.request import RunConfig


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


class Outcome(NamedTuple):
    """A batch that is complete."""

    rules: Track
    standing: Standing
    summary: Summary
    plots: list[Path]


@dataclass
class Batch:
    """A declared batch in its folder.

    Raises:
        UsageError: if there is no declaration, or none that can be read.
    """

    folder: Path
    data: Path | None  #: folder of shards; None: the track's
    title: str | None  #: None: keep the one that the record has
    ghost: str | None  #: as in `--ghost`
    say: Callable[[str], None]  #: called with a line of progress after each run
    to_stderr: bool  #: where the runs print

    def __post_init__(self) -> None:
        path = self.folder / layout.BATCH
        try:
            raw = read_regular(path)
            self._declared = decode(raw, layout.Declaration)
        except OSError:
            raise UsageError(
                f"{self.folder} holds no {layout.BATCH}; declare a batch: speedrun batch --runs N"
            ) from None
        except FormatError as error:
            raise UsageError(f"{path}: {error}; restore it, or declare a new batch") from None
        self._sha256 = layout.sha256(raw)
        self._told: set[str] = set()  # runs that were killed
        self._rules = tracks.load(self._declared.track.id.rpartition("@")[0])
        self._ghost = race.find(self.ghost, self._rules.id)

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
                with race.live(sys.stderr if self.to_stderr else sys.stdout, self._ghost) as printer:
                    code, _ = child_run.trained(self._request(seed), printer, keep_open=(lock,))
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

    def _request(self, seed: int) -> RunConfig:
        declared = self._declared
        return RunConfig(
            track=self._rules.name,
            out=self.folder,
            recipe=declared.recipe.name,
            seed=seed,
            overrides=declared.recipe.overrides,
            data=self.data,
            num_devices=declared.num_devices,
            microbatches=declared.microbatches,
            attention=declared.attention,
            batch_sha256=self._sha256,
        )


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
