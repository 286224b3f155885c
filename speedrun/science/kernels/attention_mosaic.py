"""Attention kernels for Hopper in Pallas for Mosaic GPU: two warpgroups compute, a third copies their next tiles.

The three kernels are those of `attention_triton`. Weights go from registers into the next product, sums of gradients
stay in the registers of their products, and tiles that are seen whole have no mask.

Legend: B batch, T time, H heads, K head width; N groups of rows; in a kernel C rows of a warpgroup, P columns of a
tile: queries and keys, in the last kernel keys and queries.
Source: the recurrence is that of Dao et al. 2022 and 2023; warpgroups take turns as in Shah et al. 2024. The pipeline
follows JAX's example for Hopper.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from speedrun.science.kernels.attention_triton import LOG2_E, UNSEEN, bounds
from speedrun.science.kernels.varying import varying_like

ROWS = 64  #: of a warpgroup's products
WARPGROUPS = 2
OWN = ROWS * WARPGROUPS  #: rows of a program
#: Columns of a tile, for which registers suffice.
FORWARD, BACKWARD = 128, 64
WIDTH = 128  #: of a head
STAGES = 2  #: tiles in flight
#: Of a thread. Two warpgroups that compute and one that copies use all 64k registers of a multiprocessor.
_COMPUTE_REGISTERS, _COPY_REGISTERS = 240, 24


def attention(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    first_BT: jax.Array,
    *,
    scale: float,
    interpret: Any = None,
) -> jax.Array:
    """Compute `attention.attention` and its gradient to the rounding of bfloat16, as far as `refusals` permits."""
    return _attention(q_BTHK, k_BTHK, v_BTHK, first_BT, scale, interpret)


def refusals(shape_BTHK: tuple[int, ...]) -> list[str]:
    """Return why the kernels cannot run on this shape."""
    _, num_tokens, _, head_dim = shape_BTHK
    checks = {
        f"sequences of {num_tokens:,} tokens; the kernels need a multiple of {OWN}": num_tokens % OWN,
        f"heads of {head_dim} dimensions; the kernels need {WIDTH}": head_dim != WIDTH,
    }
    return [reason for reason, applies in checks.items() if applies]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(*arguments: Any) -> Any:
    return _forward(*arguments)[0]


def _forward(
    q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, first_BT: jax.Array, scale: float, interpret: Any
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    rows, tokens, heads, _ = q_BTHK.shape
    run = partial(_call, _forward_kernel, FORWARD, scale, interpret)
    results = q_BTHK, jax.ShapeDtypeStruct((rows, heads, tokens), jnp.float32)
    o_BTHK, lse_BHT = run([q_BTHK, first_BT, _now(first_BT)], [[k_BTHK], [v_BTHK]], results)
    return o_BTHK, (q_BTHK, k_BTHK, v_BTHK, first_BT, o_BTHK, lse_BHT)


def _backward(scale: float, interpret: Any, saved: tuple[jax.Array, ...], do_BTHK: jax.Array) -> Any:
    q_BTHK, k_BTHK, v_BTHK, first_BT, o_BTHK, lse_BHT = saved
    own = [q_BTHK, o_BTHK, do_BTHK, lse_BHT, first_BT, _now(first_BT)]
    run = partial(_call, _query_kernel, BACKWARD, scale, interpret)
    dq_BTHK, delta_BHT = run(own, [[k_BTHK], [v_BTHK]], [q_BTHK, lse_BHT])
    last_BT = bounds(first_BT, query_tile=1, key_tile=1).end_query_tile_BM - 1
    own, piped = [k_BTHK, v_BTHK, _now(first_BT), last_BT], [[q_BTHK, lse_BHT], [do_BTHK, delta_BHT]]
    run = partial(_call, _key_kernel, BACKWARD, scale, interpret)
    dk_BTHK, dv_BTHK = run(own, piped, [k_BTHK, v_BTHK])
    return dq_BTHK, dk_BTHK, dv_BTHK, None


_attention.defvjp(_forward, _backward)


class _Pipe(NamedTuple):
    """Operands whose tiles are copied together, in `STAGES` slots that take turns."""

    tiles: list[Any]  #: [STAGES, P, ...]
    arrived: Any  #: barriers of slots
    freed: Any

    def fetch(self, sources: list[Any], tile: Any, slot: Any) -> None:
        for source, target in zip(sources, self.tiles, strict=True):
            rows = _rows(source, tile, target.shape[1])
            plgpu.copy_gmem_to_smem(rows, target.at[slot], self.arrived.at[slot])

    def wait(self, slot: Any) -> list[Any]:
        plgpu.barrier_wait(self.arrived.at[slot])
        return [x.at[slot] for x in self.tiles]

    def free(self, slot: Any) -> None:
        plgpu.barrier_arrive(self.freed.at[slot])


class _Part(NamedTuple):
    """A warpgroup's part of a program. Row r sees columns low[r] to high[r]."""

    own: Callable[
        [Any], list[Any]
    ]  #: number of a tile -> rows of each operand; the last are `low` and `high`
    pipes: list[_Pipe]
    tiles: tuple[Any, ...]  #: as `_visits` returns them
    turn: Any  #: barrier of the warpgroups
    scale: float  #: of scores, which are in base 2

    def visit(self, step: Callable[..., Any], carry: Any = None) -> Any:
        """Call `step` with the number of each tile, its slot and what the last step returned."""
        start, *_, end = self.tiles
        return lax.fori_loop(start, end, lambda i, carry: step(i, lax.rem(i - start, STAGES), carry), carry)

    def masked(self, x_CP: jax.Array, tile: Any) -> jax.Array:
        """Mask unscaled scores where needed: that takes as many instructions as the softmax."""

        def mask() -> jax.Array:
            at_CP = tile * x_CP.shape[1] + lax.broadcasted_iota(jnp.int32, x_CP.shape, 1)
            low_CP, high_CP = (_across(x[...], x_CP) for x in self.own(tile)[-2:])
            return jnp.where((at_CP >= low_CP) & (at_CP <= high_CP), x_CP, UNSEEN / self.scale)

        _, whole, end_whole, _ = self.tiles
        return lax.cond((tile >= whole) & (tile < end_whole), lambda: x_CP, mask)

    def meet(self) -> None:
        """Wait for the other warpgroup, so that one multiplies while the other takes exponentials."""
        plgpu.barrier_arrive(self.turn)
        plgpu.barrier_wait(self.turn)


