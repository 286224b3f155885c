"""windows: unet on 8 long sequences, with attention inside documents and a window that grows.

Claim: none yet; not run at full size. Published: 4.66 minutes on 8xH100 and 3.2759 in 1,750 steps, as record 13 of
2024-11-24; record 12, with a constant window of 1,024 tokens, 5.03 minutes.
Differs: as unet.
Run: speedrun run --track main-8xh100 --recipe windows
Credits: @KoszarskyB, @fernbear.bsky.social, K. Jordan.
"""

from dataclasses import asdict, replace

from speedrun.recipes import unet
from speedrun.science.models import windows
from speedrun.science.optim.groups import Adam
from speedrun.science.recipe import Stage

PARENT = unet.RECIPE
THEN = replace(unet.SCHEDULE.then, cooldown_fraction=640 / 1750, final_window=28.0, window_grows="down")
SCHEDULE = replace(unet.SCHEDULE, then=THEN, warmup_steps=300)
RECIPE = replace(
    PARENT,
    name="windows",
    summary="12 layers, 162M parameters, 0.9B tokens: documents and growing windows, record 13",
    parent="unet",
    config=windows.Config(**asdict(PARENT.config), document_token=50256, block_tokens=64),
    forward=windows.forward,
    optimizer=replace(PARENT.optimizer, muon_lr=0.05, adam=Adam(beta1=0.8, beta2=0.95, eps=1e-8)),
    schedule=SCHEDULE,
    stages=(Stage(num_steps=1750, num_sequences=8, seq_len=65536),),
    eval_sequences=8,
    eval_seq_len=65536,
)
