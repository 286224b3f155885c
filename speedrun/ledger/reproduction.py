"""`reproduction.json`: what came out when somebody ran a record again, and what that says of the record.

Two questions, one answer each. Is the loss the record's, within the noise of single runs? Is the time, on hardware of
its kind? Intervals are 99 %: of a hundred honest reproductions one would be called a mismatch, not five.
"""

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev
from typing import Literal, NamedTuple

import msgspec

from speedrun.ground import runlog
from speedrun.ground.console import clean
from speedrun.ledger import runfile
from speedrun.ledger.format import Hardware
from speedrun.ledger.run import Run
from speedrun.ledger.statistics import FEW_RUNS, Interval, difference_interval

REPRODUCTION = "reproduction.json"
CONFIDENCE = 0.99

#: Of the train time: nodes of one kind differ by so much (modded-nanogpt, issue 160: 0.4 %), and nobody is called slow.
SAME_TIME = 0.01
#: Sd of single runs, where a record has too few to tell; of time, at least this. Time: smoke-cpu on 2 shared cores,
#: 5 %; a GPU node, by the same issue. Loss, as a share of it: smoke-cpu over seeds, 0.04 of 3.2.
_TIME_SD = {"cpu": 0.05, "gpu": 0.005}
_LOSS_SD = 0.0125
#: The bench of a machine of the same kind, by that of the record, where nothing else tells CPUs apart; and of GPUs.
_SAME_BENCH = {"cpu": 0.5, "gpu": 0.85}

#: The points that decide whether times compare.
HARDWARE = ("devices", "bench")

Verdict = Literal["within", "faster", "slower", "loss mismatch", "not the same hardware"]
NoiseFrom = Literal["runs", "track", "assumed"]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base: every key is known."""


class Point(_Strict, frozen=True):
    """One thing that was looked at before or after the runs: what the record says, and what is here."""

    what: str
    recorded: str
    here: str
    equal: bool
    lost: str  #: what is no longer promised where they differ; else empty


class Outcome(_Strict, frozen=True):
    """One run of the reproduction."""

    run_id: str
    seed: int
    outcome: runfile.Outcome
    val_loss: float | None  #: None: it became non-finite
    train_time_s: float | None
    final_hash: str


class Difference(_Strict, frozen=True):
    """A mean difference or ratio to the record, and the interval that holds the true one."""

    mean: float
    low: float
    high: float
    noise_from: NoiseFrom  #: where the sd of single runs is from


class Reproduction(_Strict, frozen=True, tag_field="schema", tag=runfile.REPRODUCTION_SCHEMA):
    """`reproduction.json`."""

    record_id: str
    track: str  #: name and version
    by: str  #: who, as they call themselves; may be empty
    created_utc: str  #: when its seeds were fixed
    hardware: Hardware  #: of the first run
    software: dict[str, str]
    same_seeds: bool  #: those of the record; else fresh ones
    points: tuple[Point, ...]  #: all that was compared, equal or not
    runs: tuple[Outcome, ...]
    confidence: float  #: of both intervals
    loss_difference: Difference | None  #: nats, this less the record; None: no run finished
    time_ratio: Difference | None  #: ranked train time, this by the record
    num_same_bits: int | None  #: runs that end in the record's own state; None with fresh seeds
    verdict: Verdict


class Noise(NamedTuple):
    """How much single runs scatter."""

    sd: float
    freedom: int | None  #: None: the sd is taken as known
    origin: NoiseFrom


def noise(numbers: Sequence[float], otherwise: float, origin: NoiseFrom) -> Noise:
    """Sd of single runs: the record's own, or where it has few, the larger of that and another one.

    Only the record's runs are asked: those of a reproduction that went wrong would excuse themselves.
    """
    sd = stdev(numbers) if len(numbers) > 1 else 0.0
    if len(numbers) > FEW_RUNS:
        return Noise(sd, len(numbers) - 1, "runs")
    return Noise(max(sd, otherwise), None, origin if otherwise >= sd else "runs")


def difference(first: Sequence[float], second: Sequence[float], scatter: Noise) -> Interval:
    """Mean of the second less that of the first, 99 %."""
    return difference_interval(first, second, scatter.sd, freedom=scatter.freedom, confidence=CONFIDENCE)


def loss_difference(
    record: Sequence[Run], here: Sequence[Outcome], sigma: float | None, *, same_seeds: bool
) -> Difference:
    """Loss of these runs less that of the record's: of all its runs, or of those with the same seeds.

    Args:
        record: its finished runs.
        here: finished runs.
        sigma: sd over seeds that the track knows.
        same_seeds: compare run by run. Where the bits are not equal, rounding grows until two runs of one seed differ
            as those of two seeds do (README), so that the noise is the same.
    """
    losses = [run.val_loss for run in record]
    scatter = noise(losses, sigma or _LOSS_SD * fmean(losses), "track" if sigma else "assumed")
    seeds = {run.seed for run in here}
    counterparts = [run.val_loss for run in record if run.file.seed in seeds or not same_seeds]
    found = difference(counterparts, [run.val_loss for run in here if run.val_loss is not None], scatter)
    return _kept(found.mean, found.low, found.high, scatter)


def time_ratio(record: Sequence[Run], here: Sequence[Outcome], platform: str) -> Difference:
    """Train time of these runs by that of the record's, as the ratio of geometric means; seeds do not matter."""
    logs = [math.log(run.train_time_s) for run in record]
    assumed = _TIME_SD.get(platform, max(_TIME_SD.values()))
    scatter = noise(logs, assumed, "assumed")
    if scatter.sd < assumed:  # runs of one hour on one machine do not tell how machines of a kind differ
        scatter = Noise(assumed, None, "assumed")
    found = difference(logs, [math.log(run.train_time_s) for run in here if run.train_time_s], scatter)
    return _kept(math.exp(found.mean), math.exp(found.low), math.exp(found.high), scatter)


