"""The model of records 12 and 13: long sequences, in which a token sees the last tokens of its own document.

Legend: B batch, T time, D model.
Source: modded-nanogpt, records 12 (@KoszarskyB) and 13 (@fernbear.bsky.social).
"""

from dataclasses import dataclass

import jax

from speedrun.base.limits import Count, Natural
from speedrun.science import nn
from speedrun.science.inputs import Inputs
from speedrun.science.kernels.attention import Window
from speedrun.science.kernels.choose import Kernels
from speedrun.science.models import gpt2, modern, shortcuts, unet
from speedrun.science.params import Params


@dataclass(frozen=True, slots=True)
class Config(shortcuts.Config):
    """Sizes."""

    document_token: Natural  #: opens a document
    block_tokens: Count  #: in which windows are counted


def forward(p: Params, tokens_BT: jax.Array, inputs: Inputs, cfg: Config, kernels: Kernels) -> jax.Array:
    """Return the normalised final hidden states: [B, T, D] in the compute dtype.

    A token sees as many tokens as the blocks of the input `window_blocks` have, itself included.
    """
    doc_BT, blocks = nn.documents(tokens_BT, cfg.document_token), inputs.window("window_blocks")
    # Counted in tokens, so that it slides by single tokens.
    window = Window(blocks.blocks * cfg.block_tokens, blocks.most * cfg.block_tokens)
    attend = gpt2.attend_in(doc_BT, window, 1, cfg.head_dim, kernels)
    return unet.hidden(p, tokens_BT, modern.context(tokens_BT, attend, cfg, kernels), cfg)
