"""`speedrun reproduce`: compares a record with this machine, plans seeds, runs them, and judges the record."""

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TextIO

import msgspec

from speedrun.base import clock, provenance
from speedrun.base.atomic_files import is_occupied, make_record, read_regular, write_whole
from speedrun.base.clock import Stopwatch
from speedrun.base.console import clean, duration
from speedrun.base.errors import DataError, NonFiniteError, SpeedrunError, UsageError
from speedrun.record import reproduction
from speedrun.record.batch import seeds_from
from speedrun.record.examine.rerun import Rerun
from speedrun.record.layout import Strict
from speedrun.record.logged_run import Run
from speedrun.record.reader import Record, encode, load, load_result
from speedrun.record.reproduction import Judgement, Point, Reproduction
from speedrun.record.validate import examine

PLAN = "plan.json"


class ReproductionPlan(Strict, frozen=True, tag_field="schema", tag="speedrun.reproduction-plan/2"):
    """`plan.json`: the seeds to run, fixed before the first run, so that nobody picks among results."""

    record_ids: tuple[str, ...]  #: of the record, and of its candidate if there is one
    same_seeds: bool
    seeds: tuple[int, ...]
    created_utc: str


class Result(NamedTuple):
    """The result of running a record again."""

    record: Record
    runs: list[Run]
    reproduction: Reproduction
    judgement: Judgement


class Repetition:
    """A record to run again. `points` are the comparisons of the record with this machine."""

    def __init__(self, record: Path, folder: Path, data: Path | None, echo: TextIO, *, unsafe: bool) -> None:
        """Check a record and its data, and compare it with this machine, without executing anything.

        `folder` is that of the new runs. The other arguments are those of `Rerun`.
        """
        self.folder, self.record = folder, load_result(record)
        if any(run.train_time_s <= 0 for run in self.record.finished):
            raise UsageError(f"{record}: a finished run took no time; need one that did, to compare with")
        self._rerun = Rerun(record, data, echo, unsafe=unsafe)
        self._rerun.check_data()
        self.points = tuple(_points(self.record))

    def run_one(self, seed: int) -> Run:
        """Run one seed, unless it has a result. A non-finite loss is a result; other errors end the command."""
        if found := self._result(seed):
            return found
        attempts = (self.folder / f"{seed}-{attempt}" for attempt in count(1))
        out = next(path for path in attempts if not path.exists())
        try:
            self._rerun.run(out, seed=seed)
        except SpeedrunError as error:
            if error.exit_code != NonFiniteError.exit_code:
                said = f"{error}; run the same command again to continue in {self.folder}"
                raise SpeedrunError(said, error.exit_code) from None
        if (found := self._result(seed)) is None:
            got = f"the source left no run with seed {seed} and a result in {out}"
            raise SpeedrunError(f"{got}; need one, and no other; see its output above")
        return found

    def _result(self, seed: int) -> Run | None:
        """Return the first run of a seed with a result, so that nobody gets a second try."""
        # Next to the folders are their locks.
        for attempt in sorted(path for path in self.folder.glob(f"{seed}-*") if path.is_dir()):
            match load(attempt).runs:
                # An untrusted log may claim an end before its beginning, without hardware.
                case [run] if run.start.seed == seed and run.outcome != "aborted" and run.hardware[0]:
                    if run.finished and (differ := _differences(run, self.record.reference_run)):
                        raise DataError(
                            f"{attempt}: its run has another {', '.join(differ)} than the record; need the same; "
                            "move the folder away and run the same command again"
                        )
                    return run
        return None

    def judge(self, plan: ReproductionPlan, runs: list[Run], by: str) -> Result:
        """Write `reproduction.json`, and judge the record."""
        found = Reproduction(
            record_id=self.record.id,
            track=self.record.rules.id,
            by=clean(by),
            created_utc=plan.created_utc,
            software=provenance.software(),
            same_seeds=plan.same_seeds,
            points=self.points,
            runs=tuple(reproduction.outcome_of(run) for run in runs),
        )
        write_whole(self.folder / reproduction.REPRODUCTION, encode(found))
        judgement = reproduction.judged(found, self.record.finished, self.record.rules.target.sigma)
        return Result(self.record, runs, found, judgement)


