"""Which form of an operation runs: chosen once, before compiling, and never without a word.

Legend: B batch, T time, H heads, K head width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
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
    qk_norm_triton,
)
from speedrun.science.kernels.attention import Sight, Window, attention
from speedrun.science.kernels.cross_entropy_gpu import Fp8
from speedrun.science.kernels.qk_norm import Angles, qk_norm

#: Up to here the definition is as fast on a CPU: 3.3 ms against 3.8 with 256 tokens, 28.5 against 11.3 with 512.
SHORT_TOKENS = 256
#: A batch has room for as many documents as if they were this short; more of them are found out, never lost.
TOKENS_PER_DOCUMENT = 32
#: What the scores of the definition may take; its backward keeps about three such arrays.
MOST_SCORE_BYTES = 4 * 2**30


class AttentionCall(NamedTuple):
    """What is known of a call of attention before it is compiled."""

    shape_BTHK: tuple[int, int, int, int]  #: on one device
    dtype: jnp.dtype
    platform: str  #: of the devices, as JAX names it: cpu, gpu
    compute_capability: str  #: of an NVIDIA GPU, such as 9.0; empty elsewhere
    block_tokens: int
    max_window_blocks: int  #: the largest window this program will be given
    static_window_blocks: int | None  #: the only one it will be given, if it is compiled for each window anew
    max_documents: int  #: in the batch of one device

    @property
    def window_tokens(self) -> int:
        """No query sees more keys."""
        return self.max_window_blocks * self.block_tokens


class QkNormCall(NamedTuple):
    """What is known of a call of QK-norm and rotary before it is compiled."""

    head_dim: int
    dtype: jnp.dtype
    platform: str
    compute_capability: str


class Choice(NamedTuple):
    """A form that can run, under the signature of the definition; the log and the record keep name and reason."""

    name: str
    function: Callable[..., Any]
    reason: str


class Form(NamedTuple):
    """A way to compute an operation. All are exact: they differ from the definition by rounding alone."""

    against: Callable[[Any], list[str]]  #: of a call: why it cannot run, all reasons
    bind: Callable[[Any], Callable[..., Any]]  #: to what it must know of a call


def _against_definition(call: AttentionCall) -> list[str]:
    rows, tokens, heads, _ = call.shape_BTHK
    need = 4 * rows * heads * tokens**2
    too_much = f"its scores take {need / 2**30:.0f} GiB; it needs {MOST_SCORE_BYTES / 2**30:.0f} GiB or less"
    return [too_much] if need > MOST_SCORE_BYTES else []


def _against_triton(call: AttentionCall) -> list[str]:
    _, tokens, _, width = call.shape_BTHK
    return _against_platform(call) + _against_dtype(call) + attention_triton.refusals(tokens, width)


def _against_mosaic(call: AttentionCall) -> list[str]:
    _, tokens, _, width = call.shape_BTHK
    return _against_platform(call) + attention_mosaic.refusals(tokens, width, call.dtype)


def _against_flash3(call: AttentionCall) -> list[str]:
    elsewhere = _against_platform(call)
    reasons = elsewhere + _against_dtype(call)
    if (width := call.shape_BTHK[3]) not in {64, 128}:
        reasons.append(f"heads of {width} dimensions; the kernels need 64 or 128")
    if call.static_window_blocks is None:
        reasons.append("the window is traced; the kernels need one program for each window")
    if not elsewhere and (
        problem := attention_flash3.problem()
    ):  # loads the library: only where it may be called
        reasons.append(problem)
    return reasons


def _against_platform(call: AttentionCall | QkNormCall) -> list[str]:
    if (call.platform, call.compute_capability) == ("gpu", "9.0"):
        return []
    here = f"{call.platform} {call.compute_capability}".strip()
    return [f"this is a {here}; the kernels need an H100 or H200 (gpu 9.0)"]


def _against_dtype(call: AttentionCall | QkNormCall) -> list[str]:
    return [] if call.dtype == jnp.bfloat16 else [f"{call.dtype} inputs; the kernels need bfloat16"]


def _bind_flash3(call: AttentionCall) -> Callable[..., jax.Array]:
    assert call.static_window_blocks is not None
    return partial(
        attention_flash3.attention,
        window_blocks=call.static_window_blocks,
        block_tokens=call.block_tokens,
        max_documents=call.max_documents,
    )


ATTENTION: dict[str, Form] = {
    "definition": Form(_against_definition, lambda _: attention),
    "banded": Form(
        lambda _: [], lambda call: partial(attention_banded.attention, window_tokens=call.window_tokens)
    ),
    "triton": Form(_against_triton, lambda _: attention_triton.attention),
    "mosaic": Form(_against_mosaic, lambda _: attention_mosaic.attention),
    "flash3": Form(_against_flash3, _bind_flash3),
}


#: Forms that need one program for each window.
FIXED_WINDOW_FORMS = {"flash3"}


def choose_attention(wanted: str, call: AttentionCall) -> Choice:
    """The form that was asked for, or with "auto" the first of an order that can run.

    On a GPU the order is triton, banded, definition. Two forms run only where they are asked for: `mosaic`, because
    nobody has timed it against `triton` yet; and `flash3`, published as the fastest, because it is a binary of
    a third party that needs a program for each window.
    On a CPU it is the definition while sequences are short or the window takes in all of them, and banded beyond.

    Args:
        wanted: "auto" or a name from `ATTENTION`.
        call: what is known before compiling.

    Raises:
        UsageError: for an unknown name, or a form that cannot run; it holds all reasons.
    """
    tokens = call.shape_BTHK[1]
    if wanted != "auto":
        return _asked_for("attention", ATTENTION, wanted, call)
    if call.platform != "cpu":
        order = ["triton", "banded", "definition"]
        why = f"first of {', '.join(order)} that can run here"
    elif tokens > SHORT_TOKENS and call.window_tokens < tokens:
        order, why = ["banded"], f"{tokens:,} tokens, windows of at most {call.window_tokens:,}"
    else:
        order = ["definition", "banded"]
        why = f"{tokens:,} tokens, windows of up to {call.window_tokens:,}: nothing to skip"
    return _first_of(ATTENTION, order, why, call)


QK_NORM: dict[str, Form] = {
    "definition": Form(lambda _: [], lambda _: qk_norm),
    "triton": Form(
        lambda call: _against_platform(call) + _against_dtype(call) + qk_norm_triton.refusals(call.head_dim),
        lambda _: qk_norm_triton.qk_norm,
    ),
}


def choose_qk_norm(wanted: str, call: QkNormCall) -> Choice:
    """As `choose_attention`, from `QK_NORM`: with "auto" one pass where it can run, else the definition."""
    if wanted != "auto":
        return _asked_for("qk_norm", QK_NORM, wanted, call)
    return _first_of(QK_NORM, ["triton", "definition"], "one pass where it can run", call)


def _asked_for(operation: str, forms: dict[str, Form], wanted: str, call: Any) -> Choice:
    if wanted not in forms:
        raise unknown(f"form of {operation}", wanted, ["auto", *forms])
    if reasons := forms[wanted].against(call):
        raise UsageError(
            f"{operation} form {wanted!r} cannot run: {'; '.join(reasons)}; or let 'auto' choose another"
        )
    return Choice(wanted, forms[wanted].bind(call), "asked for")


def _first_of(forms: dict[str, Form], order: list[str], why: str, call: Any) -> Choice:
    against = {name: forms[name].against(call) for name in order}
    name = next(name for name in order if not against[name])
    passed = [f"not {other}: {', '.join(against[other])}" for other in order[: order.index(name)]]
    return Choice(name, forms[name].bind(call), "; ".join([why, *passed]))


#: Tokens whose logits exist at one time on a GPU, in 16 bits: 4.9 GB with the GPT-2 vocabulary.
HEAD_TOKENS = 49_152


def choose_head(num_tokens: int, dtype: jnp.dtype, platform: str, fp8: Fp8 | None) -> Choice:
    """The form of the loss head: the one for CPUs cannot round to 8 bits, the one for GPUs runs anywhere.

    Devices without FP8 units compute the same with wider ones.
    """
    if platform == "cpu" and fp8 is None:
        return Choice(
            "chunks", cross_entropy.summed_cross_entropy, "cpu: a chunk of logits stays in its cache"
        )
    num_chunks = next(
        n for n in range(1, num_tokens + 1) if num_tokens % n == 0 and num_tokens / n <= HEAD_TOKENS
    )
    reason = f"{platform}, {num_tokens:,} tokens in {num_chunks} chunks"
    head = partial(cross_entropy_gpu.summed_cross_entropy, fp8=fp8, num_chunks=num_chunks)
    return Choice(str(dtype) if fp8 is None else "fp8", head, reason)


@dataclass(frozen=True)
class Kernels:
    """The operations of one program. Each call is given its form when it is traced, before anything is compiled."""

    platform: str  #: as JAX names it
    compute_capability: str  #: of an NVIDIA GPU; empty elsewhere
    wanted_attention: str = "auto"
    #: By operation and shape, as traced.
    choices: dict[str, Choice] = field(default_factory=dict, compare=False)

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
        """The value of `kernels.attention`; `window` and `block_tokens` are what `sight` was made of."""
        rows, tokens, heads, width = q_BTHK.shape
        call = AttentionCall(
            shape_BTHK=(rows, tokens, heads, width),
            dtype=q_BTHK.dtype,
            platform=self.platform,
            compute_capability=self.compute_capability,
            block_tokens=block_tokens,
            max_window_blocks=window.most,
            static_window_blocks=window.blocks if isinstance(window.blocks, int) else None,
            max_documents=rows * max(64, tokens // TOKENS_PER_DOCUMENT),
        )
        choice = choose_attention(self.wanted_attention, call)
        kind = "traced" if call.static_window_blocks is None else "fixed"
        shape = f"{rows}x{tokens}x{heads}x{width} {q_BTHK.dtype}"
        self.choices[f"attention {shape}, {kind} window of {window.most} blocks"] = choice
        with jax.named_scope("attention"):
            return choice.function(q_BTHK, k_BTHK, v_BTHK, sight, scale=scale)

    def qk_norm(self, q_BTHK: jax.Array, k_BTHK: jax.Array, angles: Angles) -> tuple[jax.Array, jax.Array]:
        """RMS norm of each head, then rotary, of queries and keys. See `kernels.qk_norm`."""
        call = QkNormCall(q_BTHK.shape[3], q_BTHK.dtype, self.platform, self.compute_capability)
        choice = choose_qk_norm("auto", call)
        self.choices[f"qk_norm {'x'.join(map(str, q_BTHK.shape))} {q_BTHK.dtype}"] = choice
        return choice.function(q_BTHK, k_BTHK, angles)

    def summed_cross_entropy(
        self, x_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array, *, cap: float, fp8: Fp8 | None
    ) -> jax.Array:
        """Loss of all tokens together: f32 [], nats. See `kernels.cross_entropy`."""
        choice = choose_head(len(x_ND), x_ND.dtype, self.platform, fp8)
        factors = x_ND.dtype if fp8 is None else "fp8"
        self.choices[f"head {'x'.join(map(str, x_ND.shape))} {factors}, {len(head_VD)} columns"] = choice
        with jax.named_scope("loss_head"):
            return choice.function(x_ND, head_VD, targets_N, cap=cap)
