"""Trace a training step for a GPU that is not here, with kernels that state their work instead of computing.

The trace has all that a step computes: model, loss, gradients, optimiser, and what it sends. `fusion` counts it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.extend.core import Jaxpr

from speedrun.base.accelerators import Device
from speedrun.data.synthetic import document_lengths
from speedrun.plan.efficiencies import KIND, Kind
from speedrun.science.kernels import (
    attention_triton,
    cross_entropy_gpu,
    dispatch,
    lookup_triton,
    mlp,
    mlp_gradients,
)
from speedrun.science.kernels.attention import Window
from speedrun.science.kernels.dispatch import Choice, Kernels
from speedrun.train.program import Program

#: Issue slots of a logit in each pass of `cross_entropy_mosaic`: tanh and exp2 take eight each, as an H100 has one
#: special-function unit for eight lanes. With these two, 8 instructions are in the sum and 11 or 14 in the gradient.
HEAD_SLOTS = 16
Struct = jax.ShapeDtypeStruct


def kernel(kind: Kind, results: Sequence[Any], *operands: jax.Array, flops: int = 0, slots: int = 0) -> Any:
    """Stand for a kernel that reads the operands and writes results like these: an equation without a body.

    It states its kind. `slots` are its instructions, where they count.
    """
    axes = max((jax.typeof(x).manual_axis_type for x in operands), key=lambda axes: len(axes.varying))
    out = tuple(Struct(x.shape, x.dtype, manual_axis_type=axes) for x in results)
    cost = pl.CostEstimate(flops=flops, transcendentals=slots, bytes_accessed=0)
    return pl.pallas_call(lambda *_: None, out, cost_estimate=cost, metadata={KIND: kind})(*operands)


def for_device(program: Program, device: Device) -> Program:
    """Return the program with kernels for a GPU of this kind, which state their work."""
    capability, own = "{}.{}".format(*device.compute_capability), replace(program, portable=False)
    kernels = Stated("gpu", capability, program.attention, head_tokens=program.kernels.head_tokens)
    vars(own)["kernels"] = kernels  # a cached property
    return own


def step_jaxpr(program: Program, step: int, device: Device) -> Jaxpr:
    """Return a step of one device, traced for a GPU of this kind, with its integer inputs compiled in."""
    own = for_device(program, device)
    run = own.step.train_function(own.step.plan.static_at(step, integers=True))
    traced = jax.make_jaxpr(run)(own.state, *own.ids(own.shape_at(step)), own.step.plan.schedule)
    (shard_map,) = (one for one in traced.jaxpr.eqns if one.primitive.name == "shard_map")
    return shard_map.params["jaxpr"]


@cache
def visited_pairs(num_tokens: int, window_blocks: int, block_tokens: int) -> tuple[int, int, int]:
    """Count pairs of query and key in the tiles that attention's kernels visit: forward, by queries, by keys.

    Tiles are those of Triton on Hopper; documents have the lengths of FineWeb's.
    """
    # `attention.first_key` and `attention_triton.bounds` in NumPy: XLA would compile both for seconds.
    lengths = document_lengths(num_tokens, seed=0)
    start_T, t_T = np.repeat(np.cumsum(lengths) - lengths, lengths), np.arange(num_tokens)
    first_T = np.maximum(start_T, (t_T // block_tokens - window_blocks + 1) * block_tokens)

    def visited(tiles: attention_triton.Tiles) -> tuple[int, int]:
        """Count by queries, and by keys."""
        first_N = first_T[:: tiles.queries] // tiles.keys
        last_key_M = np.arange(tiles.keys - 1, num_tokens, tiles.keys)
        end_M = -(-np.searchsorted(first_T, last_key_M, side="right") // tiles.queries)
        end_N = -(-np.minimum(np.arange(1, len(first_N) + 1) * tiles.queries, num_tokens) // tiles.keys)
        first_M = np.arange(len(end_M)) * tiles.keys // tiles.queries
        size = tiles.queries * tiles.keys
        return size * int(np.sum(end_N - first_N)), size * int(np.sum(end_M - first_M))

    (forward, _), (by_queries, _), (_, by_keys) = map(visited, attention_triton.HOPPER)
    return forward, by_queries, by_keys


class Stated(Kernels):
    """Operations whose fast implementations state their work."""

    def attention(
        self, q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, first_BT: jax.Array, /, **more: Any
    ) -> jax.Array:
        """Visit the tiles of FineWeb's documents."""
        window: Window = more["window"]
        (rows, num_tokens, heads, _), block_tokens = q_BTHK.shape, more["block_tokens"]
        call = dispatch.AttentionCall(
            q_BTHK.shape, v_BTHK.shape[-1], *self._on(q_BTHK), window.most * block_tokens
        )
        choice = dispatch.choose_attention(self.wanted_attention, call)
        if getattr(choice.function, "func", None) is not attention_triton.attention:
            return super().attention(q_BTHK, k_BTHK, v_BTHK, first_BT, **more)
        blocks = window.blocks if isinstance(window.blocks, int) else window.most
        each = (2 * rows * heads * n for n in visited_pairs(num_tokens, blocks, block_tokens))
        return _attention(_Attended(*each, norms=int(more.get("angles") is not None)), q_BTHK, k_BTHK, v_BTHK)

    def _chosen(self, what: str, choice: Choice) -> Choice:
        """Take the chosen implementation; kernels, and Mosaic's passes over logits, state their work."""
        passes = getattr(choice.function, "keywords", {}).get("passes", cross_entropy_gpu.PASSES)
        stated = _STATED.get((what.partition(" ")[0], choice.name), choice.function)
        if passes != cross_entropy_gpu.PASSES:
            stated = partial(stated, passes=cross_entropy_gpu.Passes(_sum_exp, _softmax_gradient))
        return super()._chosen(what, choice._replace(function=stated))


