"""A declared experiment on disk: several arms with the same seeds, and the runs that are complete.

    experiment.json  summary.json  plots/  <number>-<arm>/<seed>-<attempt>/

`experiment.json` is written before the first run. Each run is a record of its own, which cannot be ranked: a rank needs
a batch. The seeds are derived from the arms and the number of runs, so they no longer fit a plan that is edited or
extended after its results are known.
"""

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec

from speedrun.base.errors import UsageError
from speedrun.base.wholefile import read_regular
from speedrun.record.batch import seeds_from
from speedrun.record.layout import Strict, TrackRef, sha256
from speedrun.record.logged_run import FormatError, Run
from speedrun.record.reader import decode, load
from speedrun.train.request import RunConfig

_File = TypeVar("_File", bound=Strict)

EXPERIMENT = "experiment.json"

#: Name of the arm that is the recipe as it is; a ladder has none.
BASELINE = "as it is"

Kind = Literal["features", "ladder", "sweep"]
Standing = Literal["research, not ranked"]


class Promise(Strict, frozen=True, tag=True):
    """A batch to declare."""

    config: RunConfig  #: of every run; its seed is ignored
    num_runs: int
    then: int | None = None  #: total number of runs at a second look
    seeds: tuple[int, ...] = ()  #: empty: derived from source and config
    expected_loss: float | None = None


class Request(Strict, frozen=True, tag=True):
    """An experiment to design."""

    config: RunConfig  #: of every run; its overrides hold for every arm, its seed is ignored
    kind: Kind
    num_runs: int  #: of each arm
    num_confirming: int  #: of the best arm and the one it is compared with
    features: tuple[str, ...] = ()  #: to switch off; empty: all that the recipe has
    variants: tuple[dict[str, str], ...] = ()  #: settings of each arm of a sweep


class Arm(Strict, frozen=True):
    """One variant of a recipe."""

    name: str
    recipe: str
    overrides: dict[str, str]
    against: str | None  #: name of the arm it is compared with
    config_sha256: str
    source_sha256: str


class Experiment(Strict, frozen=True, tag_field="schema", tag="speedrun.experiment/1"):
    """`experiment.json`."""

    standing: Standing
    kind: Kind
    track: TrackRef
    num_devices: int
    microbatches: int
    attention: str
    arms: tuple[Arm, ...]
    left_out: tuple[str, ...]  #: variants that are no arm, with the reason
    seeds: tuple[int, ...]  #: of every arm
    confirming: tuple[int, ...]  #: fresh seeds of the best arm and the one it is compared with
    created_utc: str

    def arm(self, name: str) -> Arm:
        """Return the arm of this name."""
        return next(arm for arm in self.arms if arm.name == name)


Trial = tuple[Arm, int]  #: an arm and a seed
Runs = dict[tuple[str, int], Run]  #: by name of the arm and seed


def seeds_for(arms: Sequence[Arm], num_runs: int, num_confirming: int) -> tuple[tuple[int, ...], ...]:
    """Derive the first seeds and the fresh ones from the plan; all are different."""
    numbers = f"{num_runs} {num_confirming}"
    total = num_runs + num_confirming
    drawn = seeds_from(sha256(msgspec.json.encode(arms)), sha256(numbers.encode()), total + 8)
    distinct = tuple(dict.fromkeys(drawn))  # two draws from 2^31 may be equal, hence eight spare ones
    return distinct[:num_runs], distinct[num_runs:total]


def trials(arms: Sequence[Arm], seeds: Sequence[int]) -> Iterator[Trial]:
    """Yield all arms for each seed, in reverse for every second seed, so that slow drift of the machine cancels."""
    for block, seed in enumerate(seeds):
        yield from ((arm, seed) for arm in (arms[::-1] if block % 2 else arms))


def read(folder: Path) -> tuple[Experiment, str]:
    """Read `experiment.json` with its digest; raise UsageError if it is missing, cannot be read, or was edited."""
    found, digest = declared(folder / EXPERIMENT, Experiment, "speedrun sweep")
    if problem := _problem(found):
        raise UsageError(f"{folder / EXPERIMENT}: {problem}; restore it, or start a new sweep")
    return found, digest


def declared(path: Path, kind: type[_File], command: str) -> tuple[_File, str]:
    """Read a file that a command declared; return it and its digest. Raise UsageError if it is missing or damaged."""
    try:
        raw = read_regular(path)
        return decode(raw, kind), sha256(raw)
    except OSError:
        raise UsageError(f"{path.parent} holds no {path.name}; start with '{command}'") from None
    except FormatError as error:
        raise UsageError(f"{path}: {error}; restore it, or start anew with '{command}'") from None


