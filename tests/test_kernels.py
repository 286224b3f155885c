"""The loss head against its definition, forward and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speedrun.kernels.cross_entropy import CHUNK_TOKENS, cross_entropy, logits, summed_cross_entropy

CAP = 15.0


@pytest.mark.parametrize("num_tokens", [1, 7, CHUNK_TOKENS, 2 * CHUNK_TOKENS])
def test_summed_cross_entropy_is_the_sum_of_the_definition(num_tokens):
    kx, kw, kt = jax.random.split(jax.random.key(0), 3)
    x_ND, head_VD = jax.random.normal(kx, (num_tokens, 12)), 3 * jax.random.normal(kw, (33, 12))
    targets_N = jax.random.randint(kt, (num_tokens,), 0, 33)

    def slow(x_ND: jax.Array, head_VD: jax.Array) -> jax.Array:
        return 0.25 * cross_entropy(x_ND, head_VD, targets_N, cap=CAP).sum()

    def fast(x_ND: jax.Array, head_VD: jax.Array) -> jax.Array:
        return 0.25 * summed_cross_entropy(x_ND, head_VD, targets_N, cap=CAP)

    (want, want_grads), (got, got_grads) = (
        jax.value_and_grad(f, (0, 1))(x_ND, head_VD) for f in (slow, fast)
    )
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(summed_cross_entropy(x_ND, head_VD, targets_N, cap=CAP) / 4, want, rtol=1e-6)
    for a, b in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_probabilities_of_a_zero_head_are_uniform():
    nll = cross_entropy(jnp.ones((5, 4)), jnp.zeros((50304, 4)), jnp.arange(5), cap=CAP)
    np.testing.assert_allclose(nll, np.log(50304), rtol=1e-6)


def test_the_cap_is_the_records_sigmoid_up_to_a_constant():
    x_ND, head_VD = jnp.linspace(-80, 80, 41)[:, None], jnp.ones((1, 1))
    np.testing.assert_allclose(
        logits(x_ND, head_VD, cap=CAP) + 15, 30 * jax.nn.sigmoid(x_ND / 7.5), rtol=1e-5, atol=1e-5
    )
