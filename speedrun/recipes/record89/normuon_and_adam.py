"""The optimisers of record 89: NorMuon at every step, Adam at every second.

NorMuon normalises Muon's directions and decays weights cautiously, on banks [K, m, n] as in `orthogonal`. Adam sums
gradients over several steps, decays cautiously, and keeps two tied tables equal.
Sources: Li et al. 2025 (NorMuon); Amsel et al. 2025 (Polar Express); Liang et al. 2024 (cautious).
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from speedrun.base.errors import UsageError
from speedrun.base.field_types import Momentum, Positive, Rate
from speedrun.science.inputs import Inputs
from speedrun.science.optim.banks import in_stacks, quintics
from speedrun.science.params import Dtype, Layout, Member, Params
from speedrun.science.rows import to_dense

#: (a, b, c) of each step.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def polar_express(g_Kmn: jax.Array, *, dtype: Dtype) -> jax.Array:
    """Move the singular values of each matrix (m <= n) close to one, in `dtype`. Zero stays zero."""
    x = g_Kmn.astype(dtype)
    return quintics(x / (1.02 * jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-6), POLAR_EXPRESS)


def normalize(x_Kmn: jax.Array, second: jax.Array, *, beta2: float) -> tuple[jax.Array, jax.Array]:
    """Divide directions by the root of their running mean square, but keep the norm of each matrix.

    Returns the directions, and the new running means (f32, `shorter_mean`).
    """
    mean = shorter_mean(jnp.square(x_Kmn.astype(jnp.float32)))
    second = beta2 * second + (1 - beta2) * mean
    scale = jax.lax.rsqrt(jnp.maximum(second, 1e-10))

    def norm(mean: jax.Array) -> jax.Array:
        return jnp.sqrt(x_Kmn.shape[1] * jnp.sum(mean, (1, 2), keepdims=True))

    factor = scale * norm(mean) / jnp.maximum(norm(mean * jnp.square(scale)), 1e-10)
    return factor.astype(x_Kmn.dtype) * x_Kmn, second


def shorter_mean(x_Kmn: jax.Array) -> jax.Array:
    """Return means over the shorter side: [K, 1, n]; for square matrices over the columns: [K, m, 1]."""
    return jnp.mean(x_Kmn, axis=1 if x_Kmn.shape[1] < x_Kmn.shape[2] else 2, keepdims=True)


class NorMuonState(NamedTuple):
    """Running means of gradients [K, m, n], and of squared directions (`shorter_mean`), by bank."""

    momentum: Params
    second: Params


def normuon(
    names: Collection[str], rates: Callable[[], Params], lr: float, decay: float, beta2: float, dtype: Dtype
) -> optax.GradientTransformationExtraArgs:
    """M <- mu M + (1 - mu) G;  D = normalize(polar_express(mu M + (1 - mu) G));  a = lr * lr_scale.

    Update: -a rate (D + decay a W [D W >= 0]). Gradients of other arrays pass unchanged. `inputs` are "momentum" (mu)
    and "lr_scale"; `rates()` returns the rate of each matrix (f32 [K, 1, 1]) by bank.
    """

    def init(params: Params) -> NorMuonState:
        banks = {name: params[name] for name in names}
        means = jax.tree.map(shorter_mean, banks)
        return NorMuonState(*(jax.tree.map(jnp.zeros_like, x) for x in (banks, means)))

    @jax.named_scope("normuon")
    def update(
        grads: Params, state: NorMuonState, params: Params, *, inputs: Inputs, **_: Any
    ) -> tuple[Params, NorMuonState]:
        mu, a, rate = inputs["momentum"], lr * inputs["lr_scale"], rates()
        mean = {name: mu * m + (1 - mu) * grads[name] for name, m in state.momentum.items()}
        ahead = [mu * m + (1 - mu) * grads[name] for name, m in mean.items()]
        polar = zip(mean, in_stacks(ahead, partial(polar_express, dtype=dtype)), strict=True)
        moves, second = {**grads}, {}
        for name, x_Kmn in polar:
            d, second[name] = normalize(x_Kmn, state.second[name], beta2=beta2)
            kept = jnp.where(d * params[name] >= 0, params[name], 0.0)
            moves[name] = -a * rate[name] * (d + decay * a * kept)
        return moves, NorMuonState(mean, second)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True)
class AdamGroup:
    """Settings of a group of parameters."""

    name: str
    lr: Rate  #: factor of `adam_lr`
    beta1: Momentum
    beta2: Momentum
    decay: Rate  #: factor of `adam_decay`


class AdamState(NamedTuple):
    """State by packed name."""

    num_updates: jax.Array
    waiting: Params  #: sum of gradients since the last update, in the dtype of the parameter
    mean: Params  #: f32, running mean of the sums
    square: Params  #: f32, running mean of their squares


def cautious_adam(
    periods: Sequence[Mapping[str, AdamGroup]],
    tied: tuple[str, ...],
    lr: float,
    *,
    eps: float,
    decay: float,
    when: str = "adam",
) -> optax.GradientTransformationExtraArgs:
    """Adam for some arrays at some steps; the gradients of other arrays pass unchanged.

    `inputs[when]` is the number of the period, from 1, whose settings a step uses; 0 or False: sum gradients.

    a = lr * group.lr * lr_scale;  u = a sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps).
    Update: -(u + a^2 decay * group.decay W [u W > 0]).

    While `inputs["tied"]`, each of the `tied` arrays gets the sum of their gradients, so that equal arrays and their
    moments stay equal. The period is compiled in; "tied" is traced.
    """

    def init(params: Params) -> AdamState:
        waiting = {name: jnp.zeros_like(params[name]) for name in periods[0]}
        mean, square = (jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), waiting) for _ in range(2))
        return AdamState(jnp.zeros((), jnp.int32), waiting, mean, square)

    @jax.named_scope("adam")
    def update(
        grads: Params, state: AdamState, params: Params, *, inputs: Inputs, **_: Any
    ) -> tuple[Params, AdamState]:
        total = {
            name: waiting + to_dense(waiting, grads[name]).astype(waiting.dtype)
            for name, waiting in state.waiting.items()
        }
        if not (period := int(inputs[when])):
            rest = {name: jnp.zeros_like(x, jnp.float32) for name, x in total.items()}
            return {**grads, **rest}, state._replace(waiting=total)
        all_tied = sum(total[name] for name in tied)
        count, moves, mean, square = state.num_updates + 1, {**grads}, {}, {}
        for name, group in periods[period - 1].items():
            sums = jnp.where(inputs["tied"], all_tied, total[name]) if name in tied else total[name]
            g, w = sums.astype(jnp.float32), params[name].astype(jnp.float32)
            m = mean[name] = group.beta1 * state.mean[name] + (1 - group.beta1) * g
            v = square[name] = group.beta2 * state.square[name] + (1 - group.beta2) * g * g
            a = lr * group.lr * inputs["lr_scale"]
            corrected = a * jnp.sqrt(since(group.beta2, count)) / since(group.beta1, count)
            u = corrected * m / (jnp.sqrt(v) + eps)
            moves[name] = -(u + a * a * decay * group.decay * jnp.where(u * w > 0, w, 0.0))
        return moves, AdamState(count, jax.tree.map(jnp.zeros_like, total), mean, square)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def since(beta: float, count: jax.Array) -> jax.Array:
    """Return 1 - beta^count. In float32 the difference itself would lose six bits of 1 - 0.99."""
    return -jnp.expm1(count * jnp.float32(math.log(beta)))


def by_array(layout: Layout, names: Iterable[str], given: Sequence[AdamGroup]) -> dict[str, AdamGroup]:
    """Return the settings of packed arrays; raise UsageError for a group without settings."""
    settings, groups = {group.name: group for group in given}, layout.groups
    if missing := sorted({groups[name] for name in names} - {*settings}):
        raise UsageError(f"its optimizer has no AdamGroup for group {missing[0]!r} of its table")
    return {name: settings[groups[name]] for name in names}


def check_tied(layout: Layout, groups: Mapping[str, AdamGroup], tied: tuple[str, ...]) -> None:
    """Raise UsageError unless two tables have equal starts and settings."""
    rules = {name: astuple(groups[name])[1:] for name in tied if name in groups}
    starts = {layout.table[name].like or name for name in rules}
    if len(rules) != 2 or len({*rules.values()}) != 1 or len(starts) != 1:
        need = "need two tables with equal starts, whose groups have equal settings"
        raise UsageError(f"its optimizer ties {tied}; {need}")


@dataclass(frozen=True, slots=True)
class NorMuonAndAdam:
    """NorMuon for group "matrix", Adam for all others. Both decays grow with the square of the learning rate.

    Learning rates are multiplied by the input `lr_scale`.
    """

    muon_lr: Rate
    muon_decay: Rate
    muon_beta2: Momentum  #: of the second moment
    polar_dtype: Dtype  #: of Polar Express
    rate_of: Callable[[Member], float]  #: factor of `muon_lr`
    adam_lr: Rate
    adam_eps: Positive
    adam_decay: Rate
    adam: tuple[AdamGroup, ...]  #: one for each group but "matrix"
    tied: tuple[str, str] = ("head", "embed")  #: updated as one while the input `tied` is true

    def transform(self, layout: Layout) -> optax.GradientTransformationExtraArgs:
        """Return the transformation; raise UsageError for groups without settings, or unequal tied tables."""
        matrices = [name for name, group in layout.groups.items() if group == "matrix"]
        others = [name for name, group in layout.groups.items() if group != "matrix"]
        groups = by_array(layout, others, self.adam)
        check_tied(layout, groups, self.tied)
        rates = partial(layout.per_matrix, self.rate_of)
        muon = normuon(matrices, rates, self.muon_lr, self.muon_decay, self.muon_beta2, self.polar_dtype)
        adam = cautious_adam([groups], self.tied, self.adam_lr, eps=self.adam_eps, decay=self.adam_decay)
        return optax.chain(muon, adam)
