"""modern: muon with QK-norm, squared ReLU, projections that start at zero, six heads, and an untied, padded head.

Claim: none yet; not run at full size. Published: 10.8 minutes on 8xH100 and 3.2762 in 4,578 steps, as record 8 of
2024-11-03. Records 6 and 7 made record 5 faster (15.2 to 12.0 minutes) without changing it.
Differs: the residual stream is bfloat16 (upstream from record 10 on), rotary angles float32 (upstream rounded them).
Run: speedrun run --track main-8xh100 --recipe modern
Credits: K. Jordan, @Grad62304977.
"""

from dataclasses import dataclass, replace
from functools import partial

import optax

from speedrun.ground.limits import Natural, Rate
from speedrun.science.models import modern
from speedrun.science.optim.groups import Adam, by_group, scale_by_input
from speedrun.science.optim.muon import scale_by_muon, shape_factor
from speedrun.science.params import Dtype, Layout
from speedrun.science.recipe import Stage
from speedrun.science.recipes import muon


@dataclass(frozen=True, slots=True)
class MuonAndAdam:
    """Muon for the matrices, Adam for table and head. Learning rates are peak values, multiplied by `lr_scale`."""

    muon_lr: Rate
    muon_steps: Natural
    muon_dtype: Dtype  #: of the Newton-Schulz iteration
    embed_lr: Rate
    head_lr: Rate
    adam: Adam

    def transform(self, layout: Layout) -> optax.GradientTransformationExtraArgs:
        """Return the transformation of packed parameters."""
        factors = partial(layout.per_matrix, shape_factor)
        matrix = scale_by_muon(factors, steps=self.muon_steps, dtype=self.muon_dtype)
        groups = {
            "matrix": optax.chain(matrix, optax.scale(-self.muon_lr)),
            "embed": self.adam.at(self.embed_lr),
            "head": self.adam.at(self.head_lr),
        }
        return optax.chain(by_group(groups, layout), scale_by_input("lr_scale"))


RECIPE = replace(
    muon.RECIPE,
    name="modern",
    summary="12 layers, 162M parameters, 2.4B tokens: the architecture of record 8",
    parent="muon",
    config=modern.Config(
        vocab_size=50257,
        head_size=50304,
        num_layers=12,
        model_dim=768,
        num_heads=6,
        head_dim=128,
        mlp_dim=3072,
        table_dtype="float32",
    ),
    table=modern.table,
    forward=modern.forward,
    logits=modern.logits,
    loss=modern.loss,
    optimizer=MuonAndAdam(
        muon_lr=0.02,
        muon_steps=5,
        muon_dtype="bfloat16",
        embed_lr=0.3,
        head_lr=0.002,
        adam=Adam(beta1=0.9, beta2=0.95, eps=1e-8),
    ),
    schedule=replace(muon.RECIPE.schedule, cooldown_fraction=1308 / 4578),
    stages=(Stage(num_steps=4578, num_sequences=512, seq_len=1024),),
)
