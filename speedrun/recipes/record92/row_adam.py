"""Adam for tables of which a batch reads few rows (`science.rows`): a row that no batch read does not move.

Source: modded-nanogpt, record 92. Legend: R rows of a shard, U rows of an update, D model.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from speedrun.base.field_types import Momentum, Rate
from speedrun.recipes.record89.normuon_and_adam import since
from speedrun.science.inputs import Inputs
from speedrun.science.params import Params
from speedrun.science.rows import Rows, gather_rows


@dataclass(frozen=True, slots=True)
class RowPeriod:
    """Settings of a period."""

    lr: Rate  #: factor of `adam_lr`
    beta2: Momentum
    decay: Rate  #: factor of `adam_decay`


Scales = tuple[float, float, jax.Array, jax.Array]  #: beta2, eps, and factors of the step and of the decay


class RowAdamState(NamedTuple):
    """State by name of the table."""

    num_updates: jax.Array
    waiting: Params  #: sum of gradients since the last update, in the dtype of the table
    waits: Params  #: bool [R], rows that were read since
    square: Params  #: f32 [R], running mean of the mean square of a row's gradient


def row_adam(
    names: Collection[str], periods: Sequence[RowPeriod], lr: float, *, eps: float, decay: float, when: str
) -> optax.GradientTransformationExtraArgs:
    """Adam without a mean, with one mean square for each row, at some steps; other gradients pass unchanged.

    `inputs[when]` is the number of the period, from 1, whose settings a step uses; 0: sum gradients. It is compiled in,
    as is `inputs["rows_room"]`: how many batches as large as that of the update may wait.

    v <- beta2 v + (1 - beta2) mean(g^2);  a = lr * period.lr * lr_scale;  u = a sqrt(1 - beta2^t) g / (sqrt(v) + eps).
    Update: -(u + a^2 decay * period.decay W [u W > 0]).

    If more rows wait for an update than fit, the weights become NaN, and the run ends.
    """

    def init(params: Params) -> RowAdamState:
        tables = {name: params[name] for name in names}
        waits = {name: jnp.zeros(len(x), bool) for name, x in tables.items()}
        square = jax.tree.map(jnp.float32, waits)
        return RowAdamState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, tables), waits, square)

    @jax.named_scope("row_adam")
    def update(
        grads: Params, state: RowAdamState, params: Params, *, inputs: Inputs, **_: Any
    ) -> tuple[dict[str, Any], RowAdamState]:
        moves: dict[str, Any] = {**grads}
        new = RowAdamState(state.num_updates, {}, {}, {**state.square})
        number = int(inputs[when])
        for name in names:
            (ids_N, values_ND), table_RD = grads[name], params[name]
            waiting_RD = state.waiting[name].at[ids_N].add(values_ND.astype(table_RD.dtype), mode="drop")
            waits_R = state.waits[name].at[ids_N].set(True, mode="drop")
            if number:
                one, num_rows = periods[number - 1], len(waits_R)
                most = min(num_rows, int(inputs["rows_room"]) * len(ids_N))
                (ids_U,) = jnp.nonzero(waits_R, size=most, fill_value=num_rows)
                a = lr * one.lr * inputs["lr_scale"]
                fits = jnp.where(jnp.sum(waits_R) > most, jnp.nan, 1.0)
                corrected = fits * a * jnp.sqrt(since(one.beta2, state.num_updates + 1))
                scales = one.beta2, eps, corrected, a * a * decay * one.decay
                move_UD, new.square[name] = _update(table_RD, waiting_RD, ids_U, state.square[name], scales)
                moves[name] = Rows(ids_U, move_UD)
                waiting_RD = waiting_RD.at[ids_U].set(0, mode="drop")
                waits_R = jnp.zeros_like(waits_R)
            else:
                moves[name] = Rows(ids_N[:0], values_ND[:0])
            new.waiting[name], new.waits[name] = waiting_RD, waits_R
        return moves, new._replace(num_updates=state.num_updates + bool(number))

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _update(
    table_RD: jax.Array, waiting_RD: jax.Array, ids_U: jax.Array, square_R: jax.Array, scales: Scales
) -> tuple[jax.Array, jax.Array]:
    """Return what rows move, and all new mean squares."""
    beta2, eps, a, pull = scales
    g_UD, w_UD = (gather_rows(x, ids_U).astype(jnp.float32) for x in (waiting_RD, table_RD))
    v_U = beta2 * gather_rows(square_R, ids_U) + (1 - beta2) * jnp.mean(g_UD * g_UD, axis=1)
    u_UD = a * g_UD / (jnp.sqrt(v_U) + eps)[:, None]
    move_UD = -(u_UD + pull * jnp.where(u_UD * w_UD > 0, w_UD, 0.0))
    return move_UD, (beta2 * square_R).at[ids_U].set(v_U, mode="drop")
