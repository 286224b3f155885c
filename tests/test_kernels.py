"""Each operation against its definition, forward and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speedrun.kernels.attention import attention, visible
from speedrun.kernels.cross_entropy import CHUNK_TOKENS, cross_entropy, logits, summed_cross_entropy

CAP = 15.0


def sees(t: int, s: int, doc: list[int], window: int, block: int) -> bool:
    """The mask rule in words."""
    return s <= t and doc[t] == doc[s] and t // block - s // block < window


@pytest.mark.parametrize("window", [1, 2, 3, 99])
@pytest.mark.parametrize("block", [1, 4, 7])
@pytest.mark.parametrize(
    "doc",
    [[0] * 17, list(range(17)), [0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 4, 5, 5, 5, 5, 5, 5]],
    ids=["one", "each", "mixed"],
)
def test_visibility_is_the_rule(window, block, doc):
    got = visible(jnp.array([doc]), jnp.int32(window), block)[0]
    want = [[sees(t, s, doc, window, block) for s in range(17)] for t in range(17)]
    np.testing.assert_array_equal(got, want)


def test_attention_is_a_softmax_over_visible_keys():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 9, 2, 4)).astype(np.float32)
    mask = np.asarray(visible(jnp.array([[0, 0, 0, 1, 1, 1, 1, 2, 2]]), jnp.int32(2), 2))
    got = attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(mask), scale=0.3)
    for t in range(9):
        for h in range(2):
            keys = np.flatnonzero(mask[0, t])
            weights = np.exp(0.3 * k[0, keys, h] @ q[0, t, h])
            np.testing.assert_allclose(
                got[0, t, h], weights @ v[0, keys, h] / weights.sum(), rtol=2e-5, atol=2e-6
            )


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
