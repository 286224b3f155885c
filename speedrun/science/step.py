"""The training step: one `jit` of one `shard_map`, the same code on 1, 2, 4 or 8 devices and on several nodes.

    gather      one all-gather per packed array, in the compute dtype; of some tables, the rows that are read (`rows`)
    accumulate  forward and backward pass of each micro-batch on whole parameters; gradients are summed in float32
    scatter     one reduce-scatter per packed array, in the dtype of its gradient; then a sum over the nodes, and
                division by the number of devices in float32
    update      the recipe's optimiser on whole local matrices and local rows, without communication

The state is donated, packed (`params.Layout`) and sharded; only copies in the compute dtype are whole. The schedule is
on the device and indexed by the step number in the state, so the host dispatches one program per step.

Legend: B sequences, T time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from speedrun.base.mesh import DATA
from speedrun.science import rows
from speedrun.science.inputs import Arrays, InputPlan, Inputs, Static
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.params import Layout, Params
from speedrun.science.recipe import Batch, Loss, Recipe

#: XLA options by platform. They keep one reduce-scatter per bank, which starts as soon as its gradients are ready. A
#: combined one would start at the end, with no computation left to overlap. Activations in 16 bits stay in 16 bits.
COMPILER_OPTIONS: dict[str, dict[str, bool | int | str]] = {
    "gpu": {
        "xla_gpu_all_gather_combine_threshold_bytes": 1,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
        "xla_allow_excess_precision": False,
    }
}


class TrainState(NamedTuple):
    """Training state without the data position."""

    step: jax.Array  #: i32[]
    params: Params  #: packed
    opt_state: optax.OptState
    carry: Params  #: [B, ...], `Loss.carry` of the last step, sharded like a batch


class StepMetrics(NamedTuple):
    """Results of a step on the device. The host fetches them one step late."""

    loss: jax.Array  #: f32[], mean nats per token before the update
    bad: jax.Array  #: f32 [devices], numbers of flags in `nonfinite`
    nonfinite: dict[str, Params]  #: of "gradient" and "update", by packed name: flags for what is not finite


@dataclass(frozen=True)
class Step:
    """The training step of a recipe on a mesh, as pure functions that `program.Program` compiles."""

    recipe: Recipe
    mesh: Mesh
    microbatches: int  #: per step, over all devices
    kernels: Kernels
    constants: Callable[[], Arrays]  #: the recipe's constants, checked

    @cached_property
    def layout(self) -> Layout:
        """Layout of the packed parameters."""
        return Layout(self.recipe.table(self.recipe.config))

    @cached_property
    def transform(self) -> optax.GradientTransformationExtraArgs:
        """The recipe's optimiser over packed arrays. It gets its own layout, so it cannot change the model's."""
        return self.recipe.optimizer.transform(Layout(self.recipe.table(self.recipe.config)))

    @cached_property
    def plan(self) -> InputPlan:
        """The inputs of all steps, and the constants."""
        return InputPlan.of(self.recipe.inputs_at, self.recipe.num_steps, self.constants())

    @cached_property
    def specs(self) -> TrainState:
        """Partition spec of each leaf of the state. Optimiser leaves are sharded like their parameter."""
        abstract = jax.eval_shape(self.init, jax.random.key(0))

        def spec(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> P:
            # Zeros inherit no sharding; without a spec, XLA would put them on one device.
            keys = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
            names = [key for key in keys if key in self.layout.specs]
            is_alike = names and leaf.shape[:1] == abstract.params[names[-1]].shape[:1]
            return self.layout.specs[names[-1]] if is_alike else P()

        specs = jax.tree_util.tree_map_with_path(spec, abstract)
        return specs._replace(carry=jax.tree.map(lambda _: P(self.mesh.axis_names), abstract.carry))

    def init(self, key: jax.Array) -> TrainState:
        """Return the initial state."""
        params, number = self.layout.init(key), self.recipe.stages[0].num_sequences
        carry = {name: jnp.stack([x] * number) for name, x in self.recipe.carry(self.recipe.config).items()}
        return TrainState(jnp.zeros((), jnp.int32), params, self.transform.init(params), carry)

    def train_function(self, static: Static) -> Callable[..., tuple[TrainState, StepMetrics]]:
        """Return the function (state, tokens_BT, targets_BT, schedule) -> (state, metrics), `static` compiled in."""
        batch, flags = P(self.mesh.axis_names), dict.fromkeys(("gradient", "update"), self.layout.specs)
        out = self.specs, StepMetrics(P(), batch, flags)  # pyright: ignore[reportArgumentType]
        step, takes = partial(self._train_step, static), (self.specs, batch, batch, P())
        return jax.shard_map(step, mesh=self.mesh, in_specs=takes, out_specs=out)

    def _train_step(
        self, static: Static, state: TrainState, tokens_BT: jax.Array, targets_BT: jax.Array, schedule: Params
    ) -> tuple[TrainState, StepMetrics]:
        """Compute one device's part of a step."""
        inputs, num_sequences = self.plan.at(state.step, schedule, static), len(tokens_BT)
        index_B = num_sequences * jax.lax.axis_index(self.mesh.axis_names) + jnp.arange(num_sequences)
        batch = Batch(tokens_BT, targets_BT, state.carry, index_B)
        loss, grads = self.loss_and_grads(state.params, batch, inputs)
        updates: Any
        updates, opt_state = self.transform.update(grads, state.opt_state, state.params, inputs=inputs)
        new = jax.tree.map(rows.apply_update, state.params, updates)
        flags = {"gradient": self.layout.flags(grads), "update": self.layout.flags(updates)}
        # Do not sum over devices: no computation is left to overlap the sum.
        bad = sum(jnp.sum(flag, dtype=jnp.float32) for flag in jax.tree.leaves(flags))
        metrics = StepMetrics(jax.lax.pmean(loss.nll, self.mesh.axis_names), jnp.stack([bad]), flags)
        return TrainState(state.step + 1, new, opt_state, loss.carry), metrics

    def loss_and_grads(self, packed: Params, batch: Batch, inputs: Inputs) -> tuple[Loss, Params]:
        """Return the loss of this device's sequences and its packed shard of the mean gradient over all devices."""
        loss, grads = self._accumulate(self.all_gather(packed), batch, inputs)
        return loss, self._scatter_mean(self.layout.pack(grads))

    def _accumulate(self, params: Params, batch: Batch, inputs: Inputs) -> tuple[Loss, Params]:
        """Return the mean loss and this device's gradients, in float32 if there are several micro-batches."""
        num_local = self.microbatches // self.mesh.size

        def grad(params: Params, batch: Batch) -> tuple[Params, Any, Loss]:
            sent, arrived, ids = rows.exchange_rows(self.layout, params, batch.tokens_BT, self.kernels)
            given = batch, inputs, self.recipe.config, self.kernels, self.recipe.forward

            def objective(sent: Params) -> tuple[jax.Array, Loss]:
                loss = self.recipe.loss(arrived(sent), *given)
                return loss.objective, loss

            grads, loss = jax.grad(objective, has_aux=True)(sent)
            few = {k: rows.Rows(at.ravel(), jnp.concatenate(grads.pop(k))) for k, at in ids.items()}
            return grads, few, loss

        def accumulate(total: Params, batch: Batch) -> tuple[Params, Any]:
            grads, few, loss = grad(params, batch)
            return jax.tree.map(lambda t, x: t + x.astype(jnp.float32), total, grads), (few, loss)

        def zeros(x: jax.Array) -> jax.Array:
            return jax.lax.pcast(jnp.zeros(x.shape, jnp.float32), self.mesh.axis_names, to="varying")

        if num_local == 1:  # without a loop, reductions overlap the backward pass
            grads, few, loss = grad(params, batch)
            return loss, grads | few
        parts = jax.tree.map(lambda x: x.reshape(num_local, -1, *x.shape[1:]), batch)
        start = {name: zeros(x) for name, x in params.items() if name not in self.layout.reads}
        total, (few, losses) = jax.lax.scan(accumulate, start, parts)
        few, carry = jax.tree.map(jnp.concatenate, (few, losses.carry))
        grads = {name: x / num_local for name, x in total.items()}
        return Loss(jnp.mean(losses.objective), jnp.mean(losses.nll), carry), grads | few

    def all_gather(self, packed: Params) -> Params:
        """Return whole parameters in the compute dtype, scalars in float32, and own shards of tables that are read."""

        def all_gather(name: str, x: jax.Array) -> jax.Array:
            # Otherwise JAX would sum whole gradients over nodes before the scatter.
            x = jax.lax.pcast(x, self._repeated_over(name), to="varying")
            if name in self.layout.vectors:
                return x
            x = x.astype(self.recipe.compute_dtype)
            return x if name in self.layout.reads else jax.lax.all_gather(x, DATA, tiled=True)

        return self.layout.unpack({name: all_gather(name, x) for name, x in packed.items()})

    def _scatter_mean(self, grads: Params) -> Params:
        """Return this device's shard of the mean gradients: summed in their dtype, divided in float32."""

        def own(name: str, grad: Any) -> Any:
            if name in self.layout.reads:
                return rows.of_all(grad, self._repeated_over(name), self.microbatches)
            part = grad if name in self.layout.vectors else jax.lax.psum_scatter(grad, DATA, tiled=True)
            return jax.lax.psum(part, self._repeated_over(name)).astype(jnp.float32) / self.mesh.size

        return {name: own(name, grad) for name, grad in grads.items()}

    def _repeated_over(self, name: str) -> tuple[str, ...]:
        """Return the mesh axes over which a packed array is replicated."""
        return tuple(axis for axis in self.mesh.axis_names if axis not in self.layout.specs[name])
