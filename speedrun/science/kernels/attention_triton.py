"""Attention kernels in Pallas for Triton, which skip fully masked tiles.

There is one forward kernel, and two backward ones: by queries (dq) and by keys (dk, dv), so that sums need no atomics
and are deterministic. Plain JAX computes which tiles each program visits (`Bounds`). QK-norm and rotary of queries, and
their gradients, cost no pass, as a tile of them is in registers anyway. Keys are visited too often for that.

Legend: B batch, T time, H heads, K width of queries and keys, V width of values; inside a kernel C queries of a tile,
S keys of a tile, J half a head; N tiles of queries, M tiles of keys.
Source: the recurrence is that of Dao et al. 2022 and 2023, FlashAttention 1 and 2.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from speedrun.science.kernels.qk_norm_triton import halves, rotate, turned_back

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


class Tiling(NamedTuple):
    """Tiles of the three kernels."""

    forward: Tiles
    by_queries: Tiles
    by_keys: Tiles


#: The fastest of 20 on an H200 (docs/LOG.md, 2026-11-26).
HOPPER = Tiling(Tiles(64, 64, 4, 3), Tiles(64, 32, 4, 2), Tiles(64, 64, 4, 2))
#: Not timed. With four warps, registers spill on 8.x.
AMPERE = Tiling(Tiles(128, 64, 8, 3), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2))


class Bounds(NamedTuple):
    """Range of tiles to visit. It is exact, because `first` is non-decreasing; the other end is the diagonal."""

    first_key_tile_BN: jax.Array  #: i32, for each tile of queries
    end_query_tile_BM: jax.Array  #: i32, exclusive, for each tile of keys


def bounds(first_BT: jax.Array, tiles: Tiles) -> Bounds:
    """Return the tile of the lowest key of each query tile, and the end of the queries that see each key tile."""
    last_key_M = jnp.arange(tiles.keys - 1, first_BT.shape[1], tiles.keys)
    search = partial(jnp.searchsorted, v=last_key_M, side="right", method="scan_unrolled")
    end_BM = -(-jax.vmap(search)(first_BT) // tiles.queries)
    return Bounds(first_BT[:, :: tiles.queries] // tiles.keys, end_BM.astype(jnp.int32))


def attention(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    first_BT: jax.Array,
    *,
    scale: float,
    normed: tuple[jax.Array, ...] = (),
    tiling: Tiling = HOPPER,
    interpret: bool = False,
) -> jax.Array:
    """Compute `attention.attention` to its inputs' rounding, for sizes that `unsupported_reasons` permits.

    Scores, sums and accumulators are float32. Weights and their gradients are rounded to the dtype of the values
    before each product. The backward pass recomputes scores, so memory is linear in T.

    With `qk_norm_triton.normed` of the keys, QK-norm and rotary come first; gradients are those before both.
    """
    settings = _Settings(scale, tiling, interpret)
    return _attention(settings, q_BTHK, k_BTHK, v_BTHV, first_BT, *normed)


def unsupported_reasons(num_tokens: int, *widths: int) -> list[str]:
    """Return why the kernels cannot run on sequences and heads of these sizes."""
    reasons = []
    if num_tokens % 128:  # a multiple of every tile
        reasons.append(f"sequences of {num_tokens:,} tokens; the kernels need a multiple of 128")
    if others := {*widths} - {16, 32, 64, 128}:
        reasons.append(f"heads of {min(others)} dimensions; the kernels need 16, 32, 64 or 128")
    return reasons


class _Settings(NamedTuple):
    scale: float
    tiling: Tiling
    interpret: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings: _Settings, *args: jax.Array) -> jax.Array:
    return _forward(settings, *args)[0]


def _forward(settings: _Settings, *args: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
    q_BTHK, k_BTHK, v_BTHV, first_BT, *normed = args
    k_BTHK, *of_k = normed or [k_BTHK]  # 1 / rms and angles
    tiles, angles = settings.tiling.forward, of_k[1:]
    operands = q_BTHK, k_BTHK, v_BTHV, first_BT, bounds(first_BT, tiles).first_key_tile_BN, *angles
    results, parts = [_like(v_BTHV), _rows(q_BTHK)], "tile all all tile one"
    if angles:
        results, parts = [*results, _like(q_BTHK), _rows(q_BTHK)], parts + " angles"
    o_BTHV, lse_BHT, *more = _call(_forward_kernel, tiles.queries, tiles, settings, parts, operands, results)
    q_BTHK, *r_BHT = more or [q_BTHK]
    return o_BTHV, (q_BTHK, k_BTHK, v_BTHV, first_BT, o_BTHV, lse_BHT, [*r_BHT, *angles], of_k)


def _backward(settings: _Settings, residuals: tuple[Any, ...], do_BTHV: jax.Array) -> tuple[Any, ...]:
    q_BTHK, k_BTHK, v_BTHV, first_BT, o_BTHV, lse_BHT, of_q, of_k = residuals
    (_, tiles, by_keys), back = settings.tiling, " tile angles" if of_q else ""
    starts_BN = bounds(first_BT, tiles).first_key_tile_BN
    ends_BM = bounds(first_BT, by_keys).end_query_tile_BM
    operands = q_BTHK, k_BTHK, v_BTHV, o_BTHV, do_BTHV, lse_BHT, first_BT, starts_BN, *of_q
    results, parts = [_like(q_BTHK), _rows(q_BTHK)], "tile all all tile tile tile tile one" + back
    dq_BTHK, delta_BHT = _call(_query_kernel, tiles.queries, tiles, settings, parts, operands, results)
    operands = q_BTHK, k_BTHK, v_BTHV, do_BTHV, lse_BHT, delta_BHT, first_BT, ends_BM, *of_k
    results, parts = [_like(k_BTHK), _like(v_BTHV)], "all tile tile all all all all one" + back
    dk_BTHK, dv_BTHV = _call(_key_kernel, by_keys.keys, by_keys, settings, parts, operands, results)
    return dq_BTHK, dk_BTHK, dv_BTHV, *[None] * (4 if of_k else 1)  # of `first_BT`, and of `normed`


_attention.defvjp(_forward, _backward)


def _forward_kernel(*refs: Any, scale: float, tiles: Tiles) -> None:
    """Process a tile of queries: a running softmax over the key tiles it sees, the diagonal last."""
    q_ref, k_ref, v_ref, first_ref, first_tile_ref, *rest = refs
    angles_ref, o_ref, lse_ref, *made = rest if len(rest) > 2 else (None, *rest)
    q_CK = q_ref[...] if angles_ref is None else _turned(q_ref, angles_ref, *made)
    first_C, t_C = first_ref[...], pl.program_id(0) * tiles.queries + jnp.arange(tiles.queries)

    def visit(tile: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        o_CV, top_C, sum_C = carry
        keys = pl.ds(tile * tiles.keys, tiles.keys)
        s_S = tile * tiles.keys + jnp.arange(tiles.keys)
        scores_CS = _scores(q_CK, k_ref[keys, :], _sees(t_C[:, None], s_S[None, :], first_C[:, None]), scale)
        new_top_C = jnp.maximum(top_C, jnp.max(scores_CS, axis=1))
        weights_CS = jnp.exp2(scores_CS - new_top_C[:, None])
        shrink_C = jnp.exp2(top_C - new_top_C)  # zero for a row that has seen no key yet: drops its sums
        o_CV = o_CV * shrink_C[:, None] + plgpu.dot(weights_CS.astype(v_ref.dtype), v_ref[keys, :])
        return o_CV, new_top_C, sum_C * shrink_C + jnp.sum(weights_CS, axis=1)

    start = jnp.zeros(o_ref.shape, jnp.float32), jnp.full(t_C.shape, UNSEEN), jnp.zeros(t_C.shape)
    o_CV, top_C, sum_C = jax.lax.fori_loop(first_tile_ref[...], _end_key_tile(tiles), visit, start)
    sum_C = jnp.where(first_C <= t_C, sum_C, jnp.nan)  # sees nothing: not the mean of all values
    o_ref[...] = (o_CV / sum_C[:, None]).astype(o_ref.dtype)
    lse_ref[...] = top_C + jnp.log2(sum_C)


def _query_kernel(*refs: Any, scale: float, tiles: Tiles) -> None:
    """Compute dq of a tile of queries, over the key tiles it sees, and delta, the sum of o * do of each query."""
    q_ref, k_ref, v_ref, o_ref, do_ref, lse_ref, first_ref, first_tile_ref, *back, dq_ref, delta_ref = refs
    q_CK, do_CV, lse_C, first_C = (x[...] for x in (q_ref, do_ref, lse_ref, first_ref))
    delta_C = jnp.sum(o_ref[...].astype(jnp.float32) * do_CV, axis=1)
    t_C = pl.program_id(0) * tiles.queries + jnp.arange(tiles.queries)

    def visit(tile: jax.Array, dq_CK: jax.Array) -> jax.Array:
        keys = pl.ds(tile * tiles.keys, tiles.keys)
        k_SK, v_SV = k_ref[keys, :], v_ref[keys, :]
        s_S = tile * tiles.keys + jnp.arange(tiles.keys)
        scores_CS = _scores(q_CK, k_SK, _sees(t_C[:, None], s_S[None, :], first_C[:, None]), scale)
        weights_CS = jnp.exp2(scores_CS - lse_C[:, None])
        dscores_CS = weights_CS * (plgpu.dot(do_CV, v_SV.T) - delta_C[:, None])
        return dq_CK + plgpu.dot(dscores_CS.astype(k_SK.dtype), k_SK)

    start = jnp.zeros(q_CK.shape, jnp.float32)
    dq_CK = jax.lax.fori_loop(first_tile_ref[...], _end_key_tile(tiles), visit, start)
    _put(dq_ref, dq_CK * scale, q_ref, *back)
    delta_ref[...] = delta_C


def _key_kernel(*refs: Any, scale: float, tiles: Tiles) -> None:
    """Compute dk and dv of a tile of keys, over the query tiles that see it. Scores are transposed throughout."""
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, first_ref, end_tile_ref, *back, dk_ref, dv_ref = refs
    k_SK, v_SV = k_ref[...], v_ref[...]
    s_S = pl.program_id(0) * tiles.keys + jnp.arange(tiles.keys)

    def visit(tile: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dk_SK, dv_SV = carry
        queries = pl.ds(tile * tiles.queries, tiles.queries)
        q_CK, do_CV = q_ref[queries, :], do_ref[queries, :]
        t_C = tile * tiles.queries + jnp.arange(tiles.queries)
        sees_SC = _sees(t_C[None, :], s_S[:, None], first_ref[queries][None, :])
        weights_SC = jnp.exp2(_scores(k_SK, q_CK, sees_SC, scale) - lse_ref[queries][None, :])
        dscores_SC = weights_SC * (plgpu.dot(v_SV, do_CV.T) - delta_ref[queries][None, :])
        dv_SV += plgpu.dot(weights_SC.astype(do_CV.dtype), do_CV)
        return dk_SK + plgpu.dot(dscores_SC.astype(q_CK.dtype), q_CK), dv_SV

    first_tile = pl.program_id(0) * tiles.keys // tiles.queries
    start = jnp.zeros(k_SK.shape, jnp.float32), jnp.zeros(v_SV.shape, jnp.float32)
    dk_SK, dv_SV = jax.lax.fori_loop(first_tile, end_tile_ref[...], visit, start)
    dv_ref[...] = dv_SV.astype(dv_ref.dtype)
    _put(dk_ref, dk_SK * scale, k_ref, *back)


def _turned(q_ref: Any, angles_ref: Any, y_ref: Any, r_ref: Any) -> jax.Array:
    """Return a tile of queries after QK-norm and rotary, which is also stored, as is 1 / rms."""
    *y, r_ref[...] = rotate(*halves(q_ref), *halves(angles_ref))
    y_CK = y_ref[...] = _joined(*y).astype(y_ref.dtype)
    return y_CK


def _put(dx_ref: Any, dx_CK: jax.Array, y_ref: Any, *back: Any) -> None:
    """Store a gradient, before QK-norm and rotary if there are 1 / rms and angles."""
    if back:
        dy, (r_ref, angles_ref) = jnp.split(dx_CK, 2, axis=1), back
        dx_CK = _joined(*turned_back(*dy, *halves(y_ref), r_ref[...], *halves(angles_ref)))
    dx_ref[...] = dx_CK.astype(dx_ref.dtype)


def _joined(u_CJ: jax.Array, w_CJ: jax.Array) -> jax.Array:
    """Concatenate columns; Triton joins only along a new last axis."""
    joined_CJ2 = jnp.concatenate([u_CJ[..., None], w_CJ[..., None]], axis=-1)
    return joined_CJ2.swapaxes(1, 2).reshape(len(u_CJ), -1)


def _sees(t: jax.Array, s: jax.Array, first: jax.Array) -> jax.Array:
    return (s <= t) & (s >= first)


def _scores(rows_CK: jax.Array, columns_SK: jax.Array, sees_CS: jax.Array, scale: float) -> jax.Array:
    return jnp.where(sees_CS, plgpu.dot(rows_CK, columns_SK.T) * (scale * LOG2_E), UNSEEN)


def _end_key_tile(tiles: Tiles) -> jax.Array:
    """Return the exclusive end of the key tiles of this program's queries: the diagonal."""
    return ((pl.program_id(0) + 1) * tiles.queries + tiles.keys - 1) // tiles.keys


