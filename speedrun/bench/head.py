"""The loss head.

Legend: N tokens, D model, V vocabulary.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from speedrun.bench.timing import Timing, compare
from speedrun.ground import mesh as meshes
from speedrun.ground.errors import UsageError
from speedrun.science.kernels import cross_entropy_gpu
from speedrun.science.kernels.cross_entropy import cross_entropy, summed_cross_entropy

_CAP = 15.0


def head(*, num_tokens: int, model_dim: int, vocab_size: int) -> list[Timing]:
    """Loss and gradients of the vocabulary head: three matrix products are the bound.

    Raises:
        UsageError: if the arguments and one more array of logits are larger than the memory.
    """
    _require_memory(4 * (num_tokens * model_dim + vocab_size * model_dim + 2 * num_tokens * vocab_size))
    kx, kw, kt, kg = jax.random.split(jax.random.key(0), 4)
    x_ND = jax.random.normal(kx, (num_tokens, model_dim))
    head_VD = 0.02 * jax.random.normal(kw, (vocab_size, model_dim))
    targets_N = jax.random.randint(kt, (num_tokens,), 0, vocab_size)
    g_NV = jax.random.normal(kg, (num_tokens, vocab_size))

    is_gpu = jax.default_backend() == "gpu"
    if is_gpu:
        x_ND, head_VD, g_NV = (x.astype(jnp.bfloat16) for x in (x_ND, head_VD, g_NV))

    def products(x_ND: jax.Array, head_VD: jax.Array) -> Any:
        return x_ND @ head_VD.T, g_NV @ head_VD, g_NV.T @ x_ND

    def definition(x_ND: jax.Array, head_VD: jax.Array) -> jax.Array:
        return cross_entropy(x_ND, head_VD, targets_N, cap=_CAP).sum()

    def summed(form: Callable[..., jax.Array]) -> Callable[..., Any]:
        return jax.value_and_grad(lambda x_ND, head_VD: form(x_ND, head_VD, targets_N, cap=_CAP), (0, 1))

    ours = {"for CPUs": summed(summed_cross_entropy)}
    if is_gpu:
        ours = {
            "bf16": summed(cross_entropy_gpu.summed_cross_entropy),
            "fp8": summed(partial(cross_entropy_gpu.summed_cross_entropy, fp8=cross_entropy_gpu.RECORD21)),
        }
    forms = {"three products": products, **ours, "definition": jax.value_and_grad(definition, (0, 1))}
    return compare(forms, x_ND, head_VD)


def _require_memory(need_bytes: int) -> None:
    """XLA ends the process where the host has too little."""
    limit_bytes = meshes.memory_bytes(meshes.make_mesh(1))
    if limit_bytes is None:
        limit_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need_bytes > limit_bytes:
        raise UsageError(
            f"the head takes {need_bytes / 1e9:,.1f} GB or more, there are {limit_bytes / 1e9:,.1f} GB; "
            "ask for fewer --tokens"
        )
