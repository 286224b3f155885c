"""Batches: how many runs prove their target, and the runs of a declared one, each in a child process.

So this process holds no device. Imports no JAX.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, NamedTuple

from speedrun.base import subprocesses
from speedrun.base import track as tracks
from speedrun.base.atomic_files import lock_record
from speedrun.base.budget import Purse, purse_of
from speedrun.base.console import Printer
from speedrun.base.errors import NonFiniteError, Terminated, UsageError
from speedrun.base.track import Track
from speedrun.commands import added, pictures
from speedrun.record import layout, statistics
from speedrun.record.batch import BatchStatus, Preregistration, batch_status
from speedrun.record.logged_run import Run
from speedrun.record.reader import load, read_declared
from speedrun.record.salvage import salvage
from speedrun.record.summary import Summary, assemble
from speedrun.train import keeper
from speedrun.train.run_config import RunConfig

if TYPE_CHECKING:
    from speedrun.science.recipe import Recipe  # it imports JAX

Say = Callable[[str], None]  #: takes lines of progress


class BatchRequest(layout.Strict, frozen=True, tag=True):
    """A batch to declare."""

    config: RunConfig  #: its seed is ignored
    num_runs: int | None  #: None: as `num_runs` finds
    then: int | None = None  #: total number of runs at a second look
    expected_loss: float | None = None  #: mean; None: what the recipe states
    budget: str = ""


class Prospect(NamedTuple):
    """The final losses that runs to come are expected to have, on a track."""

    rules: Track
    loss: float  #: their mean
    sd: float  #: of single runs
    source: str

    def chance(self, num_runs: int, num_looks: int = 1) -> float:
        """Return the probability that a batch proves its target at a look after so many runs, one of `num_looks`."""
        margin, known = self.rules.target.loss - self.loss, self.rules.target.sigma
        return statistics.power(num_runs, margin, self.sd, known, num_looks)

    def runs_needed(self, num_looks: int = 1) -> int | None:
        """Return the smallest batch with a chance of 90 % at its first look; None above MOST_RUNS."""
        margin, known = self.rules.target.loss - self.loss, self.rules.target.sigma
        return statistics.batch_needed(margin, self.sd, known_sigma=known, num_looks=num_looks)

    def __str__(self) -> str:
        return f"{self.loss:.4f}, sd {self.sd:.4f} ({self.source})"


def prospect(recipe: "Recipe", rules: Track, loss: float | None = None) -> Prospect | None:
    """Return what to expect: a mean of `loss`, else what the recipe states for this track's validation tokens.

    A recipe with overrides states nothing. Without an sd of its own, single runs have the track's.
    """
    if loss is not None and rules.target.sigma is not None:
        return Prospect(rules, loss, rules.target.sigma, f"--expect; sd of {rules.id}")
    known = recipe.expected
    if loss is not None or known is None or known.recipe != recipe.name or recipe.overrides:
        return None
    sd = known.sd or rules.target.sigma
    scored = [(x.folder, x.val, x.val_tokens) for x in (rules.data, tracks.load(known.track).data)]
    if sd is None or scored[0] != scored[1]:
        return None
    runs = f"{known.num_runs:,} run{'s' * (known.num_runs > 1)}"
    return Prospect(rules, known.loss, sd, f"{runs}: {known.source}")


def num_runs(request: BatchRequest, rules: Track, found: Prospect | None) -> int:
    """Return the number of runs to declare: as asked, else that which proves the target 9 times of 10.

    Raises:
        UsageError: nobody knows what to expect; no number suffices.
    """
    if request.num_runs is not None:
        return request.num_runs
    if found is None:
        what = "noise of" if rules.target.sigma is None else "mean loss of this recipe on"
        expect = ", or --expect LOSS" if rules.target.sigma else ""
        raise UsageError(f"the {what} {rules.id} is not known; pass --runs N{expect}")
    needed = found.runs_needed(1 if request.then is None else 2)
    if needed is None:
        cannot = f"{statistics.MOST_RUNS:,} runs would not prove it below {rules.target.loss}"
        raise UsageError(f"expected is a mean of {found}: {cannot}; need a lower mean, or --runs N")
    return max(needed, rules.rules.min_runs, 2)


#: Trains each request on a track; yields it with its exit code. Also gets the earlier runs of a batch or sweep.
Trainer = Callable[[Track, Iterable[RunConfig], Iterable[Run]], Iterator[tuple[RunConfig, int]]]


def here(printer: Callable[[], Printer], purse: Purse | None = None) -> Trainer:
    """Return what trains one after the other in children, which end with this process, as long as the purse allows."""

    def trained(_: Track, configs: Iterable[RunConfig], __: Iterable[Run]) -> Iterator[tuple[RunConfig, int]]:
        for number, config in enumerate(configs):
            budget = purse and purse.left(Terminated.exit_code if number else UsageError.exit_code)
            with printer() as shown:
                code, error = keeper.trained(keeper.Job(config, budget=budget), shown)
            if error:
                subprocesses.say(f"error: {error}")
            yield config, code

    return trained


class Outcome(NamedTuple):
    """A complete batch."""

    rules: Track
    status: BatchStatus
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
    budget: str | None = None,
) -> Outcome:
    """Run the missing seeds of a declared batch, and write its record after each.

    Without `data`, the runs read the track's. Without `title`, the record keeps its own. Without `trained`, they run
    one after the other on this machine. Without `budget`, they have the one of before.
    """
    path = folder / layout.BATCH
    declared, sha256 = read_declared(path, Preregistration, "speedrun batch --runs N")
    recipe, rules = declared.recipe, tracks.load(declared.track.id.rpartition("@")[0])
    purse = purse_of(folder, budget, declared.budget, elsewhere=trained is not None)
    curve, told = added("ghost")(ghost, rules.id) if ghost else None, set[str]()

    def assembled() -> Summary:
        return assemble(folder, title=title, default_title=f"{recipe.name} on {rules.id}")

    def status_now() -> BatchStatus:
        """Salvage killed runs, and write the record."""
        for run_id in {*salvage(folder)} - told:
            told.add(run_id)
            subprocesses.say(f"warning: {run_id} was killed; its log is kept as that of a run that crashed")
        if list(folder.glob("runs/*")):
            assembled()
        now = batch_status(declared, load(folder).runs, rules.target.loss, rules.target.sigma)
        say(progress(declared, now))
        return now

    with lock_record(folder, layout.RUNNING):
        now = status_now()
        kept = ("num_devices", "microbatches", "attention", "purpose")
        same = {
            **{name: getattr(declared, name) for name in kept},
            **{"track": rules.name, "recipe": recipe.name, "overrides": recipe.overrides},
            **{"out": folder, "data": data, "batch_sha256": sha256},
        }
        train = trained or here(lambda: Printer(sys.stderr if to_stderr else sys.stdout, curve), purse)
        while now.missing:
            configs = [RunConfig(seed=seed, **same) for seed in now.missing]
            for config, code in train(rules, configs, load(folder).runs):
                now = status_now()
                if config.seed in now.missing or code not in (0, NonFiniteError.exit_code):
                    raise subprocesses.run_error(code, "batch", folder, data)
                if not now.missing:  # decided by a loss that is not finite
                    break
        summary = assembled()
        return Outcome(rules, now, summary, pictures(folder) if summary.num_finished else [])


def progress(declared: Preregistration, now: BatchStatus) -> str:
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
