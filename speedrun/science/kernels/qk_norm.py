"""QK-norm: RMS norm of queries and keys per head, then rotary. The definition.

Legend: B batch, T time, H heads, K head width.
"""

import jax

from speedrun.science import nn

#: Cosines and sines for `nn.rotary`, f32 [T, n K/2] each, which cycle through n heads. Both may be multiplied by a
#: length, the same for all pairs of a token.
Angles = tuple[jax.Array, jax.Array]


def qk_norm(q_BTHK: jax.Array, k_BTHK: jax.Array, angles: Angles) -> tuple[jax.Array, jax.Array]:
    """Return rotary(rms_norm(x)) of queries and keys; both operations round to the dtype of the inputs."""
    return nn.rotary(nn.rms_norm(q_BTHK), angles), nn.rotary(nn.rms_norm(k_BTHK), angles)
