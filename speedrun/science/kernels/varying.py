"""Mesh axes that results of opaque calls vary over, for shard_map."""

import jax


def varying_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Mark `x` as varying over every mesh axis that `like` varies over."""
    axes = jax.typeof(like).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x
