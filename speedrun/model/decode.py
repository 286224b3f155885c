"""Continues prompts: one jitted loop over tokens for all prompts, and the text of each.

Each token costs a forward pass over all positions, since a recipe's `forward` maps whole sequences.

Legend: P prompts, T positions, V vocabulary, N new tokens, H heads, K head width, D model.
"""

import codecs
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speedrun.base.errors import UsageError
from speedrun.model.weights import Trained, Words
from speedrun.science.inputs import Inputs
from speedrun.science.kernels import attention as definition
from speedrun.science.kernels.choose import Kernels
from speedrun.science.params import Params
from speedrun.science.recipe import Recipe

POSITIONS = 64  #: lengths are rounded up to a multiple, to compile fewer programs
CHUNK = 16  #: tokens of one call


def lengths(longest: int) -> list[int]:
    """Return the lengths of programs for up to `longest` positions; each is four times the one before."""
    return [n for i in range(20) if (n := POSITIONS * 4**i) < longest] + [longest]


class Draw(NamedTuple):
    """How to draw tokens."""

    temperature: float = 1.0  #: of the softmax; 0: always the most probable token
    top_k: int = 0  #: draw from this number of most probable tokens; 0: from all
    top_p: float = 1.0  #: draw from the fewest most probable tokens with this total probability
    seed: int = 0


class Texts(NamedTuple):
    """Prompts and their continuations, on the device."""

    tokens_PT: jax.Array  #: i32, zero after the last token
    length_P: jax.Array  #: i32
    stream_P: jax.Array  #: u32, number of the random stream


@dataclass(frozen=True, eq=False)
class DecodingKernels(Kernels):
    """The reference implementations of all operations, without opaque kernels or limits on sequence length."""

    platform: str = "cpu"
    compute_capability: str = ""

    def attention(
        self, q_BTHK: Any, k_BTHK: Any, v_BTHK: Any, first_BT: jax.Array, /, **more: Any
    ) -> jax.Array:
        """Compute `Kernels.attention`."""
        if more.get("angles"):
            q_BTHK, k_BTHK = self.qk_norm(q_BTHK, k_BTHK, more["angles"])
        return definition.attention(q_BTHK, k_BTHK, v_BTHK, first_BT, scale=more["scale"])


def drawn(z_V: jax.Array, key: jax.Array, how: Draw) -> jax.Array:
    """Draw an id, i32 [], from softmax(z / temperature), cut to the most probable tokens.

    It has the largest z / temperature - log(-log u) with u uniform (Gumbel 1954), which other frameworks can reproduce.
    """
    z_V = z_V.astype(jnp.float32)
    scaled_V = z_V / jnp.where(how.temperature > 0, how.temperature, 1.0)
    order_V = jnp.argsort(-scaled_V)
    p_V = jax.nn.softmax(scaled_V[order_V])
    before_V = jnp.cumsum(p_V) - p_V
    rank_V = jnp.arange(len(z_V))
    # The most probable token always stays.
    kept_V = (rank_V < jnp.where(how.top_k > 0, how.top_k, len(z_V))) & (before_V < how.top_p) | (rank_V == 0)
    u_V = jax.random.uniform(key, z_V.shape, minval=jnp.finfo(jnp.float32).tiny)
    noisy_V = jnp.where(kept_V, scaled_V[order_V] - jnp.log(-jnp.log(u_V[order_V])), -jnp.inf)
    return jnp.where(how.temperature > 0, order_V[jnp.argmax(noisy_V)], jnp.argmax(z_V)).astype(jnp.int32)


