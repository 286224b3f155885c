"""A pointer to earlier tokens of the same document, mixed into the distribution of the next token.

p(v) = (1 - sum_c w_c) softmax(z)_v + sum_c w_c [token_c = v], with weights of at most C earlier tokens. `logits` sees
no earlier ids, so ids and weights travel beside the hidden states, and the logits are log p, which the scorer
normalises in vain. Source: modded-nanogpt #379 (a copy head with a learned sink), after Vinyals et al. 2015, Pointer
Networks, and Merity et al. 2016, Pointer Sentinel Mixture Models.
Legend: B batch, T time (also of keys: S), N tokens, D model, E what travels, K width, C copies, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from speedrun.science.kernels.attention_triton import UNSEEN


class Copies(NamedTuple):
    """Tokens that may be copied."""

    ids: jax.Array  #: i32 [..., C]
    weights: jax.Array  #: f32 [..., C], their probabilities; those of the model make up the rest


def pointed(
    q_BTK: jax.Array,
    k_BTK: jax.Array,
    tokens_BT: jax.Array,
    doc_BT: jax.Array,
    sink: jax.Array,
    gate_BT: jax.Array,
    num_copies: int,
) -> Copies:
    """Return the tokens that followed the `num_copies` states with the highest scores q k, of the document.

    Weights are a gate below 1 times a softmax over all earlier states and a sink. The share of other states stays with
    the model.
    """
    t_T = jnp.arange(tokens_BT.shape[1])
    seen_BTS = (t_T[None, None, :] < t_T[None, :, None]) & (doc_BT[:, :, None] == doc_BT[:, None, :])
    scores_BTS = jnp.einsum("btk,bsk->bts", q_BTK, k_BTK, preferred_element_type=jnp.float32)
    scores_BTS = jnp.where(seen_BTS, scores_BTS, UNSEEN)
    lse_BT = jnp.logaddexp(jax.nn.logsumexp(scores_BTS, axis=-1), sink)
    top_BTC, place_BTC = jax.lax.top_k(scores_BTS, min(num_copies, len(t_T)))
    ids_BTC = jax.vmap(lambda next_T, place_TC: next_T[place_TC])(jnp.roll(tokens_BT, -1, axis=1), place_BTC)
    return Copies(ids_BTC, gate_BT[..., None] * jnp.exp(top_BTC - lse_BT[..., None]))


def beside(x_BTD: jax.Array, copies: Copies) -> jax.Array:
    """Append copies to hidden states: id // 256, id % 256 (exact in bfloat16 for ids of 16 bits) and weight."""
    columns = (*jnp.divmod(copies.ids, 256), copies.weights)
    return jnp.concatenate([x_BTD, *(x.astype(x_BTD.dtype) for x in columns)], axis=-1)


def apart(x_NE: jax.Array, model_dim: int) -> tuple[jax.Array, Copies]:
    """Return hidden states and copies."""
    high_NC, low_NC, weights_NC = jnp.split(x_NE[..., model_dim:].astype(jnp.float32), 3, axis=-1)
    return x_NE[..., :model_dim], Copies((256 * high_NC + low_NC).astype(jnp.int32), weights_NC)


def mixed(logits_NV: jax.Array, copies: Copies) -> jax.Array:
    """Return log p: f32 [N, V]."""
    p_NV = jax.nn.softmax(logits_NV, axis=-1) * (1 - jnp.sum(copies.weights, axis=-1, keepdims=True))
    n_N1 = jnp.arange(len(p_NV))[:, None]
    return jnp.log(p_NV.at[n_N1, copies.ids].add(copies.weights))


def nll(logits_NV: jax.Array, copies: Copies, targets_N: jax.Array) -> jax.Array:
    """Return -log p of the targets: f32 [N]."""
    z_N = jnp.take_along_axis(logits_NV, targets_N[:, None], axis=1)[:, 0]
    own_N = jnp.exp(z_N - jax.nn.logsumexp(logits_NV, axis=1)) * (1 - jnp.sum(copies.weights, axis=-1))
    copied_N = jnp.sum(copies.weights, axis=-1, where=copies.ids == targets_N[:, None])
    return -jnp.log(own_N + copied_N)
