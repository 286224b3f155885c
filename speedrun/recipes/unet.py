"""unet: shortcuts with skips from the first half of the layers to the second, doubled rates, and a bfloat16 table.

Claim: none yet; not run at full size. Published: 7.2 minutes on 8xH100 and 3.2753 in 3,000 steps, as record 11 of
2024-11-10. The bfloat16 table and residual stream are record 10 (7.8 minutes).
Differs: scalars are float32, and rotary angles too (upstream rounded both); the momentum is a running mean.
Run: speedrun run --track main-8xh100 --recipe unet
Credits: @brendanh0gan, K. Jordan.
"""

from dataclasses import replace

from speedrun.recipes import shortcuts
from speedrun.science.models import unet
from speedrun.science.recipe import Stage

PARENT = shortcuts.RECIPE
SCHEDULE = replace(shortcuts.SCHEDULE, then=replace(shortcuts.SCHEDULE.then, cooldown_fraction=900 / 3000))
RECIPE = replace(
    PARENT,
    name="unet",
    summary="12 layers, 162M parameters, 1.6B tokens: U-net skips, record 11",
    parent="shortcuts",
    config=replace(PARENT.config, table_dtype="bfloat16"),
    table=unet.table,
    forward=unet.forward,
    optimizer=replace(PARENT.optimizer, muon_lr=0.04, embed_lr=0.6, head_lr=0.008, scalar_lr=0.04),
    schedule=SCHEDULE,
    stages=(Stage(num_steps=3000, num_sequences=512, seq_len=1024),),
)
