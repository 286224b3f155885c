"""Finds what a model may not know: changes later tokens, other sequences or other rows of the head, and compares.

A program may condition on all that it sees, so calls of an examination are drawn like calls of scoring: whole batches
of scored sequences and full chunks of their rows, in random order. Compared values keep their place in two such calls
of one program, which computes them by the same operations in the same order; inputs that they may not depend on enter
as exact zeros or not at all. So the log-probabilities must be equal: a program could use any tolerance at every token.

Legend: B sequences, T time, D model, N outputs (B * T), K outputs of a chunk, V vocabulary, R texts, Q changes,
M batches.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speedrun.base.progress import over

_BLOCK = 64  #: positions cover every residue modulo this
_EDGES = 3  #: positions at each end of a sequence
_ROUNDS = 2  #: changed ends of each text
_KINDS = 6  #: of a change: see `changed`


class Model(NamedTuple):
    """The programs that score."""

    hidden: Callable[[np.ndarray], Any]  #: ids [B, T] -> outputs [B, T, D]
    log_probs: Callable[[np.ndarray], jax.Array]  #: outputs [K, D] -> [K, V]
    chunk: int  #: K


class Text(NamedTuple):
    """The scored text."""

    rows_RT: np.ndarray
    num_ids: int
    separator: int  #: the id that opens a document


class Known(NamedTuple):
    """The largest changes of log-probabilities, in nats. An honest model has zeros."""

    rows: float = 0.0  #: with other rows of the head
    later: float = 0.0  #: with other later tokens
    at: int = -1  #: position of the output that showed `later`
    neighbours: float = 0.0  #: with other sequences
    changes: int = 0  #: number of changed texts


NOTHING = Known()


class _Case(NamedTuple):
    """Outputs of a call that must equal those of another call at some places."""

    what: str  #: field of `Known`
    x_ND: np.ndarray
    kept_N: np.ndarray  #: bool


def parts(number: int, size: int, draw: np.random.Generator) -> np.ndarray:
    """Return 0 to number - 1 in random order, in parts of one size; the first ones also fill the last part."""
    return np.resize(draw.permutation(number), (-(-number // size), size))


def known(
    model: Model, text: Text, num_texts: int, batch: int, draw: np.random.Generator, found: Known = NOTHING
) -> Known:
    """Compare batches of scored text with partly changed ones; return the larger changes of these and `found`.

    At least `num_texts` are changed, each at its own place, since a model may leak in few texts or at few places.
    """
    num_batches = -(-num_texts // batch)
    batches = _batches(len(text.rows_RT), batch, draw)
    ids_MBT = np.stack([text.rows_RT[next(batches)] for _ in range(num_batches)])
    rows_RT = ids_MBT.reshape(-1, ids_MBT.shape[-1])
    places_QMB = [places(rows_RT, text.separator, draw).reshape(num_batches, batch) for _ in range(_ROUNDS)]
    found = found._replace(changes=found.changes + _ROUNDS * len(rows_RT))
    for ids_BT, *places_QB in over("leaks", [*zip(ids_MBT, *places_QMB, strict=True)], "batches"):
        x_ND = _flat(model.hidden(ids_BT))
        cases = [_other_ends(model, ids_BT, at_B, text, draw) for at_B in places_QB]
        if batch > 1:
            random_BT = draw.integers(0, text.num_ids, ids_BT.shape, ids_BT.dtype)
            for others_BT, num_kept in ((text.rows_RT[next(batches)], batch // 2), (random_BT, 1)):
                cases.append(_other_neighbours(model, ids_BT, others_BT, num_kept, draw))
        cases.append(_other_rows(x_ND, draw.permutation(cases[-1].x_ND), 0.5, draw))
        cases.append(_other_rows(x_ND, draw.choice(x_ND), 8 / model.chunk, draw))
        for places_K in parts(len(x_ND), model.chunk, draw):
            log_probs_KV = model.log_probs(x_ND[places_K])
            for case in cases:
                again_KV = model.log_probs(case.x_ND[places_K])
                apart_K = np.asarray(apart(log_probs_KV, again_KV)) * case.kept_N[places_K]
                worst = int(np.argmax(apart_K))
                if (nats := float(apart_K[worst])) > getattr(found, case.what):
                    at = {"at": int(places_K[worst] % ids_BT.shape[1])} if case.what == "later" else {}
                    found = found._replace(**{case.what: nats}, **at)
    return found


def _batches(num_rows: int, batch: int, draw: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield the batches of successive scorings."""
    while True:
        yield from parts(num_rows, batch, draw)


