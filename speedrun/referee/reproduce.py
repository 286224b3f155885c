"""The runs of `speedrun reproduce`: fixed before the first one, run in any order, judged together."""

from itertools import count
from pathlib import Path

import msgspec

from speedrun.ground import clock, lock, provenance
from speedrun.ground.console import clean
from speedrun.ground.errors import DataError, UsageError
from speedrun.ground.wholefile import make_folder, write_whole
from speedrun.ledger.batch import seeds_from
from speedrun.ledger.format import Manifest
from speedrun.ledger.record import Record, load
from speedrun.ledger.reproduction import (
    CONFIDENCE,
    REPRODUCTION,
    Point,
    Reproduction,
    concluded,
    encode,
    hardware_of,
    hardware_points,
    outcome_of,
)
from speedrun.ledger.run import Run

PLAN = "plan.json"


class Plan(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="schema",
    tag="speedrun.reproduction-plan/1",
):
    """`plan.json`: what is going to be run, fixed before the first run, so that nobody picks among results."""

    record_id: str
    same_seeds: bool
    seeds: tuple[int, ...]
    created_utc: str


def planned(
    folder: Path, record: Record, manifest: Manifest, num_runs: int | None, *, same_seeds: bool
) -> Plan:
    """The plan in a folder: the one that is there, if it is the same, or a new one.

    Fresh seeds follow from the record's digest and the moment at which the plan was made: nobody picks them.

    Raises:
        UsageError: more of the record's seeds than there are; a folder that holds another plan, or something else.
    """
    theirs = [run.file.seed for run in record.finished]
    num_runs = num_runs or len(theirs)
    if same_seeds and num_runs > len(theirs):
        raise UsageError(
            f"--runs {num_runs} --same-seeds: the record has {len(theirs)} finished runs; say so many or fewer"
        )
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        found = _read_plan(folder)
        if (found.record_id, found.same_seeds, len(found.seeds)) != (
            manifest.record_id,
            same_seeds,
            num_runs,
        ):
            raise UsageError(
                f"{folder} was begun with another record, seeds or number of runs; pass another --out"
            )
        return found
    now = clock.now().utc
    fresh = [
        seed for seed in seeds_from(manifest.record_id, now, num_runs + len(theirs)) if seed not in theirs
    ]
    seeds = (theirs if same_seeds else fresh)[:num_runs]
    made = Plan(manifest.record_id, same_seeds, tuple(seeds), now)
    with lock.alone_with(folder):
        make_folder(folder, {PLAN: msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n"})
    return made


def _read_plan(folder: Path) -> Plan:
    try:
        return msgspec.json.decode((folder / PLAN).read_bytes(), type=Plan)
    except (OSError, ValueError, RecursionError):
        raise UsageError(
            f"{folder} exists already and was not begun by this command; pass another --out"
        ) from None


def next_folder(folder: Path, seed: int) -> Path:
    """For the next attempt of a run: what broke off stays where it is."""
    tries = (folder / f"{seed}-{attempt}" for attempt in count(1))
    return next(path for path in tries if not path.exists())


def ended(folder: Path, plan: Plan, manifest: Manifest) -> dict[int, Run]:
    """By seed, the runs that came to an end, good or bad; the first of each, so that nobody gets a second try.

    Raises:
        DataError: if one ran or read something else than the record.
    """
    found: dict[int, Run] = {}
    for seed in plan.seeds:
        # Of a run that hung, its stacks lie beside its folder.
        for attempt in sorted(path for path in folder.glob(f"{seed}-*") if path.is_dir()):
            for run in load(attempt).runs:
                if run.file.seed == seed and run.file.outcome in ("finished", "non-finite"):
                    _check_same(run, manifest, attempt)
                    found.setdefault(seed, run)
    return found


def _check_same(run: Run, manifest: Manifest, attempt: Path) -> None:
    """A run that finished ran the record's source and config, and read the same tokens from the same shards."""
    file = run.file
    differ = {
        "source": file.source_sha256 != manifest.source.sha256,
        "config": file.config_sha256 != manifest.config_sha256,
        "data": file.data != manifest.data,
    }
    if run.finished and any(differ.values()):
        names = ", ".join(name for name, other in differ.items() if other)
        raise DataError(
            f"{attempt}: its run has another {names} than the record; nothing can be compared; take it out"
        )


def judged(
    record: Record, manifest: Manifest, plan: Plan, compared: tuple[Point, ...], runs: list[Run], by: str
) -> Reproduction:
    """All of it, as `reproduction.json` holds it.

    Args:
        record: what was reproduced.
        manifest: of it.
        plan: what was to be run.
        compared: the points from before the runs.
        runs: all that came to an end, in the order of the seeds; at least one.
        by: who ran them.
    """
    hardware = [hardware_of(run) for run in runs]
    found = Reproduction(
        record_id=manifest.record_id,
        track=manifest.track.id,
        by=clean(by),
        created_utc=plan.created_utc,
        hardware=hardware[0],
        software=provenance.software(),
        same_seeds=plan.same_seeds,
        points=(*compared, *hardware_points([hardware_of(run) for run in record.finished], hardware)),
        runs=tuple(outcome_of(run) for run in runs),
        confidence=CONFIDENCE,
        loss_difference=None,
        time_ratio=None,
        num_same_bits=None,
        verdict="loss mismatch",
    )
    return concluded(found, record.finished, record.rules.target.sigma)


def write(found: Reproduction, folder: Path) -> Path:
    """Writes `reproduction.json`; its path."""
    write_whole(folder / REPRODUCTION, encode(found))
    return folder / REPRODUCTION
