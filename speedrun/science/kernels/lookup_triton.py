"""Rows of a table, whose gradient is summed tile by tile, in Pallas for Triton.

XLA adds rows of a gradient to zeros in float32 in memory, in any order, and rounds the sums in a further pass. Here
tokens are sorted by id, and a program takes some columns of a tile of them: a product with [id_i = id_j] adds those of
equal ids, and a loop adds what later tiles have of the tile's last id. So gradients are read once, and a run repeats.

Legend: B batch, T time, N tokens, V rows of the table, D model; inside a kernel C tokens of a tile, J columns.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from speedrun.science.kernels.varying import varying_like

#: Of a tile, whose loads are all in flight at once.
TOKENS, COLUMNS, WARPS = 64, 128, 4


class Order(NamedTuple):
    """Tokens by id, equal ones side by side."""

    ids_N: jax.Array  #: i32
    places_N: jax.Array  #: i32, where each of them is


def order(ids_BT: jax.Array) -> Order:
    """Sort tokens by id; equal ids keep their order, so that sums repeat."""
    places_N = varying_like(jnp.arange(ids_BT.size, dtype=jnp.int32), ids_BT)
    return Order(*jax.lax.sort_key_val(ids_BT.reshape(-1), places_N, is_stable=True))


def unsupported_reasons(num_tokens: int, model_dim: int) -> list[str]:
    """Return why the kernel cannot sum gradients of these sizes."""
    sizes = [(num_tokens, "tokens", TOKENS), (model_dim, "dimensions", COLUMNS)]
    return [f"{n:,} {what}; the kernel needs a multiple of {tile}" for n, what, tile in sizes if n % tile]


def row_sums(by_id: Order, dy_ND: jax.Array, num_rows: int, *, interpret: bool = False) -> jax.Array:
    """Return the sum of gradients for each row, [V, D] in their dtype, rounded once. Ids without a row have none."""
    zeros_VD = varying_like(jnp.zeros((num_rows, dy_ND.shape[1]), dy_ND.dtype), dy_ND)
    axes = jax.typeof(dy_ND).manual_axis_type
    return pl.pallas_call(
        _row_sums,
        grid=(len(dy_ND) // TOKENS, dy_ND.shape[1] // COLUMNS),
        out_shape=jax.ShapeDtypeStruct(zeros_VD.shape, zeros_VD.dtype, manual_axis_type=axes),
        input_output_aliases={3: 0},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name="row_sums",
    )(*by_id, dy_ND, zeros_VD)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def lookup(
    table_VD: jax.Array, ids_BT: jax.Array, by_id: Order, sums: Callable[..., jax.Array] = row_sums
) -> jax.Array:
    """Compute `nn.lookup`, given the `order` of ids. Those without a row get no gradient.

    A gradient that is not finite makes those of other ids of its tile NaN.
    """
    return table_VD[ids_BT]


def _forward(table_VD: jax.Array, ids_BT: jax.Array, by_id: Order, _: Any) -> tuple[jax.Array, Any]:
    return table_VD[ids_BT], (table_VD, by_id)  # of the table, the shape is used


def _backward(sums: Any, saved: Any, dy_BTD: jax.Array) -> tuple[jax.Array, None, None]:
    return sums(saved[1], dy_BTD.reshape(-1, dy_BTD.shape[-1]), len(saved[0])), None, None


lookup.defvjp(_forward, _backward)


def _row_sums(ids_ref: Any, places_ref: Any, dy_ref: Any, _: Any, sums_ref: Any) -> None:
    num_tokens, start = ids_ref.shape[0], pl.program_id(0) * TOKENS
    shape, t_C = (TOKENS, COLUMNS), start + jnp.arange(TOKENS)
    columns_CJ = jnp.broadcast_to(pl.program_id(1) * COLUMNS + jnp.arange(COLUMNS), shape)

    def gradients(start: jax.Array, is_read_C: jax.Array) -> jax.Array:
        """Return those of a tile, and zeros for those that are not to be read."""
        places_CJ = jnp.broadcast_to(places_ref[pl.ds(start, TOKENS)][:, None], shape)
        mask_CJ = jnp.broadcast_to(is_read_C[:, None], shape)
        return plgpu.load(dy_ref.at[places_CJ, columns_CJ], mask=mask_CJ, other=0.0)

    ids_C = ids_ref[pl.ds(start, TOKENS)]
    opens_C = (t_C == 0) | (ids_ref[jnp.maximum(t_C - 1, 0)] != ids_C)
    is_same_CC = ids_C[:, None] == ids_C[None, :]
    sums_CJ = plgpu.dot(is_same_CC.astype(dy_ref.dtype), gradients(start, t_C >= 0))
    last = ids_ref[start + TOKENS - 1]
    is_last_C = ids_C == last
    has_opened = jnp.max(jnp.where(opens_C & is_last_C, 1, 0)) > 0

    def goes_on(carried: Any) -> jax.Array:
        start, _ = carried
        return has_opened & (start < num_tokens) & (ids_ref[jnp.minimum(start, num_tokens - 1)] == last)

    def add(carried: Any) -> tuple[jax.Array, jax.Array]:
        start, more_J = carried
        dy_CJ = gradients(start, ids_ref[pl.ds(start, TOKENS)] == last)
        return start + TOKENS, more_J + jnp.sum(dy_CJ.astype(jnp.float32), axis=0)

    _, more_J = jax.lax.while_loop(goes_on, add, (start + TOKENS, jnp.zeros(COLUMNS, jnp.float32)))
    sums_CJ += jnp.where(is_last_C[:, None], more_J[None, :], 0.0)
    # Of equal ids, the first has their sum. The others have no row: where kernels are interpreted, masks are no help.
    opens_C &= (ids_C >= 0) & (ids_C < sums_ref.shape[0])
    rows_CJ = jnp.broadcast_to(jnp.where(opens_C, ids_C, sums_ref.shape[0])[:, None], shape)
    mask_CJ = jnp.broadcast_to(opens_C[:, None], shape)
    plgpu.store(sums_ref.at[rows_CJ, columns_CJ], sums_CJ.astype(sums_ref.dtype), mask=mask_CJ)
