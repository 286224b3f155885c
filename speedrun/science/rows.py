"""Tables of which a batch reads few rows: the rows travel between devices, the table stays where it is.

Each device asks the owners for the distinct rows that it reads, and they send them: two all-to-alls of a static size.
Gradients return by a third, which differentiation makes. Call these functions inside `shard_map`.

Legend: B sequences, N ids, S shards, C rows that fit between two devices, R rows of a shard, D model.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from speedrun.base.mesh import DATA
from speedrun.science.params import Layout, Params


def read(layout: Layout, params: Params, tokens_BT: jax.Array, *, all_fit: bool = False) -> Params:
    """Replace each table's own shard [R, D] by the rows that tokens read: [B, N, D].

    Rows that do not fit are zero, and `unread` counts them; if `all_fit` there are none, and more is sent.
    """
    ids = {name: (ids_of(tokens_BT), len(params[name])) for name, ids_of in layout.reads.items()}
    return params | {name: fetch(params[name], wants(*of, all_fit=all_fit)) for name, of in ids.items()}


def unread(layout: Layout, params: Params, tokens_BT: jax.Array, num_parts: int) -> jax.Array:
    """Return the number of distinct rows that do not fit, if tokens are read in so many parts: f32 []."""
    found = jnp.zeros(())
    for name, ids_of in layout.reads.items():
        for part_BT in jnp.split(tokens_BT, num_parts):
            found += wants(ids_of(part_BT), len(params[name])).missing
    return found


class Wants(NamedTuple):
    """The rows that a device reads."""

    local_SC: jax.Array  #: i32, by owner: its rows without repetition; R where there is none
    slot_BN: jax.Array  #: i32, where each id's row arrives among S * C; beyond if it does not fit
    missing: jax.Array  #: f32 [], distinct rows that do not fit, and ids outside the table


def most_rows(num_ids: int, num_local: int, shards: int) -> int:
    """Return C for ids that spread evenly over the shards: their mean and eight standard deviations."""
    return min(num_ids, num_local, math.ceil(num_ids / shards + 8 * math.sqrt(num_ids / shards)))


def wants(ids_BN: jax.Array, num_local: int, *, all_fit: bool = False) -> Wants:
    """Return what a device asks of the owners, who have `num_local` rows each."""
    shards, ids_N = jax.lax.axis_size(DATA), ids_BN.reshape(-1)
    t_N, most = jnp.arange(len(ids_N)), most_rows(len(ids_N), num_local, 1 if all_fit else shards)
    last_N = jnp.zeros(shards * num_local, jnp.int32).at[ids_N].max(t_N)[ids_N]  # last place of the same id
    asks_N, owner_N = last_N == t_N, ids_N // num_local
    asks_NS = jax.nn.one_hot(jnp.where(asks_N, owner_N, shards), shards, dtype=jnp.int32)
    nth_N = (jnp.cumsum(asks_NS, axis=0) - 1)[t_N, owner_N]
    place_N = jnp.where(asks_N & (nth_N < most), nth_N, shards * most)
    local_SC = jnp.full((shards, most), num_local).at[owner_N, place_N].set(ids_N % num_local, mode="drop")
    outside_N = (ids_N < 0) | (ids_N >= shards * num_local)
    missing = jnp.sum(jnp.maximum(jnp.sum(asks_NS, axis=0) - most, 0)) + jnp.sum(outside_N)
    return Wants(
        local_SC, (owner_N * most + place_N)[last_N].reshape(ids_BN.shape), missing.astype(jnp.float32)
    )


def fetch(table_RD: jax.Array, wanted: Wants) -> jax.Array:
    """Return the row of each id: [B, N, D]. Readers and owners sum gradients in float32, as in `nn.lookup`."""

    def taken(x: jax.Array, at: jax.Array) -> jax.Array:
        return x.astype(jnp.float32).at[at].get(mode="fill", fill_value=0).astype(x.dtype)

    exchanged = partial(jax.lax.all_to_all, axis_name=DATA, split_axis=0, concat_axis=0, tiled=True)
    rows_SCD = exchanged(taken(table_RD, exchanged(wanted.local_SC)))
    return taken(rows_SCD.reshape(-1, *table_RD.shape[1:]), wanted.slot_BN)
