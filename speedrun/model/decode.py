"""Continues prompts: one jitted loop over tokens for all prompts, and the text of each.

Legend: P prompts, T positions, V vocabulary, N new tokens.
"""

import codecs
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speedrun.base.errors import UsageError
from speedrun.model.incremental import DecodingKernels, Incremental
from speedrun.model.weights import Trained, Words
from speedrun.science.inputs import Inputs
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
    caches: list[jax.Array]  #: [P, ...]


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

        def forward(params: Params, tokens_BT: jax.Array) -> jax.Array:
            return recipe.forward(recipe.read(params, tokens_BT), tokens_BT, inputs, recipe.config, kernels)

        self._logits = lambda params, x_ND: recipe.logits(params, x_ND, inputs, recipe.config)[:, :vocab_size]
        self._is_new = True  #: whether caches were not yet compared since the last start
        # A single row and one of many are summed in different orders.
        dtypes = [x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
        self._tolerance = max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0) ** 0.5
        self.model = Incremental(forward, params, self.num_positions)
        self._fixed = jax.jit(self.model.fixed)(params)
        self._start = jax.jit(self._read)
        self._extend = jax.jit(self._write, static_argnums=4, donate_argnums=2)
        self._differ = jax.jit(jax.vmap(self.model.differences))

    def start(self, prompts: Sequence[np.ndarray]) -> Texts:
        """Read prompts of at least one id. Equal prompts get different random streams."""
        tokens_PT = np.zeros((len(prompts), self.num_positions), np.int32)
        for row_T, ids in zip(tokens_PT, prompts, strict=True):
            row_T[: len(ids)] = ids
        lengths, raw = np.array([len(ids) for ids in prompts], np.int32), [ids.tobytes() for ids in prompts]
        # A stream depends on its prompt and on the number of equal ones before it only.
        streams = [zlib.crc32(one) + raw[:number].count(one) for number, one in enumerate(raw)]
        self._is_new = True
        return self._start(self._fixed, tokens_PT, lengths, np.array(streams, np.uint64).astype(np.uint32))

    def extend(self, texts: Texts, num_tokens: int, how: Draw) -> tuple[Texts, np.ndarray]:
        """Write tokens after each text; return the texts and the new ids [P, N]. `texts` is donated.

        Ids beyond `num_positions` are garbage.

        Raises:
            UsageError: from the first call after `start`, if the caches differ from the forward pass.
        """
        texts, ids_PN = self._extend(self._params, self._fixed, texts, how, num_tokens)
        if self._is_new and (found := self._difference(texts)) > self._tolerance:
            raise UsageError(
                f"the states of this model depend on later tokens: its cache differs by {found:.1e} from the forward "
                "pass; need a causal model; if this is rounding, `speedrun sample --dtype float32` computes without it"
            )
        self._is_new = False
        return texts, np.asarray(ids_PN)

    def _difference(self, texts: Texts) -> float:
        """Return the difference between the caches and those of a forward pass with other tokens at the end."""
        # The last token was not read; positions past the end overwrite the last one.
        read_P = np.minimum(texts.length_P, self.num_positions) - 1
        other_PT = np.random.default_rng(0).integers(0, self._vocab_size, texts.tokens_PT.shape, np.int32)
        is_read_PT = np.arange(self.num_positions) < read_P[:, None]
        tokens_PT = np.where(is_read_PT, texts.tokens_PT, other_PT)
        whole = self._start(self._fixed, tokens_PT, texts.length_P, texts.stream_P)
        return float(jnp.max(self._differ(texts.caches, whole.caches, read_P)))

    def continued(self, prompts: Sequence[np.ndarray], num_tokens: int, how: Draw) -> Iterator[np.ndarray]:
        """Yield the new ids of all prompts in chunks [P, N] with N up to `CHUNK`."""
        texts = self.start(prompts)
        for left in range(num_tokens, 0, -CHUNK):
            texts, ids_PN = self.extend(texts, CHUNK, how)  # another number would need a compilation
            yield ids_PN[:, :left]

    def _read(
        self, fixed: list[jax.Array], tokens_PT: jax.Array, length_P: jax.Array, stream_P: jax.Array
    ) -> Texts:
        # One by one, since each needs a score for every pair of positions.
        caches = jax.lax.map(lambda tokens_T: self.model.start(fixed, tokens_T[None])[1], tokens_PT)
        return Texts(tokens_PT, length_P, stream_P, caches)

    def _write(
        self, params: Params, fixed: list[jax.Array], texts: Texts, how: Draw, num_tokens: int
    ) -> tuple[Texts, jax.Array]:
        rows_P, draw = jnp.arange(len(texts.length_P)), jax.vmap(partial(drawn, how=how))

        def after(tokens_T: jax.Array, length: jax.Array, cache: list[jax.Array]) -> Any:
            x_BTD, cache = self.model.step(fixed, cache, tokens_T[None], length - 1)
            return self._logits(params, x_BTD[0])[0], cache

        def write(texts: Texts, _: None) -> tuple[Texts, jax.Array]:
            z_PV, caches = jax.vmap(after)(texts.tokens_PT, texts.length_P, texts.caches)
            # Keys depend on text and position only, not on chunks.
            keys_P = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(how.seed), texts.stream_P)
            keys_P = jax.vmap(jax.random.fold_in)(keys_P, texts.length_P)
            new_P = draw(z_PV, keys_P)
            tokens_PT = texts.tokens_PT.at[rows_P, texts.length_P].set(new_P, mode="drop")
            return Texts(tokens_PT, texts.length_P + 1, texts.stream_P, caches), new_P

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
