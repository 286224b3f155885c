"""QK-norm and rotary fused, in Pallas for Triton: each number is read and written once.

With r = 1 / rms(x) and R the rotation of a position times a length l, y = R x r. Rotations preserve inner products, so
dx = r R^T (dy - y mean(y dy) / l^2), for any epsilon under the root. The backward pass needs y, which attention keeps
anyway, and r, but not x.

Legend: B batch, T time, H heads, K head width; inside a kernel C tokens of a tile, J pairs of a head (K/2).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from speedrun.science import nn
from speedrun.science.kernels.qk_norm import Angles
from speedrun.science.kernels.varying import varying_like

#: Tokens per tile, so that each thread loads 16 bytes at a time.
TOKENS = 16
WARPS = 4


def qk_norm(
    q_BTHK: jax.Array, k_BTHK: jax.Array, angles: Angles, *, tokens: int = TOKENS, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Compute `qk_norm.qk_norm`, rounded once, if `unsupported_reasons` permits the width. Angles have no gradient."""
    call = partial(_call, tokens=tokens, interpret=interpret)
    return _normed(q_BTHK, angles, call), _normed(k_BTHK, angles, call)


def unsupported_reasons(head_dim: int) -> list[str]:
    """Return why the kernels cannot run on heads of this width."""
    fits = head_dim > 1 and head_dim.bit_count() == 1
    return [] if fits else [f"heads of {head_dim} dimensions; the kernels need a power of two"]


def normed(x_BTHK: jax.Array, angles: Angles, *, interpret: bool = False) -> tuple[jax.Array, ...]:
    """Return y, r and the table of angles, without gradients."""
    call = partial(_call, tokens=TOKENS, interpret=interpret)
    return _forward(*jax.lax.stop_gradient((x_BTHK, angles)), call)[1]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _normed(x_BTHK: jax.Array, angles: Angles, call: Callable[..., Any]) -> jax.Array:
    return _forward(x_BTHK, angles, call)[0]


def _forward(
    x_BTHK: jax.Array, angles: Angles, call: Callable[..., Any]
) -> tuple[jax.Array, tuple[Any, ...]]:
    rows, num_tokens, num_heads, width = x_BTHK.shape
    # Cosines and sines of heads in turn, next to each other: [T, n K].
    pairs_TnJ = [a.reshape(num_tokens, -1, width // 2) for a in angles]
    angles_TN = varying_like(jnp.concatenate(pairs_TnJ, axis=2).reshape(num_tokens, -1), x_BTHK)
    r_BHT = jax.ShapeDtypeStruct((rows, num_heads, num_tokens), jnp.float32)
    y_BTHK, r_BHT = call(_forward_kernel, angles_TN, (x_BTHK,), (x_BTHK, r_BHT))
    return y_BTHK, (y_BTHK, r_BHT, angles_TN)


def _backward(
    call: Callable[..., Any], saved: tuple[jax.Array, ...], dy_BTHK: jax.Array
) -> tuple[jax.Array, None]:
    y_BTHK, r_BHT, angles_TN = saved
    return *call(_backward_kernel, angles_TN, (dy_BTHK, y_BTHK, r_BHT), (dy_BTHK,)), None


_normed.defvjp(_forward, _backward)


def _forward_kernel(angles_ref: Any, x_ref: Any, y_ref: Any, r_ref: Any) -> None:
    """Apply norm, then rotary, to a tile, head by head."""
    for h in range(x_ref.shape[1]):
        *y, r_ref[h, :] = rotate(*halves(x_ref, h), *halves(angles_ref, h % angles_ref.shape[1]))
        _store(y_ref, h, *y)


def _backward_kernel(angles_ref: Any, dy_ref: Any, y_ref: Any, r_ref: Any, dx_ref: Any) -> None:
    for h in range(dy_ref.shape[1]):
        angles = halves(angles_ref, h % angles_ref.shape[1])
        _store(dx_ref, h, *turned_back(*halves(dy_ref, h), *halves(y_ref, h), r_ref[h, :], *angles))


def rotate(u_CJ: jax.Array, w_CJ: jax.Array, cos_CJ: jax.Array, sin_CJ: jax.Array) -> list[jax.Array]:
    """Return both halves of y, given those of x in float32, and r [C]."""
    r_C = jax.lax.rsqrt(_mean(u_CJ * u_CJ, w_CJ * w_CJ) + nn.EPS)
    y = u_CJ * cos_CJ + w_CJ * sin_CJ, w_CJ * cos_CJ - u_CJ * sin_CJ
    return [*(r_C[:, None] * half_CJ for half_CJ in y), r_C]


def turned_back(
    du_CJ: jax.Array, dw_CJ: jax.Array, u_CJ: jax.Array, w_CJ: jax.Array, r_C: jax.Array, *angles: jax.Array
) -> list[jax.Array]:
    """Return both halves of dx, given those of dy and y: remove its component along y, rotate back and scale."""
    cos_CJ, sin_CJ = angles
    along_CJ = _mean(u_CJ * du_CJ, w_CJ * dw_CJ)[:, None] / (cos_CJ * cos_CJ + sin_CJ * sin_CJ)
    du_CJ, dw_CJ = du_CJ - along_CJ * u_CJ, dw_CJ - along_CJ * w_CJ
    dx = du_CJ * cos_CJ - dw_CJ * sin_CJ, dw_CJ * cos_CJ + du_CJ * sin_CJ
    return [r_C[:, None] * half_CJ for half_CJ in dx]


def halves(ref: Any, *head: int) -> list[jax.Array]:
    """Return both halves of the dimensions of a tile [C, K], or of a head of [C, H, K], in float32."""
    half = ref.shape[-1] // 2
    return [ref[:, *head, at].astype(jnp.float32) for at in (slice(half), slice(half, None))]


def _store(ref: Any, h: int, u_CJ: jax.Array, w_CJ: jax.Array) -> None:
    half = ref.shape[2] // 2
    ref[:, h, :half], ref[:, h, half:] = u_CJ.astype(ref.dtype), w_CJ.astype(ref.dtype)


def _mean(u_CJ: jax.Array, w_CJ: jax.Array) -> jax.Array:
    """Return the mean over both halves: f32 [C]."""
    return jnp.sum(u_CJ + w_CJ, axis=1) / (2 * u_CJ.shape[1])


def _call(
    kernel: Any, angles_TN: jax.Array, operands: Any, results: Any, *, tokens: int, interpret: bool
) -> Any:
    num_rows, num_tokens, _, width = operands[0].shape
    tile = math.gcd(num_tokens, tokens)  # divides any length, so no tile is cut off

    def spec(x: Any) -> pl.BlockSpec:
        """Return the block of [B, T, H, K], [B, H, T] or [T, n, K]."""
        if x.ndim == 4:
            return pl.BlockSpec((None, tile, *x.shape[2:]), lambda i, b: (b, i, 0, 0))
        if x is angles_TnK:
            return pl.BlockSpec((tile, *x.shape[1:]), lambda i, _: (i, 0, 0))
        return pl.BlockSpec((None, x.shape[1], tile), lambda i, b: (b, 0, i))

    angles_TnK = angles_TN.reshape(num_tokens, -1, width)
    axes = jax.typeof(operands[0]).manual_axis_type
    return pl.pallas_call(
        kernel,
        grid=(num_tokens // tile, num_rows),
        in_specs=[*map(spec, (angles_TnK, *operands))],
        out_specs=tuple(map(spec, results)),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axes) for x in results),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name=f"qk_norm{kernel.__name__}",
    )(angles_TnK, *operands)
