"""Fingerprints of a state. An instrument: a recipe may not define the digest of its own state."""

from typing import Any

import jax
import jax.numpy as jnp

from speedrun.base.mesh import fetch


@jax.jit
def fingerprint(state: Any) -> jax.Array:
    """Return 64 bits of a state (any tree of arrays), u32[2]. They do not depend on the devices.

    Integer sums wrap and do not depend on their order, so neither device count nor reduction tree changes them.
    """
    lanes = jnp.zeros(2, jnp.uint32)
    for leaf in jax.tree.leaves(state):
        flat = leaf.reshape(-1)
        width = jnp.dtype(leaf.dtype).itemsize * 8
        bits = jax.lax.bitcast_convert_type(flat, jnp.dtype(f"uint{width}")).astype(jnp.uint32)
        place = jax.lax.iota(jnp.uint32, flat.size)
        odd = (place[None, :] * jnp.array([[2654435761], [2246822519]], jnp.uint32)) | 1
        mixed = (bits[None, :] ^ (bits[None, :] >> 15)) * odd
        lanes = lanes * jnp.uint32(1000003) + jnp.sum(mixed ^ (mixed >> 13), axis=1, dtype=jnp.uint32)
    return lanes


def state_hash(state: Any) -> str:
    """Return `fingerprint` as 16 hex digits."""
    return "".join(f"{int(lane):08x}" for lane in fetch(fingerprint(state)))