def _problem(found: Experiment) -> str | None:
    names = [arm.name for arm in found.arms]
    if len(set(names)) != len(names):
        return "two arms have one name"
    if unknown := [arm.name for arm in found.arms if arm.against not in {None, *names} - {arm.name}]:
        return f"arm {unknown[0]!r} is compared with no other arm"
    if (found.seeds, found.confirming) != seeds_for(found.arms, len(found.seeds), len(found.confirming)):
        return "its seeds do not follow from its arms"
    return None


def arm_folder(folder: Path, experiment: Experiment, arm: Arm) -> Path:
    """Return the folder of an arm; its name is restricted to characters that every file system allows."""
    number = experiment.arms.index(arm)
    return folder / f"{number:02}-{re.sub(r'[^A-Za-z0-9._=-]+', '-', arm.name)[:60]}"


def new_folder(folder: Path, experiment: Experiment, arm: Arm, seed: int) -> Path:
    """Return the folder for the next attempt at a trial; earlier attempts are kept."""
    place = arm_folder(folder, experiment, arm)
    return place / f"{seed}-{len([*place.glob(f'{seed}-*')]) + 1}"


def completed(folder: Path, experiment: Experiment, wanted: Sequence[Trial]) -> Runs:
    """Return the runs that finished or became non-finite, the first of each trial; others are run again.

    Raises:
        UsageError: if a folder holds another run.
    """
    found: Runs = {}
    for arm, seed in wanted:
        for attempt in sorted(arm_folder(folder, experiment, arm).glob(f"{seed}-*")):
            for run in load(attempt).runs:  # the log of one that was killed cannot be read
                if run.outcome not in ("finished", "non-finite"):
                    continue
                start = run.start.seed, run.start.config_sha256, run.start.source_sha256
                if start != (seed, arm.config_sha256, arm.source_sha256):
                    raise UsageError(
                        f"{attempt} holds another run than arm {arm.name!r} with seed {seed} as declared; take it out"
                    )
                found.setdefault((arm.name, seed), run)
    return found


#: A limit on time and on the correction of p for the number of arms.
MOST_ARMS = 200


class Range(NamedTuple):
    """A range to draw from: uniform if both ends are whole, else log-uniform."""

    low: str
    high: str

    def draw(self, rng: random.Random) -> str:
        """Draw a number; three digits if it is not whole, so that it can be typed again."""
        if (self.low + self.high).isdigit():
            return str(rng.randint(int(self.low), int(self.high)))
        low, high = math.log(float(self.low)), math.log(float(self.high))
        return f"{math.exp(rng.uniform(low, high)):.3g}"


Space = Mapping[str, tuple[str, ...] | Range]


def parse(key: str, text: str) -> tuple[str, ...] | Range:
    """Parse `1,2,3` as three values and `1..3` as a range; commas inside brackets belong to a value.

    Raises:
        UsageError: for a range that is empty, or not of numbers above zero.
    """
    if ".." not in text:
        return tuple(value.strip() for value in re.split(r",(?![^()]*\))", text) if value.strip())
    low, _, high = text.partition("..")
    with suppress(ValueError):
        if 0 < float(low) < float(high) < math.inf or ((low + high).isdigit() and int(low) < int(high)):
            return Range(low, high)
    raise UsageError(f"--set {key}={text}; need LOW..HIGH, two numbers above zero, the smaller one first")


def grid(space: Space) -> list[dict[str, str]]:
    """Return every combination; raise UsageError for a range, or too many."""
    for key, values in space.items():
        if isinstance(values, Range):
            raise UsageError(f"--set {key} is a range; add --trials K to draw from it, or list values")
    if (number := math.prod(map(len, space.values()))) > MOST_ARMS:
        raise UsageError(f"got {number:,} combinations; need at most {MOST_ARMS}, or --trials K")
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]


def draw(space: Space, trials: int, seed: int) -> list[dict[str, str]]:
    """Draw distinct combinations, fewer than `trials` if there are no more; raise UsageError for too many."""
    if trials > MOST_ARMS:
        raise UsageError(f"got {trials:,} trials; need at most {MOST_ARMS}")
    rng, found = random.Random(seed), []
    for _ in range(100 * trials):  # a small grid is exhausted before that
        one = {key: v.draw(rng) if isinstance(v, Range) else rng.choice(v) for key, v in space.items()}
        if one not in found:
            found.append(one)
        if len(found) == trials:
            break
    return found
