"""Mesh axes over which the results of kernels vary, for shard_map."""

import jax


def varying_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Mark `x` as varying over the mesh axes that `like` varies over."""
    axes = jax.typeof(like).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x
