"""The optimisers of record 92: ANVIL at every step, Adam at every second, tables at events.

ANVIL is NorMuon with two running means of gradients, a fast and a slow one. The slow one decides what decays, and later
has a part in the direction. Tables sum their gradients over the steps of a cycle, and are updated at its end.
Source: modded-nanogpt, record 92.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from speedrun.base.field_types import Momentum, Positive, Rate
from speedrun.recipes.record89 import normuon_and_adam as adams
from speedrun.recipes.record89.normuon_and_adam import AdamGroup, normalize, shorter_mean
from speedrun.recipes.record92.averages import Average, averages
from speedrun.recipes.record92.row_adam import RowPeriod, row_adam
from speedrun.science.inputs import Inputs
from speedrun.science.optim.banks import in_stacks, quintics
from speedrun.science.params import Dtype, Layout, Member, Params

#: (a, b, c) of each step.
COEFFICIENTS = (
    (3.923798038567, -6.095026865488, 3.905234618423),
    (3.278126713798, -3.328923386476, 0.989127286973),
    (3.505298394150, -5.137358782410, 1.968325560615),
    (2.815058591845, -3.685181239622, 1.417196497642),
    (2.245503932403, -2.443826979899, 0.963091710461),
    (2.256537145403, -2.166840097229, 0.929501253245),
)


def orthogonal(g_Kmn: jax.Array, *, dtype: Dtype) -> jax.Array:
    """Move the singular values of each matrix (m <= n) close to one, in `dtype`. Zero stays zero."""
    # From 1.00007 / 1.05 on they explode. Rank one has 1 / 1.05, and rounding adds up to two eps (LOG, 2026-11-28).
    x, safety = g_Kmn.astype(dtype), 1 + 2 * float(jnp.finfo(dtype).eps)
    norm = jnp.linalg.norm(x.astype(jnp.float32), axis=(1, 2), keepdims=True)
    return quintics((x / (1.05 * safety * norm + 1e-6)).astype(dtype), COEFFICIENTS)


class AnvilState(NamedTuple):
    """Running means of gradients [K, m, n], and of squared directions (`shorter_mean`), by bank."""

    fast: Params
    slow: Params
    second: Params


#: Of the slow mean, and of the second moment.
Betas = tuple[float, float]


def anvil(
    names: Collection[str], rates: Callable[[], Params], lr: float, decay: float, betas: Betas, dtype: Dtype
) -> optax.GradientTransformationExtraArgs:
    """Fast and slow are means of G;  B = w fast + (1 - w) slow;  D = normalize(orthogonal((1 - mu) G + mu B)).

    Update: -a rate (D + decay a W [slow W >= 0]) with a = lr * lr_scale, so weights without gradient decay. Gradients
    of other arrays pass unchanged. `inputs` are "momentum" (mu), "fast_beta", "fast_weight" (w) and "lr_scale";
    `rates()` returns the rate of each matrix (f32 [K, 1, 1]) by bank.
    """

    def init(params: Params) -> AnvilState:
        banks = {name: params[name] for name in names}
        kinds = banks, banks, jax.tree.map(shorter_mean, banks)
        return AnvilState(*(jax.tree.map(jnp.zeros_like, kind) for kind in kinds))

    @jax.named_scope("anvil")
    def update(
        grads: Params, state: AnvilState, params: Params, *, inputs: Inputs, **_: Any
    ) -> tuple[Params, AnvilState]:
        mu, weight, a, rate = inputs["momentum"], inputs["fast_weight"], lr * inputs["lr_scale"], rates()
        own = {name: grads[name] for name in names}
        fast = _moved(state.fast, own, 1 - inputs["fast_beta"])
        slow = _moved(state.slow, own, jnp.float32(1 - betas[0]))
        ahead = _moved(own, _moved(slow, fast, weight), mu)
        directions = in_stacks([*ahead.values()], partial(orthogonal, dtype=dtype))
        moves, second = {**grads}, {}
        for name, x_Kmn in zip(ahead, directions, strict=True):
            d, second[name] = normalize(x_Kmn, state.second[name], beta2=betas[1])
            kept = jnp.where(slow[name] * params[name] >= 0, params[name], 0.0)
            moves[name] = -a * rate[name] * (d + decay * a * kept)
        return moves, AnvilState(fast, slow, second)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _moved(old: Params, new: Params, part: jax.Array) -> Params:
    return {name: x + part * (new[name] - x) for name, x in old.items()}


@dataclass(frozen=True, slots=True)
class AnvilAndAdam:
    """ANVIL for banks, Adam for all others; averages of late weights replace the last ones.

    Decays grow with the square of the learning rate. Learning rates are multiplied by the input `lr_scale`. Tables have
    settings for each period; the input `update_tables` is its number, from 1, or 0 between events.
    """

    anvil_lr: Rate
    anvil_decay: Rate
    anvil_betas: tuple[Momentum, Momentum]  #: of the slow mean, and of the second moment
    polar_dtype: Dtype  #: of the iteration that makes matrices orthogonal
    rate_of: Callable[[Member], float]  #: factor of `anvil_lr`
    adam_lr: Rate
    adam_eps: Positive
    adam_decay: Rate
    adam: tuple[AdamGroup, ...]  #: one for each group but banks and tables
    tables: tuple[AdamGroup, ...]  #: in the first period
    later_tables: tuple[AdamGroup, ...]
    rows: tuple[RowPeriod, ...]  #: of tables that are read, by period
    averages: tuple[Average, ...]
    rescaled: tuple[str, ...]  #: groups that keep their norm when averages are shipped
    tied: tuple[str, str] = ("head", "embed")  #: updated as one while the input `tied` is true

    def transform(self, layout: Layout) -> optax.GradientTransformationExtraArgs:
        """Return the transformation; raise UsageError for groups without settings, or unequal tied tables."""
        names = [name for name in layout.groups if name not in (*layout.banks, *layout.reads)]
        tables = [name for name in names if layout.groups[name] in {group.name for group in self.tables}]
        groups = adams.by_array(layout, [name for name in names if name not in tables], self.adam)
        adams.check_tied(layout, groups, self.tied)
        periods = [adams.by_array(layout, tables, given) for given in (self.tables, self.later_tables)]
        rates = partial(layout.per_matrix, self.rate_of)
        settings: Any = {"lr": self.adam_lr, "eps": self.adam_eps, "decay": self.adam_decay}
        return optax.chain(
            anvil(layout.banks, rates, self.anvil_lr, self.anvil_decay, self.anvil_betas, self.polar_dtype),
            adams.cautious_adam([groups], self.tied, **settings),
            adams.cautious_adam(periods, (), when="update_tables", **settings),
            row_adam(layout.reads, self.rows, when="update_tables", **settings),
            averages(self.averages, self.rescaled, layout),
        )
