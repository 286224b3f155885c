"""The runs of `speedrun reproduce`: planned before the first, run in any order, judged together."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import TextIO

import msgspec

from speedrun.ground import clock, lock, provenance
from speedrun.ground.clock import Stopwatch
from speedrun.ground.console import clean, duration
from speedrun.ground.errors import DataError, NonFiniteError, SpeedrunError, UsageError
from speedrun.ground.wholefile import make_folder, read_regular, write_whole
from speedrun.ledger.batch import seeds_from
from speedrun.ledger.decoding import FormatError, decode
from speedrun.ledger.format import encode
from speedrun.ledger.record import Record, load
from speedrun.ledger.reproduction import (
    CONFIDENCE,
    REPRODUCTION,
    NoiseFrom,
    Point,
    Reproduction,
    Verdict,
    concluded,
    hardware_of,
    hardware_points,
    outcome_of,
)
from speedrun.ledger.run import Run
from speedrun.referee.rerun import Rerun

PLAN = "plan.json"

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
    tag="speedrun.reproduction-plan/1",
):
    """`plan.json`: the seeds to run, fixed before the first run, so that nobody picks among results."""

    record_id: str
    same_seeds: bool
    seeds: tuple[int, ...]
    created_utc: str


@dataclass(frozen=True)
class Repetition:
    """A record that is run again in a folder of its own."""

    folder: Path
    record: Record
    plan: Plan

    def run(
        self, rerun: Rerun, data: Path | None, points: tuple[Point, ...], by: str, echo: TextIO
    ) -> Reproduction:
        """Run what is missing, judge all runs and write `reproduction.json`.

        Args:
            rerun: runs the record's source.
            data: folder of shards; None: the track's own.
            points: what was compared before the runs.
            by: who runs them.
            echo: where progress and the output of the runs go.

        Raises:
            SpeedrunError: if a run breaks off; the runs before it are kept.
            DataError: if a run has another source, config or data than the record.
        """
        found = self._judged(self._run_missing(rerun, data, echo), points, by)
        write_whole(self.folder / REPRODUCTION, encode(found))
        return found

    def _run_missing(self, rerun: Rerun, data: Path | None, echo: TextIO) -> list[Run]:
        """Run the seeds that have no result yet; return all runs in the order of the seeds."""
        done, watch, num_new = self._ended(), Stopwatch(), 0
        expected_s = fmean(run.end.cold_wall_s for run in self.record.finished)
        num_seeds = len(self.plan.seeds)
        for number, seed in enumerate(self.plan.seeds, 1):
            if seed in done:
                continue
            eta_s = (num_seeds - len(done)) * (watch.seconds / num_new if num_new else expected_s)
            print(f"run {number} of {num_seeds}  seed {seed}  eta {duration(eta_s)}", file=echo)
            self._run_one(rerun, seed, data, echo)
            done, num_new = self._ended(), num_new + 1
            if seed not in done:
                raise SpeedrunError(f"the run with seed {seed} left no readable log; see its output above")
        return [done[seed] for seed in self.plan.seeds]

    def _run_one(self, rerun: Rerun, seed: int, data: Path | None, echo: TextIO) -> None:
        """Run one seed. A non-finite loss is a result; any other error ends the command."""
        attempts = (self.folder / f"{seed}-{attempt}" for attempt in count(1))
        out = next(path for path in attempts if not path.exists())
        try:
            rerun.run(out, seed=seed, data=data, echo=echo)
        except SpeedrunError as error:
            if error.exit_code == NonFiniteError.exit_code:
                return
            resumable = SpeedrunError(f"{error}; run the same command again to continue in {self.folder}")
            resumable.exit_code = error.exit_code
            raise resumable from None

    def _ended(self) -> dict[int, Run]:
        """Return the runs with a result by seed: the first of each seed, so that nobody gets a second try."""
        found: dict[int, Run] = {}
        for seed in self.plan.seeds:
            # The stacks of a run that hung lie beside its folder.
            for attempt in sorted(path for path in self.folder.glob(f"{seed}-*") if path.is_dir()):
                for run in load(attempt).runs:
                    if run.start.seed == seed and run.outcome in ("finished", "non-finite"):
                        self._check_same(run, attempt)
                        found.setdefault(seed, run)
        return found

    def _check_same(self, run: Run, attempt: Path) -> None:
        """Raise DataError if a finished run has another source, config or data than the record."""
        start, wanted = run.start, self.record.lead
        differ = {
            "source": start.source_sha256 != wanted.start.source_sha256,
            "config": start.config_sha256 != wanted.start.config_sha256,
            "data": run.finished and run.data != wanted.data,
        }
        if run.finished and any(differ.values()):
            names = ", ".join(name for name, other in differ.items() if other)
            raise DataError(
                f"{attempt}: its run has another {names} than the record, so they cannot be compared; "
                "move the folder away and run the same command again"
            )

    def _judged(self, runs: list[Run], compared: tuple[Point, ...], by: str) -> Reproduction:
        hardware = [hardware_of(run) for run in runs]
        recorded = [hardware_of(run) for run in self.record.finished]
        found = Reproduction(
            record_id=self.record.id,
            track=self.record.rules.id,
            by=clean(by),
            created_utc=self.plan.created_utc,
            hardware=hardware[0],
            software=provenance.software(),
            same_seeds=self.plan.same_seeds,
            points=(*compared, *hardware_points(recorded, hardware)),
            runs=tuple(outcome_of(run) for run in runs),
            confidence=CONFIDENCE,
            loss_difference=None,
            time_ratio=None,
            num_same_bits=None,
            verdict="loss mismatch",
        )
        return concluded(found, self.record.finished, self.record.rules.target.sigma)


def planned(folder: Path, record: Record, num_runs: int | None, *, same_seeds: bool) -> Repetition:
    """Return the repetition that was planned in a folder before, if it is the same one; else plan it.

    Fresh seeds follow from the record's digest and the time of planning, so nobody picks them.

    Args:
        folder: of the runs; new, empty, or with the same plan.
        record: to run again.
        num_runs: None: as many as the record has.
        same_seeds: use the record's seeds.

    Raises:
        UsageError: if more of the record's seeds are wanted than there are, or the folder holds something else.
    """
    recorded = [run.start.seed for run in record.finished]
    num_runs = num_runs or len(recorded)
    if same_seeds and num_runs > len(recorded):
        raise UsageError(
            f"--runs {num_runs} --same-seeds: the record has {len(recorded)} finished runs; ask for at most that many"
        )
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        plan = _read_plan(folder)
        found = (plan.record_id, plan.same_seeds, len(plan.seeds))
        if found != (record.id, same_seeds, num_runs):
            raise UsageError(
                f"{folder} was begun with another record, seeds or number of runs; pass another --out"
            )
        return Repetition(folder, record, plan)
    now = clock.now().utc
    derived = seeds_from(record.id, now, num_runs + len(recorded))
    fresh = [seed for seed in derived if seed not in recorded]
    seeds = (recorded if same_seeds else fresh)[:num_runs]
    plan = Plan(record.id, same_seeds, tuple(seeds), now)
    with lock.lock_record(folder):
        make_folder(folder, {PLAN: msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n"})
    return Repetition(folder, record, plan)


def _read_plan(folder: Path) -> Plan:
    try:
        return msgspec.json.decode(read_regular(folder / PLAN), type=Plan)
    except (OSError, ValueError, RecursionError):
        raise UsageError(f"{folder} exists and was not begun by this command; pass another --out") from None


def put_into_record(folder: Path, record: Path) -> Path:
    """Copy `reproduction.json` from a folder of runs into the record; return its new path.

    The file is decoded first: where a stranger's code ran, it may be a link to a file of ours.

    Raises:
        UsageError: if it cannot be read as a reproduction.
    """
    path, target = folder / REPRODUCTION, record / REPRODUCTION
    try:
        raw = encode(decode(path.read_bytes(), Reproduction))
    except (OSError, FormatError) as error:
        raise UsageError(
            f"{path}: {clean(str(error))}; nothing was put into the record; run again with another --out"
        ) from None
    write_whole(target, raw)
    return target


def differences(points: Sequence[Point]) -> list[str]:
    """Return one line that names all equal points, and one line for each other point."""
    same = ", ".join(clean(point.what) for point in points if point.equal)
    lines = [f"same     {same}"] if same else []
    for point in points:
        if not point.equal:
            both = f"{point.what}: the record has {point.recorded}, here is {point.here}"
            lines.append(f"differs  {clean(both)}; no longer promised: {clean(point.lost)}")
    return lines


def table(found: Reproduction, record: Record) -> list[str]:
    """Return the result for people: points, loss and time with intervals, equal bits, and the verdict."""
    runs = f"{len(found.runs)} run{'s' * (len(found.runs) != 1)}"
    seeds = "the record's seeds" if found.same_seeds else "fresh seeds"
    hardware = f"{found.hardware.num_devices} x {clean(found.hardware.device_kind)}"
    lines = [f"again    {found.track}, {runs} with {seeds} on {hardware}", *differences(found.points)]
    lines += _numbers(found, record)
    if found.num_same_bits is not None:
        lines.append(
            f"bits     {found.num_same_bits} of {runs} ended in exactly the state of the record's run of that seed"
        )
    return [*lines, f"verdict  {found.verdict}: {_MEANING[found.verdict].format(runs=runs)}"]


def _numbers(found: Reproduction, record: Record) -> list[str]:
    """Loss and time of both sides, of the runs that stayed finite."""
    losses = [run.val_loss for run in found.runs if run.val_loss is not None]
    times_s = [run.train_time_s for run in found.runs if run.train_time_s is not None]
    num_non_finite = len(found.runs) - len(losses)
    lines = (
        [f"loss     {num_non_finite} of {len(found.runs)} runs became non-finite"] if num_non_finite else []
    )
    loss, time = found.loss_difference, found.time_ratio
    if loss is None or time is None:
        return lines
    seeds = {run.seed for run in found.runs}
    counterparts = [run for run in record.finished if run.start.seed in seeds or not found.same_seeds]
    record_loss = fmean(run.val_loss for run in counterparts)
    record_s = fmean(run.train_time_s for run in record.finished)
    return [
        *lines,
        f"loss     {fmean(losses):.5f}, record {record_loss:.5f} | {loss.mean:+.5f} nats, "
        f"{found.confidence:.0%} between {loss.low:+.5f} and {loss.high:+.5f} ({_NOISE[loss.noise_from]})",
        f"time     {fmean(times_s):.2f} s, record {record_s:.2f} s | {time.mean - 1:+.1%}, "
        f"{found.confidence:.0%} between {time.low - 1:+.1%} and {time.high - 1:+.1%} ({_NOISE[time.noise_from]})",
    ]
