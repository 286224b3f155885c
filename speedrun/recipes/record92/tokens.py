"""Hashed n-grams, attention segments and sampled columns of record 92.

Legend: B batch, T time, D model, V vocabulary, P sampled columns, N tokens, M targets of a token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from speedrun.recipes.record89.tokens import bigram_rows, previous
from speedrun.science.kernels.cross_entropy import Targets
from speedrun.science.params import SHARDS, Params

#: Factors of the hashes of an id, the one before, and the one before that. 32-bit products wrap.
TRIPLE_ROW = 17351, 60961, 45259
PAIR_SIGN, TRIPLE_SIGN = (48271, 30011), (58699, 39779, 26801)
STRIDE = 20011  #: of the sweep through the vocabulary: a prime, so it meets every id if it does not divide their number


def hashed(tokens_BT: jax.Array, factors: tuple[int, ...]) -> jax.Array:
    """Return the exclusive or of factor times id over a token and those before it: i32 [B, T]."""
    found_BT = factors[0] * tokens_BT
    for factor in factors[1:]:
        tokens_BT = previous(tokens_BT)
        found_BT ^= factor * tokens_BT
    return found_BT


def ngram_rows(tokens_BT: jax.Array, rows: int) -> jax.Array:
    """Return the rows of the pairs, then of the triples that end at each token: i32 [B, 2T], spread over shards.

    Each kind has half of the hashes. The first two tokens have no triple: they read the last row of all.
    """
    half = rows // 2
    triples_BT = half + hashed(tokens_BT, TRIPLE_ROW) % (half - 1)
    triples_BT = triples_BT.at[:, :2].set(rows - 1)
    return spread(jnp.concatenate([bigram_rows(tokens_BT, half), triples_BT], axis=1), rows)


def spread(hashes: jax.Array, rows: int) -> jax.Array:
    """Return rows, of which each of eight shards has every eighth hash.

    Frequent ids are small, and products of two of them crowd the first hashes: 5,400 of 49,152 would not fit.
    """
    each = rows // SHARDS
    return jnp.where(hashes < SHARDS * each, hashes % SHARDS * each + hashes // SHARDS, hashes)


def ngrams(p: Params, tokens_BT: jax.Array, signs_SD: jax.Array) -> jax.Array:
    """Return the sum of the vectors of pairs and triples, each times random signs of another hash: [B, T, D]."""

    def signed(vectors_BTD: jax.Array, factors: tuple[int, ...]) -> jax.Array:
        sign_BT = (hashed(tokens_BT, factors) % len(signs_SD)).at[:, : len(factors) - 1].set(0)
        return vectors_BTD * signs_SD[sign_BT].astype(vectors_BTD.dtype)

    pairs_BTD, triples_BTD = jnp.split(p["ngram_embed"], 2, axis=1)
    return signed(pairs_BTD, PAIR_SIGN) + signed(triples_BTD, TRIPLE_SIGN)


def segments(tokens_BT: jax.Array, document_token: int, most: int) -> jax.Array:
    """Return the segment of each token. A document is cut into segments of `most` tokens."""
    t_T = jnp.arange(tokens_BT.shape[1])
    start_BT = jax.lax.cummax(jnp.where(tokens_BT == document_token, t_T[None], 0), axis=1)
    return jnp.cumsum((t_T[None] - start_BT) % most == 0, axis=1)


class Columns(NamedTuple):
    """The columns of the softmax of a sequence."""

    ids_P: jax.Array  #: i32, ascending
    column_V: jax.Array  #: i32, where an id is among them; -1: nowhere
    offset: jax.Array  #: i32, where the next sweep starts
    fits: jax.Array  #: bool, whether there is room for all targets

    def of(self, targets: Targets) -> Targets:
        """Return targets by place. One without a column, which only a prefix can lack, leaves the softmax."""
        exists_NM = targets.ids_NM >= 0
        place_NM = jnp.where(exists_NM, self.column_V[targets.ids_NM], -1)
        weights_NM = jnp.where(place_NM >= 0, targets.weights_NM, 0.0)
        lost_N = jnp.sum(jnp.where(exists_NM, targets.weights_NM - weights_NM, 0.0), axis=1)
        weights_NM = jnp.where(self.fits, weights_NM, jnp.nan)  # a loss that is no number ends the run
        return Targets(place_NM, weights_NM, targets.softmax_N - lost_N)


def sampled(targets_T: jax.Array, offset: jax.Array, num_columns: int, vocab_size: int) -> Columns:
    """Return all distinct targets and as many other ids as there is room for, from a sweep through the vocabulary.

    No random numbers: a sweep goes on where the last one of this sequence ended. It visits 1.7 times as many ids as are
    needed, and 256, to pass over targets. If it still finds too few, every k-th id that is no target is taken instead.
    """
    id_V = jnp.arange(vocab_size)
    is_other_V = jnp.ones(vocab_size, bool).at[targets_T].set(False)
    num_others = jnp.sum(is_other_V)
    room = num_columns - (vocab_size - num_others)
    need = jnp.maximum(0, room)
    length = jnp.where(need > 0, jnp.minimum(vocab_size, 17 * need // 10 + 256), 0)

    sweep_V = STRIDE * ((offset + id_V) % vocab_size) % vocab_size
    fits_V = is_other_V[sweep_V] & (id_V < length)
    nth_V = jnp.cumsum(fits_V)
    swept_V = jnp.zeros(vocab_size, bool).at[sweep_V].set(fits_V & (nth_V <= need))
    rank_V, every = jnp.cumsum(is_other_V) - 1, jnp.maximum(1, num_others // jnp.maximum(1, need))
    even_V = is_other_V & (rank_V % every == 0) & (rank_V // every < need)

    chosen_V = ~is_other_V | jnp.where(nth_V[-1] >= need, swept_V, even_V)
    column_V = jnp.where(chosen_V, jnp.cumsum(chosen_V) - 1, -1)
    (ids_P,) = jnp.nonzero(chosen_V, size=num_columns)
    return Columns(ids_P, column_V, (offset + length) % vocab_size, room >= 0)
