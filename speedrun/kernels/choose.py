"""Which form of an operation runs: chosen once, before compiling, and never without a word.

Not part of `speedrun.kernels` itself, so that a record carries the source of those forms only that its recipe reaches.

Legend: B batch, T time, H heads, K head width.
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from speedrun.errors import UsageError, unknown
from speedrun.kernels import attention_banded, attention_flash3, attention_pallas
from speedrun.kernels.attention import attention

#: Up to here the definition is as fast on a CPU: 3.9 ms against 4.2 with 256 tokens, 20.5 against 8.7 with 512.
SHORT_TOKENS = 256
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


class Choice(NamedTuple):
    """A form that can run, under the signature of the definition; the log and the record keep name and reason."""

    name: str
    function: Callable[..., jax.Array]
    reason: str


class Form(NamedTuple):
    """A way to compute attention. All are exact: they differ from the definition by rounding alone."""

    against: Callable[[AttentionCall], list[str]]  #: why it cannot run, all reasons
    bind: Callable[[AttentionCall], Callable[..., jax.Array]]


def _against_definition(call: AttentionCall) -> list[str]:
    rows, tokens, heads, _ = call.shape_BTHK
    need = 4 * rows * heads * tokens**2
    too_much = f"its scores take {need / 2**30:.0f} GiB; it needs {MOST_SCORE_BYTES / 2**30:.0f} GiB or less"
    return [too_much] if need > MOST_SCORE_BYTES else []


def _against_pallas(call: AttentionCall) -> list[str]:
    _, tokens, _, width = call.shape_BTHK
    return _against_platform(call) + attention_pallas.refusals(tokens, width)


def _against_flash3(call: AttentionCall) -> list[str]:
    reasons = _against_platform(call)
    if (width := call.shape_BTHK[3]) not in {64, 128}:
        reasons.append(f"heads of {width} dimensions; the kernels need 64 or 128")
    if call.static_window_blocks is None:
        reasons.append("the window is traced; the kernels need one program for each window")
    if importlib.util.find_spec("dew_flash_attn") is None:
        reasons.append(f"no wheel; {attention_flash3.INSTALL}")
    return reasons


def _against_platform(call: AttentionCall) -> list[str]:
    reasons = []
    if (call.platform, call.compute_capability) != ("gpu", "9.0"):
        here = f"{call.platform} {call.compute_capability}".strip()
        reasons.append(f"this is a {here}; the kernels need an H100 or H200 (gpu 9.0)")
    if call.dtype != jnp.bfloat16:
        reasons.append(f"{call.dtype} inputs; the kernels need bfloat16")
    return reasons


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
    "pallas": Form(_against_pallas, lambda _: attention_pallas.attention),
    "flash3": Form(_against_flash3, _bind_flash3),
}


def choose(operation: str, wanted: str, call: AttentionCall) -> Choice:
    """The form that was asked for, or with "auto" the first of an order that can run.

    On a GPU the order is pallas, banded, definition. `flash3` is published as the faster kernel, but its dq is summed
    by atomics, so that no replay could compare losses to the last bit, and it is a binary of a third party: it runs
    where it is asked for. On a CPU it is the definition while sequences are short or the window takes in all of them,
    and banded beyond.

    Args:
        operation: "attention", the only one with a choice so far.
        wanted: "auto" or a name from `ATTENTION`.
        call: what is known before compiling.

    Raises:
        UsageError: for an unknown name, or a form that cannot run; it holds all reasons.
    """
    if operation != "attention":
        raise unknown("operation", operation, ["attention"])
    if wanted == "auto":
        return _choose_freely(call)
    if wanted not in ATTENTION:
        raise unknown("form of attention", wanted, ["auto", *ATTENTION])
    if reasons := ATTENTION[wanted].against(call):
        raise UsageError(
            f"attention form {wanted!r} cannot run: {'; '.join(reasons)}; or let 'auto' choose another"
        )
    return Choice(wanted, ATTENTION[wanted].bind(call), "asked for")


def _choose_freely(call: AttentionCall) -> Choice:
    tokens = call.shape_BTHK[1]
    if call.platform != "cpu":
        order = ["pallas", "banded", "definition"]
        why = f"first of {', '.join(order)} that can run here"
    elif tokens > SHORT_TOKENS and call.window_tokens < tokens:
        order, why = ["banded"], f"{tokens:,} tokens, windows of at most {call.window_tokens:,}"
    else:
        order = ["definition", "banded"]
        why = f"{tokens:,} tokens, windows of up to {call.window_tokens:,}: nothing to skip"
    against = {name: ATTENTION[name].against(call) for name in order}
    name = next(name for name in order if not against[name])
    passed = [f"not {other}: {', '.join(against[other])}" for other in order[: order.index(name)]]
    return Choice(name, ATTENTION[name].bind(call), "; ".join([why, *passed]))
