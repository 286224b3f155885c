"""Attention: the rule of who sees whom, and each form against the definition."""

import jax.numpy as jnp
import numpy as np
import pytest

from speedrun.kernels.attention import attention, sight, visible


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
    got = visible(sight(jnp.array([doc]), jnp.int32(window), block).first_BT)[0]
    want = [[sees(t, s, doc, window, block) for s in range(17)] for t in range(17)]
    np.testing.assert_array_equal(got, want)


def test_attention_is_a_softmax_over_visible_keys():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 9, 2, 4)).astype(np.float32)
    seen = sight(jnp.array([[0, 0, 0, 1, 1, 1, 1, 2, 2]]), jnp.int32(2), 2)
    mask = np.asarray(visible(seen.first_BT))
    got = attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), seen, scale=0.3)
    for t in range(9):
        for h in range(2):
            keys = np.flatnonzero(mask[0, t])
            weights = np.exp(0.3 * k[0, keys, h] @ q[0, t, h])
            np.testing.assert_allclose(
                got[0, t, h], weights @ v[0, keys, h] / weights.sum(), rtol=2e-5, atol=2e-6
            )