def _differences(first: Run, second: Run) -> list[str]:
    facts = {
        "source": (first.start.source_sha256, second.start.source_sha256),
        "config": (first.start.config_sha256, second.start.config_sha256),
        "data": (first.data, second.data),
    }
    return [name for name, (one, other) in facts.items() if one != other]


def _points(record: Record) -> Iterator[Point]:
    """Compare checks, packages and lock files. Source and flags are always the record's."""
    failed = ", ".join(result.check.id for result in examine(record).having("failed"))
    here = f"{failed} failed" if failed else "all pass"
    yield reproduction.point("checks", "all pass", here, lost="the record's own claims")
    theirs, software = record.reference_run.preflight, provenance.software()
    for name in {**theirs.software, **software}:
        if theirs.platform == "cpu" and provenance.FOR_GPUS.fullmatch(name):
            continue  # CPUs do not use these
        versions = theirs.software.get(name, "none"), software.get(name, "none")
        yield reproduction.point(name, *versions, lost="equal bits and equal times")
    ours = provenance.lock()
    locks = (f"{theirs.lock} {theirs.lock_sha256[:16]}", f"{ours.name} {ours.sha256[:16]}")
    yield reproduction.point("lock", *(lock.strip() or "none" for lock in locks), lost="the same packages")


def run_in_turns(sides: Sequence[Repetition], seeds: Sequence[int], echo: TextIO) -> list[list[Run]]:
    """Run every seed on every side, and return the runs of each side.

    The order alternates (A B, B A, ...), so that a node that warms up or slows down favours neither.
    """
    runs: list[list[Run]] = [[] for _ in sides]
    expected_s = sum(fmean(run.end.cold_wall_s for run in side.record.finished) for side in sides)
    watch = Stopwatch()
    for number, seed in enumerate(seeds):
        eta_s = (len(seeds) - number) * max(expected_s, watch.seconds / max(1, number))
        print(f"run {number + 1} of {len(seeds)}  seed {seed}  eta {duration(eta_s)}", file=echo)
        order = [*zip(sides, runs, strict=True)]
        for side, ended in order if number % 2 == 0 else order[::-1]:
            ended.append(side.run_one(seed))
    return runs


def planned(folder: Path, records: Sequence[Record], num_runs: int, *, same_seeds: bool) -> ReproductionPlan:
    """Return the plan in a folder, or plan; the records are one, or one and its candidate.

    Fresh seeds are derived from the records' digests and the time, so that nobody chooses them. With `same_seeds`, they
    are the first record's.
    """
    recorded = [run.start.seed for run in records[0].finished]
    ids = tuple(record.id for record in records)
    if same_seeds and num_runs > len(recorded):
        found = f"--runs {num_runs} --same-seeds: the record has {len(recorded)} finished runs"
        raise UsageError(f"{found}; ask for at most that many")
    if is_occupied(folder):
        try:
            plan = msgspec.json.decode(read_regular(folder / PLAN), type=ReproductionPlan)
        except (OSError, ValueError, RecursionError):
            plan = None
        if plan is None or (plan.record_ids, plan.same_seeds, len(plan.seeds)) != (ids, same_seeds, num_runs):
            raise UsageError(f"{folder} has another plan, or none; pass another --out")
        return plan
    now = clock.now().utc
    known = {run.start.seed for record in records for run in record.finished}
    derived = seeds_from(" ".join(ids), now, num_runs + len(known))
    seeds = recorded if same_seeds else [seed for seed in derived if seed not in known]
    plan = ReproductionPlan(ids, same_seeds, tuple(seeds[:num_runs]), now)
    make_record(folder, {PLAN: encode(plan)})
    return plan
