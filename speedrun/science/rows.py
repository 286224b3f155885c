"""Tables of which a batch reads few rows: the rows travel between devices, the table stays where it is.

Each device asks the owners for the distinct rows that it reads, and they send them: two all-to-alls of a static size.
Gradients return by a third, which differentiation makes. Call these functions inside `shard_map`.

Legend: B sequences, N ids, S shards, C rows that fit between two devices, R rows of a shard, D model.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from speedrun.base.mesh import DATA
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
    layout: Layout, params: Params, tokens_BT: jax.Array
) -> tuple[Params, Callable[[Params], Params], dict[str, jax.Array]]:
    """Return parameters with the rows that are sent, [S, C, D], for tables; what models get of them; and their ids.

    Models get the row of each id: [B, N, D]. One that does not fit arrives as NaN.
    """
    asked = {name: _ask(ids_of(tokens_BT), len(params[name])) for name, ids_of in layout.reads.items()}

    def by_id(rows_SCD: jax.Array, slot_BN: jax.Array) -> jax.Array:
        wide_ND = jnp.concatenate(_exchanged(rows_SCD)).astype(jnp.float32)  # sums gradients in float32
        return gather_rows(wide_ND, slot_BN, jnp.nan).astype(rows_SCD.dtype)

    def arrived(sent: Params) -> Params:
        return sent | {name: by_id(sent[name], slot_BN) for name, (_, slot_BN) in asked.items()}

    ids = {name: ids_SC for name, (ids_SC, _) in asked.items()}
    return params | {name: gather_rows(params[name], ids_SC) for name, ids_SC in ids.items()}, arrived, ids


def max_rows(num_ids: int, num_local: int, shards: int) -> int:
    """Return C for ids that spread evenly over the shards: their mean and eight standard deviations."""
    return min(num_ids, num_local, math.ceil(num_ids / shards + 8 * math.sqrt(num_ids / shards)))


def _ask(ids_BN: jax.Array, num_local: int) -> tuple[jax.Array, jax.Array]:
    """Return the ids of this shard that each reader asks for, and where each id that it reads arrives among S * C."""
    shards, ids_N = jax.lax.axis_size(DATA), ids_BN.reshape(-1)
    t_N, most = jnp.arange(len(ids_N)), max_rows(len(ids_N), num_local, shards)
    ids_N = jnp.where((ids_N >= 0) & (ids_N < shards * num_local), ids_N, shards * num_local)  # of no owner
    last_N = jnp.zeros(shards * num_local, jnp.int32).at[ids_N].max(t_N)[ids_N]  # last place of the same id
    asks_N, owner_N = last_N == t_N, ids_N // num_local
    asks_NS = jax.nn.one_hot(jnp.where(asks_N, owner_N, shards), shards, dtype=jnp.int32)
    nth_N = (jnp.cumsum(asks_NS, axis=0) - 1)[t_N, owner_N]
    column_N = jnp.where(asks_N & (nth_N < most), nth_N, shards * most)
    local_SC = jnp.full((shards, most), 2**31 - 1).at[owner_N, column_N].set(ids_N % num_local, mode="drop")
    slot_N = jnp.where(owner_N < shards, (owner_N * most + column_N)[last_N], shards * most)
    return _exchanged(local_SC), slot_N.reshape(ids_BN.shape)


def of_all(rows: Rows, axes: tuple[str, ...], parts: int) -> Rows:
    """Return the rows of all devices along the axes, of a mean over so many parts, in float32."""
    number, at = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    own = [jnp.zeros((number, *x.shape), x.dtype).at[at].set(x) for x in rows]
    # The type of a gather would vary over the axes.
    ids_N, values_ND = map(jnp.concatenate, jax.lax.psum(own, axes))
    return Rows(ids_N, values_ND.astype(jnp.float32) / parts)
