"""Choose the form of each operation while a program is traced, and record the choice with its reason.

Legend: B batch, T time, H heads, K head width.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from speedrun.ground.errors import UsageError, unknown
from speedrun.science.kernels import (
    attention_banded,
    attention_flash3,
    attention_mosaic,
    attention_triton,
    cross_entropy,
    cross_entropy_gpu,
    cross_entropy_mosaic,
    mlp_mosaic,
    qk_norm_triton,
)
from speedrun.science.kernels.attention import Sight, Window, attention
from speedrun.science.kernels.cross_entropy import Cap, Losses, Targets, as_cap, single_targets
from speedrun.science.kernels.cross_entropy_gpu import PASSES, Fp8, Passes
from speedrun.science.kernels.mlp import Factors, mlp
from speedrun.science.kernels.qk_norm import Angles, qk_norm

#: On a CPU the definition is as fast up to this length: 3.3 ms against 3.8 at 256 tokens, 28.5 against 11.3 at 512.
SHORT_TOKENS = 256
#: Room for documents assumes this mean length. With more documents the output is NaN, never silently wrong.
TOKENS_PER_DOCUMENT = 32
#: Limit for the scores of the definition; its backward pass keeps about three such arrays.
MOST_SCORE_BYTES = 4 * 2**30


class AttentionCall(NamedTuple):
    """The static facts of a call of attention."""

    shape_BTHK: tuple[int, int, int, int]  #: on one device
    dtype: jnp.dtype
    platform: str  #: as JAX names it: cpu, gpu
    compute_capability: str  #: of an NVIDIA GPU, such as 9.0; empty elsewhere
    block_tokens: int
    max_window_blocks: int  #: upper bound of the window
    static_window_blocks: int | None  #: the window, if the program is compiled for one; None if it is traced
    max_documents: int  #: in the batch of one device

    @property
    def window_tokens(self) -> int:
        """Upper bound of the keys that a query sees."""
        return self.max_window_blocks * self.block_tokens


class QkNormCall(NamedTuple):
    """The static facts of a call of QK-norm and rotary."""

    head_dim: int
    dtype: jnp.dtype
    platform: str
    compute_capability: str


class MlpCall(NamedTuple):
    """The static facts of a call of the MLP."""

    num_tokens: int  #: on one device
    model_dim: int
    mlp_dim: int
    dtype: jnp.dtype  #: that all three operands fit into
    platform: str
    compute_capability: str


class Choice(NamedTuple):
    """A form that can run, with the signature of the definition. Name and reason go into the log."""

    name: str
    function: Callable[..., Any]
    reason: str


class Form(NamedTuple):
    """A way to compute an operation. Forms differ from the definition only by rounding."""

    refusals: Callable[[Any], list[str]]  #: call -> all reasons why the form cannot run
    bind: Callable[[Any], Callable[..., Any]]  #: call -> function with the signature of the definition


def _definition_refusals(call: AttentionCall) -> list[str]:
    rows, tokens, heads, _ = call.shape_BTHK
    need = 4 * rows * heads * tokens**2
    too_much = f"its scores take {need / 2**30:.0f} GiB; it needs {MOST_SCORE_BYTES / 2**30:.0f} GiB or less"
    return [too_much] if need > MOST_SCORE_BYTES else []


def _flash3_refusals(call: AttentionCall) -> list[str]:
    elsewhere = _platform_refusals(call)
    reasons = elsewhere + _dtype_refusals(call) + attention_flash3.refusals(call.shape_BTHK)
    if call.static_window_blocks is None:
        reasons.append("the window is traced; the kernels need one program for each window")
    # Loads the library, so only where it can run.
    if not elsewhere and (problem := attention_flash3.problem()):
        reasons.append(problem)
    return reasons


def _platform_refusals(call: "AttentionCall | QkNormCall | MlpCall | HeadCall") -> list[str]:
    if (call.platform, call.compute_capability) == ("gpu", "9.0"):
        return []
    here = f"{call.platform} {call.compute_capability}".strip()
    return [f"this is a {here}; the kernels need an H100 or H200 (gpu 9.0)"]


def _dtype_refusals(call: AttentionCall | QkNormCall) -> list[str]:
    return [] if call.dtype == jnp.bfloat16 else [f"{call.dtype} inputs; the kernels need bfloat16"]


def _bind_flash3(call: AttentionCall) -> Callable[..., jax.Array]:
    assert call.static_window_blocks is not None
    return partial(
        attention_flash3.attention,
        window_blocks=call.static_window_blocks,
        block_tokens=call.block_tokens,
        max_documents=call.max_documents,
    )


ATTENTION: Mapping[str, Form] = MappingProxyType(
    {
        "definition": Form(_definition_refusals, lambda _: attention),
        "banded": Form(
            lambda _: [], lambda call: partial(attention_banded.attention, window_tokens=call.window_tokens)
        ),
        "triton": Form(
            lambda call: (
                _platform_refusals(call) + _dtype_refusals(call) + attention_triton.refusals(call.shape_BTHK)
            ),
            lambda _: attention_triton.attention,
        ),
        "mosaic": Form(
            lambda call: _platform_refusals(call) + attention_mosaic.refusals(call.shape_BTHK, call.dtype),
            lambda _: attention_mosaic.attention,
        ),
        "flash3": Form(_flash3_refusals, _bind_flash3),
    }
)

#: Forms that need one program per window.
FIXED_WINDOW_FORMS = frozenset({"flash3"})


def choose_attention(wanted: str, call: AttentionCall) -> Choice:
    """Return the wanted form, or for "auto" the first form in order of preference that can run.

    On a GPU the order is triton, banded, definition. "auto" never chooses `mosaic`, which has not been timed, nor
    `flash3`, a third-party binary that needs one program per window. On a CPU it chooses the definition for short
    sequences and for windows that cover the whole sequence, and banded otherwise.

    Raises:
        UsageError: if the name is unknown or the form cannot run; the message lists all reasons.
    """
    tokens = call.shape_BTHK[1]
    if wanted != "auto":
        return _wanted("attention", ATTENTION, wanted, call)
    if call.platform != "cpu":
        order = ["triton", "banded", "definition"]
        why = f"first of {', '.join(order)} that can run here"
    elif tokens > SHORT_TOKENS and call.window_tokens < tokens:
        order, why = ["banded"], f"{tokens:,} tokens, windows of at most {call.window_tokens:,}"
    else:
        order = ["definition", "banded"]
        why = f"{tokens:,} tokens, windows of up to {call.window_tokens:,}: nothing to skip"
    return _first_of(ATTENTION, order, why, call)


QK_NORM: Mapping[str, Form] = MappingProxyType(
    {
        "definition": Form(lambda _: [], lambda _: qk_norm),
        "triton": Form(
            lambda call: (
                _platform_refusals(call) + _dtype_refusals(call) + qk_norm_triton.refusals(call.head_dim)
            ),
            lambda _: qk_norm_triton.qk_norm,
        ),
    }
)


def choose_qk_norm(wanted: str, call: QkNormCall) -> Choice:
    """Return a form from `QK_NORM`, as `choose_attention` does; "auto" prefers the fused kernel."""
    if wanted != "auto":
        return _wanted("qk_norm", QK_NORM, wanted, call)
    return _first_of(QK_NORM, ["triton", "definition"], "one pass where it can run", call)


def choose_mlp(call: MlpCall) -> Choice:
    """Return the form with activations inside products where it can run, else the definition."""
    if refusals := _platform_refusals(call) + mlp_mosaic.refusals(*call[:4]):
        return Choice("definition", mlp, f"not mosaic: {', '.join(refusals)}")
    return Choice("mosaic", mlp_mosaic.mlp, "activations inside products")


def _wanted(operation: str, forms: Mapping[str, Form], wanted: str, call: Any) -> Choice:
    if wanted not in forms:
        raise unknown(f"form of {operation}", wanted, ["auto", *forms])
    if reasons := forms[wanted].refusals(call):
        raise UsageError(
            f"{operation} form {wanted!r} cannot run: {'; '.join(reasons)}; or let 'auto' choose another"
        )
    return Choice(wanted, forms[wanted].bind(call), "asked for")


def _first_of(forms: Mapping[str, Form], order: list[str], why: str, call: Any) -> Choice:
    refusals = {name: forms[name].refusals(call) for name in order}
    name = next(name for name in order if not refusals[name])
    skipped = [f"not {other}: {', '.join(refusals[other])}" for other in order[: order.index(name)]]
    return Choice(name, forms[name].bind(call), "; ".join([why, *skipped]))


#: Tokens per chunk of logits on a GPU: 4.9 GB in 16 bits with the GPT-2 vocabulary.
HEAD_TOKENS = 49_152
#: For Hopper.
MOSAIC = Passes(cross_entropy_mosaic.sum_exp, cross_entropy_mosaic.softmax_gradient)


class HeadCall(NamedTuple):
    """The static facts of a call of the loss head."""

    num_tokens: int  #: on one device
    num_columns: int
    dtype: jnp.dtype
    platform: str
    compute_capability: str
    fp8: Fp8 | None
    cap: Cap


def choose_head(call: HeadCall) -> Choice:
    """Return the form of the loss head: the plain one without a cap, the CPU's on a CPU without FP8, else the GPU's.

    Devices without FP8 units emulate FP8 products in a wider dtype.

    Raises:
        UsageError: for FP8 without a cap.
    """
    num_tokens, fp8, is_cpu = call.num_tokens, call.fp8, call.platform == "cpu"
    if math.isinf(call.cap.height):
        if fp8 is not None:
            raise UsageError("the head has FP8 products only with a logit cap; set a cap or no FP8")
        chunks = cross_entropy.fewest_chunks(
            num_tokens, cross_entropy.CHUNK_TOKENS if is_cpu else HEAD_TOKENS // 4
        )
        plain = partial(cross_entropy.weighted_uncapped, num_chunks=chunks)
        return Choice("uncapped", plain, f"logits without a cap, {num_tokens:,} tokens in {chunks} chunks")
    if is_cpu and fp8 is None:
        why = "cpu: a chunk of logits stays in its cache"
        return Choice("chunks", cross_entropy.weighted_on_cpu, why)
    num_chunks = cross_entropy.fewest_chunks(num_tokens, HEAD_TOKENS)
    shape = num_tokens // num_chunks, call.num_columns
    refusals = _platform_refusals(call) + cross_entropy_mosaic.refusals(*shape, call.dtype)
    passes, by = (PASSES, f"XLA's passes: {', '.join(refusals)}") if refusals else (MOSAIC, "mosaic's passes")
    head = partial(cross_entropy_gpu.weighted_cross_entropy, fp8=fp8, num_chunks=num_chunks, passes=passes)
    reason = f"{call.platform}, {num_tokens:,} tokens in {num_chunks} chunks; {by}"
    return Choice(str(call.dtype) if fp8 is None else "fp8", head, reason)


@dataclass(frozen=True)
class Kernels:
    """The operations of one program. Tracing a call chooses its form and adds the choice to `choices`.

    Shapes and dtypes of calls are known only to the traced model, and traced functions can return only arrays.
    The choice is a pure function of the call, so tracing a program again changes nothing.
    """

    platform: str  #: as JAX names it
    compute_capability: str  #: of an NVIDIA GPU; empty elsewhere
    wanted_attention: str = "auto"
    choices: dict[str, Choice] = field(default_factory=dict, compare=False)  #: by operation and shape

    def attention(
        self,
        q_BTHK: jax.Array,
        k_BTHK: jax.Array,
        v_BTHK: jax.Array,
        sight: Sight,
        /,
        *,
        scale: float,
        window: Window,
        block_tokens: int,
    ) -> jax.Array:
        """Compute `kernels.attention`; `sight` must be made from this `window` and `block_tokens`."""
        rows, tokens, heads, width = q_BTHK.shape
        if isinstance(window.blocks, int) and window.blocks < 1:  # forms disagree about what sees nothing
            raise UsageError(f"attention has a window of {window.blocks} blocks; need at least 1")
        static = window.blocks if isinstance(window.blocks, int) else None
        max_documents = rows * max(64, tokens // TOKENS_PER_DOCUMENT)
        here = (rows, tokens, heads, width), q_BTHK.dtype, self.platform, self.compute_capability
        call = AttentionCall(*here, block_tokens, window.most, static, max_documents)
        choice = choose_attention(self.wanted_attention, call)
        shape, kind = f"{rows}x{tokens}x{heads}x{width}", "traced" if static is None else "fixed"
        self.choices[f"attention {shape} {q_BTHK.dtype}, {kind} window of {window.most} blocks"] = choice
        with jax.named_scope("attention"):
            return choice.function(q_BTHK, k_BTHK, v_BTHK, sight, scale=scale)

    def qk_norm(self, q_BTHK: jax.Array, k_BTHK: jax.Array, angles: Angles) -> tuple[jax.Array, jax.Array]:
        """Apply the RMS norm per head, then rotary, to queries and keys. See `kernels.qk_norm`."""
        call = QkNormCall(q_BTHK.shape[3], q_BTHK.dtype, self.platform, self.compute_capability)
        choice = choose_qk_norm("auto", call)
        self.choices[f"qk_norm {'x'.join(map(str, q_BTHK.shape))} {q_BTHK.dtype}"] = choice
        return choice.function(q_BTHK, k_BTHK, angles)

    def mlp(
        self, x_D: jax.Array, up_FD: jax.Array, down_DF: jax.Array, *, factors: Factors = "float32"
    ) -> jax.Array:
        """Apply the MLP with a squared ReLU to states [..., D]. See `kernels.mlp`."""
        num_tokens, (mlp_dim, model_dim) = math.prod(x_D.shape[:-1]), up_FD.shape
        call = MlpCall(num_tokens, model_dim, mlp_dim, x_D.dtype, self.platform, self.compute_capability)
        choice = choose_mlp(call)
        kind = factors if jnp.finfo(factors).bits == 8 else x_D.dtype
        self.choices[f"mlp {num_tokens}x{model_dim}x{mlp_dim} {kind}"] = choice
        with jax.named_scope("mlp"):
            return choice.function(x_D, up_FD, down_DF, factors=factors)

    def summed_cross_entropy(
        self, x_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array, *, cap: float, fp8: Fp8 | None
    ) -> jax.Array:
        """Return the summed loss of all tokens: f32 [], nats."""
        targets = single_targets(targets_N)
        return self.weighted_cross_entropy(x_ND, head_VD, targets, cap=cap, fp8=fp8).weighted

    def weighted_cross_entropy(
        self, x_ND: jax.Array, head_VD: jax.Array, targets: Targets, *, cap: float | Cap, fp8: Fp8 | None
    ) -> Losses:
        """Return the losses of all tokens and targets. See `kernels.cross_entropy`."""
        sizes, capped = (len(x_ND), len(head_VD)), as_cap(cap)
        here = x_ND.dtype, self.platform, self.compute_capability
        choice = choose_head(HeadCall(*sizes, *here, fp8, capped))
        factors = x_ND.dtype if fp8 is None else "fp8"
        call = f"head {'x'.join(map(str, x_ND.shape))} {factors}, {len(head_VD)} columns"
        num_targets = targets.ids_NM.shape[1]
        self.choices[call if num_targets == 1 else f"{call}, {num_targets} targets"] = choice
        with jax.named_scope("loss_head"):
            return choice.function(x_ND, head_VD, targets, cap=capped)
