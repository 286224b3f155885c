"""Training of a fleet of islands: rounds, each followed by an outer step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from speedrun.base.clock import Stopwatch
from speedrun.data.stream import Shape
from speedrun.islands.island import Answer, Order
from speedrun.islands.leases import Leases
from speedrun.islands.outer import Outer, Weights, stepped
from speedrun.islands.rounds import Engine, Lost, Round, Rules, refusal


@dataclass
class Fleet:
    """The weights and everything that moves them. The inner optimisers are on the islands."""

    outer: Outer
    rules: Rules
    every: int  #: inner steps of a round
    quorum: int  #: islands that must answer for a round to count
    config_sha256: str  #: of all islands
    shapes: Sequence[Shape]  #: of the batch of an island at each step
    leases: Leases
    weights: Weights
    velocity: Weights = field(default_factory=dict[str, np.ndarray])
    version: int = 0  #: number of outer steps

    def __post_init__(self) -> None:
        self.velocity = self.velocity or {
            name: np.zeros(x.shape, np.float32) for name, x in self.weights.items()
        }

    @property
    def step(self) -> int:
        """The step of the schedule at which the next round begins."""
        return self.version * self.every

    @property
    def is_done(self) -> bool:
        """Whether all steps of the schedule are done."""
        return self.step >= len(self.shapes)

    def advance(self, engine: Engine) -> Round:
        """Play a round. If enough islands have answered, take the outer step; else their tokens are given again."""
        found = self._play(engine)
        if len(found.answers) < self.quorum:
            for answer in found.answers:
                self.leases.give_back(found.leases[answer.island])
            return found
        parts = [(answer.num_tokens, answer.weights) for answer in found.answers]
        self.weights, self.velocity = stepped(self.outer, self.weights, self.velocity, parts)
        self.version += 1
        return found

    def _play(self, engine: Engine) -> Round:
        """Give every island that is ready an order with a lease of its own; return what came back by the deadline.

        Leases of refused, lost and late islands go back. A late answer is refused in a later round, as it is stale.
        """
        shapes = self.shapes[self.step : self.step + self.every]
        waiting: dict[str, Order] = {}
        for name in engine.islands():
            waiting[name] = Order(self.version, self.step, self.leases.grant(shapes), self.weights)
            engine.send(name, waiting[name])
        granted = {name: order.lease for name, order in waiting.items()}
        watch, taken, refused, lost = Stopwatch(), list[Answer](), list[Lost](), list[Lost]()
        while waiting and (left_s := self.rules.deadline_s - watch.seconds) > 0:
            if (found := engine.receive(left_s)) is None:
                break
            if isinstance(found, Answer) and found.version != self.version:
                # Its island may still answer this round's order.
                refused.append(Lost(found.island, f"stale: of version {found.version}, need {self.version}"))
                continue
            order = waiting.pop(found.island, None)
            if isinstance(found, Lost):
                lost.append(found)
            elif why := refusal(found, order, self.config_sha256, self.rules):
                refused.append(Lost(found.island, why))
            else:
                taken.append(found)
                continue
            if order is not None:
                self.leases.give_back(order.lease)
        for name, order in waiting.items():
            lost.append(Lost(name, f"late: no answer in {self.rules.deadline_s:g} s"))
            self.leases.give_back(order.lease)
        answers = tuple(sorted(taken, key=lambda one: one.lease))
        return Round(self.version, granted, answers, tuple(refused), tuple(lost))