def _call(
    kernel: Any, tile: int, tiles: Tiles, settings: _Settings, parts: str, operands: Any, results: Any
) -> Any:
    """Run a kernel per tile, head and row. `parts` says what a program reads of each operand (`_spec`)."""
    num_rows, num_tokens, num_heads, head_dim = operands[0].shape
    return pl.pallas_call(
        partial(kernel, scale=settings.scale, tiles=tiles),
        grid=(num_tokens // tile, num_heads, num_rows),
        in_specs=[
            _spec(x.shape, part, tile, head_dim) for x, part in zip(operands, parts.split(), strict=True)
        ],
        out_specs=tuple(_spec(x.shape, "tile", tile, head_dim) for x in results),
        out_shape=results,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=settings.interpret,
        name=kernel.__name__.strip("_"),
    )(*operands)


def _spec(shape: tuple[int, ...], part: str, tile: int, head_dim: int) -> pl.BlockSpec:
    """Return a program's block of [B, T, H, K or V], [B, H, T] or [B, T]: its tile or all; or its number in [B, N].

    "angles" is its tile of [T, n K], for heads of width K = `head_dim` in turn.
    """
    if part == "one":
        return pl.BlockSpec((None, None), lambda i, h, b: (b, i))
    if part == "angles":
        return pl.BlockSpec((tile, head_dim), lambda i, h, b: (i, h % (shape[1] // head_dim)))
    if len(shape) == 4:
        tokens, move = (tile, 1) if part == "tile" else (shape[1], 0)
        return pl.BlockSpec((None, tokens, None, shape[-1]), lambda i, h, b: (b, i * move, h, 0))
    tokens, move = (tile, 1) if part == "tile" else (shape[-1], 0)
    of_head = [None] * (len(shape) - 2)
    return pl.BlockSpec((None, *of_head, tokens), lambda i, h, b: (b, *[h] * len(of_head), i * move))


def _rows(x_BTHK: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda x_BTHK: x_BTHK[..., 0].swapaxes(1, 2).astype(jnp.float32), x_BTHK)


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Describe a result that varies over the mesh axes of `x`, as shard_map requires."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
