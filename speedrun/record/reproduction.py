"""`reproduction.json`: the runs of a referee who ran a record again, and the verdict that follows from them.

The loss is compared on any hardware, the time on hardware of the same kind. Intervals are 99 %, so one of a hundred
honest reproductions is called a mismatch.
"""

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Literal, NamedTuple

import msgspec

from speedrun.base import runlog
from speedrun.base.console import clean
from speedrun.record.layout import Strict
from speedrun.record.logged_run import Run
from speedrun.record.statistics import FEW_RUNS, Interval, sd

REPRODUCTION = "reproduction.json"
CONFIDENCE = 0.99

#: Share of the train time within which times count as equal; nodes of one kind differ by 0.4 % (modded-nanogpt, #160).
SAME_TIME = 0.01
#: Relative sd of single runs in records with few runs; for times, a lower bound. Measured for smoke-cpu on 2 shared
#: cores (losses: 60 seeds), and for GPU times in the same issue.
_TIME_SD = {"cpu": 0.05, "gpu": 0.005}
LOSS_SD = 0.0036
#: Lowest ratio of two benchmarks of the same hardware; shared CPUs vary more than GPUs.
SAME_BENCH = {"cpu": 0.5, "gpu": 0.85}

Verdict = Literal["within", "faster", "slower", "loss mismatch", "not the same hardware"]
NoiseFrom = Literal["runs", "track", "assumed"]


class Point(Strict, frozen=True):
    """One comparison of the record with this machine."""

    what: str
    recorded: str
    here: str
    equal: bool
    lost: str  #: what is no longer guaranteed if they differ; else empty


class Hardware(Strict, frozen=True):
    """Hardware of a run, measured at its start."""

    platform: str
    device_kind: str
    num_devices: int
    matmul_gflops: float


class Outcome(Strict, frozen=True):
    """One run of the reproduction."""

    run_id: str
    seed: int
    outcome: runlog.Outcome
    val_loss: float | None  #: None: it became non-finite
    train_time_s: float | None
    final_hash: str
    hardware: Hardware


class Reproduction(Strict, frozen=True, tag_field="schema", tag="speedrun.reproduction/2"):
    """`reproduction.json`."""

    record_id: str
    track: str  #: name and version
    by: str  #: name of the referee; may be empty
    created_utc: str  #: when the seeds were drawn
    software: dict[str, str]
    same_seeds: bool  #: whether seeds are the record's, and not fresh
    points: tuple[Point, ...]  #: all that was compared before the runs
    runs: tuple[Outcome, ...]


class Difference(Interval, frozen=True):
    """A mean difference or ratio to the record, and its 99 % interval."""

    noise_from: NoiseFrom


class Judgement(Reproduction, frozen=True):
    """A reproduction, the verdict on the record, and what led to it."""

    hardware: tuple[Point, ...]  #: whether times are comparable
    loss_difference: Difference | None  #: nats, these runs minus the record; None: no run finished
    time_ratio: Difference | None  #: ranked train time, these runs over the record
    num_same_bits: int | None  #: runs with the same final state as in the record; None with fresh seeds
    verdict: Verdict


class Noise(NamedTuple):
    """The sd of single runs."""

    sd: float
    freedom: int | None  #: degrees of freedom; None: the sd is taken as known
    origin: NoiseFrom


def noise(numbers: Sequence[float], otherwise: float, origin: NoiseFrom) -> Noise:
    """Return the record's own sd; if it has few runs, the larger of that and `otherwise`.

    The runs of the reproduction do not count, since a failed one would widen its own interval.
    """
    own = sd(numbers) or 0.0
    if len(numbers) > FEW_RUNS:
        return Noise(own, len(numbers) - 1, "runs")
    return Noise(max(own, otherwise), None, origin if otherwise >= own else "runs")


def difference(first: Sequence[float], second: Sequence[float], scatter: Noise) -> Difference:
    """Return mean(second) - mean(first) +- quantile * sd * sqrt(1 / n + 1 / m)."""
    from scipy import special

    tail = (1 + CONFIDENCE) / 2
    reach = special.ndtri(tail) if scatter.freedom is None else special.stdtrit(scatter.freedom, tail)
    half = float(reach) * scatter.sd * math.sqrt(1 / len(first) + 1 / len(second))
    mean = fmean(second) - fmean(first)
    return Difference(mean, mean - half, mean + half, scatter.origin)


def loss_difference(
    record: Sequence[Run], here: Sequence[Outcome], sigma: float | None, *, same_seeds: bool
) -> Difference:
    """Return the loss of these runs minus the record's; `sigma` is the track's sd over seeds.

    The same seeds do not reduce the noise: unless the bits are equal, runs of one seed end like runs of two.
    """
    losses = [run.val_loss for run in record]
    scatter = noise(losses, sigma or LOSS_SD * fmean(losses), "track" if sigma else "assumed")
    seeds = {run.seed for run in here}
    counterparts = [run.val_loss for run in record if run.start.seed in seeds or not same_seeds]
    return difference(counterparts, [run.val_loss for run in here if run.val_loss is not None], scatter)


