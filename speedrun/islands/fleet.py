"""Training of a fleet of islands: rounds, each followed by an outer step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from speedrun.data.stream import Shape
from speedrun.islands.leases import Leases
from speedrun.islands.outer import Outer, Weights, stepped
from speedrun.islands.rounds import Engine, Round, Rules, play


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
        shapes = self.shapes[self.step : self.step + self.every]
        found = play(
            engine, self.version, self.step, self.weights, self.leases, shapes, self.config_sha256, self.rules
        )
        if len(found.answers) < self.quorum:
            for answer in found.answers:
                self.leases.give_back(found.leases[answer.island])
            return found
        parts = [(answer.num_tokens, answer.weights) for answer in found.answers]
        self.weights, self.velocity = stepped(self.outer, self.weights, self.velocity, parts)
        self.version += 1
        return found
