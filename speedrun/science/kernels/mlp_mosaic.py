"""The MLP with a squared ReLU for Hopper, with the activation and its gradient fused into products.

XLA writes the product and reads it again. Here a tile of the product is squared, or multiplied by the slope, while it
is in registers. Only the square h of the first product is kept, as the slope is 2 sqrt(h).

Legend: N tokens, D model, F mlp; in a kernel R rows and C columns of a warpgroup's tile, P columns of a piece of it.
Source: the pipeline follows JAX's examples for Hopper; record 89 has a similar kernel in Triton.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from speedrun.science.kernels.cross_entropy_mosaic import put_across
from speedrun.science.kernels.mlp import Factors, bounds, rounded, rounded_weights, scale_of
from speedrun.science.kernels.mlp_gradients import E4M3, E5M2, Fused
from speedrun.science.kernels.varying import varying_like

#: Size of a warpgroup's tile: its sums take 128 of a thread's registers.
ROWS, COLUMNS = 64, 256
WARPGROUPS = 2
_OWN = ROWS * WARPGROUPS  #: rows of a tile
#: Columns that a warpgroup finishes at a time.
PIECE = 64
_PIECES = COLUMNS // PIECE
#: Bytes of a row of a factor in a step of the pipeline: the widest swizzle.
_ROW_BYTES = 128
#: Multiprocessors of an H100 (SXM) and H200. Each starts its next tile while the last results are being stored.
_CORES = 132
_COPY_REGISTERS = 40
_MOST_E4M3, _MOST_E5M2 = (float(jnp.finfo(dtype).max) for dtype in (E4M3, E5M2))


class _Product(NamedTuple):
    """A product, and the function that follows it."""

    finish: Callable[..., list[jax.Array]]  #: sums, a piece of the fetched operand, and scales -> results
    columns_axis: int  #: of the second factor
    results: tuple[Any, ...]  #: their dtypes
    interpret: Any  #: None, or parameters of JAX's interpreter
    fetched: Any = None  #: dtype of an operand like the result, of which pieces are fetched ahead
    is_turned: bool = False  #: whether the second result is the first one as [F, N]

    @property
    def shares_slots(self) -> bool:
        """Whether pieces are fetched into the slots of the results."""
        return self.fetched == self.results[0]

    @property
    def num_slots(self) -> int:
        """Pieces of each result in shared memory."""
        return _PIECES if self.shares_slots else 2

    @property
    def num_stages(self) -> int:
        """Steps of the pipeline in flight: four fit into shared memory beside the slots of one result."""
        return 3 if self.fetched or len(self.results) > 1 else 4


def unsupported_reasons(num_tokens: int, model_dim: int, mlp_dim: int, dtype: Any) -> list[str]:
    """Return why the kernels cannot run on states of this shape and dtype."""
    checks = {
        f"{num_tokens} tokens; the kernels need a multiple of {_OWN}": num_tokens % _OWN,
        f"{model_dim} dimensions; the kernels need a multiple of {_ROW_BYTES}": model_dim % _ROW_BYTES,
        f"an MLP of {mlp_dim}; the kernels need a multiple of {COLUMNS}": mlp_dim % COLUMNS,
        f"{dtype} inputs; the kernels need bfloat16": dtype != jnp.bfloat16,
    }
    return [reason for reason, applies in checks.items() if applies]


def mlp(
    x_D: jax.Array, up_FD: jax.Array, down_DF: jax.Array, *, factors: Factors, interpret: Any = None
) -> jax.Array:
    """Compute `mlp.mlp` and its gradient to the rounding of bfloat16, for shapes that `unsupported_reasons` permits."""
    x_ND = x_D.reshape(-1, x_D.shape[-1])
    return jnp.reshape(_mlp(x_ND, up_FD, down_DF, factors, interpret), x_D.shape)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _mlp(x_ND: jax.Array, up_FD: jax.Array, down_DF: jax.Array, factors: Factors, interpret: Any) -> Any:
    return _forward(x_ND, up_FD, down_DF, factors, interpret)[0]


def _forward(x_ND: jax.Array, up_FD: jax.Array, down_DF: jax.Array, factors: Factors, interpret: Any) -> Any:
    if jnp.finfo(factors).bits > 8:
        (h_NF,) = _call(_Product(_squared, 0, (x_ND.dtype,), interpret), x_ND, up_FD)
        return h_NF @ down_DF.T, (x_ND, up_FD, down_DF, h_NF)
    most_x, most_h = bounds(x_ND, up_FD)
    (x8_ND, x_scale), (up8_FD, up_scale) = rounded(x_ND, most_x, factors), rounded_weights(up_FD, factors)
    (down8_DF, down_scale), h_scale = rounded_weights(down_DF, factors), scale_of(most_h, factors)
    scales = jnp.stack([x_scale * up_scale, 1 / h_scale])
    product = _Product(_squared, 0, (x_ND.dtype, jnp.dtype(factors)), interpret)
    h_NF, h8_NF = _call(product, x8_ND, up8_FD, scales)
    y_ND = jnp.einsum("nf,df->nd", h8_NF, down8_DF, preferred_element_type=x_ND.dtype)
    y_ND = (y_ND.astype(jnp.float32) * (h_scale * down_scale)).astype(x_ND.dtype)
    return y_ND, (x_ND, up_FD, down_DF, h_NF)


def _backward(factors: Factors, interpret: Any, saved: tuple[jax.Array, ...], dy_ND: jax.Array) -> Any:
    del factors
    x_ND, up_FD, down_DF, h_NF = saved
    (dz_NF,) = _call(_Product(_sloped, 1, (h_NF.dtype,), interpret, h_NF.dtype), dy_ND, down_DF, h_NF)
    _, pull = jax.vjp(lambda x_ND, up_FD: x_ND @ up_FD.T, x_ND, up_FD)
    _, pull_down = jax.vjp(lambda down_DF: h_NF @ down_DF.T, down_DF)
    return *pull(dz_NF), *pull_down(dy_ND)


_mlp.defvjp(_forward, _backward)


def fused(interpret: Any = None) -> Fused:
    """Return `mlp_gradients.Fused` for Hopper."""

    def squares(x8_ND: jax.Array, up8_FD: jax.Array, factor: jax.Array, _: Any) -> Any:
        product = _Product(_squared_in_eight, 0, (E4M3, E4M3), interpret, is_turned=True)
        return _call(product, x8_ND, up8_FD, factor)

    def slopes(*given: jax.Array) -> Any:
        return _call(_Product(_sloped, 1, (E5M2, E5M2), interpret, E4M3, is_turned=True), *given)

    return Fused(squares, slopes)


FUSED = fused()


def _squared(sums_RP: jax.Array, _: Any, scales: Any) -> list[jax.Array]:
    """Return the square, and if there are scales also the square in 8 bits."""
    z_RP = jnp.maximum(sums_RP if scales is None else sums_RP * scales[0], 0.0)
    h_RP = z_RP * z_RP
    return [h_RP] if scales is None else [h_RP, jnp.minimum(h_RP * scales[1], _MOST_E4M3)]


def _squared_in_eight(sums_RP: jax.Array, _: Any, factor: Any) -> list[jax.Array]:
    z_RP = jnp.maximum(sums_RP * factor[0], 0.0)
    return [jnp.minimum(z_RP * z_RP, _MOST_E4M3)]


def _sloped(sums_RP: jax.Array, h_RP: jax.Array, factor: Any) -> list[jax.Array]:
    """Multiply by the slope 2 sqrt(h), or if there is a factor by factor sqrt(h), for 8 bits."""
    h_RP = h_RP.astype(jnp.float32)
    root_RP = h_RP * lax.rsqrt(jnp.maximum(h_RP, 1e-37))
    if factor is None:
        return [sums_RP * (2.0 * root_RP)]
    return [jnp.clip(sums_RP * (factor[0] * root_RP), -_MOST_E5M2, _MOST_E5M2)]


def _kernel(a: Any, b: Any, *refs: Any, product: _Product) -> None:
    """Share the tiles with the other multiprocessors. The third warpgroup fetches factors, also of the next tile."""
    operands, results = refs[: -len(product.results)], refs[-len(product.results) :]
    (num_rows, num_columns), across = results[0].shape, results[0].shape[1] // COLUMNS
    group = lax.axis_index("warpgroup")

    def memory(dtype: Any, slots: int = product.num_slots) -> Any:
        shape = WARPGROUPS, slots, ROWS, PIECE  # of turned pieces, too: they are square
        return plgpu.SMEM(shape, dtype, transforms=_swizzle(PIECE, dtype, product))

    own_slots = [memory(product.fetched, _PIECES)] * bool(product.fetched and not product.shares_slots)

    def visit_all(allocations: Any, stores: Any, fetched: Any, arrived: Any) -> None:
        @plgpu.nd_loop((num_rows * num_columns // (_OWN * COLUMNS),), collective_axes="core")
        def _visit(at: Any) -> None:
            row, column = at.index[0] // across * _OWN, at.index[0] % across * COLUMNS
            own = _Own(
                row + group * ROWS,
                column,
                [store.at[group] for store in stores],
                (fetched or stores)[0].at[group],
                lambda piece: arrived.at[group * _PIECES + piece],
            )

            def compute(run: Callable[..., Any]) -> None:
                def with_sums(sums: Any) -> None:
                    run(sums)
                    _finish(sums[...], own, product, operands, results)

                if product.fetched:
                    _fetch(operands[0], own, product)
                pl.run_scoped(with_sums, plgpu.WGMMAAccumulatorRef((ROWS, COLUMNS), jnp.float32))

            columns = pl.ds(column, COLUMNS)
            own_b = b.at[:, columns] if product.columns_axis else b.at[columns, :]
            _pipeline(a, b, product, compute)(a.at[pl.ds(row, _OWN), :], own_b, allocations=allocations)

        plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(
        visit_all,
        allocations=_pipeline(a, b, product, lambda _: None).get_allocations(a, b),
        stores=[memory(dtype) for dtype in product.results],
        fetched=own_slots,
        arrived=plgpu.Barrier(num_barriers=WARPGROUPS * _PIECES),
        collective_axes="warpgroup",
    )


def _pipeline(a: Any, b: Any, product: _Product, compute: Callable[..., None]) -> Any:
    """Multiply a tile in steps along the rows of `a`, while the next steps are fetched."""
    step = _ROW_BYTES // jnp.dtype(a.dtype).itemsize
    b_shape = (step, COLUMNS) if product.columns_axis else (COLUMNS, step)

    def multiply(_: Any, own_a: Any, own_b: Any, sums: Any) -> Any:
        rows = pl.ds(lax.axis_index("warpgroup") * ROWS, ROWS)
        plgpu.wgmma(sums, own_a.at[rows], own_b if product.columns_axis else own_b.T)
        plgpu.wgmma_wait(0)  # the other warpgroup's products continue
        return sums

    return plgpu.emit_pipeline_warp_specialized(
        multiply,
        grid=(a.shape[1] // step,),
        in_specs=[
            _block((_OWN, step), 1, a.dtype, product),
            _block(b_shape, 1 - product.columns_axis, b.dtype, product),
        ],
        max_concurrent_steps=product.num_stages,
        num_compute_wgs=WARPGROUPS,
        memory_registers=_COPY_REGISTERS,
        wg_axis="warpgroup",
        compute_context=compute,
    )


class _Own(NamedTuple):
    """A warpgroup's part of a tile."""

    row: Any
    column: Any
    stores: list[Any]  #: slots of each result
    fetched: Any  #: slots of the fetched operand
    arrived: Callable[[int], Any]  #: piece -> its barrier

    def indices(self, piece: int) -> tuple[Any, Any]:
        """Return the indices of a piece in [N, F]."""
        return pl.ds(self.row, ROWS), pl.ds(self.column + piece * PIECE, PIECE)