class Decoder:
    """A model that continues prompts. Programs are compiled at the first call."""

    def __init__(
        self, recipe: Recipe, inputs: Inputs, params: Params, *, vocab_size: int, num_positions: int
    ) -> None:
        """Trace the model for up to `num_positions` tokens; raise UsageError if its context is shorter.

        `params` are in the compute dtype. Ids from `vocab_size` on, which the data lacks, are never drawn.
        """
        longest = recipe.eval_seq_len
        if num_positions > longest:
            raise UsageError(
                f"{num_positions:,} tokens of prompt and text; the model was scored on {longest:,} at a time; "
                "shorten the prompt, or ask for fewer --tokens"
            )
        self.num_positions = min(longest, -(-num_positions // POSITIONS) * POSITIONS)
        self._params, self._vocab_size, kernels = params, vocab_size, DecodingKernels()

        def forward(params: Params, tokens_T: jax.Array) -> jax.Array:
            read = recipe.read(params, tokens_T[None])
            return recipe.forward(read, tokens_T[None], inputs, recipe.config, kernels)[0]

        self._forward = forward
        self._logits = lambda params, x_ND: recipe.logits(params, x_ND, inputs, recipe.config)[:, :vocab_size]
        self._is_new = True  #: whether causality was not yet checked since the last start
        dtypes = [x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
        self._tolerance = max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0) ** 0.5
        self._extend = jax.jit(self._write, static_argnums=3)
        self._differ = jax.jit(self._differences)

    def start(self, prompts: Sequence[np.ndarray]) -> Texts:
        """Read prompts of at least one id. Equal prompts get different random streams."""
        tokens_PT = np.zeros((len(prompts), self.num_positions), np.int32)
        for row_T, ids in zip(tokens_PT, prompts, strict=True):
            row_T[: len(ids)] = ids
        lengths, raw = np.array([len(ids) for ids in prompts], np.int32), [ids.tobytes() for ids in prompts]
        # A stream depends on its prompt and on the number of equal ones before it only.
        streams = np.array([zlib.crc32(one) + raw[:number].count(one) for number, one in enumerate(raw)])
        self._is_new = True
        return Texts(*map(jnp.asarray, (tokens_PT, lengths, streams.astype(np.uint32))))

    def extend(self, texts: Texts, num_tokens: int, how: Draw) -> tuple[Texts, np.ndarray]:
        """Write tokens after each text; return the texts and the new ids [P, N].

        Ids beyond `num_positions` are garbage.

        Raises:
            UsageError: from the first call after `start`, if states depend on later tokens.
        """
        if self._is_new and (found := float(self._differ(self._params, texts))) > self._tolerance:
            raise UsageError(
                f"the states of this model depend on later tokens: others change them by {found:.1e}; need a "
                "causal model; if this is rounding, `speedrun sample --dtype float32` computes without it"
            )
        self._is_new = False
        texts, ids_PN = self._extend(self._params, texts, how, num_tokens)
        return texts, np.asarray(ids_PN)

    def _differences(self, params: Params, texts: Texts) -> jax.Array:
        """Return how much other tokens at the end change the states before, relative to the largest: f32 []."""
        other_T = jax.random.randint(jax.random.key(0), (self.num_positions,), 0, self._vocab_size)

        def changed(row: tuple[jax.Array, jax.Array]) -> jax.Array:
            is_read_T = jnp.arange(self.num_positions) < row[1]
            x_TD, y_TD = (
                jnp.where(is_read_T[:, None], self._forward(params, tokens_T).astype(jnp.float32), 0)
                for tokens_T in (row[0], jnp.where(is_read_T, row[0], other_T))
            )
            return jnp.max(jnp.abs(x_TD - y_TD)) / jnp.maximum(jnp.max(jnp.abs(x_TD)), 1e-30)

        return jnp.max(jax.lax.map(changed, (texts.tokens_PT, texts.length_P)))

    def continued(self, prompts: Sequence[np.ndarray], num_tokens: int, how: Draw) -> Iterator[np.ndarray]:
        """Yield the new ids of all prompts in chunks [P, N] with N up to `CHUNK`."""
        texts = self.start(prompts)
        for left in range(num_tokens, 0, -CHUNK):
            texts, ids_PN = self.extend(texts, CHUNK, how)  # another number would need a compilation
            yield ids_PN[:, :left]

    def _write(self, params: Params, texts: Texts, how: Draw, num_tokens: int) -> tuple[Texts, jax.Array]:
        rows_P, draw = jnp.arange(len(texts.length_P)), jax.vmap(partial(drawn, how=how))

        def after(row: tuple[jax.Array, jax.Array]) -> jax.Array:
            x_TD = self._forward(params, row[0])
            return self._logits(params, jax.lax.dynamic_slice_in_dim(x_TD, row[1] - 1, 1))[0]

        def write(texts: Texts, _: None) -> tuple[Texts, jax.Array]:
            # One by one, since each needs a score for every pair of positions.
            z_PV = jax.lax.map(after, (texts.tokens_PT, texts.length_P))
            # Keys depend on text and position only, not on chunks.
            keys_P = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(how.seed), texts.stream_P)
            keys_P = jax.vmap(jax.random.fold_in)(keys_P, texts.length_P)
            new_P = draw(z_PV, keys_P)
            tokens_PT = texts.tokens_PT.at[rows_P, texts.length_P].set(new_P, mode="drop")
            return Texts(tokens_PT, texts.length_P + 1, texts.stream_P), new_P

        texts, ids_NP = jax.lax.scan(write, texts, length=num_tokens)
        return texts, ids_NP.T


class Text:
    """A growing text, which ends with the document."""

    def __init__(self, words: Words, prompt: np.ndarray) -> None:
        self._words, self._decoder = words, codecs.getincrementaldecoder("utf-8")("replace")
        self.prompt = self._text(prompt)
        self.ids: list[int] = []
        self.text = ""
        self.has_ended = False

    def add(self, ids: np.ndarray, *, is_last: bool) -> str:
        """Add ids up to the end of the document; return the completed characters."""
        ends = np.flatnonzero(ids == self._words.track.data.document_token)
        new = [] if self.has_ended else ids[: ends[0]] if len(ends) else ids
        self.has_ended |= len(ends) > 0
        self.ids += map(int, new)
        text = self._text(new, is_last=is_last or self.has_ended)
        self.text += text
        return text

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for `--json`."""
        return {"prompt": self.prompt, "text": self.text, "ids": self.ids, "has_ended": self.has_ended}

    def _text(self, ids: Iterable[int], *, is_last: bool = False) -> str:
        if not self._words.tokens:
            return "".join(f"{index} " for index in ids)
        raw = b"".join(self._words.tokens.get(int(index), b"") for index in ids)
        # A model may write control characters of terminals.
        return "".join(
            c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}"
            for c in self._decoder.decode(raw, is_last)
        )


def decoder_of(trained: Trained, num_positions: int) -> Decoder:
    """Return a `Decoder` of a trained model."""
    model = trained.program.recipe, trained.inputs, trained.params
    return Decoder(*model, vocab_size=trained.track.data.vocab_size, num_positions=num_positions)
