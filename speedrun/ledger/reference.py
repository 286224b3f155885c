"""Reference loss curves by track: validation losses of honest runs.

A loss far below the curve calls for a replay.
"""

from bisect import bisect_left
from typing import NamedTuple


class Point(NamedTuple):
    """A validation loss in nats per token, after a number of training tokens."""

    tokens: int
    loss: float


_RECORD_21_STEP = 393_216  #: tokens
#: Means of ten public runs of record 21, by step; they differ by 0.002 to 0.007 nats (modded-nanogpt, 2025).
_RECORD_21 = {
    0: 10.8258, 125: 4.6488, 250: 4.1033, 375: 3.9003, 500: 3.7505, 625: 3.6642, 750: 3.6007, 875: 3.5510,
    1000: 3.5129, 1125: 3.4724, 1250: 3.4249, 1375: 3.3813, 1500: 3.3435, 1625: 3.3092, 1750: 3.2823, 1770: 3.2793,
}  # fmt: skip
_FINEWEB = tuple(Point(step * _RECORD_21_STEP, loss) for step, loss in _RECORD_21.items())

#: By the name of the track. That of smoke-cpu is the record 2026-11-21-first.
CURVES: dict[str, tuple[Point, ...]] = {
    "main-8xh100": _FINEWEB,
    "single-gpu": _FINEWEB,
    "smoke-cpu": (Point(0, 5.5452), Point(204_800, 4.1676), Point(409_600, 3.2990), Point(573_440, 3.1783)),
}


def expected_loss(curve: tuple[Point, ...], tokens: int) -> float:
    """Return the loss of the curve's next point at or after a number of tokens, or of its last point.

    There is no linear interpolation: loss curves are convex, so honest runs would lie below it.
    """
    place = bisect_left(curve, tokens, key=lambda point: point.tokens)
    return curve[min(place, len(curve) - 1)].loss
