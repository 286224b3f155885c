"""The training step: one `jit` of one `shard_map`, the same code on 1, 2, 4 or 8 devices and on several nodes.

    gather      one all-gather per packed array, in the compute dtype
    accumulate  forward and backward of each micro-batch on whole parameters; gradients are summed in float32
    scatter     one reduce-scatter per packed array, in the dtype of its gradient; of several nodes, each device then
                sums its shard with the same shard on the others; divided by the number of devices in float32
    update      Muon on whole local matrices, Adam on local rows, without communication

State is donated and always sharded; only copies of parameters in the compute dtype are whole. `params.Layout` packs
them into banks of equal matrices, tables sharded by rows, and one vector of scalars. The schedule is on the device,
indexed by the step number in the state, so a step costs the host one dispatch.

Legend: A micro-batches per device, B sequences, T time, K matrices of a bank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from speedrun.ground.mesh import DATA, fetch
from speedrun.science.kernels.attention import Window
from speedrun.science.kernels.choose import Kernels
from speedrun.science.kernels.cross_entropy_gpu import Fp8
from speedrun.science.optim.muon import shape_factor
from speedrun.science.optim.schedules import StepInputs
from speedrun.science.params import SCALARS, Layout, Params
from speedrun.science.recipe import Recipe

#: XLA's settings by platform. They keep one reduce-scatter per bank, which starts as soon as its gradients are ready;
#: XLA would combine all of them into one at the end, where no computation is left to overlap.
COMPILER_OPTIONS: dict[str, dict[str, bool | int | str]] = {
    "gpu": {
        "xla_gpu_all_gather_combine_threshold_bytes": 1,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
    }
}


class TrainState(NamedTuple):
    """State of training, without the position in the data. `params` are packed (`params.Layout`)."""

    step: jax.Array  #: i32[]
    params: Params
    opt_state: optax.OptState


class StepMetrics(NamedTuple):
    """Results of one step, on the device; fetched one step late."""

    loss: jax.Array  #: f32[], mean nats per token before the update
    bad: jax.Array  #: f32 [shards], above zero if a gradient of the shard is not finite
    nonfinite: dict[str, jax.Array]  #: by packed name: where a gradient is not finite


@dataclass(frozen=True)
class Step:
    """The training step of a recipe on a mesh, as pure functions. `program.Program` compiles them."""

    recipe: Recipe
    mesh: Mesh
    microbatches: int  #: per step, over all devices
    kernels: Kernels

    @cached_property
    def layout(self) -> Layout:
        """Layout of the packed parameters."""
        return Layout(self.recipe.table(self.recipe.config))

    @cached_property
    def transform(self) -> optax.GradientTransformationExtraArgs:
        """The recipe's optimiser over packed arrays."""
        return optax.partition({**self.recipe.optimizer.transforms()}, self.layout.groups)

    @cached_property
    def specs(self) -> TrainState:
        """Partition spec of each leaf of the state. Optimiser leaves are sharded like their parameter."""
        abstract = jax.eval_shape(self.init, jax.random.key(0))

        def spec(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> P:
            # Zeros inherit no sharding: without a spec, XLA would put them on one device.
            names = [
                k.key for k in path if isinstance(k, jax.tree_util.DictKey) and k.key in self.layout.specs
            ]
            shaped_alike = names and leaf.shape == abstract.params[names[-1]].shape
            return self.layout.specs[names[-1]] if shaped_alike else P()

        return jax.tree_util.tree_map_with_path(spec, abstract)

    def init(self, key: jax.Array) -> TrainState:
        """Return the initial state."""
        params = self.layout.init(key)
        return TrainState(jnp.zeros((), jnp.int32), params, self.transform.init(params))

    def train_function(self, window_blocks: int | None) -> Callable[..., tuple[TrainState, StepMetrics]]:
        """Return the function (state, tokens_BT, targets_BT, schedule) -> (state, metrics).

        Args:
            window_blocks: static window; None reads the window from the schedule.
        """
        return jax.shard_map(
            partial(self._train_step, window_blocks),
            mesh=self.mesh,
            in_specs=(self.specs, P(self.mesh.axis_names), P(self.mesh.axis_names), P()),
            out_specs=(self.specs, StepMetrics(P(), P(DATA), self.layout.specs)),  # pyright: ignore[reportArgumentType]
        )

    def _train_step(
        self,
        window_blocks: int | None,
        state: TrainState,
        tokens_BT: jax.Array,
        targets_BT: jax.Array,
        schedule: StepInputs,
    ) -> tuple[TrainState, StepMetrics]:
        """Compute one device's part of a step."""
        inputs = jax.tree.map(lambda x: x[state.step], schedule)
        window = self.window(inputs.window_blocks if window_blocks is None else window_blocks)
        loss, grads = self.loss_and_grads(state.params, tokens_BT, targets_BT, window)
        updates, opt_state = self.transform.update(
            grads, state.opt_state, state.params, momentum=inputs.momentum, factors=self._local_factors()
        )
        new = jax.tree.map(
            lambda p, u: (p.astype(jnp.float32) + inputs.lr_scale * u).astype(p.dtype), state.params, updates
        )
        flags = {k: _nonfinite(k, g) for k, g in grads.items()}
        # Not summed over devices: no computation is left to overlap a sum.
        bad = sum(jnp.sum(flag, dtype=jnp.float32) for flag in flags.values())
        metrics = StepMetrics(jax.lax.pmean(loss, self.mesh.axis_names), jnp.asarray(bad)[None], flags)
        return TrainState(state.step + 1, new, opt_state), metrics

    def loss_and_grads(
        self, packed: Params, tokens_BT: jax.Array, targets_BT: jax.Array, window: Window
    ) -> tuple[jax.Array, Params]:
        """Return this device's mean loss, and its shard of the mean gradient over all devices, packed."""
        params = self.whole(packed)
        loss, grads = self._accumulate(params, tokens_BT, targets_BT, window)
        return loss, self._scatter_mean(self.layout.pack(grads))

    def _accumulate(
        self, params: Params, tokens_BT: jax.Array, targets_BT: jax.Array, window: Window
    ) -> tuple[jax.Array, Params]:
        """Return mean loss and gradients over this device's sequences, one micro-batch at a time.

        Gradients of several micro-batches are summed in float32; those of a single one stay in the compute dtype.
        """
        num_local = self.microbatches // self.mesh.size

        def loss_fn(params: Params, tokens_BT: jax.Array, targets_BT: jax.Array) -> jax.Array:
            return self.nll_sum(params, tokens_BT, targets_BT, window, self.recipe.head_fp8) / targets_BT.size

        def accumulate(total: Any, batch: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            one = jax.value_and_grad(loss_fn)(params, *batch)
            return jax.tree.map(lambda t, x: t + x.astype(jnp.float32), total, one), None

        def zeros(x: jax.Array) -> jax.Array:
            return jax.lax.pcast(jnp.zeros(x.shape, jnp.float32), self.mesh.axis_names, to="varying")

        tokens_ABT, targets_ABT = (x.reshape(num_local, -1, x.shape[-1]) for x in (tokens_BT, targets_BT))
        if num_local == 1:  # no loop, so that reductions overlap the backward pass
            return jax.value_and_grad(loss_fn)(params, tokens_ABT[0], targets_ABT[0])
        start = zeros(jnp.zeros(())), jax.tree.map(zeros, params)
        total, _ = jax.lax.scan(accumulate, start, (tokens_ABT, targets_ABT))
        return jax.tree.map(lambda x: x / num_local, total)

    def window(self, blocks: jax.Array | int) -> Window:
        """Return a window: static if `blocks` is an int, scheduled if it is traced."""
        return Window(blocks, blocks if isinstance(blocks, int) else self.recipe.most_window_blocks)

    def nll_sum(
        self, params: Params, tokens_BT: jax.Array, targets_BT: jax.Array, window: Window, fp8: Fp8 | None
    ) -> jax.Array:
        """Return the training objective: summed negative log likelihood of all targets, f32 [], nats."""
        cfg, targets_N = self.recipe.config, targets_BT.reshape(-1)
        x_ND = self.hidden(params, tokens_BT, window).reshape(len(targets_N), -1)
        return self.kernels.summed_cross_entropy(x_ND, params["head"], targets_N, cap=cfg.logit_cap, fp8=fp8)

    def hidden(self, params: Params, tokens_BT: jax.Array, window: Window) -> jax.Array:
        """Return the final hidden states: [B, T, D]."""
        return self.recipe.forward(params, tokens_BT, window, self.recipe.config, self.kernels)

    def logits(self, params: Params, x_ND: jax.Array) -> jax.Array:
        """Return the logits of hidden states: [N, V]."""
        return self.recipe.logits(params, x_ND, self.recipe.config)

    def whole(self, packed: Params) -> Params:
        """Return whole named parameters in the compute dtype. Call inside `shard_map`."""
        return self.layout.unpack(self._gather(packed))

    def _gather(self, packed: Params) -> Params:
        """Gather packed parameters in the compute dtype; scalars are replicated already and stay float32."""

        def whole(name: str, x: jax.Array) -> jax.Array:
            # Marked as varying over nodes, or JAX would sum whole gradients over them before they are scattered.
            x = jax.lax.pcast(x, self._repeated_over(name), to="varying")
            if name == SCALARS:
                return x
            return jax.lax.all_gather(x.astype(self.recipe.compute_dtype), DATA, tiled=True)

        return {name: whole(name, x) for name, x in packed.items()}

    def _scatter_mean(self, grads: Params) -> Params:
        """Reduce gradients to their mean over devices: summed in their dtype, divided in float32, sharded."""

        def own(name: str, grad: jax.Array) -> jax.Array:
            part = grad if name == SCALARS else jax.lax.psum_scatter(grad, DATA, tiled=True)
            return jax.lax.psum(part, self._repeated_over(name)).astype(jnp.float32) / self.mesh.size

        return {name: own(name, grad) for name, grad in grads.items()}

    def _repeated_over(self, name: str) -> tuple[str, ...]:
        """Return the mesh axes over which a packed array is replicated: the nodes; all axes for the scalars."""
        return tuple(axis for axis in self.mesh.axis_names if axis not in self.layout.specs[name])

    def _local_factors(self) -> Params:
        """Return Muon's shape factors of this device's matrices: f32 [K / shards, 1, 1] by bank."""

        def local(factor_K: np.ndarray) -> jax.Array:
            num_local = len(factor_K) // self.mesh.shape[DATA]
            start = jax.lax.axis_index(DATA) * num_local
            return jax.lax.dynamic_slice_in_dim(jnp.asarray(factor_K), start, num_local)[:, None, None]

        return jax.tree.map(local, self.layout.per_matrix(shape_factor))

    def first_nonfinite(self, metrics: StepMetrics) -> str | None:
        """Return the name of the first parameter in the table whose gradient is not finite."""
        bad: set[str] = set()
        for packed, flags in fetch(metrics.nonfinite).items():
            if packed in self.layout.banks:
                bad |= {m.name for m, flag in zip(self.layout.banks[packed], flags, strict=False) if flag}
            elif packed != SCALARS:
                bad |= {packed} if flags.any() else set()
            else:
                sizes = [self.layout.table[name].size for name in self.layout.scalars]
                parts = np.split(flags, np.cumsum(sizes)[:-1])
                bad |= {name for name, part in zip(self.layout.scalars, parts, strict=True) if part.any()}
        return next((name for name in self.layout.table if name in bad), None)


def _nonfinite(name: str, grad: jax.Array) -> jax.Array:
    """Flag where a gradient is not finite: per matrix, per device for a table, per scalar."""
    bad = ~jnp.isfinite(grad)
    if name == SCALARS:
        return bad
    return jnp.any(bad, axis=(1, 2)) if grad.ndim == 3 else jnp.any(bad)[None]
