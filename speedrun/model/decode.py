"""Continues prompts: a jitted step for all of them, and the text of each.

Each token costs a forward pass over all positions, since a recipe's `forward` maps whole sequences.

Legend: P prompts, T positions, V vocabulary, H heads, K head width, D model.
"""

import codecs
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speedrun.base.errors import UsageError
from speedrun.model.weights import Trained, Words
from speedrun.science.inputs import Inputs
from speedrun.science.kernels import attention as definition
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.params import Params
from speedrun.science.recipe import Recipe

POSITIONS = 64  #: lengths are rounded up to a multiple, to compile fewer programs


def lengths(longest: int) -> list[int]:
    """Return the lengths of programs for up to `longest` positions; each is four times the one before."""
    return [n for i in range(20) if (n := POSITIONS * 4**i) < longest] + [longest]


class Draw(NamedTuple):
    """How to draw tokens."""

    temperature: float = 1.0  #: of the softmax; 0: always the most probable token
    top_k: int = 0  #: draw from this number of most probable tokens; 0: from all
    top_p: float = 1.0  #: draw from the fewest most probable tokens with this total probability
    seed: int = 0


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
        self._params, kernels = params, DecodingKernels()

        def states(params: Params, tokens_T: jax.Array) -> jax.Array:
            read = recipe.read(params, tokens_T[None])
            return recipe.forward(read, tokens_T[None], inputs, recipe.config, kernels)[0]

        def after(params: Params, how: Draw, tokens_T: jax.Array, length: Any, stream: Any) -> jax.Array:
            x_1D = jax.lax.dynamic_slice_in_dim(states(params, tokens_T), length - 1, 1)
            (z_V,) = recipe.logits(params, x_1D, inputs, recipe.config)[:, :vocab_size]
            # The key depends on text and position only.
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(how.seed), stream), length)
            return drawn(z_V, key, how)

        def change(params: Params, tokens_T: jax.Array, length: Any) -> jax.Array:
            """Return how much other tokens at the end change the states before, relative to the largest."""
            is_read_T = jnp.arange(self.num_positions) < length
            other_T = jax.random.randint(jax.random.key(0), (self.num_positions,), 0, vocab_size)
            x_TD, y_TD = (
                jnp.where(is_read_T[:, None], states(params, text_T).astype(jnp.float32), 0)
                for text_T in (tokens_T, jnp.where(is_read_T, tokens_T, other_T))
            )
            return jnp.max(jnp.abs(x_TD - y_TD)) / jnp.maximum(jnp.max(jnp.abs(x_TD)), 1e-30)

        # Text by text, since each needs a score for every pair of positions.
        self._next = jax.jit(
            lambda params, how, *texts: jax.lax.map(lambda one: after(params, how, *one), texts)
        )
        self._change = jax.jit(
            lambda params, *texts: jnp.max(jax.lax.map(lambda one: change(params, *one), texts))
        )

    def continued(self, prompts: Sequence[np.ndarray], num_tokens: int, how: Draw) -> Iterator[np.ndarray]:
        """Yield the ids that come next in all texts, i32 [P], one after the other. A prompt has at least one id.

        Equal prompts get different random streams. Raise UsageError if states depend on later tokens.
        """
        tokens_PT, rows = np.zeros((len(prompts), self.num_positions), np.int32), range(len(prompts))
        for tokens_T, ids in zip(tokens_PT, prompts, strict=True):
            tokens_T[: len(ids)] = ids
        length_P, raw = np.array([len(ids) for ids in prompts], np.int32), [ids.tobytes() for ids in prompts]
        # A stream depends on its prompt and on the number of equal ones before it only.
        streams = np.array([zlib.crc32(one) + raw[:number].count(one) for number, one in enumerate(raw)])
        self._check(tokens_PT, length_P)
        for number in range(num_tokens):
            texts = tokens_PT, length_P + number, streams.astype(np.uint32)
            ids_P = np.asarray(self._next(self._params, how, *texts))
            tokens_PT[rows, length_P + number] = ids_P
            yield ids_P

    def _check(self, tokens_PT: np.ndarray, length_P: np.ndarray) -> None:
        dtypes = [x.dtype for x in self._params.values() if jnp.issubdtype(x.dtype, jnp.floating)]
        rounding = max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0) ** 0.5
        if (found := float(self._change(self._params, tokens_PT, length_P))) > rounding:
            raise UsageError(
                f"the states of this model depend on later tokens: others change them by {found:.1e}; need a "
                "causal model; if this is rounding, `speedrun sample --dtype float32` computes without it"
            )


class Text:
    """A growing text, which ends with the document."""

    def __init__(self, words: Words, prompt: np.ndarray) -> None:
        self._words, self._decoder = words, codecs.getincrementaldecoder("utf-8")("replace")
        self.prompt = self._text(prompt)
        self.ids: list[int] = []
        self.text = ""
        self.has_ended = False

    def add(self, index: int, *, is_last: bool) -> str:
        """Add an id, unless the document has ended; return the completed characters."""
        self.has_ended |= index == self._words.track.data.document_token
        new = [] if self.has_ended else [index]
        self.ids += new
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
        text = self._decoder.decode(raw, is_last)
        # A model may write control characters of terminals.
        return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def decoder_of(trained: Trained, num_positions: int) -> Decoder:
    """Return a `Decoder` of a trained model."""
    model = trained.program.recipe, trained.inputs, trained.params
    return Decoder(*model, vocab_size=trained.track.data.vocab_size, num_positions=num_positions)


def written(
    decoder: Decoder,
    words: Words,
    starts: Sequence[np.ndarray],
    num_tokens: int,
    how: Draw,
    show: Callable[[str], None] = lambda _: None,
) -> list[Text]:
    """Continue prompts up to the ends of their documents; `show` gets the first text as it grows."""
    texts = [Text(words, start) for start in starts]
    show(texts[0].prompt)
    for number, ids_P in enumerate(decoder.continued(starts, num_tokens, how), 1):
        new = [text.add(int(i), is_last=number == num_tokens) for text, i in zip(texts, ids_P, strict=True)]
        show(new[0])
        if all(text.has_ended for text in texts):
            break
    return texts
