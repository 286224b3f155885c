"""The summary of an experiment as a table of text."""

import math

from speedrun.lab.comparison import RATE_FROM
from speedrun.lab.effects import LEVEL, NEGLIGIBLE, Effect, Finding, Summary
from speedrun.lab.trials import Kind

TITLES: dict[Kind, str] = {
    "features": "without each feature",
    "ladder": "each recipe against its parent",
    "sweep": "with other settings",
}
_HEAD = ("arm", "loss (nats)", "train time", "both (equivalent s)", "p (Holm)", "verdict")
_NOTE = (
    f"paired by seed, 95 % intervals; resolved means Holm's p below {LEVEL:g}; a barnacle is worth less than "
    f"{NEGLIGIBLE:.0%} of the time"
)


def table(found: Summary) -> list[str]:
    """Return the lines: one for each arm, the price of a nat, and what the fresh seeds show."""
    rows = [_HEAD, *(_row(one, found.kind) for one in found.findings)]
    if found.confirmation is not None:
        arm, *rest = _row(found.confirmation, found.kind)
        rows.append((f"{arm}, fresh seeds", *rest))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return [*lines, *_price(found), f"best    {_best(found)}", f"note    {found.standing}: {_NOTE}"]


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
    return one.arm, loss, time, together, p, _verdict(one, kind)


def _interval(effect: Effect | None, digits: str) -> str:
    if effect is None:
        return "-"
    return f"{effect.mean:+{digits}} [{effect.low:+{digits}}, {effect.high:+{digits}}]"


def _verdict(one: Finding, kind: Kind) -> str:
    """Return the verdict in words; with `features`, the arm is the recipe without the feature."""
    if one.verdict == "non-finite":
        return f"{count(one.num_non_finite, 'run')} became non-finite"
    if one.verdict == "unresolved":
        return f"not resolvable with {count(len(one.seeds), 'seed')}{_resolved_alone(one)}"
    if one.verdict == "equal":
        return ("barnacle" if kind == "features" else "no difference") + ": interval covers zero"
    if kind == "features":
        return "worth it" if one.verdict == "worse" else "harmful: better without it"
    return f"{one.verdict} than {one.against!r}"


def _resolved_alone(one: Finding) -> str:
    """Return whether loss or time is resolved by itself: noise in the time does not blur the loss."""
    alone = [
        f"{what} alone is: {'better' if effect.mean < 0 else 'worse'}"
        for what, effect in (("loss", one.loss), ("time", one.log_time))
        if effect is not None and effect.adjusted_p < LEVEL
    ]
    return f" ({', '.join(alone)})" if alone else ""


def _price(found: Summary) -> list[str]:
    """Return the price of a nat for each arm that others are compared with."""
    prices = {one.against: one.s_per_nat for one in found.findings if one.s_per_nat is not None}
    lines = [f"price   {s_per_nat:.1f} s a nat for {name!r}" for name, s_per_nat in prices.items()]
    return [*lines, f"price   {RATE_FROM}"] if lines else []


def _best(found: Summary) -> str:
    if found.winner is None:
        return "no arm gains anything; nothing to confirm"
    if (fresh := found.confirmation) is None:
        return f"{found.winner}: not confirmed, because no fresh seeds ran"
    confirmed = "confirmed" if found.confirmed else "NOT confirmed"
    return f"{found.winner}: {confirmed} by {count(len(fresh.seeds), 'fresh seed')}"
