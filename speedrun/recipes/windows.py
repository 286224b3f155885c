"""windows: unet on 8 long sequences, with attention inside documents and a window that grows.

Claim: none yet; not run at full size. Published: 4.66 minutes on 8xH100 and 3.2759 in 1,750 steps, as record 13 of
2024-11-24; record 12, with a constant window of 1,024 tokens, 5.03 minutes.
Differs: as unet.
Run: speedrun run --track main-8xh100 --recipe windows
Credits: modded-nanogpt, records 12 (@KoszarskyB) and 13 (@fernbear.bsky.social, K. Jordan).

Legend: B batch, T time, D model.
"""

from dataclasses import asdict, dataclass, replace

import jax

from speedrun.base.field_types import Count, Natural
from speedrun.recipes import gpt2, modern, shortcuts, unet
from speedrun.science import nn
from speedrun.science.inputs import Inputs
from speedrun.science.kernels.attention import Window
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.optim.muon_and_adam import Adam
from speedrun.science.params import Params
from speedrun.science.recipe import Expected, Stage


@dataclass(frozen=True, slots=True)
class Config(shortcuts.Config):
    """Sizes."""

    document_token: Natural  #: starts a document
    block_tokens: Count  #: tokens per block of a window


def forward(p: Params, tokens_BT: jax.Array, inputs: Inputs, cfg: Config, kernels: Kernels) -> jax.Array:
    """Return the normalised final hidden states: [B, T, D] in the compute dtype.

    A token sees as many tokens as `window_blocks` blocks have, including itself.
    """
    doc_BT, blocks = nn.documents(tokens_BT, cfg.document_token), inputs.window("window_blocks")
    # In blocks of one token, so that the window slides by tokens.
    window = Window(blocks.blocks * cfg.block_tokens, blocks.most * cfg.block_tokens)
    attend = gpt2.attend_in(doc_BT, window, 1, cfg.head_dim, kernels)
    return unet.hidden(p, tokens_BT, modern.context(tokens_BT, attend, cfg, kernels), cfg)


PARENT = unet.RECIPE
THEN = replace(unet.SCHEDULE.then, cooldown_fraction=640 / 1750, final_window=28.0, window_grows="down")
SCHEDULE = replace(unet.SCHEDULE, then=THEN, warmup_steps=300)
RECIPE = replace(
    PARENT,
    name="windows",
    summary="12 layers, 162M parameters, 0.9B tokens: documents and growing windows, record 13",
    parent="unet",
    config=Config(**asdict(PARENT.config), document_token=50256, block_tokens=64),
    forward=forward,
    optimizer=replace(PARENT.optimizer, muon_lr=0.05, adam=Adam(beta1=0.8, beta2=0.95, eps=1e-8)),
    schedule=SCHEDULE,
    stages=(Stage(num_steps=1750, num_sequences=8, seq_len=65536),),
    eval_sequences=8,
    eval_seq_len=65536,
    expected=Expected("windows", "main-8xh100", 3.2759, None, 1, "modded-nanogpt, record 13"),
)