def _fetch(source: Any, own: _Own, product: _Product) -> None:
    """Start to fetch the pieces. All threads have read those of the previous tile, as each store waits for them."""
    if product.shares_slots:  # until its results have left them
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for piece in range(_PIECES):
        plgpu.copy_gmem_to_smem(source.at[own.indices(piece)], own.fetched.at[piece], own.arrived(piece))


def _finish(
    sums_RC: jax.Array, own: _Own, product: _Product, operands: tuple[Any, ...], results: Any
) -> None:
    """Turn sums into results, piece by piece: each is computed while the previous one is copied."""
    scales = operands[-1] if len(operands) > bool(product.fetched) else None
    for piece in range(_PIECES):
        slot, start, fetched = piece % product.num_slots, piece * PIECE, None
        stores = [store.at[slot] for store in own.stores]
        if product.fetched:
            plgpu.barrier_wait(own.arrived(piece))
            fetched = own.fetched.at[piece][...]
        if not product.shares_slots:
            plgpu.wait_smem_to_gmem(len(results), wait_read_only=True)
        made = product.finish(sums_RC[:, start : start + PIECE], fetched, scales)
        places = [own.indices(piece)] * len(results)
        if product.is_turned:
            made = [made[0].astype(jnp.float16)]  # threads exchange 16 bits
            put_across(stores[1], made[0], product.interpret)
            places[1] = places[1][::-1]
        for store, piece_RP in zip(stores, made, strict=not product.is_turned):
            store[...] = piece_RP.astype(store.dtype)
        plgpu.commit_smem()
        for store, result, place in zip(stores, results, places, strict=True):
            plgpu.copy_smem_to_gmem(store, result.at[place])


