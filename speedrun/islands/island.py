"""An island: one mesh with its own program and inner optimiser, which trains on leases from weights that it is sent.

Its optimiser state stays here between rounds. A newcomer starts with zero moments, at the schedule's present step.
"""

import hashlib
from typing import Any, NamedTuple

import jax
import numpy as np

from speedrun.base import mesh as meshes
from speedrun.islands.leases import Lease
from speedrun.islands.outer import Weights
from speedrun.record import layout
from speedrun.train.checkpoint import state_hash
from speedrun.train.preflight import prepare
from speedrun.train.program import StepShape
from speedrun.train.request import RunConfig


class Order(NamedTuple):
    """What an island is asked to do."""

    version: int  #: of the weights: the number of outer steps before
    step: int  #: of the schedule, at which it begins
    lease: Lease
    weights: Weights


class Answer(NamedTuple):
    """What it did."""

    island: str
    version: int
    lease: int  #: its number
    config_sha256: str  #: of recipe, split over devices, and data
    num_tokens: int
    weights: Weights
    digest: str  #: of the weights
    losses: tuple[float, ...]  #: of each step, before its update
    state_hash: str  #: of weights and optimiser


class Island:
    """A checked and initialised program. Each shape of a step is compiled when it is first needed."""

    def __init__(self, name: str, config: RunConfig) -> None:
        """Check the run as `speedrun run` does; raise its errors."""
        self.name, self.ready = name, prepare(config)
        self._program = self.ready.program
        self._state = self._program.init(jax.random.key(config.seed))
        self._compiled: dict[StepShape, Any] = {}
        tokens = {"val": self.ready.val_sha256, "data": self.ready.track.data.sha256}
        self.config_sha256 = layout.config_sha256({**self.ready.described, **tokens})

    def weights(self) -> dict[str, np.ndarray]:
        """Return the packed parameters."""
        return {name: np.asarray(meshes.fetch(x)) for name, x in self._state.params.items()}

    def work(self, order: Order) -> Answer:
        """Train on a lease, from the weights and the step of an order."""
        shardings = self._program.shardings(self._program.specs)
        params = {name: jax.device_put(x, shardings.params[name]) for name, x in order.weights.items()}
        step = meshes.replicate(np.int32(order.step), self._program.mesh)
        self._state, losses = self._state._replace(params=params, step=step), []
        stream = self.ready.stream(order.lease.start)
        for number, shape in enumerate(order.lease.shapes, start=order.step):
            batch = [meshes.place(x_BT, self._program.mesh) for x_BT in stream.batch(*shape)]
            given = self._state, *batch, self._program.schedule
            self._state, metrics = self._step(self._program.shape_at(number), given)(*given)
            losses.append(metrics.loss)
        weights = self.weights()
        return Answer(
            island=self.name,
            version=order.version,
            lease=order.lease.number,
            config_sha256=self.config_sha256,
            num_tokens=order.lease.num_tokens,
            weights=weights,
            digest=digest(weights),
            losses=tuple(float(x) for x in jax.device_get(losses)),
            state_hash=state_hash(self._state),
        )

    def _step(self, shape: StepShape, given: tuple[Any, ...]) -> Any:
        if shape not in self._compiled:
            lowered = self._program.train_step_for(shape.static).lower(*given)
            self._compiled[shape] = self._program.compiled(lowered)
        return self._compiled[shape]


def digest(weights: Weights) -> str:
    """Return the sha256 of weights by name."""
    found = hashlib.sha256()
    for name, x in sorted(weights.items()):
        found.update(
            f"{name} {x.dtype} {x.shape} ".encode() + np.ascontiguousarray(x).view(np.uint8).tobytes()
        )
    return found.hexdigest()
