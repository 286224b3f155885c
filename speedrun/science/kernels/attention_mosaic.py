"""Attention kernels for Hopper in Pallas for Mosaic GPU: specialised warps overlap copies and products.

The same three kernels as `attention_triton`, with the same bounds of tiles. Each program has two warpgroups that
compute, with one tile of 64 tokens each, and a third that feeds both from one pipeline of TMA copies. Weights pass
through shared memory, and every product starts at zero and is added to sums in registers. Both cost some time, but
JAX's interpreter can run such kernels on a CPU.

Legend: B batch, T time, H heads, K head width; in a kernel C tokens of a warpgroup's tile, P tokens of a piped tile.
Source: the recurrence is that of Dao et al. 2022 and 2023; two warpgroups on one pipeline are from Shah et al. 2024.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from speedrun.science.kernels.attention import Sight, size_refusals
from speedrun.science.kernels.attention_triton import LOG2_E, UNSEEN, bounds
from speedrun.science.kernels.varying import varying_like

#: A warpgroup multiplies 64 rows at a time.
TILE = 64
WARPGROUPS = 2
#: Tokens per program: queries, or in the last kernel keys.
OWN = WARPGROUPS * TILE
#: Tiles in flight. At most `WARPGROUPS`: a pipeline hangs with fewer tiles than stages, and a program visits at least
#: its own tiles.
_STAGES = 2
#: Registers per thread of the copying warpgroup; the others share the rest.
_COPY_REGISTERS = 40


class _Settings(NamedTuple):
    scale: float
    interpret: Any  #: None, or parameters of JAX's interpreter


def attention(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    sight: Sight,
    *,
    scale: float,
    interpret: Any = None,
) -> jax.Array:
    """Compute the definition's value and gradient to the rounding of bfloat16, for any window.

    Queries, keys and values are bfloat16, T is a multiple of 128, K is 64 or 128. `interpret` has parameters of JAX's
    interpreter, to run without a GPU.

    Raises:
        ValueError: if the kernels cannot take this T, K or dtype.
    """
    if reasons := refusals(q_BTHK.shape, q_BTHK.dtype):
        raise ValueError("; ".join(reasons))
    return _attention(q_BTHK, k_BTHK, v_BTHK, sight.first_BT, _Settings(scale, interpret))


def refusals(shape_BTHK: tuple[int, ...], dtype: Any) -> list[str]:
    """Return why the kernels cannot run on this shape and dtype."""
    reasons = size_refusals(shape_BTHK, multiple=OWN, widths=(64, 128))
    return reasons if dtype == jnp.bfloat16 else [*reasons, f"{dtype} inputs; the kernels need bfloat16"]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(
    q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, first_BT: jax.Array, settings: _Settings
) -> Any:
    return _forward(q_BTHK, k_BTHK, v_BTHK, first_BT, settings)[0]


def _forward(
    q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, first_BT: jax.Array, settings: _Settings
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    first_tile_BN = bounds(first_BT, query_tile=OWN, key_tile=TILE).first_key_tile_BN
    rows, tokens, heads, width = q_BTHK.shape
    lse = jax.ShapeDtypeStruct((rows, heads, tokens), jnp.float32)
    o_BTHK, lse_BHT = _call(
        _forward_kernel,
        settings,
        [jax.ShapeDtypeStruct(q_BTHK.shape, q_BTHK.dtype), lse],
        _wide(width, q_BTHK.dtype),
        _wide(TILE, q_BTHK.dtype),
        plgpu.SMEM((WARPGROUPS, TILE), jnp.int32),
        plgpu.SMEM((WARPGROUPS, TILE), jnp.float32),
    )(q_BTHK, k_BTHK, v_BTHK, first_BT, first_tile_BN)
    return o_BTHK, (q_BTHK, k_BTHK, v_BTHK, first_BT, o_BTHK, lse_BHT)


def _backward(settings: _Settings, residuals: tuple[jax.Array, ...], do_BTHK: jax.Array) -> tuple[Any, ...]:
    q_BTHK, k_BTHK, v_BTHK, first_BT, o_BTHK, lse_BHT = residuals
    width, dtype = q_BTHK.shape[3], q_BTHK.dtype
    first_tile_BN = bounds(first_BT, query_tile=OWN, key_tile=TILE).first_key_tile_BN
    end_tile_BM = bounds(first_BT, query_tile=TILE, key_tile=OWN).end_query_tile_BM
    delta_BHT = jnp.einsum("bthk,bthk->bht", o_BTHK, do_BTHK, preferred_element_type=jnp.float32)
    (dq_BTHK,) = _call(
        _query_kernel,
        settings,
        [jax.ShapeDtypeStruct(q_BTHK.shape, dtype)],
        _wide(width, dtype),
        _wide(width, dtype),
        _wide(TILE, dtype),
        plgpu.SMEM((WARPGROUPS, TILE), jnp.float32),
        plgpu.SMEM((WARPGROUPS, TILE), jnp.float32),
        plgpu.SMEM((WARPGROUPS, TILE), jnp.int32),
    )(q_BTHK, k_BTHK, v_BTHK, do_BTHK, lse_BHT, delta_BHT, first_BT, first_tile_BN)
    dk_BTHK, dv_BTHK = _call(
        _key_kernel,
        settings,
        [jax.ShapeDtypeStruct(k_BTHK.shape, dtype), jax.ShapeDtypeStruct(v_BTHK.shape, dtype)],
        _wide(width, dtype),
        _wide(width, dtype),
        _wide(TILE, dtype),
    )(q_BTHK, k_BTHK, v_BTHK, do_BTHK, lse_BHT, delta_BHT, first_BT, end_tile_BM)
    return dq_BTHK, dk_BTHK, dv_BTHK, None


_attention.defvjp(_forward, _backward)


def _forward_kernel(*refs: Any, scale: float) -> None:
    """Process own queries: a running softmax over the key tiles they see, the diagonal last."""
    q, k, v, first, first_tile, o, lse, *scratch = refs
    own_q, own_weights, own_first, own_lse, arrived = (_own(x) for x in scratch)
    at = _Place()
    start_tile = first_tile[at.row, at.index]

    def compute(run: Callable[..., Any]) -> None:
        _load(arrived, (q.at[at.wide], own_q), (first.at[at.row, at.tokens], own_first))
        zeros_CK = jnp.zeros(own_q.shape, jnp.float32)
        o_CK, top_C, sum_C = run((zeros_CK, jnp.full(TILE, UNSEEN), jnp.zeros(TILE)))
        own_q[...] = (o_CK / _columns(sum_C, o_CK.shape[1])).astype(own_q.dtype)
        own_lse[...] = top_C + jnp.log(sum_C) * LOG2_E
        _store((own_q, o.at[at.wide]), (own_lse, lse.at[at.narrow]))

    def visit(step: Any, k_PK: Any, v_PK: Any, k_done: Any, v_done: Any, carry: Any) -> tuple[jax.Array, ...]:
        o_CK, top_C, sum_C = carry
        scores_CP = _product(own_q, k_PK.T) * (scale * LOG2_E)
        plgpu.barrier_arrive(k_done)
        t_CP, s_CP = at.start + _iota(0), (start_tile + step[0]) * TILE + _iota(1)
        scores_CP = _masked(scores_CP, t_CP, s_CP, own_first, _columns)
        new_top_C = jnp.maximum(top_C, jnp.max(scores_CP, axis=1))
        weights_CP = jnp.exp2(scores_CP - _columns(new_top_C))
        shrink_C = jnp.exp2(top_C - new_top_C)
        _put(own_weights, weights_CP)
        o_CK = o_CK * _columns(shrink_C, o_CK.shape[1]) + _product(own_weights, v_PK)
        plgpu.barrier_arrive(v_done)
        return o_CK, new_top_C, sum_C * shrink_C + jnp.sum(weights_CP, axis=1)

    num_tiles = (at.index + 1) * WARPGROUPS - start_tile
    _pipeline(visit, compute, num_tiles, start_tile, _rows_of(k, at), _rows_of(v, at))


def _query_kernel(*refs: Any, scale: float) -> None:
    """Compute dq of own queries, over the key tiles they see."""
    q, k, v, do, lse, delta, first, first_tile, dq, *scratch = refs
    own_q, own_do, own_dscores, own_lse, own_delta, own_first, arrived = (_own(x) for x in scratch)
    at = _Place()
    start_tile = first_tile[at.row, at.index]

    def compute(run: Callable[..., Any]) -> None:
        _load(arrived, (q.at[at.wide], own_q), (do.at[at.wide], own_do))
        _load(arrived, (lse.at[at.narrow], own_lse), (delta.at[at.narrow], own_delta))
        _load(arrived, (first.at[at.row, at.tokens], own_first))
        dq_CK = run(jnp.zeros(own_q.shape, jnp.float32))
        own_q[...] = (dq_CK * scale).astype(own_q.dtype)
        _store((own_q, dq.at[at.wide]))

    def visit(step: Any, k_PK: Any, v_PK: Any, k_done: Any, v_done: Any, dq_CK: Any) -> jax.Array:
        scores_CP = _product(own_q, k_PK.T) * (scale * LOG2_E)
        t_CP, s_CP = at.start + _iota(0), (start_tile + step[0]) * TILE + _iota(1)
        scores_CP = _masked(scores_CP, t_CP, s_CP, own_first, _columns)
        weights_CP = jnp.exp2(scores_CP - _columns(own_lse[...]))
        dweights_CP = _product(own_do, v_PK.T)
        plgpu.barrier_arrive(v_done)
        _put(own_dscores, weights_CP * (dweights_CP - _columns(own_delta[...])))
        dq_CK = dq_CK + _product(own_dscores, k_PK)
        plgpu.barrier_arrive(k_done)
        return dq_CK

    num_tiles = (at.index + 1) * WARPGROUPS - start_tile
    _pipeline(visit, compute, num_tiles, start_tile, _rows_of(k, at), _rows_of(v, at))


def _key_kernel(*refs: Any, scale: float) -> None:
    """Compute dk and dv of own keys, over the query tiles that see them. Scores are transposed throughout."""
    q, k, v, do, lse, delta, first, end_tile, dk, dv, *scratch = refs
    own_k, own_v, own_weights, arrived = (_own(x) for x in scratch)
    at = _Place()
    start_tile = at.index * WARPGROUPS

    def compute(run: Callable[..., Any]) -> None:
        _load(arrived, (k.at[at.wide], own_k), (v.at[at.wide], own_v))
        zeros_CK = jnp.zeros(own_k.shape, jnp.float32)
        dk_CK, dv_CK = run((zeros_CK, zeros_CK))
        own_k[...] = (dk_CK * scale).astype(own_k.dtype)
        own_v[...] = dv_CK.astype(own_v.dtype)
        _store((own_k, dk.at[at.wide]), (own_v, dv.at[at.wide]))

    def visit(step: Any, *refs: Any) -> tuple[jax.Array, jax.Array]:
        q_PK, do_PK, lse_P, delta_P, first_P, *done, (dk_CK, dv_CK) = refs
        scores_CP = _product(own_k, q_PK.T) * (scale * LOG2_E)
        s_CP, t_CP = at.start + _iota(0), (start_tile + step[0]) * TILE + _iota(1)
        scores_CP = _masked(scores_CP, t_CP, s_CP, first_P, _rows)
        weights_CP = jnp.exp2(scores_CP - _rows(lse_P[...]))
        _put(own_weights, weights_CP)
        dv_CK = dv_CK + _product(own_weights, do_PK)
        dweights_CP = _product(own_v, do_PK.T)
        _put(own_weights, weights_CP * (dweights_CP - _rows(delta_P[...])))
        dk_CK = dk_CK + _product(own_weights, q_PK)
        for barrier in done:
            plgpu.barrier_arrive(barrier)
        return dk_CK, dv_CK

    piped = (
        _rows_of(q, at),
        _rows_of(do, at),
        lse.at[at.row, at.head],
        delta.at[at.row, at.head],
        first.at[at.row],
    )
    _pipeline(visit, compute, end_tile[at.row, at.index] - start_tile, start_tile, *piped)


class _Place:
    """The tokens of this warpgroup, and their indices in an operand."""

    def __init__(self) -> None:
        self.index, self.head, self.row = (lax.axis_index(name) for name in ("index", "head", "row"))
        self.start = self.index * OWN + lax.axis_index("warpgroup") * TILE
        self.tokens = pl.ds(self.start, TILE)
        self.wide = (self.row, self.tokens, self.head)  #: of [B, T, H, K]
        self.narrow = (self.row, self.head, self.tokens)  #: of [B, H, T]


def _own(ref: Any) -> Any:
    return ref.at[lax.axis_index("warpgroup")]


def _rows_of(ref: Any, at: _Place) -> Any:
    """Select this program's head and row of [B, T, H, K]."""
    return ref.at[at.row, :, at.head, :]


