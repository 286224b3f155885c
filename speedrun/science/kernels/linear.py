"""Products of states with weights. Legend: I inputs, O outputs, N tokens; `...` are tokens in any shape."""

import jax


@jax.custom_vjp
def linear(x_I: jax.Array, w_OI: jax.Array) -> jax.Array:
    """Return x W^T: [..., O]. It can be differentiated in reverse only.

    The gradient of W sums over tokens, the rows of both factors. On CPUs, XLA has no fast product of this form, so one
    factor is transposed first (docs/LOG.md, 2026-11-29).
    """
    return x_I @ w_OI.T


def _backward(saved: tuple[jax.Array, jax.Array], dy_O: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_I, w_OI = saved
    dy_NO, x_NI = (x.reshape(-1, x.shape[-1]) for x in (dy_O, x_I))
    return (dy_O @ w_OI).astype(x_I.dtype), (transposed(dy_NO) @ x_NI).astype(w_OI.dtype)


linear.defvjp(lambda x_I, w_OI: (linear(x_I, w_OI), (x_I, w_OI)), _backward)


def transposed(x_NO: jax.Array) -> jax.Array:
    """Return the transpose, stored on CPUs."""
    stored = lambda x: jax.lax.optimization_barrier(x.T)  # noqa: E731
    return jax.lax.platform_dependent(x_NO, cpu=stored, default=lambda x: x.T)
