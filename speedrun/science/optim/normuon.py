"""NorMuon: Muon whose directions have equal sizes, and whose weights decay cautiously (record 89).

Works on banks [K, m, n] of whole local matrices, as `muon` does. Sources: Li et al. 2025 (NorMuon); Amsel et al. 2025
(Polar Express); Liang et al. 2024 (cautious).
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from speedrun.science.inputs import Inputs
from speedrun.science.optim.banks import in_stacks, quintics
from speedrun.science.params import Dtype, Params

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
    """Divide directions by the root of their running mean square; keep the norm of each matrix.

    Returns:
        The directions, by a factor that is rounded to their dtype; the new running means (f32, `shorter_mean`).
    """
    mean = shorter_mean(jnp.square(x_Kmn.astype(jnp.float32)))
    second = beta2 * second + (1 - beta2) * mean
    scale = jax.lax.rsqrt(jnp.maximum(second, 1e-10))

    def norm(mean: jax.Array) -> jax.Array:
        return jnp.sqrt(x_Kmn.shape[1] * jnp.sum(mean, (1, 2), keepdims=True))

    factor = scale * norm(mean) / jnp.maximum(norm(mean * jnp.square(scale)), 1e-10)
    return factor.astype(x_Kmn.dtype) * x_Kmn, second


def shorter_mean(x_Kmn: jax.Array) -> jax.Array:
    """Return means over the shorter side: [K, 1, n]; over the columns of square matrices: [K, m, 1].

    So every row of a matrix that is declared tall has one, though it is a column here.
    """
    return jnp.mean(x_Kmn, axis=1 if x_Kmn.shape[1] < x_Kmn.shape[2] else 2, keepdims=True)


class NorMuonState(NamedTuple):
    """Running means of gradients [K, m, n], and of squared directions (`shorter_mean`), by bank."""

    momentum: Params
    second: Params


def normuon(
    names: Collection[str], rates: Callable[[], Params], lr: float, decay: float, beta2: float, dtype: Dtype
) -> optax.GradientTransformationExtraArgs:
    """M <- mu M + (1 - mu) G;  D = normalize(polar_express(mu M + (1 - mu) G));  a = lr * lr_scale.

    Update: -a rate (D + decay a W [D W >= 0]). Gradients of other arrays pass unchanged.

    `inputs` are "momentum" (mu) and "lr_scale"; `rates()` returns the rate of each matrix (f32 [K, 1, 1]) by bank.
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
