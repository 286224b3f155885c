"""What runs prove: those of a record, those to come, and equal runs in other people's logs."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from speedrun.base import track as tracks
from speedrun.base.errors import UsageError
from speedrun.base.track import Track
from speedrun.board.foreign_logs import ContextRun
from speedrun.lab.trials import Promise
from speedrun.record import statistics
from speedrun.record.batch import standing
from speedrun.record.reader import load_result
from speedrun.record.statistics import Interval

if TYPE_CHECKING:
    from speedrun.science.recipe import Recipe  # it imports JAX


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
    if loss is not None or known is None or known.recipe != recipe.name:
        return None
    sd = known.sd or rules.target.sigma
    scored = [
        (data.folder, data.val, data.val_tokens) for data in (rules.data, tracks.load(known.track).data)
    ]
    if sd is None or scored[0] != scored[1]:
        return None
    runs = f"{known.num_runs:,} run{'s' * (known.num_runs > 1)}"
    return Prospect(rules, known.loss, sd, f"{runs}: {known.source}")


def num_runs(promise: Promise, rules: Track, found: Prospect | None) -> int:
    """Return the number of runs to declare: as promised, else that which proves the target 9 times of 10.

    Raises:
        UsageError: nobody knows what to expect; no number suffices.
    """
    if promise.num_runs is not None:
        return promise.num_runs
    if found is None:
        what = "noise of" if rules.target.sigma is None else "mean loss of this recipe on"
        expect = ", or --expect LOSS" if rules.target.sigma else ""
        raise UsageError(f"the {what} {rules.id} is not known; pass --runs N{expect}")
    needed = found.runs_needed(1 if promise.then is None else 2)
    if needed is None:
        cannot = f"{statistics.MOST_RUNS:,} runs would not prove it below {rules.target.loss}"
        raise UsageError(f"expected is a mean of {found}: {cannot}; need a lower mean, or --runs N")
    return max(needed, rules.rules.min_runs, 2)


class Stats(msgspec.Struct, frozen=True):
    """Losses and times of the finished runs of a record, and the test of their mean loss."""

    track: str
    target: float
    num_runs: int
    losses: tuple[float, ...]
    loss: Interval | None  #: 95 %; this and other statistics are None for one run
    sd: float | None
    train_times_s: tuple[float, ...]
    train_time_s: Interval | None
    declared: bool  #: whether the test is that of a declared batch
    rule: str
    p: float | None
    alpha: float
    passed: bool
    runs_needed: int | None  #: for 90 % power at this mean and noise; None: no number suffices
    equivalent: statistics.Equivalence | None  #: to the parent


def stats(folder: Path, parent: Path | None) -> Stats:
    """Test the mean loss of a record against its track's target, and against another record's."""
    record = load_result(folder)
    rules, runs = record.rules, record.finished
    target, sigma = rules.target.loss, rules.target.sigma
    losses = [run.val_loss for run in runs]
    declared = record.declaration
    blown_up = [math.inf for run in record.runs if run.outcome == "non-finite"]
    if declared is None:
        test = statistics.mean_below([*losses, *blown_up], target, known_sigma=sigma)
    elif (test := standing(declared, record.runs, target, sigma).test) is None:
        need = declared.looks[0].num_runs
        raise UsageError(
            f"{folder}: {len(runs)} of the {need} runs before its first look; 'speedrun batch --resume {folder}'"
        )
    others = [] if parent is None else [run.val_loss for run in load_result(parent).finished]
    if parent is not None and min(len(others), len(losses)) < 2:
        raise UsageError(f"--against compares {len(losses)} runs with {len(others)}; need two on each side")
    is_tested = len(losses) + len(blown_up) > 1
    sd = statistics.sd(losses)
    noise = max(sigma or 0.0, sd or 0.0) if test.rule == "z" else sd
    needed = statistics.batch_needed(target - record.mean_loss, noise, known_sigma=sigma) if noise else None
    times_s = [run.train_time_s for run in runs]
    return Stats(
        track=rules.id,
        target=target,
        num_runs=len(runs),
        losses=tuple(losses),
        loss=statistics.mean_interval(losses),
        sd=sd,
        train_times_s=tuple(times_s),
        train_time_s=statistics.mean_interval(times_s),
        declared=declared is not None,
        rule=test.rule,
        p=test.p if is_tested else None,
        alpha=test.alpha,
        passed=is_tested and test.passed,
        runs_needed=needed,
        equivalent=None if parent is None else statistics.equivalent(others, losses),
    )


class Group(msgspec.Struct, frozen=True):
    """A group of equal runs."""

    folder: str
    step: int  #: of the last validation
    num_steps: int | None
    losses: tuple[float, ...]  #: at that step
    mean: float
    sd: float | None  #: None for one run
    step_ms: float | None  #: mean over steps up to the last validation; None without times


class Noise(msgspec.Struct, frozen=True):
    """The sd of equal runs, over all groups of two or more."""

    num_runs: int
    num_groups: int
    freedom: int  #: degrees of freedom
    pooled_sd: float
    low: float  #: of the 95 % interval of the pooled sd, for normal losses
    high: float


def distinct(runs: Iterable[ContextRun]) -> list[ContextRun]:
    """Return the runs with a final loss, without copies of a log."""
    found, seen = [], set()
    for run in runs:
        # A single loss without a time may be equal by chance.
        is_telling = len(run.validations) > 1 or run.train_time_s is not None
        if run.final_loss is None or (is_telling and run.validations in seen):
            continue
        seen.add(run.validations)
        found.append(run)
    return found


def groups(runs: Iterable[ContextRun]) -> list[Group]:
    """Group the equal runs among those that `distinct` returns."""
    equal: dict[tuple[str, int, int | None], list[ContextRun]] = defaultdict(list)
    for run in runs:
        equal[run.name.rpartition("/")[0], run.validations[-1].step, run.num_steps].append(run)
    found = []
    for (folder, step, num_steps), same in equal.items():
        losses = tuple(run.final_loss for run in same if run.final_loss is not None)
        times_s = [run.train_time_s for run in same if run.train_time_s is not None]
        step_ms = fmean(times_s) / step * 1e3 if step and len(times_s) == len(same) else None
        found.append(Group(folder, step, num_steps, losses, fmean(losses), statistics.sd(losses), step_ms))
    return found


def noise(found: Sequence[Group]) -> Noise | None:
    """Return the pooled sd of runs around the means of their groups, with the interval freedom * sd^2 / chi^2."""
    from scipy import special

    several = [group for group in found if group.sd is not None]
    if not several:
        return None
    freedom = sum(len(group.losses) - 1 for group in several)
    squares = sum(variance(group.losses) * (len(group.losses) - 1) for group in several)
    pooled = math.sqrt(squares / freedom)
    low, high = (pooled * math.sqrt(freedom / special.chdtri(freedom, tail)) for tail in (0.025, 0.975))
    return Noise(
        num_runs=sum(len(group.losses) for group in several),
        num_groups=len(several),
        freedom=freedom,
        pooled_sd=pooled,
        low=float(low),
        high=float(high),
    )