def _sum_exp(z_NV: jax.Array, *_: Any) -> jax.Array:
    return kernel("head passes", [Struct(z_NV.shape[:1], jnp.float32)], z_NV, slots=HEAD_SLOTS * z_NV.size)[0]


def _softmax_gradient(z_NV: jax.Array, factor_N: jax.Array, _: Any, __: Any, dtype: Any) -> Any:
    shapes = [z_NV.shape, z_NV.shape[::-1]][: 2 if jnp.dtype(dtype).itemsize == 1 else 1]
    results = [Struct(shape, dtype) for shape in shapes]
    return kernel("head passes", results, z_NV, factor_N, slots=HEAD_SLOTS * z_NV.size)


def _stated(forward: Callable[..., Any], backward: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Return the first result of `forward`, differentiated by `backward`."""
    call = jax.custom_vjp(lambda *args: forward(*args)[0], **settings)
    call.defvjp(forward, backward)
    return call


class _Attended(NamedTuple):
    """FLOPs of products over the pairs that each kernel visits, for a column of heads."""

    forward: int
    by_queries: int
    by_keys: int
    norms: int  #: 1 if QK-norm is inside


def _attention_forward(work: _Attended, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    """Two products: of queries and keys, and with values."""
    rows = Struct(q.shape[:-1], jnp.float32)
    if work.norms:
        k, _ = kernel("attention", [k, rows], k)
    o, lse, *normed = kernel(
        "attention", [v, rows, *[q] * work.norms], q, k, v, flops=work.forward * _columns(q, v)
    )
    return o, (*(normed or [q]), k, v, o, lse)


def _columns(*heads: jax.Array) -> int:
    return sum(x.shape[-1] for x in heads)


def _attention_backward(work: _Attended, saved: tuple[jax.Array, ...], do: jax.Array) -> Any:
    """Seven products: scores and their gradients are computed by queries, and again by keys."""
    q, k, v, o, lse = saved
    dq, delta = kernel("attention", [q, lse], q, k, v, o, do, lse, flops=work.by_queries * _columns(q, q, v))
    return dq, *kernel("attention", [k, v], q, k, v, do, lse, delta, flops=2 * work.by_keys * _columns(q, v))


def _mlp_forward(factors: mlp.Factors, x_ND: jax.Array, up_FD: jax.Array, down_DF: jax.Array) -> Any:
    h_NF, flops = Struct((len(x_ND), len(up_FD)), x_ND.dtype), 2 * x_ND.size * len(up_FD)
    if jnp.finfo(factors).bits > 8:
        (h_NF,) = kernel("Mosaic bf16", [h_NF], x_ND, up_FD, flops=flops)
        return h_NF @ down_DF.T, (x_ND, up_FD, down_DF, h_NF)
    bound, most_h = mlp.bounds(x_ND, up_FD)
    (x8_ND, _), (up8_FD, _) = mlp.rounded(x_ND, bound, factors), mlp.rounded_weights(up_FD, factors)
    (down8_DF, _), scale = mlp.rounded_weights(down_DF, factors), mlp.scale_of(most_h, factors)
    h_NF, h8_NF = kernel("Mosaic FP8", [h_NF, Struct(h_NF.shape, factors)], x8_ND, up8_FD, flops=flops)
    y_ND = jnp.einsum("nf,df->nd", h8_NF, down8_DF, preferred_element_type=x_ND.dtype)
    return (y_ND.astype(jnp.float32) * scale).astype(x_ND.dtype), (x_ND, up_FD, down_DF, h_NF)


def _mlp_backward(_: mlp.Factors, saved: tuple[jax.Array, ...], dy_ND: jax.Array) -> Any:
    x_ND, up_FD, down_DF, h_NF = saved
    (dz_NF,) = kernel("Mosaic bf16", [h_NF], dy_ND, down_DF, h_NF, flops=2 * dy_ND.size * len(up_FD))
    return dz_NF @ up_FD, dz_NF.T @ x_ND, dy_ND.T @ h_NF


def _squares(x8_ND: jax.Array, up8_FD: jax.Array, factor: jax.Array, _: Any) -> Any:
    shape, flops = (len(x8_ND), len(up8_FD)), 2 * x8_ND.size * len(up8_FD)
    results = [Struct(one, mlp_gradients.E4M3) for one in (shape, shape[::-1])]
    return kernel("Mosaic FP8", results, x8_ND, up8_FD, factor, flops=flops)


def _slopes(dy_ND: jax.Array, down_DF: jax.Array, h8_NF: jax.Array, factor: jax.Array) -> Any:
    results = [Struct(one, mlp_gradients.E5M2) for one in (h8_NF.shape, h8_NF.shape[::-1])]
    flops = 2 * dy_ND.size * down_DF.shape[1]
    return kernel("Mosaic bf16", results, dy_ND, down_DF, h8_NF, factor, flops=flops)


def _mlp_of_states(x_D: jax.Array, *weights: jax.Array, **how: Any) -> jax.Array:
    if "gradient_scale" in how:
        return mlp_gradients.mlp(x_D, *weights, **how, fused=mlp_gradients.Fused(_squares, _slopes))
    return _mlp(how["factors"], x_D.reshape(-1, x_D.shape[-1]), *weights).reshape(x_D.shape)


def _norm_forward(x_BTHK: jax.Array) -> Any:
    y_BTHK, r_BTH = kernel("elementwise", [x_BTHK, Struct(x_BTHK.shape[:-1], jnp.float32)], x_BTHK)
    return y_BTHK, (y_BTHK, r_BTH)


def _row_sums(saved: tuple[jax.Array, lookup_triton.Order], dy_BTD: jax.Array) -> Any:
    table_VD, by_id = saved
    results = [table_VD, dy_BTD]  # zeros, then rows of at most as many ids as there are tokens
    return kernel("elementwise", results, dy_BTD, *by_id)[0], None, None


_attention = _stated(_attention_forward, _attention_backward, nondiff_argnums=(0,))
_mlp = _stated(_mlp_forward, _mlp_backward, nondiff_argnums=(0,))
_looked_up = _stated(lambda table, ids, by_id: (table[ids], (table, by_id)), _row_sums)
_normed = _stated(_norm_forward, lambda saved, dy: tuple(kernel("elementwise", [dy], dy, *saved)))
#: By the operation and the name of the choice.
_STATED = {
    ("qk_norm", "triton"): lambda q, k, _: (_normed(q), _normed(k)),
    ("mlp", "mosaic"): _mlp_of_states,
    ("lookup", "triton"): _looked_up,
}