def _load(arrived: Any, *pairs: tuple[Any, Any]) -> None:
    for source, target in pairs:
        plgpu.copy_gmem_to_smem(source, target, arrived)
        plgpu.barrier_wait(arrived)


def _store(*pairs: tuple[Any, Any]) -> None:
    plgpu.commit_smem()
    for source, target in pairs:
        plgpu.copy_smem_to_gmem(source, target)
    plgpu.wait_smem_to_gmem(0)


def _put(ref: Any, x: jax.Array) -> None:
    """Write to shared memory, for the next product."""
    ref[...] = x.astype(ref.dtype)
    plgpu.commit_smem()


def _product(a: Any, b: Any) -> jax.Array:
    """Multiply two tiles in shared memory; the result is float32 in registers."""

    def multiply(sums: Any) -> jax.Array:
        plgpu.wgmma(sums, a, b)
        return sums[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


def _iota(axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (TILE, TILE), axis)


def _columns(x_C: jax.Array, width: int = TILE) -> jax.Array:
    return lax.broadcast_in_dim(x_C, (TILE, width), (0,))


def _rows(x_P: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(x_P, (TILE, TILE), (1,))


def _masked(
    scores_CP: jax.Array, t_CP: jax.Array, s_CP: jax.Array, first: Any, across: Callable[..., jax.Array]
) -> jax.Array:
    """Mask scores of queries t and keys s; `first` has one number per row or column of the tile."""
    return jnp.where((s_CP <= t_CP) & (s_CP >= across(first[...])), scores_CP, UNSEEN)


def _pipeline(
    visit: Callable[..., Any], compute: Callable[..., None], num_tiles: Any, start_tile: Any, *piped: Any
) -> None:
    """Visit tiles of the piped operands in order, while the next ones are being copied."""
    specs = [
        plgpu.BlockSpec((TILE, *x.shape[1:]), lambda i, x=x: (start_tile + i, *[0] * (len(x.shape) - 1)))
        for x in piped
    ]
    plgpu.emit_pipeline_warp_specialized(
        visit,
        grid=(num_tiles,),
        in_specs=specs,
        max_concurrent_steps=_STAGES,
        num_compute_wgs=WARPGROUPS,
        memory_registers=_COPY_REGISTERS,
        wg_axis="warpgroup",
        manual_consumed_barriers=True,
        compute_context=compute,
    )(*piped)


def _call(
    kernel: Callable[..., None], settings: _Settings, results: list[jax.ShapeDtypeStruct], *scratch: Any
) -> Callable[..., tuple[jax.Array, ...]]:
    """Run a kernel once per tile of `OWN` tokens, head and row."""
    rows, tokens, heads, _ = results[0].shape
    program = plgpu.kernel(
        partial(kernel, scale=settings.scale),
        out_type=results,
        grid=(tokens // OWN, heads, rows),
        grid_names=("index", "head", "row"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=[*scratch, plgpu.Barrier(num_barriers=WARPGROUPS)],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=settings.interpret,
    )
    return lambda *operands: tuple(varying_like(x, operands[0]) for x in program(*operands))


def _wide(width: int, dtype: Any) -> Any:
    """Allocate one tile per warpgroup."""
    return plgpu.SMEM((WARPGROUPS, TILE, width), dtype)
