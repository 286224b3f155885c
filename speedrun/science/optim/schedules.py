"""Schedules of values that change between steps. They are traced, so new values do not recompile."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from speedrun.base.field_types import Blocks, Count, Momentum, Natural, Positive, Rate


@dataclass(frozen=True, slots=True)
class Schedule:
    """Warm-up and cool-down of the learning rate, a ramp of the momentum, and a growing window.

    The inputs are `lr_scale`, and `momentum` and `window_blocks` if their final values are given.
    """

    cooldown_fraction: Positive  #: part of the steps after the warm-up in which the learning rate falls
    final_lr_scale: Rate = 0.0
    cooldown: Literal["linear", "cosine"] = "linear"
    warmup_steps: Natural = 0  #: in which the learning rate rises linearly
    momentum_start: Momentum = 0.0
    momentum_end: Momentum | None = None
    momentum_steps: Count = 1  #: in which the momentum goes from start to end
    final_window: Blocks | None = None
    window_grows: Literal["up", "down"] = "up"  #: from 0 and rounded up, or from 1 and rounded down

    def at(self, step: int, num_steps: int) -> dict[str, Any]:
        """Return the inputs of step `step` (from 0) of `num_steps`; `num_steps` itself is the last validation."""
        progress = max(0, step - self.warmup_steps) / max(1, num_steps - self.warmup_steps)
        remaining = min(1.0, (1 - progress) / self.cooldown_fraction)
        if self.cooldown == "cosine":
            remaining = (1 + math.cos(math.pi * (1 - remaining))) / 2
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        lr_scale = warm * (remaining + self.final_lr_scale * (1 - remaining))
        inputs: dict[str, Any] = {"lr_scale": np.float32(lr_scale)}
        if self.momentum_end is not None:
            rise = min(1.0, step / self.momentum_steps) * (self.momentum_end - self.momentum_start)
            inputs["momentum"] = np.float32(self.momentum_start + rise)
        if self.final_window is not None:
            up = math.ceil(self.final_window * (step / num_steps))
            down = 1 + math.floor((self.final_window - 1) * step / num_steps)
            inputs["window_blocks"] = np.int32(max(1, up if self.window_grows == "up" else down))
        return inputs
