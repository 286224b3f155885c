"""How probable a model finds endings of given contexts: many short rows, one compiled program for each length.

Legend: R rows, T positions, E tokens of an ending, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speedrun.ground.errors import NonFiniteError
from speedrun.science.params import Params
from speedrun.trained.incremental import DecodingKernels
from speedrun.trained.weights import Trained

_TOGETHER = 32  #: rows of one call
_POSITIONS = 32  #: lengths are rounded up to a multiple


class Row(NamedTuple):
    """A context with one ending."""

    ids: np.ndarray  #: i32 [T]
    first: int  #: position of the ending; at least 1


class Ending(NamedTuple):
    """What a model thinks of an ending."""

    nll_E: np.ndarray  #: f64, nats
    is_likeliest: bool  #: whether each token is the most probable one, given those before it


def endings(trained: Trained, rows: Sequence[Row], say: Callable[[int], None]) -> list[Ending]:
    """Score all endings, in order; `say` gets the number of rows that are done.

    Raises:
        NonFiniteError: if a loss is no number.
    """
    score, params, found = jax.jit(partial(_scores, trained)), trained.params, list[Ending]()
    for start in range(0, len(rows), _TOGETHER):
        few = rows[start : start + _TOGETHER]
        longest = -(-max(len(row.ids) for row in few) // _POSITIONS) * _POSITIONS
        tokens_RT = np.zeros((_TOGETHER, longest), np.int32)  # rows without ids: one shape fewer to compile
        for tokens_T, row in zip(tokens_RT, few, strict=False):
            tokens_T[: len(row.ids)] = row.ids
        nll_RT, likeliest_RT = jax.device_get(score(params, tokens_RT))
        for nll_T, likeliest_T, row in zip(nll_RT, likeliest_RT, few, strict=False):
            part = slice(row.first - 1, len(row.ids) - 1)
            found.append(Ending(nll_T[part].astype(np.float64), bool(likeliest_T[part].all())))
            if not np.isfinite(found[-1].nll_E).all():
                raise NonFiniteError("the loss of an ending is no number; need a model with finite losses")
        say(start + len(few))
    return found


def _scores(trained: Trained, params: Params, tokens_RT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the negative log likelihood of each next token, f32 [R, T - 1], and whether it is the likeliest."""
    recipe, inputs = trained.program.recipe, trained.inputs

    def of_one(tokens_T: jax.Array) -> tuple[jax.Array, jax.Array]:
        (x_TD,) = recipe.forward(params, tokens_T[None], inputs, recipe.config, DecodingKernels())
        z_TV = recipe.logits(params, x_TD[:-1], recipe.config).astype(jnp.float32)
        of_target_T = jnp.take_along_axis(z_TV, tokens_T[1:, None], axis=1)[:, 0]
        return jax.nn.logsumexp(z_TV, axis=1) - of_target_T, jnp.argmax(z_TV, axis=1) == tokens_T[1:]

    return jax.lax.map(of_one, tokens_RT)
