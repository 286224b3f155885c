"""`cross_entropy_gpu.Passes` for Hopper, in Pallas for Mosaic GPU.

XLA's passes are bound by instructions. These use the special-function units for exp2 and tanh (error up to 2^-11).

Legend: N tokens, V vocabulary; in a kernel R rows and C columns of a tile.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from speedrun.science.kernels.attention_triton import LOG2_E
from speedrun.science.kernels.cross_entropy import Cap
from speedrun.science.kernels.cross_entropy_gpu import Passes
from speedrun.science.kernels.varying import varying_like

ROWS = 64
#: Widths of a tile, the best first: 192 divides 50,304 and fits into the registers.
COLUMNS = (192, 128, 64)
#: A factor is repeated, as no tile has fewer columns.
_FACTOR_COLUMNS = 8


class _Settings(NamedTuple):
    cap: Cap
    scale: float
    interpret: Any  #: None, or parameters of JAX's interpreter


def unsupported_reasons(num_tokens: int, num_columns: int, dtype: Any) -> list[str]:
    """Return why the kernels cannot run on logits of this shape and dtype."""
    checks = {
        f"{num_tokens} tokens in a chunk; the kernels need a multiple of {ROWS}": num_tokens % ROWS,
        f"{num_columns} columns; the kernels need a multiple of {COLUMNS[-1]}": num_columns % COLUMNS[-1],
        f"{dtype} logits; the kernels need bfloat16": dtype != jnp.bfloat16,
    }
    return [reason for reason, applies in checks.items() if applies]


def sum_exp(z_NV: jax.Array, cap: Cap, scale: float, interpret: Any = None) -> jax.Array:
    """Return the sum of exp(capped - height) of each row: f32 [N]."""
    rows, tiles = len(z_NV), z_NV.shape[1] // _columns(z_NV)
    settings = _Settings(cap, scale, interpret)
    (sums_JN,) = _call(_sum_kernel, settings, [((tiles, rows), jnp.float32)], [((ROWS,), jnp.float32)], z_NV)
    return jnp.sum(sums_JN, axis=0)


def softmax_gradient(
    z_NV: jax.Array, factor_N: jax.Array, cap: Cap, scale: float, dtype: Any, interpret: Any = None
) -> tuple[jax.Array, ...]:
    """Return factor exp(capped - height) (1 - tanh^2), rounded: [N, V]; in 8 bits also [V, N], both saturated."""
    shapes = [(z_NV.shape, dtype), (z_NV.shape[::-1], dtype)][: 2 if jnp.dtype(dtype).itemsize == 1 else 1]
    tile = ROWS, _columns(z_NV)
    stores = [(tile, dtype), (tile[::-1], dtype)][: len(shapes)]
    factor_NF = jnp.broadcast_to(factor_N[:, None], (len(factor_N), _FACTOR_COLUMNS))
    stores = [((ROWS, _FACTOR_COLUMNS), jnp.float32), *stores]
    return _call(_gradient_kernel, _Settings(cap, scale, interpret), shapes, stores, z_NV, factor_NF)


PASSES = Passes(sum_exp, softmax_gradient)


def _sum_kernel(z: Any, sums: Any, own_z: Any, own_sums: Any, arrived: Any, *, settings: _Settings) -> None:
    rows, columns = _place(own_z)
    _fetch(z.at[rows, columns], own_z, arrived)
    _, weights_RC = _weights(own_z, settings)
    own_sums[...] = jnp.sum(weights_RC, axis=1)
    _store((own_sums, sums.at[lax.axis_index("column"), rows]))


def _gradient_kernel(z: Any, factor: Any, *refs: Any, settings: _Settings) -> None:
    number = (len(refs) - 3) // 2
    *results, own_z, own_factor = refs[: number + 2]
    *stores, arrived = refs[number + 2 :]
    rows, columns = _place(own_z)
    _fetch(factor.at[rows, :], own_factor, arrived)
    _fetch(z.at[rows, columns], own_z, arrived)
    tanh_RC, weights_RC = _weights(own_z, settings)
    factor_R = jnp.max(own_factor[...], axis=1)  # of equal entries
    g_RC = (weights_RC - weights_RC * tanh_RC * tanh_RC) * lax.broadcast_in_dim(factor_R, own_z.shape, (0,))
    if len(stores) > 1:
        g_RC = g_RC.astype(jnp.float16)  # threads exchange 16 bits
        put_across(stores[1], g_RC, settings.interpret)
    stores[0][...] = g_RC.astype(stores[0].dtype)
    places = (rows, columns), (columns, rows)
    _store(*((store, to.at[place]) for store, to, place in zip(stores, results, places, strict=False)))


def put_across(own: Any, g_RC: jax.Array, interpret: Any) -> None:
    """Store numbers of 16 bits as columns, rounded to the dtype of the memory."""
    if interpret:
        own[...] = g_RC.astype(own.dtype).T
    else:
        turned_RC = plgpu.layout_cast(g_RC, plgpu.Layout.WGMMA_TRANSPOSED)
        own.transpose((1, 0))[...] = turned_RC.astype(own.dtype)


def _weights(own_z: Any, settings: _Settings) -> tuple[jax.Array, jax.Array]:
    """Return tanh and exp(capped - height): f32 [R, C]."""
    cap, scale, _ = settings
    z_RC = own_z[...].astype(jnp.float32)
    tanh_RC = jnp.tanh(z_RC * (1 / (scale * cap.unit)) + cap.shift / cap.unit)
    return tanh_RC, jnp.exp2(tanh_RC * (cap.height * LOG2_E) - cap.height * LOG2_E)


def _place(own_z: Any) -> tuple[Any, Any]:
    rows, columns = own_z.shape
    return pl.ds(lax.axis_index("row") * rows, rows), pl.ds(lax.axis_index("column") * columns, columns)


def _fetch(source: Any, target: Any, arrived: Any) -> None:
    plgpu.copy_gmem_to_smem(source, target, arrived)
    plgpu.barrier_wait(arrived)


def _store(*pairs: tuple[Any, Any]) -> None:
    plgpu.commit_smem()
    for source, target in pairs:
        plgpu.copy_smem_to_gmem(source, target)
    plgpu.wait_smem_to_gmem(0)


def _columns(z_NV: jax.Array) -> int:
    return next((width for width in COLUMNS if z_NV.shape[1] % width == 0), COLUMNS[-1])


def _call(
    kernel: Any, settings: _Settings, results: list[Any], stores: list[Any], *operands: jax.Array
) -> tuple[jax.Array, ...]:
    """Run a kernel once per tile; tiles are swizzled against bank conflicts. Arrays are (shape, dtype)."""
    num_tokens, num_columns = operands[0].shape
    width = _columns(operands[0])

    def tile(shape: tuple[int, ...], dtype: Any) -> Any:
        if settings.interpret or len(shape) == 1:
            return plgpu.SMEM(shape, dtype)
        row = min(64, shape[1])
        swizzle = plgpu.TilingTransform((8, row)), plgpu.SwizzleTransform(row * jnp.dtype(dtype).itemsize)
        return plgpu.SMEM(shape, dtype, transforms=swizzle)

    program = plgpu.kernel(
        partial(kernel, settings=settings),
        out_type=[jax.ShapeDtypeStruct(*result) for result in results],
        grid=(num_columns // width, num_tokens // ROWS),
        grid_names=("column", "row"),
        scratch_types=[
            tile((ROWS, width), operands[0].dtype),
            *(tile(*store) for store in stores),
            plgpu.Barrier(),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=settings.interpret,
    )
    return tuple(varying_like(x, operands[0]) for x in program(*operands))
