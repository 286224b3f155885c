"""Which transformation moves which group of parameters, as values a recipe holds.

Learning rates are those of full strength; the schedule's `lr_scale` multiplies every update in the step.
"""

from dataclasses import dataclass

import optax

from speedrun.optim.muon import scale_by_muon
from speedrun.params import Group

Transforms = dict[Group, optax.GradientTransformation]


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam with bias correction, no weight decay."""

    beta1: float
    beta2: float
    eps: float

    def at(self, lr: float) -> optax.GradientTransformation:
        """The transformation with its learning rate."""
        return optax.chain(optax.scale_by_adam(self.beta1, self.beta2, self.eps), optax.scale(-lr))


@dataclass(frozen=True, slots=True)
class MuonAndAdam:
    """Muon for the matrices inside blocks, Adam for tables, head and scalars (record 21)."""

    muon_lr: float
    muon_steps: int
    embed_lr: float
    head_lr: float
    scalar_lr: float
    adam: Adam

    def transforms(self) -> Transforms:
        """One transformation a group."""
        return {
            "matrix": optax.chain(scale_by_muon(steps=self.muon_steps), optax.scale(-self.muon_lr)),
            "embed": self.adam.at(self.embed_lr),
            "head": self.adam.at(self.head_lr),
            "scalar": self.adam.at(self.scalar_lr),
        }


@dataclass(frozen=True, slots=True)
class AdamOnly:
    """Adam for everything: what Muon replaced (record 2024-10-04)."""

    matrix_lr: float
    embed_lr: float
    head_lr: float
    scalar_lr: float
    adam: Adam

    def transforms(self) -> Transforms:
        """One transformation a group."""
        return {
            "matrix": self.adam.at(self.matrix_lr),
            "embed": self.adam.at(self.embed_lr),
            "head": self.adam.at(self.head_lr),
            "scalar": self.adam.at(self.scalar_lr),
        }