def _forward_kernel(part: _Part) -> list[jax.Array]:
    """Process own queries: a running softmax over the key tiles they see, the diagonal last."""
    (own_q, *_), (keys, values) = part.own(part.tiles[0]), part.pipes
    group = lax.axis_index("warpgroup")
    pl.when(group == 1)(part.meet)

    def step(tile: Any, slot: Any, carry: Any) -> tuple[jax.Array, ...]:
        o_CK, top_C, sum_C = carry
        (k_PK,) = keys.wait(slot)
        scores_CP = _product(own_q, k_PK.T, part.meet)
        keys.free(slot)
        scores_CP = part.masked(scores_CP, tile)
        new_top_C = jnp.maximum(top_C, jnp.max(scores_CP, axis=1) * part.scale)
        weights_CP = jnp.exp2(scores_CP * part.scale - _across(new_top_C, scores_CP))
        shrink_C = jnp.exp2(top_C - new_top_C)  # zero for a row that has seen no key yet: drops its sums
        sum_C = sum_C * shrink_C + jnp.sum(weights_CP, axis=1)
        weights_CP = weights_CP.astype(own_q.dtype)
        part.meet()
        (v_PK,) = values.wait(slot)
        o_CK = o_CK * _across(shrink_C, o_CK) + _product(weights_CP, v_PK)
        values.free(slot)
        return o_CK, new_top_C, sum_C

    zeros_CK, zeros_C = jnp.zeros((ROWS, WIDTH), jnp.float32), jnp.zeros(ROWS, jnp.float32)
    o_CK, top_C, sum_C = part.visit(step, (zeros_CK, zeros_C + UNSEEN, zeros_C))
    pl.when(group == 0)(part.meet)
    sum_C = jnp.where(top_C > UNSEEN / 2, sum_C, jnp.nan)  # sees nothing: not the mean of all values
    return [o_CK * _across(1 / sum_C, o_CK), top_C + jnp.log(sum_C) * LOG2_E]


