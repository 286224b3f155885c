"""Training of a fleet of islands: rounds, each followed by an outer step."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from speedrun.base import runlog
from speedrun.base.clock import Stopwatch
from speedrun.base.rounds import Work
from speedrun.data.stream import Cursor, Shape
from speedrun.islands.rounds import Answer, Engine, Leases, Lost, Order, Weights, digest, refusal, stepped

#: Once a quorum has answered, the others have as much time again.
_PATIENCE = 2.0
_LEAST_S = 1.0  #: of that time, for rounds of milliseconds


class Played(NamedTuple):
    """What came of a round."""

    round: runlog.Round
    lost: tuple[Lost, ...]

    @property
    def used(self) -> list[Work]:
        """The works whose weights were used."""
        return [one for one in self.round.works if not one.refused]


@dataclass
class Fleet:
    """The weights and everything that moves them. The inner optimisers are on the islands."""

    settings: runlog.Islands
    config_sha256: str  #: of all islands
    shapes: Sequence[Shape]  #: of the batch of an island at each step
    leases: Leases
    weights: dict[str, np.ndarray]
    score: Callable[[Weights, Cursor, int], float]  #: mean loss on the batch from there, as at a step
    velocity: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    version: int = 0  #: number of rounds that counted

    def __post_init__(self) -> None:
        self.late: list[Answer | Lost] = []
        #: Islands that keep their moments: all that they answered last was used. Else steps that do not count would
        #: move their optimisers, and each loss of a round make the next one more likely.
        self.steady = set[str]()
        self.velocity = self.velocity or {
            name: np.zeros(x.shape, np.float32) for name, x in self.weights.items()
        }

    @property
    def step(self) -> int:
        """The step of the schedule at which the next round begins."""
        return min(self.version * self.settings.every, len(self.shapes))

    def poll(self, engine: Engine, timeout_s: float) -> None:
        """Wait for something between two rounds, and keep it for the next one."""
        if (found := engine.receive(timeout_s)) is not None:
            self.late.append(found)

    def advance(self, engine: Engine) -> Played:
        """Play a round. If enough islands have answered, take the outer step; else their tokens are given again."""
        orders, works, parts, lost = self._play(engine)
        counts = len(parts) >= self.settings.quorum
        for order in orders:
            if not (counts and order.lease.number in parts):
                self.leases.returned.append(order.lease)
        if not counts:
            short = f"only {len(parts)} of {self.settings.quorum} answered"
            works = [one if one.refused else replace(one, refused=short) for one in works]
        self.steady = {one.island for one in works if not one.refused} - {
            one.island for one in works if one.refused
        }
        num_bytes = sum(x.nbytes for x in self.weights.values()) * (len(orders) + len(works))
        found = runlog.Round(self.version, tuple(works), num_bytes)
        if counts:
            in_order = [part for _, part in sorted(parts.items())]
            self.weights, self.velocity = stepped(self.settings, self.weights, self.velocity, in_order)
            self.version += 1
            found = replace(found, digest=digest(self.weights))
        return Played(found, tuple(lost))

    def _play(
        self, engine: Engine
    ) -> tuple[Collection[Order], list[Work], dict[int, tuple[int, Weights]], list[Lost]]:
        """Give every island that is ready an order with a lease of its own; sort what comes back in time.

        Return the orders, all works, tokens and weights of the good ones by lease, and losses. The answer of a late
        island is refused in a later round, as it is stale. The deadline is shorter once there is a quorum, so that an
        island that is mute costs the others little.
        """
        shapes, deadline_s = self.shapes[self.step :][: self.settings.every], self.settings.deadline_s
        orders: dict[str, Order] = {}
        for name in engine.islands():
            lease, is_fresh = self.leases.grant(shapes), name not in self.steady
            orders[name] = Order(self.version, self.step, lease, self.weights, is_fresh)
            engine.send(name, orders[name])
        waiting, watch = dict(orders), Stopwatch()
        works, answers, lost = list[Work](), dict[int, Answer](), list[Lost]()
        while self.late or waiting:
            found = self.late.pop(0) if self.late else engine.receive(max(0.0, deadline_s - watch.seconds))
            if found is None:
                break
            if isinstance(found, Lost):
                lost.append(found)
                waiting.pop(found.island, None)
                continue
            work = found.work
            why = f"stale: of version {work.version}, need {self.version}"
            if work.version == self.version:
                order = waiting.get(work.island)
                why = refusal(found, order, self.config_sha256)
                if order is not None and work.lease == order.lease.number:
                    del waiting[work.island]  # it may still answer if this was of an earlier order
            if why:
                finite = work.losses if np.isfinite(work.losses).all() else ()
                work = replace(work, refused=why, losses=finite)
            else:
                answers[work.lease] = found
                if len(answers) == self.settings.quorum:
                    deadline_s = min(deadline_s, max(_LEAST_S, _PATIENCE * watch.seconds))
            works.append(work)
        lost += [Lost(name, f"late: no answer in {deadline_s:g} s") for name in waiting]
        parts, harmful = self._harmless(answers)
        works = [one if one.refused else replace(one, refused=harmful.get(one.lease, "")) for one in works]
        return orders.values(), works, parts, lost

    def _harmless(self, answers: dict[int, Answer]) -> tuple[dict[int, tuple[int, Weights]], dict[int, str]]:
        """Return tokens and weights of the answers that do no harm, by lease, and why the others are refused.

        All are scored on one batch, which is drawn now from the text so far. The limit is `max_rise` above the weights
        that were sent, or above the median of the answers (of two, the better one) if that is worse. The outer step has
        the same limit: answers are left out until it keeps it, as weights of one function may not have a mean.
        """
        start, why = self._drawn(), dict[int, str]()
        scores = {lease: self.score(one.weights, start, self.step) for lease, one in answers.items()}
        known = [math.inf if math.isnan(x) else x for x in scores.values()]
        before = self.score(self.weights, start, self.step)
        limit = max(before, median_low(known or [before])) + self.settings.max_rise
        for lease, x in scores.items():
            if not x <= limit:
                why[lease] = f"its weights cost {x:.3f} nats, and may cost {limit:.3f}"
        parts = {key: (one.work.num_tokens, one.weights) for key, one in answers.items() if key not in why}

        def together(leases: Collection[int]) -> float:
            own = [parts[lease] for lease in sorted(leases)]
            return self.score(stepped(self.settings, self.weights, self.velocity, own)[0], start, self.step)

        while len(parts) > 1 and not (cost := together(parts)) <= limit:
            without = {lease: together(parts.keys() - {lease}) for lease in parts}
            out = min(without, key=lambda lease: without[lease])
            del parts[out]
            why[out] = f"the mean costs {cost:.3f} nats with its weights, {without[out]:.3f} without"
        return parts, why

    def _drawn(self) -> Cursor:
        """Draw a place in the text so far, which nobody knows before."""
        shape, (shard, offset) = self.shapes[self.step], self.leases.stream.cursor
        size = shape.num_sequences * shape.seq_len
        batches = max(1, offset // size)  # a batch begins where those of a run do, as models may rely on that
        return Cursor(shard, size * int(np.random.default_rng().integers(batches)))
