"""Attention in every form that runs here.

Legend: B batch, T time, H heads, K head width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from speedrun.bench.timing import FormTimings, compare_forms
from speedrun.ground import mesh as meshes
from speedrun.ground.errors import unknown
from speedrun.science.kernels.attention import Sight, sight
from speedrun.science.kernels.choose import ATTENTION, AttentionCall, choose_attention

_SCALE = 0.12


def attention(
    *,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    window_blocks: int,
    block_tokens: int,
    document_tokens: int,
    without: Sequence[str] = (),
) -> FormTimings:
    """Every form but those `without`, on one sequence of equally long documents; in bfloat16 on a GPU, else in float32.

    Raises:
        UsageError: if a form is to be left out that there is not.
    """
    if strange := sorted(set(without) - {*ATTENTION}):
        raise unknown("form of attention", strange[0], ATTENTION)
    forms = {name: form for name, form in ATTENTION.items() if name not in without}
    platform, compute_capability = meshes.accelerator(meshes.make_mesh(1))
    dtype = jnp.dtype(jnp.bfloat16 if platform == "gpu" else jnp.float32)
    call = AttentionCall(
        shape_BTHK=(1, num_tokens, num_heads, head_dim),
        dtype=dtype,
        platform=platform,
        compute_capability=compute_capability,
        block_tokens=block_tokens,
        max_window_blocks=window_blocks,
        static_window_blocks=window_blocks,
        max_documents=-(-num_tokens // document_tokens),
    )
    doc_BT = (jnp.arange(num_tokens) // document_tokens)[None]
    seen = sight(doc_BT, jnp.int32(window_blocks), block_tokens)
    do, *qkv = jax.random.normal(jax.random.key(0), (4, *call.shape_BTHK), dtype)

    def value_and_gradients(form: Callable[..., jax.Array]) -> Callable[..., Any]:
        def run(do: jax.Array, seen: Sight, *qkv: jax.Array) -> tuple[jax.Array, ...]:
            o_BTHK, pull = jax.vjp(lambda *qkv: form(*qkv, seen, scale=_SCALE), *qkv)
            return o_BTHK, *pull(do)

        return run

    return compare_forms(forms, choose_attention, call, value_and_gradients, do, seen, *qkv)