def _query_kernel(part: _Part) -> list[jax.Array]:
    """Compute dq of own queries, over the key tiles they see, and delta, the sum of o * do of each query."""
    (own_q, own_o, own_do, own_lse, *_), (keys, values) = part.own(part.tiles[0]), part.pipes
    delta_C = jnp.sum(own_o[...].astype(jnp.float32) * own_do[...].astype(jnp.float32), axis=1)

    def compute(dq_CK: Any) -> list[jax.Array]:
        def step(tile: Any, slot: Any, _carry: None) -> None:
            (k_PK,), (v_PK,) = keys.wait(slot), values.wait(slot)
            pairs = (own_q, k_PK.T), (own_do, v_PK.T)
            _, dscores_CP = _differentiated(part, tile, pairs, own_lse[...], delta_C, 0)
            values.free(slot)
            plgpu.wgmma(dq_CK, dscores_CP, k_PK)
            plgpu.wgmma_wait(0)
            keys.free(slot)

        part.visit(step)
        return [dq_CK[...] * (part.scale / LOG2_E), delta_C]

    return _with_sums(compute, WIDTH)


def _key_kernel(part: _Part) -> list[jax.Array]:
    """Compute dk and dv of own keys, over the query tiles that see them. Scores are transposed throughout."""
    queries, gradients = part.pipes

    def compute(dk_CK: Any, dv_CK: Any) -> list[jax.Array]:
        def step(tile: Any, slot: Any, _carry: None) -> None:
            (q_PK, lse_P), (do_PK, delta_P) = queries.wait(slot), gradients.wait(slot)
            own_k, own_v, *_ = part.own(tile)
            pairs = (own_k, q_PK.T), (own_v, do_PK.T)
            weights_CP, dscores_CP = _differentiated(part, tile, pairs, lse_P[...], delta_P[...], 1)
            plgpu.wgmma(dv_CK, weights_CP, do_PK)
            plgpu.wgmma(dk_CK, dscores_CP, q_PK)
            plgpu.wgmma_wait(0)
            plgpu.commit_smem()  # of lse and delta: what threads read is written again by a copy
            queries.free(slot)
            gradients.free(slot)

        part.visit(step)
        return [dk_CK[...] * (part.scale / LOG2_E), dv_CK[...]]

    return _with_sums(compute, WIDTH, WIDTH)


def _differentiated(
    part: _Part, tile: Any, pairs: Any, lse: jax.Array, delta: jax.Array, axis: int
) -> list[jax.Array]:
    """Return weights and gradients of scores. `pairs` are the factors of scores and of gradients of weights."""

    def compute(scores_CP: Any, dweights_CP: Any) -> list[jax.Array]:
        for sums_CP, pair in zip((scores_CP, dweights_CP), pairs, strict=True):
            plgpu.wgmma(sums_CP, *pair)
        x_CP = part.masked(plgpu.wgmma_accumulator_load(scores_CP, wait_n=1), tile)
        weights_CP = jnp.exp2(x_CP * part.scale - _across(lse, x_CP, axis))
        dscores_CP = weights_CP * (dweights_CP[...] - _across(delta, x_CP, axis))
        return [x.astype(jnp.bfloat16) for x in (weights_CP, dscores_CP)]

    return _with_sums(compute, BACKWARD, BACKWARD)


def _product(a: Any, b: Any, meanwhile: Callable[[], None] = lambda: None) -> jax.Array:
    def multiply(sums: Any) -> jax.Array:
        plgpu.wgmma(sums, a, b)
        meanwhile()
        return sums[...]

    return _with_sums(multiply, b.shape[1])


def _with_sums(compute: Callable[..., Any], *widths: int) -> Any:
    """Call a function with sums of products, which start at zero."""
    return pl.run_scoped(compute, *[plgpu.WGMMAAccumulatorRef((ROWS, n), jnp.float32) for n in widths])


def _across(x: jax.Array, like_CP: jax.Array, axis: int = 0) -> jax.Array:
    return lax.broadcast_in_dim(x, like_CP.shape, (axis,))


def _rows(ref: Any, index: Any, number: int) -> Any:
    """Select rows of this program's head in [B, T, H, K], [B, H, T] or [B, T]."""
    head, row, rows = lax.axis_index("head"), lax.axis_index("row"), pl.ds(index * number, number)
    return ref.at[{2: (row, rows), 3: (row, head, rows), 4: (row, rows, head)}[len(ref.shape)]]


