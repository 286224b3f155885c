"""Compile for absent GPUs: the CUDA compiler in JAX's plugin needs no GPU and no driver.

The result is the program that a GPU would run, scheduled, with its buffers assigned. It cannot be executed, and
nothing is autotuned.
"""

import math
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from speedrun.base import accelerators, provenance
from speedrun.base.errors import UsageError
from speedrun.base.mesh import arranged
from speedrun.train.program import Program

Options = Mapping[str, bool | int | str]

#: Wheels of a compiler: the plugin compiles, `nvcc` brings `ptxas`. The first is this project's extra `aot`.
COMPILERS = (
    ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12"),
    ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm"),
)

#: Makes all GEMMs cuBLAS calls, also in FP8, as autotuning often does. Without a GPU the default is Triton for all.
CUBLAS_GEMMS: Options = {"xla_gpu_enable_triton_gemm": False}


def missing_wheels() -> list[str]:
    """Return the missing wheels of the first compiler, or none if any is complete. A CUDA toolkit on PATH counts."""
    here, toolkit = provenance.installed(), shutil.which("ptxas") is not None
    lacking = [
        [name for name in wheels if name not in here and not (toolkit and name.startswith("nvidia-"))]
        for wheels in COMPILERS
    ]
    return lacking[0] if all(lacking) else []


def target_mesh(kind: str, num_devices: int, num_nodes: int = 1) -> Mesh:
    """Return a mesh to compile for, with `num_devices` of one kind in each machine.

    Raises:
        UsageError: an unknown kind; a compiler that is not installed.
    """
    device = accelerators.load(kind)
    if missing := missing_wheels():
        # The plugin must be of JAX's own version.
        exact = " ".join(f"{name}=={jax.__version__}" if "jax" in name else name for name in COMPILERS[0])
        raise UsageError(
            f"found no {', '.join(missing)}; to compile for {device.name} without one, "
            f"scripts/install.sh compile, or pip install --no-deps {exact}"
        )
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=accelerators.target(device), topology=f"1x{num_nodes}x{num_devices}"
    )
    return arranged(topology.devices, num_nodes)


def compile_for_target(function: Any, *args: Any, options: Options = CUBLAS_GEMMS) -> Any:
    """Compile a result of `jax.jit` for the mesh of its arguments.

    Args:
        function: anything with `lower`.
        *args: trees of `jax.ShapeDtypeStruct` with shardings on a `target_mesh`.
        options: of XLA; booleans as Python's.

    Returns:
        A `jax.stages.Compiled`, for `anatomy.dissect`.
    """
    # JAX can write such a program to its disk cache, but not read it back. It stores what took at least this long.
    setting = "jax_persistent_cache_min_compile_time_secs"
    stored_after_s = getattr(jax.config, setting)
    jax.config.update(setting, math.inf)
    target = jax.tree.leaves(args)[0].sharding.mesh.devices.flat[0]
    try:
        with jax.default_device(target):  # Pallas asks it for the capability of cards that it does not know
            lowered = function.lower(*args)
        return lowered.compile(compiler_options=dict(options))
    finally:
        jax.config.update(setting, stored_after_s)


def compiled_step(program: Program, step: int, options: Options = CUBLAS_GEMMS) -> Any:
    """Compile the training step of this number for the `target_mesh` of a program."""
    shape = program.shape_at(step)
    ids_BT = _ids(program, shape.num_sequences, shape.seq_len)
    settings = {**program.compiler_options, **options}
    train_step = program.train_step_for(shape.static)
    return compile_for_target(train_step, program.state, ids_BT, ids_BT, _schedule(program), options=settings)


def compiled_evaluation(program: Program, options: Options = CUBLAS_GEMMS) -> Any:
    """Compile a validation pass for the `target_mesh` of a program."""
    ids_BT = _ids(program, program.recipe.eval_sequences, program.recipe.eval_seq_len)
    inputs = program.state.params, ids_BT, ids_BT, _schedule(program), program.state.step
    eval_step = program.eval_step_for(program.static_at(program.recipe.num_steps))
    return compile_for_target(eval_step, *inputs, options={**program.compiler_options, **options})


def _placed(program: Program, x: Any, spec: P) -> jax.ShapeDtypeStruct:
    """Return the type and sharding of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(program.mesh, spec))


def _ids(program: Program, num_sequences: int, seq_len: int) -> jax.ShapeDtypeStruct:
    return _placed(program, np.empty((num_sequences, seq_len), np.int32), P(program.mesh.axis_names))


def _schedule(program: Program) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the types of `Program.schedule`."""
    return {name: _placed(program, x, P()) for name, x in program.step.plan.schedule.items()}
