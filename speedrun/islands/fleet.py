"""Training of a fleet of islands: rounds, each followed by an outer step."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from speedrun.base import runlog
from speedrun.base.clock import Stopwatch
from speedrun.base.rounds import Work
from speedrun.data.stream import Shape
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
    score: Callable[[Weights, Order], float]  #: mean loss on the first batch of an order
    velocity: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    version: int = 0  #: number of rounds that counted

    def __post_init__(self) -> None:
        self.late: list[Answer | Lost] = []
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
            orders[name] = Order(self.version, self.step, self.leases.grant(shapes), self.weights)
            engine.send(name, orders[name])
        waiting, watch = dict(orders), Stopwatch()
        works, parts, lost = list[Work](), dict[int, tuple[int, Weights]](), list[Lost]()
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
                why = refusal(found, order, self.config_sha256) or self._worse(found, [*orders.values()])
                if order is not None and work.lease == order.lease.number:
                    del waiting[work.island]  # it may still answer if this was of an earlier order
            if why:
                finite = work.losses if np.isfinite(work.losses).all() else ()
                work = replace(work, refused=why, losses=finite)
            else:
                parts[work.lease] = work.num_tokens, found.weights
                if len(parts) == self.settings.quorum:
                    deadline_s = min(deadline_s, max(_LEAST_S, _PATIENCE * watch.seconds))
            works.append(work)
        lost += [Lost(name, f"late: no answer in {deadline_s:g} s") for name in waiting]
        return orders.values(), works, parts, lost

    def _worse(self, answer: Answer, orders: Sequence[Order]) -> str:
        """Return why weights are not taken that score worse than those that were sent, by more than may be.

        Both are scored on tokens of the next island, which this one was not given, if there is another.
        """
        own = [order.lease.number for order in orders].index(answer.work.lease)
        other, most = orders[(own + 1) % len(orders)], self.settings.max_rise
        before, after = self.score(self.weights, other), self.score(answer.weights, other)
        if after <= before + most:
            return ""
        found = f"its weights cost {after:.3f} nats on lease {other.lease.number}, those sent {before:.3f}"
        return f"{found}; at most {most:g} more"