def _now(first_BT: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(first_BT.shape[1], dtype=jnp.int32), first_BT.shape)


def _visits(low_BT: jax.Array, high_BT: jax.Array, tile: int) -> jax.Array:
    """Return the first tile of each warpgroup's rows, the first and the end of whole ones, and the end: [B, N, 4]."""
    ends = ((x_BT[:, ::ROWS], x_BT[:, ROWS - 1 :: ROWS]) for x_BT in (low_BT, high_BT + 1))
    (start_BN, whole_BN), (end_whole_BN, end_BN) = ends
    return jnp.stack([start_BN, whole_BN + tile - 1, end_whole_BN, end_BN + tile - 1], axis=-1) // tile


def _program(*refs: Any, kernel: Callable[..., Any], scale: float) -> None:
    """Compute results of own rows in all warpgroups but the last, which copies tiles as slots are freed."""
    own, piped, visits, *results, own_stores, stores, pipes, loaded, turn = refs
    index, row, group = (lax.axis_index(name) for name in ("index", "row", "warpgroup"))
    first, mine = index * WARPGROUPS, index * WARPGROUPS + group
    # Sums vary over no mesh axes in a kernel, what is read does: a loop needs indices of one type.
    start, end = visits[row, first, 0] + 0, visits[row, first + WARPGROUPS - 1, 3] + 0
    pipes = [_Pipe(*pipe) for pipe in pipes]

    def own_rows(tile: Any) -> list[Any]:
        # Adds zero, which no compiler knows: places computed before the loop were spilled.
        return [x.at[group + lax.shift_right_logical(tile, 26)] for x in own_stores]

    @pl.when(group < WARPGROUPS)
    def _compute() -> None:
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        for source, target in zip(own, own_stores, strict=True):
            plgpu.copy_gmem_to_smem(_rows(source, mine, ROWS), target.at[group], loaded.at[group])
        plgpu.barrier_wait(loaded.at[group])
        tiles = start, visits[row, mine, 1], visits[row, mine, 2], end
        made = kernel(_Part(own_rows, pipes, tiles, turn, scale * LOG2_E))
        for x, store in zip(made, stores, strict=True):
            store.at[group][...] = x.astype(store.dtype)
        plgpu.commit_smem()
        for store, result in zip(stores, results, strict=True):
            plgpu.copy_smem_to_gmem(store.at[group], _rows(result, mine, ROWS))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(group == WARPGROUPS)
    def _copy() -> None:
        plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")

        @pl.loop(0, end - start + STAGES)
        def _step(step: Any) -> None:
            slot = lax.rem(step, STAGES)
            for pipe, sources in zip(pipes, piped, strict=True):
                pl.when(step >= STAGES)(partial(plgpu.barrier_wait, pipe.freed.at[slot]))
                pl.when(step < end - start)(partial(pipe.fetch, sources, start + step, slot))


def _call(
    kernel: Any, tile: int, scale: float, interpret: Any, own: list[jax.Array], piped: Any, results: Any
) -> tuple[jax.Array, ...]:
    """Run a kernel once per `OWN` rows, head and row of the batch."""
    rows, tokens, heads, _ = own[0].shape

    def memory(leading: int, tokens: int, arrays: Sequence[Any]) -> list[Any]:
        return [plgpu.SMEM((leading, tokens, *x.shape[3:]), x.dtype) for x in arrays]

    def barriers(arrivals: int, number: int) -> Any:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)

    pipes = [(memory(STAGES, tile, x), barriers(len(x), STAGES), barriers(WARPGROUPS, STAGES)) for x in piped]
    stores = memory(WARPGROUPS, ROWS, own), memory(WARPGROUPS, ROWS, results)
    semantics = plgpu.LoweringSemantics.Warpgroup
    program = plgpu.kernel(
        partial(_program, kernel=kernel, scale=scale),
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
        grid=(tokens // OWN, heads, rows),
        grid_names=("index", "head", "row"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=[*stores, pipes, barriers(len(own), WARPGROUPS), barriers(WARPGROUPS, 1)],
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=semantics),
        interpret=interpret,
        kernel_name=kernel.__name__.strip("_"),
    )
    return tuple(varying_like(x, own[0]) for x in program(own, piped, _visits(own[-2], own[-1], tile)))
