"""QK-norm and rotary fused, in Pallas for Triton: each number is read and written once.

With r = 1 / rms(x) and R the rotation of a position times a length l, y = R x r. Rotations preserve inner products, so
dx = r R^T (dy - y mean(y dy) / l^2), for any epsilon under the root. The backward pass needs y, which attention keeps
anyway, and r, but not x.

Legend: B batch, T time, H heads, K head width; inside a kernel C tokens of a tile, J pairs of a head (K/2).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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
    """Compute `qk_norm.qk_norm`, rounded once, for widths that `refusals` permits. Angles have no gradient."""
    return _qk_norm(q_BTHK, k_BTHK, angles, _Settings(tokens, interpret))


def refusals(head_dim: int) -> list[str]:
    """Return why the kernels cannot run on heads of this width."""
    fits = head_dim > 1 and head_dim.bit_count() == 1
    return [] if fits else [f"heads of {head_dim} dimensions; the kernels need a power of two"]


class _Settings(NamedTuple):
    tokens: int
    interpret: bool


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _qk_norm(
    q_BTHK: jax.Array, k_BTHK: jax.Array, angles: Angles, settings: _Settings
) -> tuple[jax.Array, jax.Array]:
    return _forward(q_BTHK, k_BTHK, angles, settings)[0]


def _forward(
    q_BTHK: jax.Array, k_BTHK: jax.Array, angles: Angles, settings: _Settings
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    num_rows, num_tokens, num_heads, _ = q_BTHK.shape
    r_BHT, qk = jax.ShapeDtypeStruct((num_rows, num_heads, num_tokens), jnp.float32), (q_BTHK, k_BTHK)
    yq_BTHK, yk_BTHK, *r = _call(_forward_kernel, angles, qk, (*qk, r_BHT, r_BHT), settings)
    return (yq_BTHK, yk_BTHK), (yq_BTHK, yk_BTHK, *r, angles)


def _backward(
    settings: _Settings, residuals: tuple[Any, ...], dy: tuple[jax.Array, jax.Array]
) -> tuple[Any, ...]:
    *y_and_r, angles = residuals
    return *_call(_backward_kernel, angles, (*dy, *y_and_r), dy, settings), None


_qk_norm.defvjp(_forward, _backward)


def _forward_kernel(*refs: Any) -> None:
    """Apply norm, then rotary, to a tile of queries and keys, head by head."""
    cos_ref, sin_ref, q_ref, k_ref, yq_ref, yk_ref, rq_ref, rk_ref = refs
    turns = _turns(cos_ref, sin_ref, q_ref)
    for h in range(q_ref.shape[1]):
        cos_CJ, sin_CJ = turns[h % len(turns)]
        loaded = _halves(q_ref, h), _halves(k_ref, h)  # loads are not moved before stores
        for (u_CJ, w_CJ), y_ref, r_ref in zip(loaded, (yq_ref, yk_ref), (rq_ref, rk_ref), strict=True):
            r_C = jax.lax.rsqrt(_mean(u_CJ * u_CJ, w_CJ * w_CJ) + nn.EPS)
            r_ref[h, :] = r_C
            _store(y_ref, h, r_C, u_CJ * cos_CJ + w_CJ * sin_CJ, w_CJ * cos_CJ - u_CJ * sin_CJ)


def _backward_kernel(*refs: Any) -> None:
    """Remove from dy its component along y, rotate back and scale."""
    cos_ref, sin_ref, dyq_ref, dyk_ref, yq_ref, yk_ref, rq_ref, rk_ref, dq_ref, dk_ref = refs
    turns, inputs = _turns(cos_ref, sin_ref, dq_ref), ((dyq_ref, yq_ref, rq_ref), (dyk_ref, yk_ref, rk_ref))
    for h in range(dq_ref.shape[1]):
        cos_CJ, sin_CJ = turns[h % len(turns)]
        loaded = [(_halves(dy_ref, h), _halves(y_ref, h), r_ref[h, :]) for dy_ref, y_ref, r_ref in inputs]
        for ((du_CJ, dw_CJ), (u_CJ, w_CJ), r_C), dx_ref in zip(loaded, (dq_ref, dk_ref), strict=True):
            along_CJ = _mean(u_CJ * du_CJ, w_CJ * dw_CJ)[:, None] / (cos_CJ * cos_CJ + sin_CJ * sin_CJ)
            du_CJ, dw_CJ = du_CJ - along_CJ * u_CJ, dw_CJ - along_CJ * w_CJ
            _store(dx_ref, h, r_C, du_CJ * cos_CJ - dw_CJ * sin_CJ, dw_CJ * cos_CJ + du_CJ * sin_CJ)


def _turns(cos_ref: Any, sin_ref: Any, x_ref: Any) -> list[tuple[jax.Array, jax.Array]]:
    half = x_ref.shape[2] // 2
    return [(cos_ref[:, i : i + half], sin_ref[:, i : i + half]) for i in range(0, cos_ref.shape[1], half)]


def _halves(ref: Any, h: int) -> tuple[jax.Array, jax.Array]:
    half = ref.shape[2] // 2
    return ref[:, h, :half].astype(jnp.float32), ref[:, h, half:].astype(jnp.float32)


def _store(ref: Any, h: int, r_C: jax.Array, u_CJ: jax.Array, w_CJ: jax.Array) -> None:
    half = ref.shape[2] // 2
    ref[:, h, :half] = (r_C[:, None] * u_CJ).astype(ref.dtype)
    ref[:, h, half:] = (r_C[:, None] * w_CJ).astype(ref.dtype)


def _mean(u_CJ: jax.Array, w_CJ: jax.Array) -> jax.Array:
    """Return the mean over both halves: f32 [C]."""
    return jnp.sum(u_CJ + w_CJ, axis=1) / (2 * u_CJ.shape[1])


def _call(
    kernel: Callable[..., None],
    angles: Angles,
    operands: tuple[jax.Array, ...],
    results: tuple[Any, ...],
    settings: _Settings,
) -> Any:
    first = operands[0]
    num_rows, num_tokens = first.shape[:2]
    tile = math.gcd(num_tokens, settings.tokens)  # divides any length, so no tile is cut off

    def spec(x: Any) -> pl.BlockSpec:
        """Return the block of [B, T, H, K] or [B, H, T]."""
        if x.ndim == 4:
            return pl.BlockSpec((None, tile, *x.shape[2:]), lambda i, b: (b, i, 0, 0))
        return pl.BlockSpec((None, x.shape[1], tile), lambda i, b: (b, 0, i))

    angle = pl.BlockSpec((tile, angles[0].shape[1]), lambda i, b: (i, 0))
    axes = jax.typeof(first).manual_axis_type
    return pl.pallas_call(
        kernel,
        grid=(num_tokens // tile, num_rows),
        in_specs=[angle, angle, *map(spec, operands)],
        out_specs=tuple(map(spec, results)),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axes) for x in results),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS),
        interpret=settings.interpret,
        name=f"qk_norm{kernel.__name__}",
    )(*(varying_like(a, first) for a in angles), *operands)
