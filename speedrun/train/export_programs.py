"""Exports the programs of a run for its record, before the clock starts: see `record.archive`.

A program is StableHLO without file names, so that equal code gives equal bytes anywhere.
"""

from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import PartitionSpec as P

from speedrun.base import messages, processes, runlog
from speedrun.base.atomic_files import write_whole
from speedrun.base.clock import Stopwatch
from speedrun.base.errors import UsageError
from speedrun.base.mesh import changed_settings, setting
from speedrun.base.track import Track
from speedrun.record import archive, layout
from speedrun.record.archive import Archive, Lowered
from speedrun.science.inputs import Static
from speedrun.science.params import Params
from speedrun.train.checkpoint import named
from speedrun.train.portable import portable
from speedrun.train.preflight import Ready
from speedrun.train.program import FOREIGN, Program, StepShape

_FORWARD_TOKENS = 8192  #: of a forward pass, in one or more sequences
_CHUNK_TOKENS = 1024  #: rows of logits

#: JAX guarantees no stability of custom calls; the examiner has its own list.
_ANY_CALL = [export.DisabledSafetyCheck.custom_call(name) for name in FOREIGN]


def export_to_record(ready: Ready, log: messages.Log) -> None:
    """Write the programs of a run into its record. All runs of a batch have the same file."""
    watch = Stopwatch()
    try:
        raw = archive.pack(exported(ready))
    except NotImplementedError as error:  # of effects, such as those of `jax.debug`
        why = " ".join(str(error).split())[:200]
        raise UsageError(f"its programs cannot be exported ({why}); remove prints and callbacks") from error
    if len(raw) > archive.MOST_BYTES:
        problem = f"programs of {len(raw):,} bytes, above {archive.MOST_BYTES:,}: it cannot be examined"
        log.emit(runlog.Warning(f"{problem}; compute tables from formulas"))
        return
    sha256 = layout.sha256(raw)
    write_whole(ready.config.out / archive.name_of(sha256), raw)
    log.emit(runlog.Exported(sha256, len(raw), watch.seconds, changed_settings()))


def exported(ready: Ready) -> Archive:
    """Return the programs of a run for its devices and for the CPU."""
    recipe, program = ready.recipe, ready.program
    programs = {"cpu": program}
    if program.kernels.platform == "gpu":
        programs = {"cuda": program, "cpu": replace(program, portable=True)}
    state = program.state
    # Without the files and lines of operations: they name folders of this machine.
    with setting("jax_traceback_in_locations_limit", 0):
        platforms = {name: _lowered(one, ready.track, state, name) for name, one in programs.items()}
    return Archive(
        leaves=tuple(named(state)),
        num_params=len(state.params),
        document_tokens=tuple(one.document_tokens for one in recipe.stages for _ in range(one.num_steps)),
        platforms=platforms,
        derived=tuple(program.constants.derived_names),
    )


def _lowered(program: Program, track: Track, state: Any, platform: str) -> Lowered:
    num_steps, plan = program.recipe.num_steps, program.step.plan
    shapes = [program.shape_at(step) for step in range(num_steps)]
    steps = {shape: f"train-{i}" for i, shape in enumerate(dict.fromkeys(shapes))}
    validated = [*filter(track.validates_at, range(num_steps)), num_steps]
    static = {step: plan.static_at(step, integers=False) for step in validated}
    kinds = {one: str(i) for i, one in enumerate(dict.fromkeys(static.values()))}
    lower = partial(export.export, platforms=[platform], disabled_checks=_ANY_CALL)
    made = {**_training(program, state, steps, lower), **_scoring(program, state.params, kinds, lower)}
    # Kernels of GPUs are calls of XLA's, which nothing but JAX's own form holds.
    is_portable = platform == "cpu"
    return Lowered(
        steps=tuple(steps[shape] for shape in shapes),
        scored={step: kinds[one] for step, one in static.items()},
        programs={} if is_portable else {name: bytes(one.serialize()) for name, one in made.items()},
        portable={name: _portable(program, name, one) for name, one in made.items()} if is_portable else {},
    )


