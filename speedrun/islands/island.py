"""An island: one mesh with its own program and inner optimiser, which trains on leases from weights that it is sent.

Its optimiser state stays here between rounds. A newcomer starts with zero moments, at the schedule's present step.
"""

import jax
import numpy as np

from speedrun.base import mesh as meshes
from speedrun.base.rounds import Work
from speedrun.islands.rounds import Answer, Order, Weights, digest
from speedrun.record import layout
from speedrun.science.step import TrainState
from speedrun.train.checkpoint import state_hash
from speedrun.train.preflight import Ready, prepare
from speedrun.train.program import Program
from speedrun.train.run_config import RunConfig

ROOTS = ("speedrun.islands.driver",)  #: its source belongs to the record


class Island:
    """A checked, compiled and initialised program."""

    def __init__(self, name: str, config: RunConfig) -> None:
        """Check and compile the run as `speedrun run` does; raise its errors."""
        self.name, self.ready = name, prepare(config, ROOTS)
        self._program, self.config_sha256 = self.ready.program, config_sha256(self.ready)
        self.state = self.fresh()
        shapes = {self._program.shape_at(step) for step in range(self.ready.recipe.num_steps)}
        lowered = {shape: self._program.traced_step(shape).lower() for shape in shapes}
        self._steps = {shape: self._program.compiled(one) for shape, one in lowered.items()}

    def fresh(self) -> TrainState:
        """Return the initial state, which all islands share."""
        return self._program.init(jax.random.key(self.ready.config.seed))

    def work(self, order: Order) -> Answer:
        """Train on a lease, from the weights and the step of an order."""
        lease, losses, num_tokens = order.lease, [], 0
        if order.is_fresh:
            self.state = self.fresh()
        self.state = with_weights(self._program, self.state, order.weights, order.step)
        stream = self.ready.stream(lease.start)
        for number, shape in enumerate(lease.shapes, start=order.step):
            read = stream.batch(*shape)
            num_tokens += read.targets_BT.size
            batch = [meshes.shard(x_BT, self._program.mesh) for x_BT in read]
            step = self._steps[self._program.shape_at(number)]
            self.state, metrics = step(self.state, *batch, self._program.schedule)
            losses.append(metrics.loss)
        weights = weights_of(self.state)
        costs = tuple(float(x) for x in jax.device_get(losses))
        place = lease.start, stream.cursor, num_tokens
        found = costs, digest(weights), state_hash(self.state)
        done = Work(self.name, order.version, lease.number, *place, *found)
        return Answer(done, self.config_sha256, weights)


def config_sha256(ready: Ready) -> str:
    """Return the digest of everything in which islands must agree: recipe, split over devices, data and packages."""
    facts, same = ready.facts, ("training shards", "validation tokens", "packages", "source")
    return layout.config_sha256({**ready.described, **{name: facts[name] for name in same}})


def weights_of(state: TrainState) -> dict[str, np.ndarray]:
    """Return the packed parameters of a state on the host."""
    return {name: np.asarray(meshes.fetch(x)) for name, x in state.params.items()}


def with_weights(program: Program, state: TrainState, weights: Weights, step: int) -> TrainState:
    """Return a state with other weights, at another step of the schedule."""
    shardings = program.shardings(program.specs)
    params = {name: jax.device_put(x, shardings.params[name]) for name, x in weights.items()}
    return state._replace(params=params, step=meshes.replicate(np.int32(step), program.mesh))
