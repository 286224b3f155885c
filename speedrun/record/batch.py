"""A declared batch: its file, its seeds and looks, its progress, and its test."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from speedrun.base.errors import UsageError
from speedrun.base.field_types import Natural
from speedrun.base.runlog import Purpose
from speedrun.record import statistics
from speedrun.record.layout import Recipe, Strict
from speedrun.record.logged_run import Run
from speedrun.record.statistics import MeanTest


class TrackRef(Strict, frozen=True):
    """The track of a record."""

    id: str
    sha256: str


class Look(Strict, frozen=True):
    """A test of the batch after a number of runs."""

    num_runs: int
    alpha: float


class Preregistration(Strict, frozen=True, omit_defaults=True, tag_field="schema", tag="speedrun.batch/1"):
    """`batch.json`: written before the first run. Every run logs its digest."""

    track: TrackRef
    recipe: Recipe
    config_sha256: str
    source_sha256: str
    num_devices: int
    microbatches: int
    attention: str
    num_steps: int
    seeds: tuple[Natural, ...]  #: in the order of the runs
    seeds_chosen: bool  #: by a person; else they follow from source and config
    looks: tuple[Look, ...]  #: in order; the last is after all seeds
    expected_loss: float | None  #: mean from which the number of runs was computed
    created_utc: str
    purpose: Purpose = ""
    budget: str = ""  #: of all runs together, as `base.budget` reads it


def seeds_from(source_sha256: str, config_sha256: str, num_runs: int) -> tuple[int, ...]:
    """Return seeds that nobody can choose: the first 31 bits of sha256("source config i") for i = 0, 1, 2, ..."""
    texts = (f"{source_sha256} {config_sha256} {i}" for i in range(num_runs))
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return tuple(int.from_bytes(digest[:4], "big") >> 1 for digest in digests)


def looks(num_runs: int, then: int | None, known_sigma: float | None) -> tuple[Look, ...]:
    """Return one look after `num_runs`; or two at half the level each, the second after `then` runs in total."""
    if then is not None and then <= num_runs:
        found = f"got {num_runs} runs, then {then}"
        raise UsageError(f"{found}; the second counts all runs, so it must be larger")
    counts = [num_runs] if then is None else [num_runs, then]
    return tuple(Look(n, statistics.ALPHA[statistics.rule_for(n, known_sigma)] / len(counts)) for n in counts)


class BatchStatus(NamedTuple):
    """Progress of a batch."""

    losses: tuple[float, ...]  #: in the order of the seeds; infinite for a non-finite run
    missing: tuple[int, ...]  #: seeds to run before the next look; empty if the batch is decided
    test: MeanTest | None  #: at the last look reached

    @property
    def passed(self) -> bool:
        """Whether the batch proves its target."""
        return self.test is not None and self.test.passed


def batch_status(
    declared: Preregistration, runs: Sequence[Run], target: float, known_sigma: float | None
) -> BatchStatus:
    """Return the progress of a batch. The seed of a run that crashed is run again."""
    done = completed(runs)
    losses: list[float] = []
    test = None
    for look in declared.looks:
        seeds = declared.seeds[: look.num_runs]
        losses = [done[seed] for seed in seeds if seed in done]
        if math.inf in losses or 0 < len(losses) == look.num_runs:
            test = statistics.mean_below(losses, target, known_sigma=known_sigma, alpha=look.alpha)
        if math.inf in losses or (test is not None and test.passed):
            return BatchStatus(tuple(losses), (), test)
        if len(losses) < look.num_runs:
            return BatchStatus(tuple(losses), tuple(seed for seed in seeds if seed not in done), test)
    return BatchStatus(tuple(losses), (), test)


def completed(runs: Sequence[Run]) -> Mapping[int, float]:
    """Return the final loss by seed of finished and non-finite runs; infinite for the latter."""
    ended = [run for run in runs if run.outcome in ("finished", "non-finite")]
    return {run.start.seed: run.val_loss if run.finished else math.inf for run in reversed(ended)}


def allowed_crashes(num_runs: int) -> int:
    """Return how many runs may crash, since machines fail: one in ten, at least one."""
    return max(1, num_runs // 10)
