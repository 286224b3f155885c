"""Side by side on this machine, in one run: what we use, its definition, and the arithmetic that bounds both.

Legend: N tokens, D model, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from speedrun.clock import Stopwatch
from speedrun.kernels.cross_entropy import cross_entropy, summed_cross_entropy

_TRIALS = 5
_CAP = 15.0


class Timing(NamedTuple):
    """One form of an operation."""

    name: str
    best_ms: float
    ratio: float  #: to the first form of its table


def compare(forms: dict[str, Callable[..., Any]], *args: Any) -> list[Timing]:
    """Best of a few calls of each compiled form, taken in turns so that a slow moment hits all of them."""
    programs = {name: jax.jit(form).lower(*args).compile() for name, form in forms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(_TRIALS):
        for name, program in programs.items():
            watch = Stopwatch()
            jax.block_until_ready(program(*args))
            seconds[name].append(watch.seconds)
    best = {name: min(times) for name, times in seconds.items()}
    first = next(iter(best.values()))
    return [Timing(name, second * 1e3, second / first) for name, second in best.items()]


def head(*, num_tokens: int, model_dim: int, vocab_size: int) -> list[Timing]:
    """Loss and gradients of the vocabulary head: three matrix products are the bound."""
    kx, kw, kt, kg = jax.random.split(jax.random.key(0), 4)
    x_ND = jax.random.normal(kx, (num_tokens, model_dim))
    head_VD = 0.02 * jax.random.normal(kw, (vocab_size, model_dim))
    targets_N = jax.random.randint(kt, (num_tokens,), 0, vocab_size)
    g_NV = jax.random.normal(kg, (num_tokens, vocab_size))

    def products(x_ND: jax.Array, head_VD: jax.Array) -> Any:
        return x_ND @ head_VD.T, g_NV @ head_VD, g_NV.T @ x_ND

    def definition(x_ND: jax.Array, head_VD: jax.Array) -> jax.Array:
        return cross_entropy(x_ND, head_VD, targets_N, cap=_CAP).sum()

    def summed(x_ND: jax.Array, head_VD: jax.Array) -> jax.Array:
        return summed_cross_entropy(x_ND, head_VD, targets_N, cap=_CAP)

    forms = {
        "three products": products,
        "ours": jax.value_and_grad(summed, (0, 1)),
        "definition": jax.value_and_grad(definition, (0, 1)),
    }
    return compare(forms, x_ND, head_VD)
