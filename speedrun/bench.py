"""Side by side on this machine, in one run: what we use, its definition, and the arithmetic that bounds both.

Legend: B batch, T time, N tokens, D model, V vocabulary, H heads, K head width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speedrun import devices
from speedrun import mesh as meshes
from speedrun.clock import Stopwatch
from speedrun.kernels import cross_entropy_gpu
from speedrun.kernels.attention import Sight, sight
from speedrun.kernels.choose import ATTENTION, AttentionCall, choose_attention
from speedrun.kernels.cross_entropy import cross_entropy, summed_cross_entropy
from speedrun.params import flops_per_token
from speedrun.step import Program

_TRIALS = 5
_CAP = 15.0
_SCALE = 0.12


class Timing(NamedTuple):
    """One form of an operation."""

    name: str
    best_ms: float
    ratio: float  #: to the first form of its table


def compare(forms: dict[str, Callable[..., Any]], *args: Any) -> list[Timing]:
    """Best of a few calls of each compiled form, taken in turns so that a slow moment hits all of them."""
    programs = {name: jax.jit(form).lower(*args).compile() for name, form in forms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(_TRIALS):
        for name, program in programs.items():
            watch = Stopwatch()
            jax.block_until_ready(program(*args))
            seconds[name].append(watch.seconds)
    best = {name: min(times) for name, times in seconds.items()}
    first = next(iter(best.values()))
    return [Timing(name, second * 1e3, second / first) for name, second in best.items()]


def head(*, num_tokens: int, model_dim: int, vocab_size: int) -> list[Timing]:
    """Loss and gradients of the vocabulary head: three matrix products are the bound."""
    kx, kw, kt, kg = jax.random.split(jax.random.key(0), 4)
    x_ND = jax.random.normal(kx, (num_tokens, model_dim))
    head_VD = 0.02 * jax.random.normal(kw, (vocab_size, model_dim))
    targets_N = jax.random.randint(kt, (num_tokens,), 0, vocab_size)
    g_NV = jax.random.normal(kg, (num_tokens, vocab_size))

    is_gpu = jax.devices()[0].platform == "gpu"
    if is_gpu:
        x_ND, head_VD, g_NV = (x.astype(jnp.bfloat16) for x in (x_ND, head_VD, g_NV))

    def products(x_ND: jax.Array, head_VD: jax.Array) -> Any:
        return x_ND @ head_VD.T, g_NV @ head_VD, g_NV.T @ x_ND

    def definition(x_ND: jax.Array, head_VD: jax.Array) -> jax.Array:
        return cross_entropy(x_ND, head_VD, targets_N, cap=_CAP).sum()

    def summed(form: Callable[..., jax.Array]) -> Callable[..., Any]:
        return jax.value_and_grad(lambda x_ND, head_VD: form(x_ND, head_VD, targets_N, cap=_CAP), (0, 1))

    ours = {"for CPUs": summed(summed_cross_entropy)}
    if is_gpu:
        ours = {
            "bf16": summed(cross_entropy_gpu.summed_cross_entropy),
            "fp8": summed(partial(cross_entropy_gpu.summed_cross_entropy, fp8=cross_entropy_gpu.RECORD21)),
        }
    forms = {"three products": products, **ours, "definition": jax.value_and_grad(definition, (0, 1))}
    return compare(forms, x_ND, head_VD)


class AttentionTimings(NamedTuple):
    """Value and gradients of every form of attention that runs here."""

    timings: list[Timing]
    left_out: dict[str, list[str]]  #: why the others do not run
    auto: str  #: the form "auto" takes
    reason: str


def attention(
    *,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    window_blocks: int,
    block_tokens: int,
    document_tokens: int,
) -> AttentionTimings:
    """Every form, on one sequence of equally long documents; in bfloat16 on a GPU, else in float32."""
    device = jax.devices()[0]
    dtype = jnp.dtype(jnp.bfloat16 if device.platform == "gpu" else jnp.float32)
    call = AttentionCall(
        shape_BTHK=(1, num_tokens, num_heads, head_dim),
        dtype=dtype,
        platform=device.platform,
        compute_capability=getattr(device, "compute_capability", ""),
        block_tokens=block_tokens,
        max_window_blocks=window_blocks,
        static_window_blocks=window_blocks,
        max_documents=-(-num_tokens // document_tokens),
    )
    left_out = {name: reasons for name, form in ATTENTION.items() if (reasons := form.against(call))}
    doc_BT = (jnp.arange(num_tokens) // document_tokens)[None]
    seen = sight(doc_BT, jnp.int32(window_blocks), block_tokens)
    do, *qkv = jax.random.normal(jax.random.key(0), (4, *call.shape_BTHK), dtype)

    def value_and_gradients(form: Callable[..., jax.Array]) -> Callable[..., Any]:
        def run(do: jax.Array, seen: Sight, *qkv: jax.Array) -> tuple[jax.Array, ...]:
            o_BTHK, pull = jax.vjp(lambda *qkv: form(*qkv, seen, scale=_SCALE), *qkv)
            return o_BTHK, *pull(do)

        return run

    forms = {
        name: value_and_gradients(choose_attention(name, call).function)
        for name in ATTENTION
        if name not in left_out
    }
    auto = choose_attention("auto", call)
    return AttentionTimings(compare(forms, do, seen, *qkv), left_out, auto.name, auto.reason)


class StepTimings(NamedTuple):
    """Training steps on random ids, one after the other, each waited for."""

    ms: list[float]  #: of each step, in order
    median_ms: float
    spread_ms: float  #: from the first to the ninth decile
    tokens_per_s: float
    mfu: float | None  #: of the vendor's bf16 rate, attention scores not counted; None for an unknown device
    peak_bytes: int  #: on one device
    compile_s: float
    kernels: dict[str, str]


def step(program: Program, *, num_steps: int, first_step: int = 0) -> StepTimings:
    """Times the training step of a recipe as the schedule has it from `first_step` on: the window matters.

    Args:
        program: the recipe on its devices.
        num_steps: timed, after two that are not.
        first_step: of the recipe's schedule.
    """
    shape, mesh = program.shape_at(first_step), program.mesh
    ids = np.random.default_rng(0).integers(
        0, program.recipe.config.vocab_size, (2, shape.num_sequences, shape.seq_len), np.int32
    )
    batch = [meshes.place(x_BT, mesh) for x_BT in ids]
    state = program.init(jax.random.key(0))
    state = state._replace(step=meshes.replicate(np.int32(first_step), mesh))
    watch = Stopwatch()
    lowered = program.train_step_for(shape.window_blocks).lower(state, *batch, program.schedule)
    train_step = lowered.compile(compiler_options=program.compiler_options)
    compile_s, ms = watch.seconds, []
    for _ in range(2 + num_steps):
        watch = Stopwatch()
        state, metrics = train_step(state, *batch, program.schedule)
        jax.block_until_ready((state, metrics))
        ms.append(watch.seconds * 1e3)
    timed = ms[2:]
    median_ms = float(np.median(timed))
    tokens_per_s = shape.num_sequences * shape.seq_len / median_ms * 1e3
    device = devices.named(mesh.devices.flat[0].device_kind)
    flops_per_s = flops_per_token(program.layout.table) * tokens_per_s
    return StepTimings(
        ms=timed,
        median_ms=median_ms,
        spread_ms=float(np.quantile(timed, 0.9) - np.quantile(timed, 0.1)),
        tokens_per_s=tokens_per_s,
        mfu=flops_per_s / (device.bf16_flops * mesh.size) if device else None,
        peak_bytes=meshes.peak_bytes(mesh),
        compile_s=compile_s,
        kernels={call: f"{one.name}: {one.reason}" for call, one in program.kernels.choices.items()},
    )
