"""muon: gpt2 with Muon for the matrices, rotary, a constant learning rate with a linear end, and no biases.

Claim: none yet; not run at full size. Published: 22.3 minutes on 8xH100 and 3.2785 in 6,200 steps, as record 4 of
2024-10-11; record 3, with the first Muon, 24.9 minutes.
Differs: the residual stream is bfloat16 (upstream from record 10 on); the RMS norm has an epsilon of 1e-7, not 1e-6.
Run: speedrun run --track main-8xh100 --recipe muon
Credits: K. Jordan, J. Bernstein (@jxbz), @bozavlado.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import optax

from speedrun.ground.limits import Momentum, Natural, Positive, Rate
from speedrun.science.models import muon
from speedrun.science.optim.groups import Adam, by_group, scale_by_input
from speedrun.science.optim.muon import scale_by_muon
from speedrun.science.params import Dtype, Layout, Member
from speedrun.science.recipe import Stage
from speedrun.science.recipes import gpt2


def longer_side_root(matrix: Member) -> float:
    """Return the scale that gives the entries of an orthogonal matrix a mean square of one."""
    return math.sqrt(max(matrix.rows, matrix.cols))


@dataclass(frozen=True, slots=True)
class MuonAndAdam:
    """Muon for the matrices, Adam for the table. Learning rates are peak values, multiplied by `lr_scale`."""

    muon_lr: Rate  #: root mean square of an update's entries
    muon_steps: Natural
    muon_dtype: Dtype  #: of the Newton-Schulz iteration
    head_lr: Rate
    adam: Adam

    def transform(self, layout: Layout) -> optax.GradientTransformationExtraArgs:
        """Return the transformation of packed parameters."""
        factors = partial(layout.per_matrix, longer_side_root)
        matrix = scale_by_muon(factors, steps=self.muon_steps, dtype=self.muon_dtype)
        groups = {
            "matrix": optax.chain(matrix, optax.scale(-self.muon_lr)),
            "head": self.adam.at(self.head_lr),
        }
        return optax.chain(by_group(groups, layout), scale_by_input("lr_scale"))


@dataclass(frozen=True, slots=True)
class Trapezoid:
    """A constant learning rate that falls linearly to zero at the end, and a constant momentum of Muon."""

    cooldown_fraction: Positive  #: last fraction of training, in which the learning rate falls
    momentum: Momentum

    def at(self, step: int, num_steps: int) -> dict[str, Any]:
        """Return the inputs of step `step` (from 0) of `num_steps`."""
        remaining = min(1.0, (1 - step / num_steps) / self.cooldown_fraction)
        return {"lr_scale": np.float32(remaining), "momentum": np.float32(self.momentum)}


RECIPE = replace(
    gpt2.RECIPE,
    name="muon",
    summary="12 layers, 124M parameters, 3.3B tokens: Muon and rotary, record 4",
    parent="gpt2",
    config=muon.Config(
        vocab_size=50257,
        num_layers=12,
        model_dim=768,
        num_heads=12,
        head_dim=64,
        mlp_dim=3072,
    ),
    table=muon.table,
    forward=muon.forward,
    optimizer=MuonAndAdam(
        muon_lr=0.00036,
        muon_steps=5,
        muon_dtype="bfloat16",
        head_lr=0.0036,
        adam=Adam(beta1=0.9, beta2=0.95, eps=1e-8),
    ),
    schedule=Trapezoid(cooldown_fraction=1800 / 6200, momentum=0.95),
    stages=(Stage(num_steps=6200, num_sequences=512, seq_len=1024),),
)