def _portable(program: Program, name: str, one: export.Exported) -> archive.Portable:
    """Return a program in the portable form, with where its arrays lie: state and batch are shared by the devices."""
    leaves = jax.tree.leaves(program.specs, is_leaf=lambda x: isinstance(x, P))
    passed, batch = [P()] * len(program.constants.passed), [P(program.mesh.axis_names)] * 2
    ins = [*leaves, *passed, *batch] if name.startswith("train") else [P()] * len(one.in_avals)
    outs = {"init": leaves}.get(name, [P()] * len(one.out_avals))
    outs = [*leaves, P()] if name.startswith("train") else outs
    return portable(one, ins, outs, dict(program.mesh.shape))


def _training(
    program: Program, state: Any, names: dict[StepShape, str], lower: Any
) -> dict[str, export.Exported]:
    """Lower the programs that make states: init, constants, and a named step for each shape."""
    structure = jax.tree.structure(state)
    # As in the run, whose trace of the step is used again. Constants cannot span processes.
    given = program.schedule if processes.count() == 1 else program.step.plan.schedule
    where = tuple(leaf.sharding for leaf in jax.tree.leaves(state))

    def init(data: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.tree.leaves(program.init(jax.random.wrap_key_data(data))))

    def constants() -> tuple[jax.Array, ...]:
        return tuple(one() for one in program.constants.computed.values())

    def step(static: Static) -> Any:
        def train(*args: jax.Array) -> tuple[jax.Array, ...]:
            leaves, passed, ids = _split(args, len(where), len(program.constants.passed))
            schedule = given | dict(zip(program.constants.passed, passed, strict=True))
            before = jax.tree.unflatten(structure, leaves)
            after, metrics = program.train_step_for(static)(before, *ids, schedule)
            return *jax.tree.leaves(after), jnp.sum(metrics.loss)

        return jax.jit(train)

    key = jax.ShapeDtypeStruct((2,), np.uint32)
    found = {"init": lower(jax.jit(init, out_shardings=where))(key), "constants": lower(jax.jit(constants))()}
    passed = [program.schedule[name] for name in program.constants.passed]
    for shape, name in names.items():
        found[name] = lower(step(shape.static))(*jax.tree.leaves(state), *passed, *program.ids(shape))
    return found


def _split(args: tuple[Any, ...], *sizes: int) -> tuple[tuple[Any, ...], ...]:
    """Split arguments into parts of these sizes, and the rest."""
    return tuple(args[start:end] for start, end in pairwise([0, *accumulate(sizes), len(args)]))


def _scoring(
    program: Program, params: Params, names: dict[Static, str], lower: Any
) -> dict[str, export.Exported]:
    """Lower the programs that score, for one device: a forward pass and the head for each name."""
    recipe, plan, passed = program.recipe, program.step.plan, program.constants.passed
    kinds = recipe.table(recipe.config)
    packed = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in params.items()}
    structure = jax.tree.structure(packed)

    def view(leaves: Any) -> Any:
        """Return the parameters by name, in the compute dtype."""
        params = program.layout.unpack(jax.tree.unflatten(structure, leaves))
        return {
            name: x if kinds[name].packed == "vector" else x.astype(recipe.compute_dtype)
            for name, x in params.items()
        }

    def run(function: Any, static: Static, *args: jax.Array) -> jax.Array:
        leaves, arrays, (step, x) = _split(args, len(packed), len(passed))
        schedule = plan.schedule | dict(zip(passed, arrays, strict=True))
        return function(view(leaves), x, plan.at(step, jax.tree.map(jnp.asarray, schedule), static))

    def forward(params: Params, tokens_BT: jax.Array, inputs: Any) -> jax.Array:
        return program.forward(recipe.read(params, tokens_BT), tokens_BT, inputs)

    seq_len = recipe.eval_seq_len
    ids_BT = jax.ShapeDtypeStruct((max(1, _FORWARD_TOKENS // seq_len), seq_len), np.int32)
    arrays = [*map(plan.constants.__getitem__, passed), np.int32(0)]
    args, found = (*jax.tree.leaves(packed), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)), {}
    for static, name in names.items():
        hidden, logits = (jax.jit(partial(run, f, static)) for f in (forward, program.logits))
        found[f"hidden-{name}"] = lower(hidden)(*args, ids_BT)
        (x_BTD,) = found[f"hidden-{name}"].out_avals
        x_ND = jax.ShapeDtypeStruct((_CHUNK_TOKENS, x_BTD.shape[-1]), x_BTD.dtype)
        found[f"logits-{name}"] = lower(logits)(*args, x_ND)
    return found
