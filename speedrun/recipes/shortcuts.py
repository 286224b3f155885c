"""shortcuts: modern with shortcuts of embedding and values to every layer, capped logits, and a momentum warm-up.

Claim: none yet; not run at full size. Published: 8.2 minutes on 8xH100 and 3.2791 in 3,200 steps, as record 9 of
2024-11-06.
Differs: as modern; and the momentum is a running mean, so old gradients weigh a little more while the momentum rises.
Run: speedrun run --track main-8xh100 --recipe shortcuts
Credits: @Grad62304977, K. Jordan.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from speedrun.base.limits import Count, Momentum
from speedrun.recipes import modern
from speedrun.science.models import shortcuts
from speedrun.science.recipe import Stage

PARENT = modern.RECIPE


@dataclass(frozen=True, slots=True)
class MomentumWarmup:
    """A schedule whose momentum rises linearly to that of another schedule."""

    then: Any  #: the other schedule, which also gives all other inputs
    first_momentum: Momentum
    warmup_steps: Count

    def at(self, step: int, num_steps: int) -> dict[str, Any]:
        """Return the inputs of step `step` (from 0) of `num_steps`."""
        inputs, warm = self.then.at(step, num_steps), min(1.0, step / self.warmup_steps)
        momentum = self.first_momentum + (inputs["momentum"] - self.first_momentum) * warm
        return inputs | {"momentum": np.float32(momentum)}


SCHEDULE = MomentumWarmup(
    then=replace(PARENT.schedule, cooldown_fraction=914 / 3200), first_momentum=0.85, warmup_steps=500
)
RECIPE = replace(
    PARENT,
    name="shortcuts",
    summary="12 layers, 162M parameters, 1.7B tokens: shortcuts and capped logits, record 9",
    parent="modern",
    config=shortcuts.Config(**asdict(PARENT.config), logit_cap=30.0),
    table=shortcuts.table,
    forward=shortcuts.forward,
    logits=shortcuts.logits,
    loss=shortcuts.loss,
    optimizer=replace(PARENT.optimizer, scalar_lr=0.02),
    schedule=SCHEDULE,
    stages=(Stage(num_steps=3200, num_sequences=512, seq_len=1024),),
)
