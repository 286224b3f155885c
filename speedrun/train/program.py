"""Compiles a recipe's functions, checks each program before it runs, and scores.

A recipe computes hidden states and logits. It never gets the targets of a validation.

Legend: B sequences, N tokens of a chunk, T time, C chunks of a sequence, D model, V vocabulary.
"""

import ctypes
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from speedrun.base import faults, runlog, signals
from speedrun.base import mesh as meshes
from speedrun.base.clock import Stopwatch
from speedrun.base.errors import NonFiniteError, UsageError
from speedrun.base.mesh import DATA
from speedrun.data.shards import Shard
from speedrun.data.stream import validation_batches
from speedrun.science import rows
from speedrun.science.inputs import Inputs, Static
from speedrun.science.kernels.dispatch import HEAD_TOKENS, Choice, Kernels
from speedrun.science.params import SHARDS, Layout, Params
from speedrun.science.recipe import Forward, Recipe, Vocabulary
from speedrun.science.step import COMPILER_OPTIONS, Step, StepMetrics, TrainState
from speedrun.train.constants import RecipeConstants

#: Custom calls that a program may contain: kernels of Pallas.
FOREIGN = ("__gpu$xla.gpu.triton", "mosaic_gpu_v2")
#: Custom calls in both forms that MLIR prints, transfers from and to the host, and XLA's stateful generator. The state
#: of that generator outlives a call, so a program could tell scoring from an examination.
_CALLS = re.compile(
    r'\bcustom_call @(?:"([^"]*)"|([^\s"(]+))|call_target_name = "([^"]*)"|stablehlo\.(infeed|outfeed|send|recv|rng)\b'
)
#: Operations whose results are stored for the backward pass with remat.
STORED = ("dot_general", "pallas_call", "custom_vjp_call")
#: Limit for the float32 logits of one chunk, by platform. On a CPU they stay in its caches.
CHUNK_BYTES = {"cpu": 64 * 2**20, "gpu": 2 * 2**30}


class StepShape(NamedTuple):
    """The static properties of one executable of the training step."""

    num_sequences: int
    seq_len: int
    static: Static  #: the inputs that are compiled in; others are read from the schedule

    def __str__(self) -> str:
        return ", ".join([f"{self.num_sequences}x{self.seq_len}", *(f"{k} {v}" for k, v in self.static)])


