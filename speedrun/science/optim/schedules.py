"""Schedules of values that change between steps. They are traced, so a new value never recompiles."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from speedrun.ground.limits import Blocks, Count, Momentum, Positive, Rate


@dataclass(frozen=True, slots=True)
class Schedule:
    """Record 21's schedules: constant, then linearly falling learning rate; momentum warm-up; growing window."""

    cooldown_fraction: Positive  #: last fraction of training, in which the learning rate falls
    final_lr_scale: Rate
    momentum_start: Momentum
    momentum_end: Momentum
    momentum_steps: Count
    final_window: Blocks  #: blocks; the window is ceil(final_window * progress), at least 1

    def at(self, step: int, num_steps: int) -> dict[str, Any]:
        """Return the inputs of step `step` (from 0) of `num_steps`; `num_steps` itself is the last validation."""
        progress = step / num_steps
        remaining = min(1.0, (1 - progress) / self.cooldown_fraction)
        warm = min(1.0, step / self.momentum_steps)
        return {
            "lr_scale": np.float32(remaining + self.final_lr_scale * (1 - remaining)),
            "momentum": np.float32(self.momentum_start + (self.momentum_end - self.momentum_start) * warm),
            "window_blocks": np.int32(max(1, math.ceil(self.final_window * progress))),
        }
