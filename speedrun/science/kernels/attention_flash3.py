"""FlashAttention-3 through XLA's FFI, exact for windows of whole blocks.

Its kernels support a window that slides by tokens: one call is exact for blocks of one token, as in record 89. Record
21's window moves in blocks of b. With w blocks, query q at offset o in its block sees (w - 1) b + o + 1 keys. Two calls
of the kernels cover them:

    near   the (w - 1) b keys up to q, inside its document
    far    the first o + 1 keys of the block w - 1 earlier: causal attention between equal offsets of two blocks

Their outputs are combined through their sums of exponentials. In the backward pass each call gets the combined output
and sum, computes the exact weights from them, and the gradients add up. A window of one block needs only `far`.

Legend: B batch, T time, H heads, K head width, R = B * T packed tokens, N sequences of a call.
Source: Shah et al. 2024, FlashAttention-3; kernels by Dao-AILab, in the third-party wheel `dew-flash-attn`.
"""

import ctypes
import importlib.util
from collections.abc import Callable
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speedrun.base.errors import UsageError
from speedrun.science.kernels.attention import Sight, size_refusals
from speedrun.science.kernels.varying import varying_like

INSTALL = "pip install --no-deps --require-hashes -r requirements/attention-cuda12.lock (cuda13 with CUDA 13)"

_LIBRARY = "libdew_flash_attn3.so"
#: Called directly, because the package's public functions accept no sum of exponentials. They are private, so the
#: version is pinned.
TARGETS = ("dew_flash3_mha_varlen_fwd", "dew_flash3_mha_varlen_bwd")


class _Settings(NamedTuple):
    scale: float
    window_blocks: int
    block_tokens: int
    max_documents: int


