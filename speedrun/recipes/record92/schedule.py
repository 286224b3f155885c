"""The inputs of each step of record 92: what record 89 has, columns of the softmax, events and weights of averages."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from speedrun.base.field_types import Count, Fraction, Momentum, Positive, Rate
from speedrun.recipes.record89 import schedule as record89


@dataclass(frozen=True, slots=True)
class Phase(record89.Phase):
    """Settings of a stage. Prefixes and columns have one value for each of equal parts, or none."""

    prefix_weights: tuple[Rate, ...] = ()
    columns: tuple[Count, ...] = ()  #: of the softmax; none: all
    room: Count = 4  #: of an update of tables, for rows that wait: in batches as large as its own

    def parts(self, done: float) -> dict[str, Any]:
        """Return the values of a part; `done` is 1 after the last step."""
        both = ((each or (0,)) for each in (self.prefix_weights, self.columns))
        prefix, columns = (each[min(int(len(each) * done), len(each) - 1)] for each in both)
        return {"prefix_weight": np.float32(prefix), "has_prefix": prefix > 0, "columns": columns}


@dataclass(frozen=True, slots=True)
class Tail:
    """Which of the last steps an average counts."""

    name: str  #: of the input with the weight of a step
    last_steps: Count  #: the average begins with the weights after the first of them
    rate: Fraction  #: the weight of a step


@dataclass(frozen=True, slots=True)
class Schedule(record89.Phases):
    """The inputs of each step."""

    phases: tuple[Phase, ...]
    short_scale: Positive  #: of attention in the first phase, in layers with short windows
    long_scale: Positive
    one_mean_steps: Count  #: before them, the slow mean of ANVIL only decides which weights decay
    fast_beta: Momentum  #: from then on
    fast_weight: Fraction
    frequent_steps: Count  #: before them, tables are updated every second step, then every fourth
    tails: tuple[Tail, ...]

    def at(self, step: int, num_steps: int) -> dict[str, Any]:
        """Return the inputs of a step; `num_steps` itself is the last validation."""
        index, done = self.progress(step, num_steps)
        inputs, phases = record89.Phases.at(self, step, num_steps), self.phases[: index + 1]
        short, short_scale = self.stretched([phase.short_blocks for phase in phases], self.short_scale)
        long, long_scale = self.stretched([phase.long_blocks for phase in phases], self.long_scale)
        has_two = step >= self.one_mean_steps
        return inputs | {
            "fast_beta": np.float32(self.fast_beta if has_two else inputs["momentum"]),
            "fast_weight": np.float32(self.fast_weight if has_two else 1.0),
            "update_tables": (number := self.update_tables(step) if step < num_steps else 0),
            "rows_room": phases[-1].room if number else 0,
            "tied": np.bool_(step <= self.starts(num_steps)[-1] | 1),
            "short_rotary": short.astype(np.float32),
            "short_scale": np.float32(short_scale),
            "long_rotary": long.astype(np.float32),
            "long_scale": np.float32(long_scale),
            "use_averages": step == num_steps - 1,
            **{tail.name: np.float32(self.rate(tail, step, num_steps)) for tail in self.tails},
            **phases[-1].parts(done),
        }

    def update_tables(self, step: int) -> int:
        """Return the period of the update of the tables after a step, 0 for none."""
        if step < self.frequent_steps:
            return step % 2
        return 2 if step % 4 == 3 else 0

    def rate(self, tail: Tail, step: int, num_steps: int) -> float:
        """Return the weight of a step in an average, 1 where it begins.

        Every fourth step counts, for the blend also the last but one. Head and embedding change at odd steps: each of
        these counts in their average, twice but for the last.
        """
        if (since := step - max(0, num_steps - tail.last_steps)) <= 0:
            return float(since == 0)
        if tail.name == "ema":
            return step % 2 * (1 - (1 - tail.rate) ** min(2, num_steps - step))
        is_last = tail.name == "blend" and step >= num_steps - 2
        return tail.rate if is_last or since % 4 == 0 else 0.0
