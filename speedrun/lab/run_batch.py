"""Declares a batch, and runs it. Each run is a child process, so that this process holds no device.

python -m speedrun.lab.run_batch PROMISE.json      declares: checks everything, then writes `batch.json`
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import msgspec

from speedrun.base import children, clock, signals
from speedrun.base import track as tracks
from speedrun.base.console import Printer
from speedrun.base.errors import NonFiniteError, UsageError
from speedrun.base.output import reported
from speedrun.base.track import Track
from speedrun.base.wholefile import lock_record, make_folder, read_regular
from speedrun.board import ghost as ghosts
from speedrun.board.plots import plot
from speedrun.data import generated
from speedrun.record import layout, statistics
from speedrun.record.about import assemble
from speedrun.record.batch import Standing, seeds_from, standing
from speedrun.record.batch import looks as looks_of
from speedrun.record.logged_run import FormatError
from speedrun.record.reader import decode, load
from speedrun.record.salvage import salvage
from speedrun.record.summary import Summary
from speedrun.train import child_run
from speedrun.train.request import RunConfig, decoded


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
                with Printer(sys.stderr if self.to_stderr else sys.stdout, self._ghost) as printer:
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


if __name__ == "__main__":
    with reported(), signals.handled_by(signals.stop):
        declare(decoded(Path(sys.argv[1]).read_bytes(), Promise))
