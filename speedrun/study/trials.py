"""A declared experiment: several arms that run the same seeds, and how far they have come.

    experiment.json  summary.json  plots/  <number>-<arm>/<seed>-<attempt>/

`experiment.json` is what was promised before the first run. Every run is a record by itself, which nobody can rank:
a rank takes a batch. The seeds follow from the arms and from how many were asked for, so a plan that was edited, or
made longer after its results were seen, has seeds that do not fit.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from speedrun.ground.errors import UsageError
from speedrun.ledger.batch import seeds_from
from speedrun.ledger.format import TrackRef
from speedrun.ledger.record import read_files, render_logs, run_folders
from speedrun.ledger.run import Run, read_run
from speedrun.ledger.runfile import FormatError, sha256

EXPERIMENT = "experiment.json"
EXPERIMENT_SCHEMA = "speedrun.experiment/1"

#: In `ablate` and `sweep` the arm that is the recipe as it is; a ladder has none.
BASELINE = "as it is"

Kind = Literal["features", "ladder", "sweep"]
Standing = Literal["research, not ranked"]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base: every key is known."""


class Arm(_Strict, frozen=True):
    """One variant of a recipe."""

    name: str
    what: str  #: in words
    recipe: str
    overrides: dict[str, str]
    against: str | None  #: the arm it is compared with
    config_sha256: str
    source_sha256: str


class Experiment(_Strict, frozen=True, tag_field="schema", tag=EXPERIMENT_SCHEMA):
    """`experiment.json`."""

    standing: Standing
    kind: Kind
    track: TrackRef
    num_devices: int
    microbatches: int
    attention: str
    arms: tuple[Arm, ...]
    left_out: tuple[str, ...]  #: what was asked for and is no arm, and why
    seeds: tuple[int, ...]  #: of every arm
    confirming: tuple[int, ...]  #: seeds that only the best arm and the one it is compared with will run
    created_utc: str

    def arm(self, name: str) -> Arm:
        """The arm of this name."""
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def pairs(self) -> list[tuple[Arm, Arm]]:
        """Each arm that is compared with another, with that one."""
        return [(arm, self.arm(arm.against)) for arm in self.arms if arm.against is not None]


class Trial(NamedTuple):
    """One run that an experiment wants."""

    arm: Arm
    seed: int


Runs = dict[tuple[str, int], Run]  #: by name of the arm and seed


def seeds_for(arms: Sequence[Arm], num_runs: int, num_confirming: int) -> tuple[tuple[int, ...], ...]:
    """Seeds to choose by and seeds to confirm with: all different, and nobody picks them."""
    numbers = f"{num_runs} {num_confirming}"
    total = num_runs + num_confirming
    drawn = seeds_from(sha256(msgspec.json.encode(arms)), sha256(numbers.encode()), total + 8)
    distinct = tuple(dict.fromkeys(drawn))  # two of 2^31 may be one: the spare ones take its place
    return distinct[:num_runs], distinct[num_runs:total]


def trials(arms: Sequence[Arm], seeds: Sequence[int]) -> Iterator[Trial]:
    """Block after block, one seed each, every other one backwards: a node that warms up favours no arm."""
    for block, seed in enumerate(seeds):
        yield from (Trial(arm, seed) for arm in (arms[::-1] if block % 2 else arms))


def encode(file: msgspec.Struct) -> bytes:
    """The one way to write a file of an experiment: indented, so that people and `diff` can read it."""
    return msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"


def read(folder: Path) -> Experiment:
    """The promise that a folder holds.

    Raises:
        UsageError: none, one that cannot be read, or one that was edited.
    """
    path = folder / EXPERIMENT
    try:
        raw = path.read_bytes()
        found = msgspec.json.decode(raw, type=Experiment)
    except OSError:
        raise UsageError(f"{folder} holds no {EXPERIMENT}; begin with 'speedrun ablate' or 'sweep'") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: {error}; restore it, or begin anew") from None
    if problem := _problem(found):
        raise UsageError(f"{path}: {problem}; restore it, or begin anew")
    return found


def _problem(found: Experiment) -> str | None:
    """What is wrong with a promise, or None."""
    names = [arm.name for arm in found.arms]
    if len(set(names)) != len(names):
        return "two arms have one name"
    if unknown := [arm.name for arm in found.arms if arm.against not in {None, *names} - {arm.name}]:
        return f"arm {unknown[0]!r} is compared with no other arm"
    if (found.seeds, found.confirming) != seeds_for(found.arms, len(found.seeds), len(found.confirming)):
        return "its seeds do not follow from its arms"
    return None


def arm_folder(folder: Path, experiment: Experiment, arm: Arm) -> Path:
    """Where the runs of an arm lie; a name that came from a command line becomes one that any disk takes."""
    number = experiment.arms.index(arm)
    return folder / f"{number:02}-{re.sub(r'[^A-Za-z0-9._=-]+', '-', arm.name)[:60]}"


def new_folder(folder: Path, experiment: Experiment, trial: Trial) -> Path:
    """For the next attempt of a trial: what broke off stays where it is."""
    attempts = len(_attempts(folder, experiment, trial))
    return arm_folder(folder, experiment, trial.arm) / f"{trial.seed}-{attempts + 1}"


def completed(folder: Path, experiment: Experiment, wanted: Sequence[Trial]) -> Runs:
    """The runs that came to an end, good or bad; one that broke off says nothing, and is run again.

    Raises:
        UsageError: if a folder holds a run of something else.
    """
    found: Runs = {}
    for trial in wanted:
        for attempt in _attempts(folder, experiment, trial):
            run = _ended(attempt)
            if run is not None:
                _check(run, trial, attempt)
                found.setdefault((trial.arm.name, trial.seed), run)  # nobody gets a second try
    return found


def _attempts(folder: Path, experiment: Experiment, trial: Trial) -> list[Path]:
    return sorted(arm_folder(folder, experiment, trial.arm).glob(f"{trial.seed}-*"))


def _ended(attempt: Path) -> Run | None:
    """The run of a folder, if it came to its end; one that was killed cannot even be read."""
    render_logs(attempt)
    raw, _ = read_files(attempt)
    for name in run_folders(raw):
        try:
            run = read_run(raw, name)
        except FormatError:
            continue
        if run.file.outcome in ("finished", "non-finite"):
            return run
    return None


def _check(run: Run, trial: Trial, attempt: Path) -> None:
    arm, file = trial.arm, run.file
    if (file.seed, file.config_sha256, file.source_sha256) != (
        trial.seed,
        arm.config_sha256,
        arm.source_sha256,
    ):
        raise UsageError(
            f"{attempt} holds no run of arm {arm.name!r} with seed {trial.seed} as it was declared; take it out"
        )
