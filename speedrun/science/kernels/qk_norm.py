"""QK-norm: RMS norm of queries and keys per head, then rotary. The definition.

Legend: B batch, T time, H heads, K head width.
"""

import jax

from speedrun.science import nn

#: Cosines and sines for `nn.rotary`, f32 [T, n K/2] each: heads 0 to n - 1 have angles of their own, which repeat.
#: Both may be times a length, the same for all of a token.
Angles = tuple[jax.Array, jax.Array]


def qk_norm(q_BTHK: jax.Array, k_BTHK: jax.Array, angles: Angles) -> tuple[jax.Array, jax.Array]:
    """Return rotary(rms_norm(x)) of queries and keys.

    Both operations compute in float32 and round to the dtype of the inputs.

    `angles` are those of all positions.
    """
    return nn.rotary(nn.rms_norm(q_BTHK), angles), nn.rotary(nn.rms_norm(k_BTHK), angles)