def attention(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    sight: Sight,
    *,
    scale: float,
    window_blocks: int,
    block_tokens: int,
    max_documents: int,
) -> jax.Array:
    """Compute the definition's value and gradient to the rounding of the inputs; the window is static.

    The whole output is NaN if `sight` has another window or more than `max_documents` documents. dq is summed with
    atomics, so its last bits differ between runs.

    Queries, keys and values are all bfloat16 or all float16, K is 64 or 128. `sight` is made from exactly this window,
    of at least one block. An unused one of `max_documents`, in the whole batch, costs a few bytes and almost no time.

    Raises:
        UsageError: if the wheel is not installed.
    """
    settings = _Settings(scale, window_blocks, block_tokens, max_documents)
    t_T = jnp.arange(q_BTHK.shape[1], dtype=jnp.int32)
    near_T = (t_T // block_tokens - window_blocks + 1) * block_tokens
    is_other_window = jnp.any(sight.first_BT != jnp.maximum(sight.start_BT, near_T[None]))
    has_no_room = jnp.sum(sight.start_BT == t_T[None]) > max_documents
    q_RHK, k_RHK, v_RHK = (x.reshape(-1, *x.shape[2:]) for x in (q_BTHK, k_BTHK, v_BTHK))
    o_RHK: jax.Array = _attention(q_RHK, k_RHK, v_RHK, sight.start_BT, settings)
    return jnp.where(is_other_window | has_no_room, jnp.nan, o_RHK.reshape(v_BTHK.shape))


def refusals(shape_BTHK: tuple[int, ...]) -> list[str]:
    """Return why the kernels cannot run on this shape."""
    return size_refusals(shape_BTHK, widths=(64, 128))


class Call(NamedTuple):
    """One call of the kernels: causal attention inside sequences of packed tokens.

    Query `shift + i` is aligned with key i: the first `shift` queries and the last `shift` keys are left out.
    """

    bounds_N: jax.Array  #: i32 [N + 1], start of each sequence of keys, and the end; sequences may be empty
    takes_part_R: jax.Array  #: bool, for the queries from `shift` on; the others see no key in this call
    shift: int
    left: int  #: number of keys before its own that a query sees; -1: all of its sequence
    longest: int  #: upper bound of a sequence, in tokens


def calls(start_BT: jax.Array, window_blocks: int, block_tokens: int, max_documents: int) -> tuple[Call, ...]:
    """Split the mask into calls of the kernels: every visible pair is in exactly one of them.

    `far` splits its keys at the starts of blocks and documents. A query takes part if its document contains the key
    aligned with it: then all keys of that sequence up to this one are in its document and in the right block.
    """
    (num_rows, num_tokens), shift = start_BT.shape, (window_blocks - 1) * block_tokens
    rows_B, r_R = np.arange(num_rows) * num_tokens, jnp.arange(start_BT.size, dtype=jnp.int32)
    start_R, end = (start_BT + rows_B[:, None]).ravel(), len(r_R)
    documents_N = jnp.nonzero(start_R == r_R, size=max_documents, fill_value=end)[0].astype(jnp.int32)
    blocks_N = np.add.outer(rows_B, np.arange(0, num_tokens, block_tokens)).ravel()
    bounds_N = jnp.append(documents_N, end)
    sliding = Call(bounds_N, jnp.ones(end, bool), 0, shift, num_tokens)
    if block_tokens == 1 or shift >= num_tokens:
        return (sliding,)
    cuts_N = jnp.sort(jnp.minimum(jnp.concatenate([blocks_N, bounds_N]), end - shift))
    far = Call(cuts_N.astype(jnp.int32), start_R[shift:] <= r_R[: end - shift], shift, -1, block_tokens)
    return (sliding._replace(left=shift - 1), far) if shift else (far,)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(
    q_RHK: jax.Array, k_RHK: jax.Array, v_RHK: jax.Array, start_BT: jax.Array, settings: _Settings
) -> Any:
    return _forward(q_RHK, k_RHK, v_RHK, start_BT, settings)[0]


def _forward(
    q_RHK: jax.Array, k_RHK: jax.Array, v_RHK: jax.Array, start_BT: jax.Array, settings: _Settings
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    outputs, sums = [], []
    for call in calls(start_BT, *settings[1:]):
        end = len(q_RHK) - call.shift
        o_RHK, lse_HR = kernel_forward(q_RHK[call.shift :], k_RHK[:end], v_RHK[:end], call, settings.scale)
        part_HR = jnp.where(call.takes_part_R, lse_HR, -jnp.inf)
        outputs.append(_behind(call.shift, o_RHK.astype(jnp.float32)))
        sums.append(jnp.pad(part_HR, ((0, 0), (call.shift, 0)), constant_values=-jnp.inf))
    lse_HR = jax.nn.logsumexp(jnp.stack(sums), axis=0)
    shares = [jnp.exp(part_HR - lse_HR).T[:, :, None] for part_HR in sums]
    o_RHK = reduce(jnp.add, map(jnp.multiply, shares, outputs)).astype(v_RHK.dtype)
    return o_RHK, (q_RHK, k_RHK, v_RHK, start_BT, o_RHK, lse_HR)


def _backward(settings: _Settings, residuals: tuple[jax.Array, ...], do_RHK: jax.Array) -> tuple[Any, ...]:
    q_RHK, k_RHK, v_RHK, start_BT, o_RHK, lse_HR = residuals
    dq_RHK = dk_RHK = dv_RHK = jnp.zeros((), jnp.float32)
    for call in calls(start_BT, *settings[1:]):
        end = len(q_RHK) - call.shift
        # An infinite sum makes every weight and gradient zero.
        lse = jnp.where(call.takes_part_R, lse_HR[:, call.shift :], jnp.inf)
        do, q, o = (x[call.shift :] for x in (do_RHK, q_RHK, o_RHK))
        dq, dk, dv = kernel_backward(do, q, o, k_RHK[:end], v_RHK[:end], lse, call, settings.scale)
        dq_RHK += _behind(call.shift, dq.astype(jnp.float32))
        dk_RHK += _before(call.shift, dk.astype(jnp.float32))
        dv_RHK += _before(call.shift, dv.astype(jnp.float32))
    return dq_RHK.astype(q_RHK.dtype), dk_RHK.astype(k_RHK.dtype), dv_RHK.astype(v_RHK.dtype), None


_attention.defvjp(_forward, _backward)


def kernel_forward(
    q_RHK: jax.Array, k_RHK: jax.Array, v_RHK: jax.Array, call: Call, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Return output and log-sum-exp (f32 [H, R]) of one call."""
    o_RHK, lse_HR, *_ = _ffi(
        TARGETS[0],
        jax.ShapeDtypeStruct(q_RHK.shape, q_RHK.dtype),
        jax.ShapeDtypeStruct((q_RHK.shape[1], len(q_RHK)), jnp.float32),
        # Scratch of a variant that splits keys.
        jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32),
        jax.ShapeDtypeStruct((1, 1, 1), jnp.float32),
    )(q_RHK, k_RHK, v_RHK, call.bounds_N, call.bounds_N, **_attributes(call, scale))
    return varying_like(o_RHK, q_RHK), varying_like(lse_HR, q_RHK)


def kernel_backward(
    do_RHK: jax.Array,
    q_RHK: jax.Array,
    o_RHK: jax.Array,
    k_RHK: jax.Array,
    v_RHK: jax.Array,
    lse_HR: jax.Array,
    call: Call,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return dq, dk and dv of one call, whose weights are exp(scores - lse)."""
    num_tokens, num_heads, _ = q_RHK.shape
    # Per head two rows of scratch, in which each sequence and the end may be rounded up to a tile of 128.
    scratch = jax.ShapeDtypeStruct((num_heads * (num_tokens + 128 * len(call.bounds_N)),), jnp.float32)
    dq_RHK, dk_RHK, dv_RHK, *_ = _ffi(
        TARGETS[1],
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q_RHK, k_RHK, v_RHK)),
        scratch,
        scratch,
    )(do_RHK, q_RHK, k_RHK, v_RHK, o_RHK, lse_HR, call.bounds_N, call.bounds_N, **_attributes(call, scale))
    return varying_like(dq_RHK, q_RHK), varying_like(dk_RHK, q_RHK), varying_like(dv_RHK, q_RHK)


@cache
def problem() -> str:
    """Register the kernels with JAX; return why that is impossible and what to do, or an empty string.

    The package is located but not imported: its import also loads FlashAttention-2, 338 MB that is not needed.
    """
    spec = importlib.util.find_spec("dew_flash_attn")
    folders = (spec and spec.submodule_search_locations) or []
    path = next((found for folder in folders if (found := Path(folder, _LIBRARY)).is_file()), None)
    if path is None:
        return f"no {_LIBRARY} of dew_flash_attn here; {INSTALL}"
    try:
        for runtime in _cuda_runtimes():
            ctypes.CDLL(str(runtime))  # loaded first, so that the library finds it by name
        library = ctypes.CDLL(str(path))
        for target in TARGETS:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="CUDA")
    except (OSError, AttributeError) as error:
        return f"{path} cannot be loaded ({error}); need the wheel for this CUDA: {INSTALL}"
    return ""


