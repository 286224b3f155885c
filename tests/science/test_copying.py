"""The mixture of a model and a pointer, against its definition in float64."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speedrun.science import copying
from speedrun.science.copying import Copies

T, K, V, SINK = 24, 8, 20, 1.5
TOKENS = np.random.default_rng(0).integers(0, V, (2, T))
DOC = np.cumsum(np.arange(T)[None] == [[0], [9]], axis=1)  # the second row begins a document at 9


def inputs(seed: int = 1) -> tuple[np.ndarray, ...]:
    """Queries, keys, gates and logits."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, 2, T, K))
    return q, k, rng.random((2, T)), 3 * rng.standard_normal((2, T, V))


def defined(q: np.ndarray, k: np.ndarray, gate: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """p of each next token: float64 [B, T, V]."""
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    for b in range(len(q)):
        for t in range(T):
            seen = [s for s in range(t) if DOC[b, s] == DOC[b, t]]
            weights = np.exp([q[b, t] @ k[b, s] for s in seen])
            share = gate[b, t] * weights / (weights.sum() + np.exp(SINK))
            p[b, t] *= 1 - share.sum()
            for s, one in zip(seen, share, strict=True):
                p[b, t, TOKENS[b, s + 1]] += one
    return p


def found(num_copies: int, q: np.ndarray, k: np.ndarray, gate: np.ndarray) -> Copies:
    q_BTK, k_BTK, gate_BT = (jnp.asarray(x, jnp.float32) for x in (q, k, gate))
    tokens_BT, doc_BT = jnp.asarray(TOKENS), jnp.asarray(DOC)
    return copying.pointed(q_BTK, k_BTK, tokens_BT, doc_BT, jnp.float32(SINK), gate_BT, num_copies)


def test_the_mixture_is_its_definition():
    q, k, gate, logits = inputs()
    x_E = copying.beside(jnp.zeros((2, T, 3)), found(T, q, k, gate)).reshape(2 * T, -1)
    x_ND, copies = copying.apart(x_E, 3)
    logits_NV, want = (
        jnp.asarray(logits.reshape(-1, V), jnp.float32),
        defined(q, k, gate, logits).reshape(-1, V),
    )
    assert x_ND.shape == (2 * T, 3)
    got = np.exp(np.asarray(copying.mixed(logits_NV, copies), np.float64))
    np.testing.assert_allclose(got, want, atol=1e-6)
    np.testing.assert_allclose(got.sum(-1), 1, atol=1e-6)
    targets_N = np.random.default_rng(2).integers(0, V, 2 * T)
    nll_N = copying.nll(logits_NV, copies, jnp.asarray(targets_N))
    np.testing.assert_allclose(nll_N, -np.log(want[np.arange(2 * T), targets_N]), rtol=1e-6)


def test_few_copies_are_those_of_most_weight_and_the_model_has_the_rest():
    q, k, gate, _ = inputs()
    few, every = (np.sort(found(n, q, k, gate).weights, axis=-1) for n in (3, T))
    np.testing.assert_array_equal(few, every[..., -3:])
    none = found(0, q, k, gate)
    logits_NV = jnp.ones((2 * T, V))
    copies = Copies(*(x.reshape(2 * T, 0) for x in none))
    np.testing.assert_allclose(copying.mixed(logits_NV, copies), np.log(1 / V), rtol=1e-6)


def test_a_later_token_changes_nothing_and_ids_survive_sixteen_bits(monkeypatch):
    q, k, gate, _ = inputs()
    before = found(4, q, k, gate)
    k[:, 12:] += 1
    monkeypatch.setattr(sys.modules[__name__], "TOKENS", np.where(np.arange(T) > 12, 0, TOKENS))
    for x, y in zip(before, found(4, q, k, gate), strict=True):
        seen = before.weights[:, :13] > 0
        np.testing.assert_array_equal(np.where(seen, x[:, :13], 0), np.where(seen, y[:, :13], 0))
    ids = jnp.arange(2**16, dtype=jnp.int32).reshape(-1, 1)
    given = Copies(ids, jnp.full(ids.shape, 0.5))
    _, back = copying.apart(copying.beside(jnp.zeros((2**16, 1), jnp.bfloat16), given), 1)
    np.testing.assert_array_equal(back.ids, ids)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_finite_where_nothing_can_be_copied_and_where_a_copy_is_certain(dtype):
    q, k, gate, logits = inputs()

    def loss(q: jax.Array, k: jax.Array, logits: jax.Array) -> jax.Array:
        where = jnp.asarray(TOKENS), jnp.asarray(DOC)
        copies = copying.pointed(q, k, *where, jnp.float32(SINK), jnp.full(gate.shape, 0.99), 4)
        x_BTE = copying.beside(jnp.zeros((2, T, 1), dtype), copies)
        _, copies = copying.apart(x_BTE.reshape(2 * T, -1), 1)
        return jnp.sum(copying.nll(logits.reshape(-1, V), copies, jnp.asarray(TOKENS).reshape(-1)))

    large = (jnp.asarray(x, dtype) for x in (20 * q, 20 * k))
    for grad in jax.grad(loss, (0, 1, 2))(*large, jnp.asarray(logits, jnp.float32)):
        assert np.isfinite(grad.astype(jnp.float32)).all()
