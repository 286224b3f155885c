"""modern: muon with QK-norm, squared ReLU, projections that start at zero, six heads, and an untied, padded head.

Claim: none yet; not run at full size. Published: 10.8 minutes on 8xH100 and 3.2762 in 4,578 steps, as record 8 of
2024-11-03. Records 6 and 7 made record 5 faster (15.2 to 12.0 minutes) without changing it.
Differs: the residual stream is bfloat16 (upstream from record 10 on), rotary angles float32 (upstream rounded them).
Run: speedrun run --track main-8xh100 --recipe modern
Credits: K. Jordan, @Grad62304977.
"""

from dataclasses import replace

from speedrun.recipes import muon
from speedrun.science.models import modern
from speedrun.science.optim.muon import shape_factor
from speedrun.science.recipe import Stage

PARENT = muon.RECIPE
RECIPE = replace(
    PARENT,
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
    optimizer=replace(PARENT.optimizer, muon_lr=0.02, embed_lr=0.3, head_lr=0.002, factor_of=shape_factor),
    schedule=replace(PARENT.schedule, cooldown_fraction=1308 / 4578),
    stages=(Stage(num_steps=4578, num_sequences=512, seq_len=1024),),
)
