"""QK-norm and rotary in every form that runs here: memory alone is the bound.

Legend: B batch, T time, H heads, K head width.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from speedrun.bench.timing import FormTimings, compare_forms
from speedrun.ground import mesh as meshes
from speedrun.science import nn
from speedrun.science.kernels.choose import QK_NORM, QkNormCall, choose_qk_norm


def norm(*, num_tokens: int, num_heads: int, head_dim: int) -> FormTimings:
    """Value and gradients of every form, on one sequence; in bfloat16 on a GPU, else in float32."""
    platform, compute_capability = meshes.accelerator(meshes.make_mesh(1))
    dtype = jnp.dtype(jnp.bfloat16 if platform == "gpu" else jnp.float32)
    call = QkNormCall(head_dim, dtype, platform, compute_capability)
    qk, dqk = jax.random.normal(jax.random.key(0), (2, 2, 1, num_tokens, num_heads, head_dim), dtype)
    angles = nn.rotary_angles(num_tokens, head_dim)

    def value_and_gradients(form: Callable[..., Any]) -> Callable[..., Any]:
        def run(q_BTHK: jax.Array, k_BTHK: jax.Array, *dy: jax.Array) -> Any:
            y, pull = jax.vjp(lambda q_BTHK, k_BTHK: form(q_BTHK, k_BTHK, angles), q_BTHK, k_BTHK)
            return y, pull(dy)

        return run

    return compare_forms(QK_NORM, choose_qk_norm, call, value_and_gradients, *qk, *dqk)
