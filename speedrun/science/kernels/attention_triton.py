"""Attention kernels in Pallas for Triton, which skip fully masked tiles.

There is one forward kernel, and two backward ones: by queries (dq) and by keys (dk, dv), so that sums need no atomics
and are deterministic. Plain JAX computes which tiles each program visits (`Bounds`).

Legend: B batch, T time, H heads, K head width; inside a kernel C queries of a tile, S keys of a tile;
N tiles of queries, M tiles of keys.
Source: the recurrence is that of Dao et al. 2022 and 2023, FlashAttention 1 and 2.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

#: Scores are in base 2: exp2 is one instruction.
LOG2_E = math.log2(math.e)
#: Score of a masked pair. Finite, because a row may see nothing in its first tile, and inf - inf is NaN.
UNSEEN = -1e30


class Tiles(NamedTuple):
    """Tile sizes in tokens, and launch parameters of a kernel."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int  #: of the software pipeline


#: 128 queries of width 128 take 32 KB of shared memory; each stage of keys and values takes as much.
FORWARD = Tiles(queries=128, keys=64, num_warps=8, num_stages=3)
BACKWARD = Tiles(queries=64, keys=64, num_warps=4, num_stages=2)
BACKWARD_ON_8 = BACKWARD._replace(num_warps=8)  #: with four warps, registers spill on 8.x


class Bounds(NamedTuple):
    """Range of tiles to visit. It is exact, because `first` is non-decreasing; the other end is the diagonal."""

    first_key_tile_BN: jax.Array  #: i32, for each tile of queries
    end_query_tile_BM: jax.Array  #: i32, exclusive, for each tile of keys


