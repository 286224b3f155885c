"""Newton-Schulz on the matrices that one device owns."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from speedrun.bench.timing import Timing, compare
from speedrun.ground.errors import UsageError
from speedrun.science.optim.groups import MuonAndAdam
from speedrun.science.optim.muon import orthogonalize
from speedrun.science.params import SHARDS
from speedrun.training.program import Program


def muon(program: Program, num_devices: int) -> list[Timing]:
    """The products alone, as one device of `num_devices` would do them; then ours, one matrix at a time, and optax.

    Ours and optax's include the norm and the sums of the polynomial; none includes momentum.

    Raises:
        UsageError: if the recipe trains without Muon.
    """
    optimizer = program.recipe.optimizer
    if not isinstance(optimizer, MuonAndAdam):
        raise UsageError(f"recipe {program.recipe.name} trains without Muon; choose another --recipe")
    own = SHARDS // num_devices
    shapes = [tuple(sorted((bank[0].rows, bank[0].cols))) for bank in program.layout.banks.values()]
    stacks = {shape: own * shapes.count(shape) for shape in dict.fromkeys(shapes)}
    key, steps, dtype = jax.random.key(0), optimizer.muon_steps, optimizer.muon_dtype
    stacks_Kmn = [jax.random.normal(key, (count, *shape), dtype) for shape, count in stacks.items()]
    ours = partial(orthogonalize, steps=steps, dtype=dtype)

    def over_stacks(function: Callable[[jax.Array], Any]) -> Callable[[Sequence[jax.Array]], Any]:
        return lambda stacks_Kmn: [function(x_Kmn) for x_Kmn in stacks_Kmn]

    def products(x_Kmn: jax.Array) -> jax.Array:
        for _ in range(steps):
            s = x_Kmn @ x_Kmn.mT
            x_Kmn = (s @ s) @ x_Kmn
        return x_Kmn

    forms = {
        "three products": over_stacks(products),
        "ours, stacked": over_stacks(ours),
        "ours, one by one": over_stacks(lambda x_Kmn: [ours(x) for x in x_Kmn]),
        "optax, stacked": over_stacks(partial(_optax, steps=steps)),
    }
    return compare(forms, stacks_Kmn)


def _optax(x_Kmn: jax.Array, *, steps: int) -> Any:
    """The direction that `optax.contrib` gives for a stack, without momentum."""
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    transform = optax.contrib.scale_by_muon(
        beta=0.0, nesterov=False, ns_steps=steps, mu_dtype=x_Kmn.dtype, weight_dimension_numbers=axes
    )
    return transform.update(x_Kmn, transform.init(jnp.zeros_like(x_Kmn)))[0]