def _flat(x_BTD: Any) -> np.ndarray:
    return np.concatenate(np.asarray(x_BTD))


def _other_ends(
    model: Model, ids_BT: np.ndarray, at_B: np.ndarray, text: Text, draw: np.random.Generator
) -> _Case:
    pairs = zip(ids_BT, at_B, strict=True)
    changed_BT = np.stack([changed(ids_T, int(at), text, draw) for ids_T, at in pairs])
    kept_BT = np.arange(ids_BT.shape[1]) < at_B[:, None]
    return _Case("later", _flat(model.hidden(changed_BT)), kept_BT.reshape(-1))


def _other_neighbours(
    model: Model, ids_BT: np.ndarray, others_BT: np.ndarray, num_kept: int, draw: np.random.Generator
) -> _Case:
    """Replace all but some sequences of a batch."""
    kept_B1 = (draw.permutation(len(ids_BT)) < num_kept)[:, None]
    x_ND = _flat(model.hidden(np.where(kept_B1, ids_BT, others_BT)))
    return _Case("neighbours", x_ND, np.broadcast_to(kept_B1, ids_BT.shape).reshape(-1))


def _other_rows(x_ND: np.ndarray, others_ND: np.ndarray, share: float, draw: np.random.Generator) -> _Case:
    """Replace all but a share of the rows of the head."""
    kept_N = draw.random(len(x_ND)) < share
    return _Case("rows", np.where(kept_N[:, None], x_ND, others_ND), kept_N)


def places(rows_RT: np.ndarray, separator: int, draw: np.random.Generator) -> np.ndarray:
    """Return the position in each text from which to change it: int [R], 1 to T - 1.

    They cover all residues modulo 64 and both ends of a sequence; half of the others follow a separator, if any.
    """
    length = rows_RT.shape[1]
    residues = [draw.choice(range(r or _BLOCK, max(length, r + 1), _BLOCK) or [0]) for r in range(_BLOCK)]
    edges = [*range(1, 1 + _EDGES), *range(length - _EDGES, length)]
    wanted = draw.permutation(np.array([at for at in (*edges, *residues) if 0 < at < length]))[: len(rows_RT)]
    found_R = draw.integers(1, length, len(rows_RT))
    order = draw.permutation(len(rows_RT))
    found_R[order[: len(wanted)]] = wanted
    for row in order[len(wanted) :: 2]:
        if len(behind := np.flatnonzero(rows_RT[row, :-1] == separator) + 1):
            found_R[row] = draw.choice(behind)
    return found_R


def changed(ids_T: np.ndarray, at: int, text: Text, draw: np.random.Generator) -> np.ndarray:
    """Return a sequence with another end, whose first token differs.

    Near the start, the end is random, because coarse numbers about a whole text could survive smaller changes. Half of
    the other ends are those of another scored sequence. The rest are, with equal probability: random ids; the end of
    another sequence with separators at `at` and at random; the sequence's own end without separators, with one token
    changed, or after an extra separator.
    """
    kind = draw.integers(1, _KINDS) if draw.random() < 0.5 else 0
    if at <= _EDGES:
        kind = 1
    new_T, (num_ids, separator), num_later = ids_T.copy(), text[1:], len(ids_T) - at
    others_RT = text.rows_RT[text.rows_RT[:, at] != ids_T[at]]
    if kind in (0, 2) and len(others_RT):
        new_T[at:] = draw.choice(others_RT)[at:]
    if kind == 1:
        new_T[at:] = draw.integers(0, num_ids, num_later)
    if kind == 2:
        new_T[at:][draw.random(num_later) < 1 / 16] = separator
        new_T[at] = separator
    if kind == 3:
        new_T[at:][new_T[at:] == separator] = (separator + 1 + draw.integers(num_ids - 1)) % num_ids
    if kind == 5:
        new_T[at:] = np.concatenate([[separator], ids_T[at:-1]])
    if new_T[at] == ids_T[at]:
        new_T[at] = (ids_T[at] + 1 + draw.integers(num_ids - 1)) % num_ids
    return new_T


@jax.jit
def apart(first_KV: jax.Array, second_KV: jax.Array) -> jax.Array:
    """Return the largest difference in each row of log-probabilities: [K]. NaN differs from everything."""
    # The result is never NaN, which comparisons drop: a column of -inf would hide all others.
    differ_KV = jnp.where(first_KV == second_KV, 0.0, jnp.abs(first_KV - second_KV))
    return jnp.nan_to_num(jnp.max(differ_KV, axis=1), nan=jnp.finfo(jnp.float32).max)
