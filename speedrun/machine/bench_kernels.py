"""Times kernels against their definitions and bounds, and the machine: products, memory, collectives, transfers.

Legend: B batch, T time, H heads, K head width, N tokens, D model, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from speedrun.base import mesh as meshes
from speedrun.base.clock import Stopwatch
from speedrun.base.mesh import DATA, shard
from speedrun.science.kernels import cross_entropy, cross_entropy_gpu, dispatch
from speedrun.science.kernels.attention import first_key
from speedrun.train.device_benchmark import best_s, is_simulated, matmul_gflops

_TRIALS = 7


class Timing(msgspec.Struct, frozen=True):
    """One form of an operation."""

    name: str
    median_ms: float
    spread_ms: float  #: from the first to the ninth decile
    ratio: float  #: of medians, to the first form

    def __str__(self) -> str:
        return f"{self.name:<16} {self.median_ms:9.2f} ms +- {self.spread_ms:6.2f}  {self.ratio:5.2f} x"


class Timings(msgspec.Struct, frozen=True):
    """All forms of an operation."""

    timings: list[Timing]
    left_out: dict[str, list[str]]  #: forms that do not run here, and why
    auto: str  #: the implementation that "auto" chooses
    reason: str

    def __str__(self) -> str:
        others = [f"{name:<16} not here: {'; '.join(reasons)}" for name, reasons in self.left_out.items()]
        return "\n".join([*map(str, self.timings), *others, f"{'auto':<16} {self.auto}: {self.reason}"])


def compare(forms: dict[str, Callable[..., Any]], *args: Any) -> list[Timing]:
    """Time each compiled form, in turns, so that a slow moment affects all of them."""
    programs = {name: jax.jit(impl).lower(*args).compile() for name, impl in forms.items()}
    for program in programs.values():
        jax.block_until_ready(program(*args))
    ms: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(_TRIALS):
        for name, program in programs.items():
            watch = Stopwatch()
            jax.block_until_ready(program(*args))
            ms[name].append(watch.seconds * 1e3)
    first = float(np.median(next(iter(ms.values()))))
    return [Timing(name, *middle(times), float(np.median(times)) / first) for name, times in ms.items()]


def middle(times: list[float]) -> tuple[float, float]:
    """Return the median, and the distance from the first to the ninth decile."""
    low, median, high = np.quantile(times, (0.1, 0.5, 0.9))
    return float(median), float(high - low)


_SCALE = 0.12  #: of attention scores
_CAP = cross_entropy.as_cap(15.0)


def attention(
    *,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    window_blocks: int,
    block_tokens: int,
    document_tokens: int,
) -> Timings:
    """Time attention with its gradients in every implementation, on one sequence of equally long documents."""
    platform, compute_capability, dtype = _here()
    call = dispatch.AttentionCall(
        shape_BTHK=(1, num_tokens, num_heads, head_dim),
        value_dim=head_dim,
        dtype=dtype,
        platform=platform,
        compute_capability=compute_capability,
        window_tokens=window_blocks * block_tokens,
    )
    doc_BT = (jnp.arange(num_tokens) // document_tokens)[None]
    seen = first_key(doc_BT, jnp.int32(window_blocks), block_tokens)
    do, *qkv = jax.random.normal(jax.random.key(0), (4, *call.shape_BTHK), dtype)

    def program(name: str) -> Callable[..., Any]:
        impl = dispatch.choose_attention(name, call).function

        def run(do: jax.Array, *qkv: jax.Array) -> Any:
            o, pull = jax.vjp(lambda *qkv: impl(*qkv, seen, scale=_SCALE), *qkv)
            return o, pull(do)

        return run

    left_out = {x: why for x, one in dispatch.ATTENTION.items() if (why := one.unsupported_reasons(call))}
    auto = dispatch.choose_attention("auto", call)
    programs = {name: program(name) for name in dispatch.ATTENTION if name not in left_out}
    return Timings(compare(programs, do, *qkv), left_out, auto.name, auto.reason)


def head(*, num_tokens: int, model_dim: int, vocab_size: int) -> list[Timing]:
    """Time loss and gradients of the vocabulary head; three matrix products are the bound."""
    kx, kw, kt, kg = jax.random.split(jax.random.key(0), 4)
    x_ND = jax.random.normal(kx, (num_tokens, model_dim))
    head_VD = 0.02 * jax.random.normal(kw, (vocab_size, model_dim))
    targets = cross_entropy.single_targets(jax.random.randint(kt, (num_tokens,), 0, vocab_size))
    g_NV = jax.random.normal(kg, (num_tokens, vocab_size))

    platform, compute_capability, dtype = _here()
    x_ND, head_VD, g_NV = (x.astype(dtype) for x in (x_ND, head_VD, g_NV))

    def products(x_ND: jax.Array, head_VD: jax.Array) -> Any:
        return x_ND @ head_VD.T, g_NV @ head_VD, g_NV.T @ x_ND

    def summed(impl: Callable[..., Any]) -> Callable[..., Any]:
        return jax.value_and_grad(lambda *x: impl(*x, targets, cap=_CAP).weighted, (0, 1))

    ours = {"for CPUs": cross_entropy.weighted_on_cpu}
    if platform == "gpu":
        call = dispatch.HeadCall(len(x_ND), len(head_VD), dtype, platform, compute_capability, None, _CAP)
        eight = call._replace(fp8=cross_entropy_gpu.RECORD21)
        plain = partial(cross_entropy_gpu.weighted_cross_entropy, fp8=eight.fp8)
        best, best_of_8 = (dispatch.choose_head(one).function for one in (call, eight))
        ours = {"bf16": best, "fp8": best_of_8, "fp8 by XLA": plain}
    ours["definition"] = cross_entropy.weighted_cross_entropy
    forms = {name: summed(impl) for name, impl in ours.items()}
    return compare({"three products": products, **forms}, x_ND, head_VD)


def _here() -> tuple[str, str, jnp.dtype]:
    """Return platform, compute capability and dtype."""
    platform, compute_capability = meshes.accelerator(meshes.make_mesh(1))
    return platform, compute_capability, jnp.dtype(jnp.bfloat16 if platform == "gpu" else jnp.float32)


# --- the rates of a machine

_FACTOR = 0.999  #: keeps numbers finite, and no pass can be left out


def measure(mesh: Mesh) -> dict[str, float]:
    """Measure the best rates of all devices at once, summed: flop/s of `matmul`, bytes/s of the others; takes seconds.

    Memory is read and written by passes over an array larger than any cache, many in one dispatch. Collectives are left
    out with one device.
    """
    x_NM, num_passes = _random(mesh), 8 if is_simulated(mesh) else 128
    host_NM = jax.device_get(x_NM)

    def passes(x_NM: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, num_passes, lambda _, y_NM: y_NM * _FACTOR, x_NM)

    copy = jax.jit(passes, out_shardings=x_NM.sharding)
    return {
        "matmul": 1e9 * matmul_gflops(mesh),
        "memory": num_passes * 2 * x_NM.nbytes / best_s(lambda: copy(x_NM)),
        **(_collective_rates(mesh, x_NM) if mesh.size > 1 else {}),
        "host to device": host_NM.nbytes / best_s(lambda: shard(host_NM, mesh)),
    }


def _random(mesh: Mesh) -> jax.Array:
    """Return random numbers, made on the devices: 16 MB per simulated device, 256 MB per real one."""
    shape = mesh.size, 2**22 if is_simulated(mesh) else 2**26
    placing = NamedSharding(mesh, P(mesh.axis_names))
    make = jax.jit(lambda key: jax.random.uniform(key, shape, jnp.float32), out_shardings=placing)
    return make(jax.random.key(0))


def _collective_rates(mesh: Mesh, x_NM: jax.Array) -> dict[str, float]:
    """Time what an FSDP step sends, an all-gather and a reduce-scatter of one array, and an all-reduce.

    Counted are bytes that arrive from other devices, or leave for them. In a ring of n devices, each sends
    2 (n - 1) / n of the array for an all-reduce.
    """
    others_bytes = (mesh.size - 1) * x_NM.nbytes

    def over_devices(
        collective: Callable[[jax.Array], jax.Array], out: P
    ) -> Callable[[jax.Array], jax.Array]:
        return jax.jit(jax.shard_map(collective, mesh=mesh, in_specs=P(DATA), out_specs=out))

    gather = over_devices(lambda x_NM: jax.lax.all_gather(x_NM, DATA, tiled=True)[None], P(DATA))
    scatter = over_devices(lambda x_1NM: jax.lax.psum_scatter(x_1NM[0], DATA, tiled=True), P(DATA))
    reduce = over_devices(lambda x_1M: jax.lax.psum(x_1M, DATA), P())
    whole_NNM = gather(x_NM)
    return {
        "all-gather": others_bytes / best_s(lambda: gather(x_NM)),
        "reduce-scatter": others_bytes / best_s(lambda: scatter(whole_NNM)),
        "all-reduce": 2 * others_bytes / mesh.size / best_s(lambda: reduce(x_NM)),
    }
