"""The optimiser that Muon replaced, for tests that compare the two."""

from dataclasses import dataclass

import optax

from speedrun.science.optim.groups import Adam, by_group, scale_by_input
from speedrun.science.params import Layout


@dataclass(frozen=True, slots=True)
class AdamOnly:
    """Adam for everything: what Muon replaced (record 2024-10-04)."""

    matrix_lr: float
    embed_lr: float
    head_lr: float
    scalar_lr: float
    adam: Adam

    def transform(self, layout: Layout) -> optax.GradientTransformationExtraArgs:
        """One transformation for each group."""
        groups = {
            "matrix": self.adam.at(self.matrix_lr),
            "embed": self.adam.at(self.embed_lr),
            "head": self.adam.at(self.head_lr),
            "scalar": self.adam.at(self.scalar_lr),
        }
        return optax.chain(by_group(groups, layout), scale_by_input("lr_scale"))