def time_ratio(record: Sequence[Run], here: Sequence[Outcome]) -> Difference:
    """Return the train time of these runs over the record's, as a ratio of geometric means."""
    logs = [math.log(run.train_time_s) for run in record]
    assumed = _TIME_SD.get(record[0].preflight.platform, max(_TIME_SD.values()))
    scatter = noise(logs, assumed, "assumed")
    if scatter.sd < assumed:  # one machine does not show how machines of its kind differ
        scatter = Noise(assumed, None, "assumed")
    found = difference(logs, [math.log(run.train_time_s) for run in here if run.train_time_s], scatter)
    return Difference(math.exp(found.mean), math.exp(found.low), math.exp(found.high), scatter.origin)


def outcome_of(run: Run) -> Outcome:
    """Return the facts of a finished or non-finite run that `reproduction.json` keeps."""
    loss, time_s = (run.val_loss, run.train_time_s) if run.finished else (None, None)
    hw = run.preflight
    here = Hardware(hw.platform, hw.device_kind, hw.num_devices, hw.matmul_gflops)
    return Outcome(run.folder, run.start.seed, run.outcome, loss, time_s, run.final_hash, here)


def point(what: str, recorded: str, here: str, *, equal: bool | None = None, lost: str = "") -> Point:
    """Compare two untrusted texts; `equal` replaces their comparison."""
    same = recorded == here if equal is None else equal
    return Point(clean(what), clean(recorded), clean(here), same, "" if same else lost)


def hardware_points(recorded: Sequence[Hardware], here: Sequence[Hardware]) -> tuple[Point, ...]:
    """Compare devices, and the median benchmark of each side."""
    first = recorded[0], here[0]
    kinds = [f"{one.num_devices} x {one.device_kind} ({one.platform})" for one in first]
    rates = [median(one.matmul_gflops for one in side) for side in (recorded, here)]
    near = min(rates) >= SAME_BENCH.get(first[0].platform, max(SAME_BENCH.values())) * max(rates) > 0
    shown = [f"{rate:,.0f} Gflop/s" for rate in rates]
    devices = point("devices", *kinds, lost="comparable times, and equal bits")
    busy = "comparable times: another machine, or a busy one"
    return devices, point("bench", *shown, equal=near, lost=busy)


def judged(found: Reproduction, record: Sequence[Run], sigma: float | None) -> Judgement:
    """Judge the finished runs of a record by a reproduction without a `runs_problem`; `sigma` is the track's."""
    done = [run for run in found.runs if run.outcome == "finished"]
    loss = loss_difference(record, done, sigma, same_seeds=found.same_seeds) if done else None
    time = time_ratio(record, done) if done else None
    old = [outcome_of(run) for run in record]
    hardware = hardware_points([run.hardware for run in old], [run.hardware for run in found.runs])
    hashes = {run.seed: run.final_hash for run in old}
    num_same_bits = sum(hashes.get(run.seed) == run.final_hash for run in done)
    return Judgement(
        **msgspec.structs.asdict(found),
        hardware=hardware,
        loss_difference=loss,
        time_ratio=time,
        num_same_bits=num_same_bits if found.same_seeds else None,
        verdict=verdict(loss, time, hardware, len(found.runs) - len(done)),
    )


def verdict(
    loss: Difference | None, time: Difference | None, hardware: Sequence[Point], num_non_finite: int = 0
) -> Verdict:
    """Judge by the loss, then by the hardware, then by the time."""
    if loss is None or time is None or num_non_finite or not loss.low <= 0 <= loss.high:
        return "loss mismatch"
    if not all(point.equal for point in hardware):
        return "not the same hardware"
    if time.low <= 1 <= time.high or abs(time.mean - 1) <= SAME_TIME:
        return "within"
    return "faster" if time.mean < 1 else "slower"


def runs_problem(found: Reproduction, record: Sequence[Run]) -> str | None:
    """Return why no verdict follows from the runs of a file, or None."""
    seeds, known = [run.seed for run in found.runs], {run.start.seed for run in record}
    done = [run for run in found.runs if run.outcome == "finished"]
    if not seeds or len(set(seeds)) != len(seeds):
        return "needs runs with distinct seeds"
    own = {fact for run in record for fact in (run.folder, run.train_time_s)}
    if any(fact in own for run in found.runs for fact in (run.run_id, run.train_time_s)):
        return "holds a run of the record itself"
    if not (known.issuperset(seeds) if found.same_seeds else known.isdisjoint(seeds)):
        return f"needs seeds that are {'those of the record' if found.same_seeds else 'new'}, as it says; has others"
    if any(not (run.val_loss and (run.train_time_s or 0) > 0) for run in done):
        return "a finished run has no loss, or no time"
    if any(run.outcome == "aborted" for run in found.runs):
        return "holds a run that crashed"
    if any(run.train_time_s <= 0 for run in record):
        return "a run of the record took no time, so there is nothing to compare with"
    return None
