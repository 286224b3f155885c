"""The runs of `speedrun reproduce`: planned before the first, run in turns with a rival's, judged together."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TextIO

import msgspec

from speedrun.ground import clock, lock, provenance
from speedrun.ground.clock import Stopwatch
from speedrun.ground.console import clean, duration
from speedrun.ground.errors import DataError, NonFiniteError, SpeedrunError, UsageError
from speedrun.ground.wholefile import make_folder, read_regular, write_whole
from speedrun.ledger.batch import seeds_from
from speedrun.ledger.format import encode
from speedrun.ledger.record import Record, load
from speedrun.ledger.reproduction import (
    CONFIDENCE,
    REPRODUCTION,
    Judgement,
    NoiseFrom,
    Point,
    Reproduction,
    Verdict,
    judged,
    outcome_of,
)
from speedrun.ledger.run import Run
from speedrun.referee.rerun import Rerun

PLAN = "plan.json"
RIVAL = "rival"  #: folder of the rival's runs, in that of the record's

_MEANING: dict[Verdict, str] = {
    "within": "loss and time agree with the record's as far as {runs} can tell",
    "faster": "the loss agrees with the record's, and the time is significantly shorter",
    "slower": "the loss agrees with the record's, but the time is significantly longer",
    "loss mismatch": "the loss differs significantly from the record's, so its time says nothing",
    "not the same hardware": "the loss agrees with the record's as far as {runs} can tell; the times do not compare",
}
_NOISE: dict[NoiseFrom, str] = {
    "runs": "noise of the record's runs",
    "track": "noise that the track declares",
    "assumed": "noise assumed: the record has too few runs",
}


class Plan(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="schema",
    tag="speedrun.reproduction-plan/2",
):
    """`plan.json`: the seeds to run, fixed before the first run, so that nobody picks among results."""

    record_ids: tuple[str, ...]  #: of the record, and of its rival if there is one
    same_seeds: bool
    seeds: tuple[int, ...]
    created_utc: str


class Result(NamedTuple):
    """What came of running a record again."""

    record: Record
    runs: list[Run]
    reproduction: Reproduction
    judgement: Judgement

    @property
    def facts(self) -> dict[str, Any]:
        """Return the reproduction and its judgement as JSON."""
        return msgspec.to_builtins(self.reproduction) | msgspec.to_builtins(self.judgement)


@dataclass(frozen=True)
class Repetition:
    """A record that is run again in a folder of its own."""

    folder: Path
    record: Record
    rerun: Rerun
    data: Path  #: folder of shards
    points: tuple[Point, ...]  #: what was compared before the runs

    def run_one(self, seed: int, echo: TextIO) -> Run:
        """Run one seed, if it has no result yet. A non-finite loss is a result; any other error ends the command.

        Raises:
            SpeedrunError: if a run breaks off; the runs before it are kept.
            DataError: if a run has another source, config or data than the record.
        """
        if found := self._result(seed):
            return found
        attempts = (self.folder / f"{seed}-{attempt}" for attempt in count(1))
        out = next(path for path in attempts if not path.exists())
        try:
            self.rerun.run(out, seed=seed, data=self.data, echo=echo)
        except SpeedrunError as error:
            if error.exit_code != NonFiniteError.exit_code:
                resumable = SpeedrunError(f"{error}; run the same command again to continue in {self.folder}")
                resumable.exit_code = error.exit_code
                raise resumable from None
        if (found := self._result(seed)) is None:
            raise SpeedrunError(f"the run with seed {seed} left no readable log; see its output above")
        return found

    def _result(self, seed: int) -> Run | None:
        """Return the first run of a seed that has a result, so that nobody gets a second try."""
        # The stacks of a run that hung lie beside its folder.
        for attempt in sorted(path for path in self.folder.glob(f"{seed}-*") if path.is_dir()):
            for run in load(attempt).runs:
                has_begun = bool(run.hardware[0])  # a stranger's log may claim an end before its beginning
                if run.start.seed == seed and has_begun and run.outcome in ("finished", "non-finite"):
                    if run.finished:
                        self._check_same(run, attempt)
                    return run
        return None

    def _check_same(self, run: Run, attempt: Path) -> None:
        """Raise DataError if a finished run has another source, config or data than the record."""
        wanted = self.record.lead
        facts = {
            "source": (run.start.source_sha256, wanted.start.source_sha256),
            "config": (run.start.config_sha256, wanted.start.config_sha256),
            "data": (run.data, wanted.data),
        }
        differ = [name for name, (here, recorded) in facts.items() if here != recorded]
        if differ:
            raise DataError(
                f"{attempt}: its run has another {', '.join(differ)} than the record, so they cannot be compared; "
                "move the folder away and run the same command again"
            )

    def judge(self, plan: Plan, runs: list[Run], by: str) -> Result:
        """Write `reproduction.json`, and judge the record by it."""
        found = Reproduction(
            record_id=self.record.id,
            track=self.record.rules.id,
            by=clean(by),
            created_utc=plan.created_utc,
            software=provenance.software(),
            same_seeds=plan.same_seeds,
            points=self.points,
            runs=tuple(outcome_of(run) for run in runs),
        )
        write_whole(self.folder / REPRODUCTION, encode(found))
        judgement = judged(found, self.record.finished, self.record.rules.target.sigma)
        return Result(self.record, runs, found, judgement)


def run_in_turns(sides: Sequence[Repetition], seeds: Sequence[int], echo: TextIO) -> list[list[Run]]:
    """Run every seed on every side, in alternating order (A B, B A, ...); return the runs of each side.

    A node that warms up or slows down then favours neither.

    Raises:
        SpeedrunError: as `Repetition.run_one`.
    """
    runs: list[list[Run]] = [[] for _ in sides]
    expected_s = sum(fmean(run.end.cold_wall_s for run in side.record.finished) for side in sides)
    watch = Stopwatch()
    for number, seed in enumerate(seeds):
        eta_s = (len(seeds) - number) * max(expected_s, watch.seconds / max(1, number))
        print(f"run {number + 1} of {len(seeds)}  seed {seed}  eta {duration(eta_s)}", file=echo)
        order = [*zip(sides, runs, strict=True)]
        for side, ended in order if number % 2 == 0 else order[::-1]:
            ended.append(side.run_one(seed, echo))
    return runs


def planned(folder: Path, records: Sequence[Record], num_runs: int, *, same_seeds: bool) -> Plan:
    """Return the plan in a folder, if it is the same one; else plan.

    Fresh seeds follow from the records' digests and the time of planning, so nobody picks them.

    Args:
        folder: of the runs; new, empty, or with the same plan.
        records: to run again: one, or one and its rival.
        num_runs: of each.
        same_seeds: use the first record's seeds.

    Raises:
        UsageError: if more of the record's seeds are wanted than there are, or the folder holds something else.
    """
    recorded = [run.start.seed for run in records[0].finished]
    ids = tuple(record.id for record in records)
    if same_seeds and num_runs > len(recorded):
        raise UsageError(
            f"--runs {num_runs} --same-seeds: the record has {len(recorded)} finished runs; ask for at most that many"
        )
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        plan = _read_plan(folder)
        if (plan.record_ids, plan.same_seeds, len(plan.seeds)) != (ids, same_seeds, num_runs):
            raise UsageError(
                f"{folder} was begun with another record, seeds or number of runs; pass another --out"
            )
        return plan
    now = clock.now().utc
    known = {run.start.seed for record in records for run in record.finished}
    derived = seeds_from(" ".join(ids), now, num_runs + len(known))
    seeds = recorded if same_seeds else [seed for seed in derived if seed not in known]
    plan = Plan(ids, same_seeds, tuple(seeds[:num_runs]), now)
    with lock.lock_record(folder):
        make_folder(folder, {PLAN: msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n"})
    return plan


def _read_plan(folder: Path) -> Plan:
    try:
        return msgspec.json.decode(read_regular(folder / PLAN), type=Plan)
    except (OSError, ValueError, RecursionError):
        raise UsageError(f"{folder} exists and was not begun by this command; pass another --out") from None


def differences(points: Sequence[Point]) -> list[str]:
    """Return one line that names all equal points, and one line for each other point."""
    same = ", ".join(clean(point.what) for point in points if point.equal)
    lines = [f"same     {same}"] if same else []
    for point in points:
        if not point.equal:
            both = f"{point.what}: the record has {point.recorded}, here is {point.here}"
            lines.append(f"differs  {clean(both)}; no longer promised: {clean(point.lost)}")
    return lines


def table(result: Result) -> list[str]:
    """Return the result for people: points, loss and time with intervals, equal bits, and the verdict."""
    record, runs, found, judgement = result
    number = f"{len(runs)} run{'s' * (len(runs) != 1)}"
    seeds = "the record's seeds" if found.same_seeds else "fresh seeds"
    hardware = f"{found.runs[0].hardware.num_devices} x {clean(found.runs[0].hardware.device_kind)}"
    lines = [
        f"again    {found.track}, {number} with {seeds} on {hardware}",
        *differences((*found.points, *judgement.hardware)),
        *_numbers(result),
    ]
    if found.same_seeds:
        lines.append(
            f"bits     {judgement.num_same_bits} of {number} ended in exactly the state of the record's run of that "
            f"seed; {_equal_losses(record, runs)}"
        )
    return [*lines, f"verdict  {judgement.verdict}: {_MEANING[judgement.verdict].format(runs=number)}"]


def _equal_losses(record: Record, runs: Sequence[Run]) -> str:
    """Return how many losses of steps are equal to those of the record's run of the same seed, to the last bit."""
    recorded = {run.start.seed: run.steps for run in record.finished}
    pairs = [
        (old.loss, new.loss)
        for run in runs
        for old, new in zip(recorded[run.start.seed], run.steps, strict=False)
    ]
    num_losses = sum(len(recorded[run.start.seed]) for run in runs)
    largest = max((abs(old - new) for old, new in pairs), default=0.0)
    num_equal = sum(old == new for old, new in pairs)
    return f"{num_equal} of {num_losses} losses are equal, the largest difference is {largest:.3g}"


