"""Measures the devices before and after a run; checks compare this with step times."""

import subprocess
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from speedrun.base import messages, runlog
from speedrun.base.clock import Stopwatch
from speedrun.base.output import text_of

_MULTIPLICATIONS = 8
#: Microseconds since the driver was loaded. The power cap is left out: large products always reach it.
_COUNTERS = ("hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")
_ANSWER_S = 90.0  #: with a broken driver nvidia-smi hangs; without persistence mode it takes 2 to 3 s a GPU
_TRIALS = 5


def matmul_gflops(mesh: Mesh) -> float:
    """Return the best rate of a chain of square matrix products, summed over devices.

    Numbers are random, in float32 on CPU and bfloat16 elsewhere: a GPU multiplies constants with less power, and so at
    a higher clock.
    """
    size, dtype = (512, jnp.float32) if is_simulated(mesh) else (8192, jnp.bfloat16)

    def make(key: jax.Array) -> jax.Array:  # powers neither grow nor vanish
        return jax.random.normal(key, (mesh.size, size, size), dtype) / size**0.5

    x_NMM = jax.jit(make, out_shardings=NamedSharding(mesh, P(mesh.axis_names)))(jax.random.key(0))
    return _MULTIPLICATIONS * mesh.size * 2 * size**3 / best_s(lambda: _chain(x_NMM, x_NMM.sharding)) / 1e9


def matmul_gflops_again(mesh: Mesh, log: messages.Log) -> float:
    """Return the rate after a run, since other programs may have started or ended; warn and return 0 if it fails."""
    try:
        return matmul_gflops(mesh)
    except jax.errors.JaxRuntimeError as error:
        log.emit(runlog.Warning(f"no bench after the run: {text_of(error)}"), hold=True)
        return 0.0


@partial(jax.jit, static_argnums=1)
def _chain(x_NMM: jax.Array, placing: NamedSharding) -> jax.Array:
    y_NMM = x_NMM
    for _ in range(_MULTIPLICATIONS):
        y_NMM = y_NMM @ x_NMM
    return jax.lax.with_sharding_constraint(y_NMM, placing)


def throttled_s(mesh: Mesh, since_s: float | None = 0.0) -> float | None:
    """Return the seconds for which heat or power supply throttled the GPUs of this machine, summed over GPUs.

    They count from `since_s`, an earlier result, or from when the driver was loaded. None if unknown.
    """
    if is_simulated(mesh) or since_s is None:
        return None
    names = ",".join(f"clocks_event_reasons_counters.{name}" for name in _COUNTERS)
    argv = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(argv, capture_output=True, text=True, timeout=_ANSWER_S, check=True).stdout
        return sum(int(number) for line in answer.splitlines() for number in line.split(",")) / 1e6 - since_s
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def is_simulated(mesh: Mesh) -> bool:
    """Return whether the devices are simulated on a CPU."""
    return mesh.devices.flat[0].platform == "cpu"


def best_s(function: Callable[[], jax.Array]) -> float:
    """Return the time of the fastest of some calls, after one that compiles."""
    function().block_until_ready()
    seconds = []
    for _ in range(_TRIALS):
        watch = Stopwatch()
        function().block_until_ready()
        seconds.append(watch.seconds)
    return min(seconds)
