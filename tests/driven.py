"""The optimiser of record 89 on a table of its own, in the shardings of the step, with gradients from the test."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from speedrun import recipes
from speedrun.base import mesh
from speedrun.recipes.record89.normuon_and_adam import AdamGroup, NorMuonAndAdam
from speedrun.science.inputs import Inputs
from speedrun.science.params import Member, ParamSpec, Table, zeros
from speedrun.science.step import Step

RATES = {"up": 2.0, "down": 4.0}  #: others 1


def rate_of(matrix: Member) -> float:
    return RATES.get(matrix.name, 1.0)


#: Numbers unlike the record's, so that every term is seen after a few steps.
OPTIMIZER = NorMuonAndAdam(
    muon_lr=0.02,
    muon_decay=3.0,
    muon_beta2=0.9,
    polar_dtype="float32",
    rate_of=rate_of,
    adam_lr=0.05,
    adam_eps=1e-2,
    adam_decay=2.0,
    adam=(
        AdamGroup("head", 1.0, 0.5, 0.95, 1.5),
        AdamGroup("embed", 1.0, 0.5, 0.95, 1.5),
        AdamGroup("scalar", 0.3, 0.9, 0.99, 0.5),
    ),
)


def spec(shape: tuple[int, ...], group: str, dtype: Any = "float32") -> ParamSpec:
    return ParamSpec(
        shape, ("axis",) * len(shape), zeros, group, dtype, like="head" if group == "embed" else None
    )


TABLE = {
    "up": spec((3, 20, 6), "matrix"),  # tall, so transposed in its bank
    "down": spec((6, 20), "matrix"),
    "square": spec((2, 12, 12), "matrix"),
    "embed": spec((10, 3), "embed"),
    "scalars.a": spec((4,), "scalar"),
    "scalars.b": spec((), "scalar"),
    "head": spec((10, 3), "head"),
}


def draw(seed: int, table: Table = TABLE) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(one.shape), np.float32) for name, one in table.items()}


class Driven:
    """Parameters and state of an optimiser between its steps."""

    def __init__(
        self,
        params: dict[str, np.ndarray],
        num_devices: int = 1,
        table: Table = TABLE,
        optimizer: NorMuonAndAdam = OPTIMIZER,
        options: Any = None,
    ) -> None:
        recipe = dataclasses.replace(recipes.load("smoke"), table=lambda _: table, optimizer=optimizer)
        kernels: Any = None
        self.step = Step(recipe, mesh.make_mesh(num_devices), num_devices, kernels, dict)
        specs = self.step.specs.params, self.step.specs.opt_state
        packed = self.step.layout.pack({k: jnp.asarray(x, table[k].dtype) for k, x in params.items()})
        place = jax.tree.map(partial(NamedSharding, self.step.mesh), specs)
        self.held: Any = jax.device_put((packed, self.step.transform.init(packed)), place)

        def moved(held: Any, grads: Any, traced: Any, adam: bool) -> Any:
            over = {"mesh": self.step.mesh, "in_specs": (specs, specs[0], P()), "out_specs": specs}
            return jax.shard_map(partial(self.local, adam), **over)(held, grads, traced)

        self.move = jax.jit(moved, static_argnums=3, compiler_options=options)

    def local(self, adam: bool, held: Any, grads: Any, traced: Any) -> Any:
        """As in `Step`: one device's part."""
        params, state = held
        inputs = Inputs({**traced, "adam": adam}, {})
        updates, state = self.step.transform.update(grads, state, params, inputs=inputs)
        new = jax.tree.map(lambda p, u: (p.astype(jnp.float32) + u).astype(p.dtype), params, updates)
        return new, state

    def go(
        self,
        grads: dict[str, np.ndarray],
        *,
        lr_scale: float = 1.0,
        momentum: float = 0.9,
        tied: bool = False,
        adam: bool = True,
    ) -> dict[str, np.ndarray]:
        """Make a step; return the parameters after it, by name."""
        rates = {"lr_scale": np.float32(lr_scale), "momentum": np.float32(momentum)}
        traced = rates | {"tied": np.bool_(tied)}
        packed = self.step.layout.pack(jax.tree.map(jnp.asarray, grads))
        self.held = self.move(self.held, packed, traced, adam)
        return jax.tree.map(np.asarray, self.step.layout.unpack(jax.device_get(self.held[0])))