def _numbers(result: Result) -> list[str]:
    """Return loss and time of both sides, of the runs that stayed finite."""
    record, _, found, judgement = result
    losses = [run.val_loss for run in found.runs if run.val_loss is not None]
    times_s = [run.train_time_s for run in found.runs if run.train_time_s is not None]
    num_non_finite = len(found.runs) - len(losses)
    lines = (
        [f"loss     {num_non_finite} of {len(found.runs)} runs became non-finite"] if num_non_finite else []
    )
    loss, time = judgement.loss_difference, judgement.time_ratio
    if loss is None or time is None:
        return lines
    seeds = {run.seed for run in found.runs}
    counterparts = [run for run in record.finished if run.start.seed in seeds or not found.same_seeds]
    record_loss = fmean(run.val_loss for run in counterparts)
    record_s = fmean(run.train_time_s for run in record.finished)
    return [
        *lines,
        f"loss     {fmean(losses):.5f}, record {record_loss:.5f} | {loss.mean:+.5f} nats, "
        f"{CONFIDENCE:.0%} between {loss.low:+.5f} and {loss.high:+.5f} ({_NOISE[loss.noise_from]})",
        f"time     {fmean(times_s):.2f} s, record {record_s:.2f} s | {time.mean - 1:+.1%}, "
        f"{CONFIDENCE:.0%} between {time.low - 1:+.1%} and {time.high - 1:+.1%} ({_NOISE[time.noise_from]})",
    ]
