"""Tables of which a batch reads few rows: the rows travel between devices, the table stays where it is.

Each device asks the owners for the distinct rows that it reads, and they send them: two all-to-alls of a static size.
Gradients return by a third. A row that does not fit arrives as NaN. Call these functions inside `shard_map`.

Legend: B sequences, N ids, S shards, C rows that fit between two devices (M = S C), R rows of a shard, D model.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from speedrun.base.mesh import DATA
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.kernels.lookup_triton import Order, order
from speedrun.science.params import Layout, Params

_exchanged = partial(jax.lax.all_to_all, axis_name=DATA, split_axis=0, concat_axis=0, tiled=True)


class Rows(NamedTuple):
    """Some rows of a device's shard: a gradient, where ids may repeat, or what an optimiser adds to them."""

    ids_N: jax.Array  #: i32; R or more: no row
    values_ND: jax.Array


def apply_update(x: jax.Array, move: Any) -> jax.Array:
    """Return a parameter plus its update, rounded once. `Rows` have distinct ids here, and move nothing else."""
    if isinstance(move, Rows):
        return x.at[move.ids_N].set(apply_update(gather_rows(x, move.ids_N), move.values_ND), mode="drop")
    return (x.astype(jnp.float32) + move).astype(x.dtype)


def to_dense(like: jax.Array, grad: Any) -> jax.Array:
    """Return a gradient as an array, with `Rows` summed in float32."""
    if isinstance(grad, Rows):
        return jnp.zeros(like.shape, jnp.float32).at[grad.ids_N].add(grad.values_ND, mode="drop")
    return grad


def gather_rows(table: jax.Array, ids: jax.Array, fill: float = 0) -> jax.Array:
    """Return rows of a device's shard; `fill` beyond it."""
    return table.at[ids].get(mode="fill", fill_value=fill)


def exchange_rows(
    layout: Layout, params: Params, tokens_BT: jax.Array, kernels: Kernels
) -> tuple[Params, Callable[[Params], Params], dict[str, jax.Array]]:
    """Return parameters with rows to send, [S, C, D], for tables; what makes [B, N, D] by id of them; and their ids."""
    asked = {name: _ask(ids_of(tokens_BT), len(params[name])) for name, ids_of in layout.reads.items()}

    def by_id(rows_MD: jax.Array, slot_BN: jax.Array, by_slot: Order) -> jax.Array:
        rows_BND = kernels.lookup(slot_BN, by_slot)(rows_MD)
        return jnp.where((slot_BN < len(rows_MD))[..., None], rows_BND, jnp.nan)

    def arrived(sent: Params) -> Params:
        return sent | {k: by_id(jnp.concatenate(_exchanged(sent[k])), *one[1:]) for k, one in asked.items()}

    ids = {name: one[0] for name, one in asked.items()}
    return params | {name: gather_rows(params[name], ids_SC) for name, ids_SC in ids.items()}, arrived, ids


def max_rows(num_ids: int, num_local: int, shards: int) -> int:
    """Return C for ids that spread evenly over the shards: their mean and eight standard deviations."""
    return min(num_ids, num_local, math.ceil(num_ids / shards + 8 * math.sqrt(num_ids / shards)))


def _ask(ids_BN: jax.Array, num_local: int) -> tuple[jax.Array, jax.Array, Order]:
    """Return the ids of this shard that each reader asks for, and where each id arrives: S * C if it does not fit."""
    shards = jax.lax.axis_size(DATA)
    most, is_row_BN = max_rows(ids_BN.size, num_local, shards), (ids_BN >= 0) & (ids_BN < shards * num_local)
    by_id = order(jnp.where(is_row_BN, ids_BN, shards * num_local))  # others have no owner
    ids_N, owner_N, opens_N = by_id.ids_N, by_id.ids_N // num_local, jnp.diff(by_id.ids_N, prepend=-1) != 0
    before_S = jnp.sum(opens_N[None] & (ids_N[None] < num_local * jnp.arange(shards)[:, None]), axis=1)
    nth_N = jnp.cumsum(opens_N) - 1 - before_S[jnp.minimum(owner_N, shards - 1)]
    slot_N = jnp.where((owner_N < shards) & (nth_N < most), owner_N * most + nth_N, shards * most)
    local_N = jnp.full(shards * most, 2**31 - 1).at[slot_N].set(ids_N % num_local, mode="drop")
    slot_BN = jnp.zeros_like(slot_N).at[by_id.places_N].set(slot_N).reshape(ids_BN.shape)
    return _exchanged(local_N.reshape(shards, most)), slot_BN, by_id._replace(ids_N=slot_N)


def of_all(rows: Rows, axes: tuple[str, ...], parts: int) -> Rows:
    """Return the rows of all devices along the axes, of a mean over so many parts, in float32."""
    number, at = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    own = [jnp.zeros((number, *x.shape), x.dtype).at[at].set(x) for x in rows]
    ids_N, values_ND = map(jnp.concatenate, jax.lax.psum(own, axes))  # a gather would vary over them
    return Rows(ids_N, values_ND.astype(jnp.float32) / parts)
