"""Compares the arms of an experiment: paired differences, their tests, and a table.

A difference is an arm minus its reference, for one seed; losses are nats per token, times are ranked seconds, and a
loss counts as time at a fixed price of a nat. Intervals are Student's t, 95 %. Tests are two-sided, and p is adjusted
by Holm over all arms, separately for each measure.
"""

import math
from collections.abc import Sequence

import msgspec

from speedrun.lab.experiments import Arm, Experiment, Kind, Runs, Status
from speedrun.record.statistics import NEGLIGIBLE, RATE_FROM, Effect, Finding, Verdict, compared

#: Significance level of the adjusted p.
LEVEL = 0.05


class Summary(msgspec.Struct, frozen=True, tag_field="schema", tag="speedrun.experiment-summary/2"):
    """`summary.json` of an experiment, derived from its runs."""

    status: Status
    experiment_sha256: str
    kind: Kind
    track: str
    num_runs: int  #: complete
    findings: tuple[Finding, ...]  #: in the order of the arms
    winner: str | None  #: the arm with the lowest mean of equivalent seconds below zero
    confirmation: Finding | None  #: the winner on fresh seeds; the best of many arms looks better than it is


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted by Holm, which is valid for dependent tests (here, they share an arm).

        adjusted p of the i-th smallest, from 0 = max over j <= i of min(1, (m - j) p_j)

    Source: Holm 1979, A simple sequentially rejective multiple test procedure.
    """
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = least
    return adjusted


def findings(pairs: Sequence[tuple[Arm, Arm]], seeds: Sequence[int], runs: Runs) -> tuple[Finding, ...]:
    """Compare the arms of each pair on these seeds, and adjust p over the pairs."""
    found = [_finding(arm, other, seeds, runs) for arm, other in pairs]
    for measure in ("loss", "log_time", "together_s"):
        tested = [(place, effect) for place, one in enumerate(found) if (effect := getattr(one, measure))]
        for (place, effect), p in zip(tested, holm([effect.p for _, effect in tested]), strict=True):
            adjusted = msgspec.structs.replace(effect, adjusted_p=p)
            found[place] = msgspec.structs.replace(found[place], **{measure: adjusted})
    return tuple(msgspec.structs.replace(one, verdict=_verdict(one)) for one in found)


def _finding(arm: Arm, other: Arm, seeds: Sequence[int], runs: Runs) -> Finding:
    """Compare two arms; leave the adjusted p and the verdict to `findings`."""
    ended = [seed for seed in seeds if (arm.name, seed) in runs]
    finished = {key for key, run in runs.items() if run.finished}
    paired = [seed for seed in ended if {(arm.name, seed), (other.name, seed)} <= finished]
    pairs = {seed: (runs[other.name, seed], runs[arm.name, seed]) for seed in paired}
    found = compared(arm.name, other.name, pairs)
    num_non_finite = sum(not runs[arm.name, seed].finished for seed in ended)
    return msgspec.structs.replace(found, num_non_finite=num_non_finite)


def _verdict(found: Finding) -> Verdict:
    """Judge by equivalent seconds; "equal" needs an interval that excludes every worthwhile difference."""
    effect = found.together_s
    if found.num_non_finite:
        return "non-finite"
    if effect is None or found.negligible_s is None:
        return "unresolved"
    if effect.adjusted_p < LEVEL:
        return "better" if effect.mean < 0 else "worse"
    if effect.low <= 0 <= effect.high and max(-effect.low, effect.high) <= found.negligible_s:
        return "equal"
    return "unresolved"


def winner(found: Sequence[Finding]) -> Finding | None:
    """Return the arm with the largest mean gain, resolved or not; None if none gains."""
    gains = [
        (one.together_s.mean, place)
        for place, one in enumerate(found)
        if one.together_s is not None and one.together_s.mean < 0 and one.verdict != "non-finite"
    ]
    return found[min(gains)[1]] if gains else None


def summary(experiment: Experiment, sha256: str, runs: Runs) -> Summary:
    """Summarize the runs so far."""
    pairs = [(arm, experiment.arm(arm.against)) for arm in experiment.arms if arm.against is not None]
    found = findings(pairs, experiment.seeds, runs)
    best = winner(found)
    confirmation = None
    if best is not None and experiment.confirming:
        pair = (experiment.arm(best.arm), experiment.arm(best.against))
        confirmation = findings([pair], experiment.confirming, runs)[0]
    return Summary(
        status=experiment.status,
        experiment_sha256=sha256,
        kind=experiment.kind,
        track=experiment.track.id,
        num_runs=len(runs),
        findings=found,
        winner=best and best.arm,
        confirmation=confirmation,
    )


# --- the table ------------------------------------------------------------------------------------------

_HEAD = ("arm", "loss (nats)", "train time", "both (equivalent s)", "p (Holm)", "verdict")
_NOTE = (
    f"paired by seed, 95 % intervals; resolved: Holm's p is below {LEVEL:g}; barnacle: worth less than "
    f"{NEGLIGIBLE:.0%} of the time"
)


def table(found: Summary) -> list[str]:
    """Return a line for each arm, the price of a nat, and the result of the fresh seeds."""
    rows = [_HEAD, *(_row(one, found.kind) for one in found.findings)]
    if found.confirmation is not None:
        arm, *rest = _row(found.confirmation, found.kind)
        rows.append((f"{arm}, fresh seeds", *rest))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    prices = {one.against: one.s_per_nat for one in found.findings if one.s_per_nat is not None}
    lines += [f"price   {s_per_nat:.1f} s a nat for {name!r}" for name, s_per_nat in prices.items()]
    lines += [f"price   {RATE_FROM}"] if prices else []
    return [*lines, f"best    {_best(found)}", f"note    {found.status}: {_NOTE}"]


def count(number: int, noun: str) -> str:
    """Return a number and its noun: `2 runs`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _row(one: Finding, kind: Kind) -> tuple[str, ...]:
    time = "-"
    if (effect := one.log_time) is not None:
        mean, low, high = (100 * math.expm1(x) for x in (effect.mean, effect.low, effect.high))
        time = f"{mean:+.1f} % [{low:+.1f}, {high:+.1f}]"
    p = "-" if one.together_s is None else f"{one.together_s.adjusted_p:.2g}"
    loss, together = _interval(one.loss, ".4f"), _interval(one.together_s, ".2f")
    return one.arm, loss, time, together, p, _in_words(one, kind)


def _interval(effect: Effect | None, digits: str) -> str:
    if effect is None:
        return "-"
    return f"{effect.mean:+{digits}} [{effect.low:+{digits}}, {effect.high:+{digits}}]"


def _in_words(one: Finding, kind: Kind) -> str:
    """Describe the verdict; with "features", the arm is the recipe without the feature."""
    if one.verdict == "non-finite":
        return f"{count(one.num_non_finite, 'run')} became non-finite"
    if one.verdict == "unresolved":
        return f"not resolvable with {count(len(one.seeds), 'seed')}"
    if one.verdict == "equal":
        return ("barnacle" if kind == "features" else "no difference") + ": interval covers zero"
    if kind == "features":
        return "worth it" if one.verdict == "worse" else "harmful: better without it"
    return f"{one.verdict} than {one.against!r}"


def _best(found: Summary) -> str:
    if found.winner is None:
        return "no arm is better; nothing to confirm"
    if (fresh := found.confirmation) is None or not fresh.seeds:
        return f"{found.winner}: not confirmed, because no fresh seeds ran"
    confirmed = "confirmed" if fresh.verdict == "better" else "NOT confirmed"
    return f"{found.winner}: {confirmed} by {count(len(fresh.seeds), 'fresh seed')}"
