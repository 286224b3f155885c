"""A declared experiment on disk: several arms with the same seeds, and the complete runs.

    experiment.json  summary.json  <number>-<arm>/<seed>-<attempt>/

`experiment.json` is written before the first run. The seeds are derived from the arms and the number of runs, so they
do not fit a plan that is edited or extended later.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from speedrun.base.errors import UsageError
from speedrun.lab.sequential import levels
from speedrun.record.batch import TrackRef, seeds_from
from speedrun.record.layout import Strict, sha256
from speedrun.record.logged_run import Run
from speedrun.record.reader import load, read_declared
from speedrun.train.run_config import RunConfig

EXPERIMENT = "experiment.json"

#: Name of the unchanged recipe's arm; a ladder has none.
BASELINE = "as it is"

Kind = Literal["features", "ladder", "sweep", "try"]
Status = Literal["research, not ranked"]


class Request(Strict, frozen=True, tag=True):
    """An experiment to design."""

    config: RunConfig  #: its overrides apply to every arm; its seed is ignored
    kind: Kind
    num_runs: int  #: of each arm
    num_confirming: int  #: of the best arm and its reference
    features: tuple[str, ...] = ()  #: to switch off; empty: all that the recipe has
    variants: tuple[dict[str, str], ...] = ()  #: settings of each arm of a sweep
    budget: str = ""
    against: str = ""  #: the parent, in a try


class Arm(Strict, frozen=True):
    """One variant of a recipe."""

    name: str
    recipe: str
    overrides: dict[str, str]
    against: str | None  #: name of its reference arm
    config_sha256: str
    source_sha256: str


class Experiment(Strict, frozen=True, omit_defaults=True, tag_field="schema", tag="speedrun.experiment/1"):
    """`experiment.json`."""

    status: Status
    kind: Kind
    track: TrackRef
    num_devices: int
    microbatches: int
    attention: str
    arms: tuple[Arm, ...]
    left_out: tuple[str, ...]  #: variants without an arm, with the reason
    seeds: tuple[int, ...]  #: of every arm
    confirming: tuple[int, ...]  #: fresh seeds of the best arm and its reference
    created_utc: str
    budget: str = ""  #: of all runs together, as `base.budget` reads it
    levels: tuple[float, ...] = ()  #: of the test after each pair of a try: `sequential`

    def arm(self, name: str) -> Arm:
        """Return the arm of this name."""
        return next(arm for arm in self.arms if arm.name == name)


Trial = tuple[Arm, int]  #: an arm and a seed
Runs = dict[tuple[str, int], Run]  #: by name of the arm and seed


def seeds_for(arms: Sequence[Arm], num_runs: int, num_confirming: int) -> tuple[tuple[int, ...], ...]:
    """Derive the first seeds and the fresh ones from the plan; all are distinct."""
    numbers = f"{num_runs} {num_confirming}"
    total = num_runs + num_confirming
    drawn = seeds_from(sha256(msgspec.json.encode(arms)), sha256(numbers.encode()), total + 8)
    distinct = tuple(dict.fromkeys(drawn))  # two draws from 2^31 may be equal, hence eight spare ones
    return distinct[:num_runs], distinct[num_runs:total]


def trials(arms: Sequence[Arm], seeds: Sequence[int]) -> Iterator[Trial]:
    """Yield all arms for each seed, in alternating order, so that slow drift of the machine cancels out."""
    for block, seed in enumerate(seeds):
        yield from ((arm, seed) for arm in (arms[::-1] if block % 2 else arms))


def read(folder: Path) -> tuple[Experiment, str]:
    """Read `experiment.json` with its digest, and check that it was not edited."""
    found, digest = read_declared(folder / EXPERIMENT, Experiment, "speedrun sweep' or 'speedrun try")
    if (found.seeds, found.confirming) != seeds_for(found.arms, len(found.seeds), len(found.confirming)):
        got = f"{folder / EXPERIMENT}: its seeds do not follow from its arms"
        raise UsageError(f"{got}; restore it, or start anew")
    if found.levels != (levels(len(found.seeds)) if found.kind == "try" else ()):
        raise UsageError(
            f"{folder / EXPERIMENT}: its test does not follow from its seeds; restore it, or start anew"
        )
    return found, digest


def arm_folder(folder: Path, experiment: Experiment, arm: Arm) -> Path:
    """Return the folder of an arm, named with characters that every file system allows."""
    number = experiment.arms.index(arm)
    return folder / f"{number:02}-{re.sub(r'[^A-Za-z0-9._=-]+', '-', arm.name)[:60]}"


def new_folder(folder: Path, experiment: Experiment, arm: Arm, seed: int) -> Path:
    """Return the folder for the next attempt at a trial."""
    place = arm_folder(folder, experiment, arm)
    return place / f"{seed}-{len([*place.glob(f'{seed}-*')]) + 1}"


def completed(folder: Path, experiment: Experiment, wanted: Sequence[Trial]) -> Runs:
    """Return the first run of each trial that finished or became non-finite; refuse runs of other trials."""
    found: Runs = {}
    for arm, seed in wanted:
        for attempt in sorted(arm_folder(folder, experiment, arm).glob(f"{seed}-*")):
            for run in load(attempt).runs:  # without killed ones, whose logs are incomplete
                if run.outcome not in ("finished", "non-finite"):
                    continue
                start = run.start.seed, run.start.config_sha256, run.start.source_sha256
                if start != (seed, arm.config_sha256, arm.source_sha256):
                    got = f"{attempt} holds another run than the declared arm {arm.name!r} with seed {seed}"
                    raise UsageError(f"{got}; move it away")
                found.setdefault((arm.name, seed), run)
    return found


#: A limit on time and on the correction of p for the number of arms.
MOST_ARMS = 200


def values(text: str) -> tuple[str, ...]:
    """Split values at their commas; commas inside brackets belong to a value."""
    found = tuple(value.strip() for value in re.split(r",(?![^()]*\))", text))
    if "" in found:
        raise UsageError(f"{text!r} has an empty value; need values with commas between them")
    return found


def grid(space: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Return every combination."""
    if (number := math.prod(map(len, space.values()))) > MOST_ARMS:
        raise UsageError(f"got {number:,} combinations; need at most {MOST_ARMS}")
    return [dict(zip(space, combination, strict=True)) for combination in itertools.product(*space.values())]