def bounds(first_BT: jax.Array, *, query_tile: int, key_tile: int) -> Bounds:
    """Return the tile of the lowest key of each query tile, and the end of the queries that see each key tile."""
    last_key_M = jnp.arange(key_tile - 1, first_BT.shape[1], key_tile)
    search = partial(jnp.searchsorted, v=last_key_M, side="right", method="scan_unrolled")
    end_BM = jax.vmap(search)(first_BT)
    return Bounds(first_BT[:, ::query_tile] // key_tile, (-(-end_BM // query_tile)).astype(jnp.int32))


def attention(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    first_BT: jax.Array,
    *,
    scale: float,
    forward: Tiles = FORWARD,
    backward: Tiles = BACKWARD,
    interpret: bool = False,
) -> jax.Array:
    """Compute `attention.attention` to the rounding of the inputs' dtype, for shapes that `refusals` permits.

    Scores, sums and accumulators are float32. Weights and their gradients are rounded to the dtype of the values
    before each product. The backward pass recomputes scores, so memory is linear in T.
    """
    return _attention(q_BTHK, k_BTHK, v_BTHK, first_BT, _Settings(scale, forward, backward, interpret))


def refusals(shape_BTHK: tuple[int, ...]) -> list[str]:
    """Return why the kernels cannot run on this shape."""
    _, num_tokens, _, head_dim = shape_BTHK
    multiple = math.lcm(FORWARD.queries, FORWARD.keys, BACKWARD.queries, BACKWARD.keys)
    reasons = []
    if num_tokens % multiple:
        reasons.append(f"sequences of {num_tokens:,} tokens; the kernels need a multiple of {multiple}")
    if head_dim not in (16, 32, 64, 128):
        reasons.append(f"heads of {head_dim} dimensions; the kernels need 16, 32, 64 or 128")
    return reasons


class _Settings(NamedTuple):
    scale: float
    forward: Tiles
    backward: Tiles
    interpret: bool


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(
    q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, first_BT: jax.Array, settings: _Settings
) -> jax.Array:
    return _forward(q_BTHK, k_BTHK, v_BTHK, first_BT, settings)[0]


def _forward(
    q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, first_BT: jax.Array, settings: _Settings
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    tiles = settings.forward
    seen = bounds(first_BT, query_tile=tiles.queries, key_tile=tiles.keys)
    operands = q_BTHK, k_BTHK, v_BTHK, first_BT, seen.first_key_tile_BN
    results = _like(q_BTHK, v_BTHK.dtype, q_BTHK.shape), _like(q_BTHK, jnp.float32, _rows(q_BTHK))
    parts = "tile all all tile one"
    o_BTHK, lse_BHT = _call(_forward_kernel, tiles.queries, tiles, settings, parts, operands, results)
    return o_BTHK, (q_BTHK, k_BTHK, v_BTHK, first_BT, o_BTHK, lse_BHT)


def _backward(settings: _Settings, residuals: tuple[jax.Array, ...], do_BTHK: jax.Array) -> tuple[Any, ...]:
    q_BTHK, k_BTHK, v_BTHK, first_BT, o_BTHK, lse_BHT = residuals
    tiles = settings.backward
    seen = bounds(first_BT, query_tile=tiles.queries, key_tile=tiles.keys)
    operands = q_BTHK, k_BTHK, v_BTHK, o_BTHK, do_BTHK, lse_BHT, first_BT, seen.first_key_tile_BN
    results = _like(q_BTHK, q_BTHK.dtype, q_BTHK.shape), _like(q_BTHK, jnp.float32, _rows(q_BTHK))
    parts = "tile all all tile tile tile tile one"
    dq_BTHK, delta_BHT = _call(_query_kernel, tiles.queries, tiles, settings, parts, operands, results)
    operands = q_BTHK, k_BTHK, v_BTHK, do_BTHK, lse_BHT, delta_BHT, first_BT, seen.end_query_tile_BM
    results = _like(k_BTHK, k_BTHK.dtype, k_BTHK.shape), _like(v_BTHK, v_BTHK.dtype, v_BTHK.shape)
    parts = "all tile tile all all all all one"
    dk_BTHK, dv_BTHK = _call(_key_kernel, tiles.keys, tiles, settings, parts, operands, results)
    return dq_BTHK, dk_BTHK, dv_BTHK, None


_attention.defvjp(_forward, _backward)


def _forward_kernel(*refs: Any, scale: float, tiles: Tiles) -> None:
    """Process a tile of queries: a running softmax over the key tiles it sees, the diagonal last."""
    q_ref, k_ref, v_ref, first_ref, first_tile_ref, o_ref, lse_ref = refs
    q_CK, first_C = q_ref[...], first_ref[...]
    t_C = pl.program_id(0) * tiles.queries + jnp.arange(tiles.queries)

    def visit(tile: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        o_CK, top_C, sum_C = carry
        keys = pl.ds(tile * tiles.keys, tiles.keys)
        s_S = tile * tiles.keys + jnp.arange(tiles.keys)
        scores_CS = _scores(q_CK, k_ref[keys, :], _sees(t_C[:, None], s_S[None, :], first_C[:, None]), scale)
        new_top_C = jnp.maximum(top_C, jnp.max(scores_CS, axis=1))
        weights_CS = jnp.exp2(scores_CS - new_top_C[:, None])
        shrink_C = jnp.exp2(top_C - new_top_C)  # zero for a row that has seen no key yet: drops its sums
        o_CK = o_CK * shrink_C[:, None] + plgpu.dot(weights_CS.astype(v_ref.dtype), v_ref[keys, :])
        return o_CK, new_top_C, sum_C * shrink_C + jnp.sum(weights_CS, axis=1)

    start = jnp.zeros(q_CK.shape, jnp.float32), jnp.full(t_C.shape, UNSEEN), jnp.zeros(t_C.shape)
    o_CK, top_C, sum_C = jax.lax.fori_loop(first_tile_ref[...], _end_key_tile(tiles), visit, start)
    sum_C = jnp.where(first_C <= t_C, sum_C, jnp.nan)  # sees nothing: not the mean of all values
    o_ref[...] = (o_CK / sum_C[:, None]).astype(o_ref.dtype)
    lse_ref[...] = top_C + jnp.log2(sum_C)


def _query_kernel(*refs: Any, scale: float, tiles: Tiles) -> None:
    """Compute dq of a tile of queries, over the key tiles it sees, and delta, the sum of o * do of each query."""
    q_ref, k_ref, v_ref, o_ref, do_ref, lse_ref, first_ref, first_tile_ref, dq_ref, delta_ref = refs
    q_CK, do_CK, lse_C, first_C = (x[...] for x in (q_ref, do_ref, lse_ref, first_ref))
    delta_C = jnp.sum(o_ref[...].astype(jnp.float32) * do_CK, axis=1)
    t_C = pl.program_id(0) * tiles.queries + jnp.arange(tiles.queries)

    def visit(tile: jax.Array, dq_CK: jax.Array) -> jax.Array:
        keys = pl.ds(tile * tiles.keys, tiles.keys)
        k_SK, v_SK = k_ref[keys, :], v_ref[keys, :]
        s_S = tile * tiles.keys + jnp.arange(tiles.keys)
        scores_CS = _scores(q_CK, k_SK, _sees(t_C[:, None], s_S[None, :], first_C[:, None]), scale)
        weights_CS = jnp.exp2(scores_CS - lse_C[:, None])
        dscores_CS = weights_CS * (plgpu.dot(do_CK, v_SK.T) - delta_C[:, None])
        return dq_CK + plgpu.dot(dscores_CS.astype(k_SK.dtype), k_SK)

    start = jnp.zeros(q_CK.shape, jnp.float32)
    dq_CK = jax.lax.fori_loop(first_tile_ref[...], _end_key_tile(tiles), visit, start)
    dq_ref[...], delta_ref[...] = (dq_CK * scale).astype(dq_ref.dtype), delta_C


def _key_kernel(*refs: Any, scale: float, tiles: Tiles) -> None:
    """Compute dk and dv of a tile of keys, over the query tiles that see it. Scores are transposed throughout."""
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, first_ref, end_tile_ref, dk_ref, dv_ref = refs
    k_SK, v_SK = k_ref[...], v_ref[...]
    s_S = pl.program_id(0) * tiles.keys + jnp.arange(tiles.keys)

    def visit(tile: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dk_SK, dv_SK = carry
        queries = pl.ds(tile * tiles.queries, tiles.queries)
        q_CK, do_CK = q_ref[queries, :], do_ref[queries, :]
        t_C = tile * tiles.queries + jnp.arange(tiles.queries)
        sees_SC = _sees(t_C[None, :], s_S[:, None], first_ref[queries][None, :])
        weights_SC = jnp.exp2(_scores(k_SK, q_CK, sees_SC, scale) - lse_ref[queries][None, :])
        dscores_SC = weights_SC * (plgpu.dot(v_SK, do_CK.T) - delta_ref[queries][None, :])
        dv_SK += plgpu.dot(weights_SC.astype(do_CK.dtype), do_CK)
        return dk_SK + plgpu.dot(dscores_SC.astype(q_CK.dtype), q_CK), dv_SK

    first_tile = pl.program_id(0) * tiles.keys // tiles.queries
    zeros_SK = jnp.zeros(k_SK.shape, jnp.float32)
    dk_SK, dv_SK = jax.lax.fori_loop(first_tile, end_tile_ref[...], visit, (zeros_SK, zeros_SK))
    dk_ref[...] = (dk_SK * scale).astype(dk_ref.dtype)
    dv_ref[...] = dv_SK.astype(dv_ref.dtype)


def _sees(t: jax.Array, s: jax.Array, first: jax.Array) -> jax.Array:
    return (s <= t) & (s >= first)


def _scores(rows_CK: jax.Array, columns_SK: jax.Array, sees_CS: jax.Array, scale: float) -> jax.Array:
    return jnp.where(sees_CS, plgpu.dot(rows_CK, columns_SK.T) * (scale * LOG2_E), UNSEEN)


def _end_key_tile(tiles: Tiles) -> jax.Array:
    """Return the exclusive end of the key tiles of this program's queries: the diagonal."""
    return ((pl.program_id(0) + 1) * tiles.queries + tiles.keys - 1) // tiles.keys


def _call(
    kernel: Callable[..., None],
    tile: int,
    tiles: Tiles,
    settings: _Settings,
    parts: str,
    operands: tuple[jax.Array, ...],
    results: tuple[jax.ShapeDtypeStruct, ...],
) -> tuple[jax.Array, ...]:
    """Run a kernel per tile, head and row. `parts` says what a program reads of each operand (`_spec`)."""
    num_rows, num_tokens, num_heads, _ = operands[0].shape
    return pl.pallas_call(
        partial(kernel, scale=settings.scale, tiles=tiles),
        grid=(num_tokens // tile, num_heads, num_rows),
        in_specs=[_spec(x.shape, part, tile) for x, part in zip(operands, parts.split(), strict=True)],
        out_specs=tuple(_spec(x.shape, "tile", tile) for x in results),
        out_shape=results,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=settings.interpret,
        name=kernel.__name__.strip("_"),
    )(*operands)


def _spec(shape: tuple[int, ...], part: str, tile: int) -> pl.BlockSpec:
    """Return a program's block of [B, T, H, K], [B, H, T] or [B, T]: its tile or all; or its number in [B, N]."""
    if part == "one":
        return pl.BlockSpec((None, None), lambda i, h, b: (b, i))
    at = {2: 1, 3: 2, 4: 1}[len(shape)]
    tokens, move = (tile, 1) if part == "tile" else (shape[at], 0)
    if len(shape) == 2:
        return pl.BlockSpec((None, tokens), lambda i, h, b: (b, i * move))
    if len(shape) == 3:
        return pl.BlockSpec((None, None, tokens), lambda i, h, b: (b, h, i * move))
    return pl.BlockSpec((None, tokens, None, shape[3]), lambda i, h, b: (b, i * move, h, 0))


def _rows(x_BTHK: jax.Array) -> tuple[int, int, int]:
    return x_BTHK.shape[0], x_BTHK.shape[2], x_BTHK.shape[1]


def _like(x: jax.Array, dtype: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Describe a result that varies over the mesh axes of `x`, as shard_map requires."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