def _kept(mean: float, low: float, high: float, scatter: Noise) -> Difference:
    """Nine digits: the next ones differ between versions of SciPy, and a file is read by all of them."""
    mean, low, high = (float(f"{number:.9g}") for number in (mean, low, high))
    return Difference(mean, low, high, scatter.origin)


def num_same_bits(record: Sequence[Run], here: Sequence[Outcome]) -> int:
    """How many runs end in the very state in which the record's run of their seed ended."""
    hashes = {run.file.seed: run.file.final_hash for run in record}
    return sum(hashes.get(run.seed) == run.final_hash for run in here)


def outcome_of(run: Run) -> Outcome:
    """What is kept of a run that came to an end."""
    file, done = run.file, run.finished
    loss, time_s = (run.val_loss, run.train_time_s) if done else (None, None)
    return Outcome(file.run_id, file.seed, file.outcome, loss, time_s, file.final_hash)


def hardware_of(run: Run) -> Hardware:
    """What a run saw before it began."""
    hw = run.of(runlog.Preflight)[0]
    return Hardware(hw.platform, hw.device_kind, hw.num_devices, hw.matmul_gflops)


def point(what: str, recorded: str, here: str, *, equal: bool | None = None, lost: str = "") -> Point:
    """A point of texts that may be anybody's; equal if they are, unless said otherwise."""
    same = recorded == here if equal is None else equal
    return Point(clean(what), clean(recorded), clean(here), same, "" if same else lost)


def hardware_points(recorded: Sequence[Hardware], here: Sequence[Hardware]) -> tuple[Point, ...]:
    """Kind and number of devices, and what they reached on the bench before the runs: the median of each side."""
    theirs, ours = recorded[0], here[0]
    their_kind, our_kind = (
        f"{one.num_devices} x {one.device_kind} ({one.platform})" for one in (theirs, ours)
    )
    rates = [median(one.matmul_gflops for one in side) for side in (recorded, here)]
    their_rate, our_rate = (f"{rate:,.0f} Gflop/s" for rate in rates)
    same = _SAME_BENCH.get(theirs.platform, max(_SAME_BENCH.values()))
    near = min(rates) >= same * max(rates) > 0
    return (
        point(HARDWARE[0], their_kind, our_kind, lost="times that compare, and equal bits"),
        point(
            HARDWARE[1],
            their_rate,
            our_rate,
            equal=near,
            lost="times that compare: another machine, or a busy one",
        ),
    )


def concluded(found: Reproduction, record: Sequence[Run], sigma: float | None) -> Reproduction:
    """The same with all that follows from its runs and points: both differences, how sure, the bits, the verdict.

    Args:
        found: a reproduction, with whatever in those places.
        record: finished runs of the record.
        sigma: sd of losses over seeds that the track knows.
    """
    done = [run for run in found.runs if run.outcome == "finished"]
    loss = loss_difference(record, done, sigma, same_seeds=found.same_seeds) if done else None
    time = time_ratio(record, done, record[0].file.platform) if done else None
    return msgspec.structs.replace(
        found,
        confidence=CONFIDENCE,
        loss_difference=loss,
        time_ratio=time,
        num_same_bits=num_same_bits(record, done) if found.same_seeds else None,
        verdict=verdict(loss, time, found.points, len(found.runs) - len(done)),
    )


def verdict(
    loss: Difference | None, time: Difference | None, points: Sequence[Point], num_non_finite: int = 0
) -> Verdict:
    """One word for all of it: first the loss, which is the same everywhere; then whether times compare; then they."""
    if loss is None or time is None or num_non_finite or not loss.low <= 0 <= loss.high:
        return "loss mismatch"
    if not all(point.equal for point in points if point.what in HARDWARE):
        return "not the same hardware"
    if time.low <= 1 <= time.high or abs(time.mean - 1) <= SAME_TIME:
        return "within"
    return "faster" if time.mean < 1 else "slower"


def runs_problem(found: Reproduction, record: Sequence[Run]) -> str | None:
    """Why nothing can be computed of the runs that a file names, or None."""
    seeds, known = [run.seed for run in found.runs], {run.file.seed for run in record}
    if not seeds or len(set(seeds)) != len(seeds):
        return "needs runs, each with a seed of its own"
    if found.same_seeds and not known.issuperset(seeds):
        return "says that its seeds are those of the record, which has others"
    if any(
        run.outcome == "finished" and not (run.val_loss and (run.train_time_s or 0) > 0) for run in found.runs
    ):
        return "a run that finished has no loss, or no time"
    if any(run.outcome == "aborted" for run in found.runs):
        return "holds a run that came to no end"
    if sorted(point.what for point in found.points if point.what in HARDWARE) != sorted(HARDWARE):
        return f"needs one point each for {' and '.join(HARDWARE)}"
    if any(run.train_time_s <= 0 for run in record):
        return "a run of the record took no time, so there is none to compare with"
    return None


def encode(found: Reproduction) -> bytes:
    """As it stands in the file: indented, so that people and `diff` can read it."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"


def decode(raw: bytes) -> Reproduction:
    """Reads what `encode` wrote, and nothing else.

    Raises:
        FormatError: it is something else.
    """
    try:
        found = msgspec.json.decode(raw, type=Reproduction)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise runfile.FormatError(f"{REPRODUCTION}: {runfile.newer(raw) or error}") from None
    if encode(found) != raw:
        raise runfile.FormatError(f"{REPRODUCTION}: not in canonical form (a key twice, or other spacing)")
    return found