def _cuda_runtimes() -> list[Path]:
    """Return the `libcudart` of the CUDA wheels; empty with a system-wide CUDA."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec and spec.submodule_search_locations) or []
    names = ("cu13/lib/libcudart.so.13", "cuda_runtime/lib/libcudart.so.12")
    return [path for folder in folders for name in names if (path := Path(folder, name)).is_file()]


def _ffi(target: str, *results: jax.ShapeDtypeStruct) -> Callable[..., Any]:
    if reason := problem():
        raise UsageError(f"attention form 'flash3' cannot run: {reason}")
    return jax.ffi.ffi_call(target, results)


def _attributes(call: Call, scale: float) -> dict[str, Any]:
    return {
        "max_seqlen": np.int64(call.longest),
        "max_seqlen_k": np.int64(call.longest),
        "softmax_scale": np.float64(scale),
        "is_causal": True,
        "window_size_left": np.int64(call.left),
        "window_size_right": np.int64(-1 if call.left < 0 else 0),
    }


def _behind(shift: int, x_RHK: jax.Array) -> jax.Array:
    return jnp.pad(x_RHK, ((shift, 0), (0, 0), (0, 0)))


def _before(shift: int, x_RHK: jax.Array) -> jax.Array:
    return jnp.pad(x_RHK, ((0, shift), (0, 0), (0, 0)))