def _block(shape: tuple[int, int], axis: int, dtype: Any, product: _Product) -> Any:
    """Specify the tiles of a factor, which the pipeline takes in order along an axis."""
    swizzle = _swizzle(shape[1], dtype, product)
    return plgpu.BlockSpec(shape, lambda k: (k, 0) if axis == 0 else (0, k), transforms=swizzle)


def _swizzle(columns: int, dtype: Any, product: _Product) -> tuple[Any, ...]:
    """Return the layout of a tile in shared memory that wgmma needs and that avoids bank conflicts."""
    if product.interpret:
        return ()
    size = jnp.dtype(dtype).itemsize
    row_bytes = min(_ROW_BYTES, columns * size)
    return plgpu.TilingTransform((8, row_bytes // size)), plgpu.SwizzleTransform(row_bytes)


def _call(product: _Product, a_NK: jax.Array, b: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
    shape = len(a_NK), b.shape[product.columns_axis]
    shapes = [shape, shape[::-1] if product.is_turned else shape][: len(product.results)]
    program = plgpu.kernel(
        partial(_kernel, product=product),
        out_type=[*map(jax.ShapeDtypeStruct, shapes, product.results)],
        grid=(1 if product.interpret else _CORES,),
        grid_names=("core",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=product.interpret,
    )
    return tuple(varying_like(x, a_NK) for x in program(a_NK, b, *operands))