@dataclass(frozen=True)
class Program:
    """A recipe on a mesh: the functions to compile, and the sharding of their arrays."""

    recipe: Recipe
    mesh: Mesh
    microbatches: int = SHARDS  #: of one step, over all devices; do not change the result
    attention: str = "auto"  #: an implementation of `kernels.dispatch`
    vocabulary: Vocabulary | None = None  #: for constants; None: unknown, as in a plan
    remat: Literal["off", "on"] = "off"  #: on: activations are recomputed
    portable: bool = False  #: only implementations that any machine can run

    def __post_init__(self) -> None:
        if SHARDS % self.num_shards:
            got = f"got {self.num_shards} devices for a replica, need a divisor of {SHARDS}"
            raise UsageError(f"{got}; pass --devices or --replicas that leave 1, 2, 4 or 8")
        for i, stage in enumerate(self.recipe.stages):
            self._check_division(f"stages.{i}.num_sequences", stage.num_sequences, self.microbatches)
            if stage.num_sequences != self.recipe.stages[0].num_sequences and self.step.specs.carry:
                got = f"stages.{i}.num_sequences: {stage.num_sequences} sequences"
                raise UsageError(f"{got}; values carried from step to step need as many as in stages.0")
        self._check_division("eval_sequences", self.recipe.eval_sequences, math.lcm(SHARDS, self.num_devices))

    def _check_division(self, setting: str, num_sequences: int, parts: int) -> None:
        if num_sequences % parts or parts % self.num_devices:
            even_parts = -(-parts // self.num_devices) * self.num_devices
            options = [f"--microbatches {even_parts}"] if even_parts != parts else []
            if num_sequences % even_parts:
                options.append(f"--set {setting}={-(-num_sequences // even_parts) * even_parts}")
            found = f"{setting}: {num_sequences} sequences in {parts} parts on {self.num_devices} devices"
            need = f"need a multiple of {even_parts}; pass {' '.join(options)}"
            raise UsageError(f"{found} do not come out even; {need}")

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return self.mesh.size

    @property
    def num_shards(self) -> int:
        """Number of devices that share one replica of the state."""
        return self.mesh.shape[DATA]

    @property
    def replicas(self) -> int:
        """Number of replicas of the state."""
        return self.num_devices // self.num_shards

    @cached_property
    def kernels(self) -> Kernels:
        """The chosen implementations of the operations."""
        here = ("cpu", "") if self.portable else meshes.accelerator(self.mesh)
        kernels = Kernels(*here, "auto" if self.portable else self.attention)
        if self.remat == "on":
            kernels = replace(kernels, head_tokens=HEAD_TOKENS // 4)
            why = f"remat; logits of {kernels.head_tokens:,} tokens at one time"
            kernels.choices["activations"] = Choice("recomputed", recomputed, why)
        return kernels

    def static_at(self, step: int) -> Static:
        """Return the inputs compiled into the executables of this step."""
        return self.step.plan.static_at(step, integers=False)

    def shape_at(self, step: int) -> StepShape:
        """Return the shape of this step, which selects its executable."""
        stage = self.recipe.stages[self.recipe.stage_of(step)]
        return StepShape(stage.num_sequences, stage.seq_len, self.static_at(step))

    def eval_shape_at(self, step: int) -> StepShape:
        """Return the shape of a validation that precedes this step."""
        return StepShape(self.recipe.eval_sequences, self.recipe.eval_seq_len, self.static_at(step))

    def shapes(self, validates_at: Callable[[int], bool]) -> list[list[StepShape]]:
        """Return the shapes of steps and those of validations. Each is a program of a run; some may be equal."""
        steps = range(self.recipe.num_steps)
        validated = map(self.eval_shape_at, [*filter(validates_at, steps), len(steps)])
        return [[*dict.fromkeys(each)] for each in (map(self.shape_at, steps), validated)]

    @property
    def compiler_options(self) -> dict[str, bool | int | str]:
        """XLA's settings for this platform."""
        return COMPILER_OPTIONS.get(self.kernels.platform, {})

    @cached_property
    def step(self) -> Step:
        """The training step of the recipe."""
        recipe = self.recipe
        if self.remat == "on":
            recipe = replace(recipe, forward=recomputed(recipe.forward))
        return Step(recipe, self.mesh, self.microbatches, self.kernels, self.constants.arrays)

    @cached_property
    def constants(self) -> RecipeConstants:
        """The constants of the recipe."""
        return RecipeConstants(self.recipe, self.vocabulary)

    @property
    def layout(self) -> Layout:
        """The packing of the recipe's parameters."""
        return self.step.layout

    @property
    def specs(self) -> TrainState:
        """The sharding spec of each leaf of the state."""
        return self.step.specs

    @cached_property
    def schedule(self) -> dict[str, jax.Array]:
        """Inputs of each step and of the last validation, [num_steps + 1, ...], and constants; replicated."""
        return meshes.replicate(self.step.plan.schedule, self.mesh)

    @cached_property
    def state(self) -> TrainState:
        """The shape, dtype and sharding of each leaf of the state."""
        shapes, placing = jax.eval_shape(self.init, jax.random.key(0)), self.shardings(self.specs)
        return jax.tree.map(lambda x, sharding: x.update(sharding=sharding), shapes, placing)

    def ids(self, shape: StepShape) -> list[jax.ShapeDtypeStruct]:
        """Return the types of the tokens and targets of a step."""
        split = NamedSharding(self.mesh, P(self.mesh.axis_names))
        return [jax.ShapeDtypeStruct((shape.num_sequences, shape.seq_len), np.int32, sharding=split)] * 2

    def shardings(self, specs: Any) -> Any:
        """Return a tree of specs as shardings on this mesh."""
        return jax.tree.map(lambda s: NamedSharding(self.mesh, s), specs, is_leaf=lambda s: isinstance(s, P))

    @cached_property
    def init(self) -> Any:
        """Key -> initial state. Each device makes only its shard."""
        return jax.jit(self.step.init, out_shardings=self.shardings(self.specs))

    @cached_property
    def train_step_for(self) -> Callable[[Static], Any]:
        """Static -> (state, tokens_BT, targets_BT, schedule) -> (state, metrics). `state` is donated. Traced once."""
        return cache(lambda static: jax.jit(self.step.train_function(static), donate_argnums=0))

    def traced_step(self, shape: StepShape) -> Any:
        """Trace the step of this shape, once, with the types of the run's arrays."""
        return self.train_step_for(shape.static).trace(self.state, *self.ids(shape), self.schedule)

    def traced_score(self, shape: StepShape) -> Any:
        """Trace the validation of this shape, once."""
        given = self.state.params, *self.ids(shape), self.schedule, self.state.step
        return self.eval_step_for(shape.static).trace(*given)

    def forward(self, params: Params, tokens_BT: jax.Array, inputs: Inputs) -> jax.Array:
        """Return the recipe's final hidden states: [B, T, D]."""
        return self.recipe.forward(params, tokens_BT, inputs, self.recipe.config, self.kernels)

    def logits(self, params: Params, x_ND: jax.Array, inputs: Inputs) -> jax.Array:
        """Return the recipe's logits of hidden states: [N, V]. They get no table of which rows are read."""
        given = {name: x for name, x in params.items() if name not in self.layout.reads}
        return self.recipe.logits(given, x_ND, inputs, self.recipe.config)

    @cached_property
    def eval_step_for(self) -> Callable[..., Any]:
        """(static, `nll_sums`) -> (packed, tokens_BT, targets_BT, schedule, step) -> nats of chunks, f32 [B, C]."""
        return cache(lambda static, measure=nll_sums: self._eval_step_for(static, measure))

    def _eval_step_for(self, static: Static, measure: Callable[..., Any]) -> Any:
        vocab_size, platform = self.recipe.config.vocab_size, self.kernels.platform

        def score(
            packed: Params, tokens_BT: jax.Array, targets_BT: jax.Array, schedule: Params, at: jax.Array
        ) -> jax.Array:
            """Score sequences one by one, so that memory does not depend on their number."""
            params, inputs = self.step.all_gather(packed), self.step.plan.at(at, schedule, static)

            def of_one(sequence_T: tuple[jax.Array, jax.Array]) -> jax.Array:
                tokens_T, targets_T = sequence_T
                sent, arrived, _ = rows.exchange_rows(self.layout, params, tokens_T[None], self.kernels)
                (x_TD,) = self.forward(arrived(sent), tokens_T[None], inputs)
                logits = partial(self.logits, params, inputs=inputs)
                return measure(logits, x_TD, targets_T, vocab_size=vocab_size, platform=platform)

            return jax.lax.map(of_one, (tokens_BT, targets_BT))

        batch = P(self.mesh.axis_names)
        specs = self.layout.specs, batch, batch, P(), P()
        return jax.jit(jax.shard_map(score, mesh=self.mesh, in_specs=specs, out_specs=batch))

    def compiled(self, lowered: Any, **more: Any) -> Any:
        """Return the executable of a lowered program that passes `inspect`; `more` are options of XLA."""
        inspect(lowered.as_text())
        done = signals.interruptible(partial(lowered.compile, compiler_options=self.compiler_options | more))
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)  # glibc would keep 150 MB of the compiler
        return done


def nll_sums(
    logits: Callable[[jax.Array], jax.Array],
    x_TD: jax.Array,
    targets_T: jax.Array,
    *,
    vocab_size: int,
    platform: str,
) -> jax.Array:
    """Return -log softmax(logits(x))[target] of a sequence in nats, summed in chunks: f32 [C].

    `logits` maps hidden states [N, D] to logits [N, V] of any float dtype, row by row; V is at least the track's
    `vocab_size`. Targets are i32, each below V. The platform determines the size of a chunk.
    """
    num_tokens = len(x_TD)
    shape = jax.eval_shape(logits, x_TD).shape
    if len(shape) != 2 or shape[0] != num_tokens or shape[1] < vocab_size:
        need = f"config.vocab_size needs {vocab_size:,} columns or more"
        raise UsageError(f"its logits are {[*shape]} for {num_tokens:,} hidden states; {need}")
    most = max(1, CHUNK_BYTES[platform] // (4 * shape[1]))
    chunk = next(n for n in range(min(most, num_tokens), 0, -1) if num_tokens % n == 0)

    def nll_sum(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        x_ND, targets_N = part
        z_NV = logits(x_ND).astype(jnp.float32)
        target_N = jnp.take_along_axis(z_NV, targets_N[:, None], axis=1)[:, 0]
        return jnp.sum(jax.nn.logsumexp(z_NV, axis=1) - target_N)

    return jax.lax.map(nll_sum, (x_TD.reshape(-1, chunk, x_TD.shape[1]), targets_T.reshape(-1, chunk)))


def evaluate(
    program: Program,
    score: Callable[..., jax.Array],
    state: TrainState,
    shard: Shard,
    num_tokens: int,
    poll: Callable[[], None] = lambda: None,
    start: int = 0,
) -> runlog.Val:
    """Score `num_tokens` targets of a shard, each once. The loss is their sum in float64 over their number.

    `score` is a compiled `Program.eval_step_for`; `poll` is called after each batch; `start` is the first input.
    """
    watch, total, tokens, sequences = Stopwatch(), 0.0, 0, []
    shape = program.recipe.eval_sequences, program.recipe.eval_seq_len
    for batch in validation_batches(shard, num_tokens, *shape, start):
        tokens_BT, targets_BT = (meshes.shard_own(x, program.mesh) for x in batch)
        nll_BC = meshes.fetch(score(state.params, tokens_BT, targets_BT, program.schedule, state.step))
        total += float(np.sum(nll_BC, dtype=np.float64))
        sequences += [float(f"{x:.9g}") for x in nll_BC.sum(axis=1, dtype=np.float64) / shape[1]]
        tokens += batch.targets_BT.size
        faults.point("evaluation")
        poll()
    step = int(jax.device_get(state.step))
    return runlog.Val(step, total / tokens, tokens, total.hex(), watch.seconds, tuple(sequences))


def finite_step(program: Program, metrics: StepMetrics, where: str) -> float:
    """Fetch the loss of a step; raise NonFiniteError unless gradients and updates are finite, too.

    All processes must call it. `metrics.bad` must be replicated (`mesh.replicated`).
    """
    loss, bad = jax.device_get((metrics.loss, metrics.bad))
    flags = meshes.fetch(metrics.nonfinite).items() if np.any(bad) else ()
    leaves = [(what, program.layout.first_flagged(found)) for what, found in flags]
    named = [f"; first non-finite {what}: {leaf}" for what, leaf in leaves if leaf]
    return finite(program, loss, where, *(named or ["; a padded row is not finite"] * bool(flags)))


def finite(program: Program, loss: float, where: str, *more: str) -> float:
    """Return the loss; raise NonFiniteError, with what to do, if it is not finite or there is `more`."""
    if np.isfinite(loss) and not more:
        return float(loss)
    reads = ", ".join(program.layout.reads)
    rows = [f"spread the ids that are read of {reads} evenly over it"] if reads else []
    advice = ", or ".join(filter(None, ["lower the learning rate", *rows, program.recipe.if_nan]))
    raise NonFiniteError(f"{where}: loss is {loss}{''.join(more[:1])}; {advice}")


def recomputed(forward: Forward) -> Forward:
    """Return `forward`, whose backward pass recomputes all but `STORED`."""

    def is_stored(primitive: Any, *_: Any, **__: Any) -> bool:
        return primitive.name in STORED

    def thrifty(params: Params, tokens_BT: jax.Array, *rest: Any, **more: Any) -> jax.Array:
        return jax.checkpoint(lambda *x: forward(*x, *rest, **more), policy=is_stored)(params, tokens_BT)

    return thrifty


def inspect(text: str) -> None:
    """Raise UsageError if a lowered program talks to the host, keeps a state, or calls code not in `FOREIGN`."""
    if found := sorted({name for names in _CALLS.findall(text) for name in names} - {"", *FOREIGN}):
        allowed = f"only XLA's code and {', '.join(FOREIGN)}, nothing that reaches the host or keeps state"
        raise UsageError(f"a compiled program would call {', '.join(found)}; remove it: {allowed}")
