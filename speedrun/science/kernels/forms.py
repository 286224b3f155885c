"""The forms of each operation, and why each can or cannot run.

Kernels for Mosaic are imported where they are used: that is a third of a start.
Legend: B batch, T time, H heads, K head width.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from speedrun.science.kernels import attention_banded, attention_flash3, attention_triton, qk_norm_triton
from speedrun.science.kernels.attention import attention
from speedrun.science.kernels.cross_entropy import Cap
from speedrun.science.kernels.cross_entropy_gpu import PASSES, Fp8, Passes
from speedrun.science.kernels.mlp import mlp
from speedrun.science.kernels.qk_norm import qk_norm

#: Limit for the scores of the definition; its backward pass keeps about three such arrays.
MOST_SCORE_BYTES = 4 * 2**30
#: Tokens per chunk of logits on a GPU: 4.9 GB in 16 bits with the GPT-2 vocabulary.
HEAD_TOKENS = 49_152
#: GPUs by compute capability: those that Mosaic's kernels and FlashAttention-3 can run on, and those that Triton's can.
_HOPPER = MappingProxyType({"9.0": "H100 or H200"})
_TRITON = MappingProxyType({"8.0": "A100", "8.9": "L40S or 4090", **_HOPPER, "10.0": "B200"})


class Choice(NamedTuple):
    """A form that can run, with the signature of the definition."""

    name: str
    function: Callable[..., Any]
    reason: str


class Form(NamedTuple):
    """A way to compute an operation. Forms differ from the definition only by rounding."""

    refusals: Callable[[Any], list[str]]  #: call -> all reasons why the form cannot run
    bind: Callable[[Any], Callable[..., Any]]  #: call -> function with the signature of the definition


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


class HeadCall(NamedTuple):
    """The static facts of a call of the loss head."""

    num_tokens: int  #: on one device
    num_columns: int
    dtype: jnp.dtype
    platform: str
    compute_capability: str
    fp8: Fp8 | None
    cap: Cap
    chunk_tokens: int = HEAD_TOKENS  #: of which logits exist at one time


def _definition_refusals(call: AttentionCall) -> list[str]:
    rows, tokens, heads, _ = call.shape_BTHK
    need = 4 * rows * heads * tokens**2
    too_much = f"its scores take {need / 2**30:.0f} GiB; it needs {MOST_SCORE_BYTES / 2**30:.0f} GiB or less"
    return [too_much] if need > MOST_SCORE_BYTES else []


def _flash3_refusals(call: AttentionCall) -> list[str]:
    reasons = _refusals(call) + attention_flash3.refusals(call.shape_BTHK)
    if call.static_window_blocks is None:
        reasons.append("the window is traced; the kernels need one program for each window")
    # Loads the library, so only where it can run.
    if not _platform_refusals(call) and (problem := attention_flash3.problem()):
        reasons.append(problem)
    return reasons


def _platform_refusals(call: Any, cards: Mapping[str, str] = _HOPPER) -> list[str]:
    if call.platform == "gpu" and call.compute_capability in cards:
        return []
    here = f"{call.platform} {call.compute_capability}".strip()
    need = ", ".join(f"{name} (gpu {capability})" for capability, name in cards.items())
    return [f"this is a {here}; the kernels need an {need}"]


def _refusals(call: AttentionCall | QkNormCall, cards: Mapping[str, str] = _HOPPER) -> list[str]:
    other = [] if call.dtype == jnp.bfloat16 else [f"{call.dtype} inputs; the kernels need bfloat16"]
    return _platform_refusals(call, cards) + other


def _bind_triton(call: AttentionCall) -> Callable[..., jax.Array]:
    is_8 = call.compute_capability.startswith("8.")
    tiles = attention_triton.BACKWARD_ON_8 if is_8 else attention_triton.BACKWARD
    return partial(attention_triton.attention, backward=tiles)


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
            lambda call: _refusals(call, _TRITON) + attention_triton.refusals(call.shape_BTHK),
            _bind_triton,
        ),
        "flash3": Form(_flash3_refusals, _bind_flash3),
    }
)

QK_NORM: Mapping[str, Form] = MappingProxyType(
    {
        "definition": Form(lambda _: [], lambda _: qk_norm),
        "triton": Form(
            lambda call: _refusals(call, _TRITON) + qk_norm_triton.refusals(call.head_dim),
            lambda _: qk_norm_triton.qk_norm,
        ),
    }
)


def mlp_form(call: MlpCall) -> Choice:
    """Return the form with activations inside products where it can run, else the definition."""
    if not (refusals := _platform_refusals(call)):
        from speedrun.science.kernels import mlp_mosaic

        if not (refusals := mlp_mosaic.refusals(*call[:4])):
            return Choice("mosaic", mlp_mosaic.mlp, "activations inside products")
    return Choice("definition", mlp, f"not mosaic: {', '.join(refusals)}")


def passes(call: HeadCall) -> tuple[Passes, str]:
    """Return the best passes over the logits of a call, and whose they are."""
    if not (refusals := _platform_refusals(call)):
        from speedrun.science.kernels import cross_entropy_mosaic as mosaic

        if not (refusals := mosaic.refusals(call.num_tokens, call.num_columns, call.dtype)):
            return mosaic.PASSES, "mosaic's passes"
    return PASSES, f"XLA's passes: {', '.join(refusals)}"
