"""values: windows with three value embeddings, windows of blocks, half of the rotary, and no attention in layer 7.

Claim: none yet; not run at full size. Published: 3.57 minutes on 8xH100 and 3.2794 (1,261 runs) in 1,490 steps, as
record 17 of 2024-12-17; records 14 to 16, with other forms of the value embeddings, 4.41, 3.95 and 3.80 minutes.
Differs: scalars are float32 (upstream bfloat16).
Run: speedrun run --track main-8xh100 --recipe values
Credits: @KoszarskyB, @leloykun, @YouJiacheng, K. Jordan.
"""

from dataclasses import asdict, replace

from speedrun.recipes import windows
from speedrun.science.models import values
from speedrun.science.recipe import Stage

PARENT = windows.RECIPE
THEN = replace(windows.SCHEDULE.then, cooldown_fraction=600 / 1490, final_window=14.5)
RECIPE = replace(
    PARENT,
    name="values",
    summary="12 layers, 276M parameters, 0.8B tokens: value embeddings, record 17",
    parent="windows",
    config=values.Config(
        **asdict(replace(PARENT.config, block_tokens=128)),
        mixing=(
            *("window", "window", "window", "window", "window", "window"),
            *("window", "none", "window", "window", "window", "window"),
        ),
        value_tables=(0, 1, 2, *(values.NO_TABLE,) * 6, 0, 1, 2),
    ),
    table=values.table,
    forward=values.forward,
    schedule=replace(windows.SCHEDULE, then=THEN),
    stages=(Stage(num_steps=1490, num_sequences=8, seq_len=65536),),
)
