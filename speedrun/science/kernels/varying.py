"""What shard_map must be told about results of calls it cannot look into."""

import jax


def varying_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """The same values, known to differ between the devices of every mesh axis along which `like` does."""
    axes = jax.typeof(like).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x
