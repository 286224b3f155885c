"""Finds outputs that depend on later tokens: changes the ends of texts, and compares the outputs before the change.

Legend: B sequences, T time, D model, N outputs, R texts.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

_BLOCK = 64  #: positions cover every residue modulo this
_EDGES = 3  #: positions at either end of a sequence
_KINDS = 6  #: of a change: see `changed`

Forward = Callable[[np.ndarray], np.ndarray]


class Change(NamedTuple):
    """A text with another end."""

    at: int  #: the first token that differs
    ids_T: np.ndarray


def texts(
    rows_RT: np.ndarray, separator: int, draw: np.random.Generator
) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Yield texts with the positions at which to change each: about 140 positions, spread evenly over the texts.

    Positions cover all residues modulo 64, both ends of a sequence, and places after a separator, which every
    second text gets before each of its positions.
    """
    length = rows_RT.shape[1]
    residues = [
        int(draw.choice(range(r or _BLOCK, max(length, r + 1), _BLOCK) or [0])) for r in range(_BLOCK)
    ]
    edges = [*range(1, 1 + _EDGES), *range(length - _EDGES, length)]
    inside = sorted({at for at in (*residues, *edges) if 0 < at < length})
    for number, part in enumerate(np.array_split(np.asarray(inside), len(rows_RT) // 2)):
        plain_T, planted_T = rows_RT[2 * number].copy(), rows_RT[2 * number + 1].copy()
        planted_T[part - 1] = separator
        yield plain_T, part.tolist()
        yield planted_T, part.tolist()


def changed(
    text_T: np.ndarray,
    at: int,
    kind: int,
    others_RT: np.ndarray,
    num_ids: int,
    separator: int,
    draw: np.random.Generator,
) -> Change:
    """Return a text with another end.

    Kinds: 0, the end of another text; 1, random ids; 2, the end of another text with separators at `at` and at random;
    3, its own end without separators; 4, its own end with one token changed; 5, its own end after an extra separator.
    """
    ids_T, length = text_T.copy(), len(text_T)
    other_T = others_RT[draw.integers(len(others_RT))]
    if kind in (0, 2):
        ids_T[at:] = other_T[at:]
    if kind == 1:
        ids_T[at:] = draw.integers(0, num_ids, length - at)
    if kind == 2:
        ids_T[at:][draw.random(length - at) < 1 / 16] = separator
        ids_T[at] = separator
    if kind == 3:
        ids_T[at:][ids_T[at:] == separator] = (separator + 1 + draw.integers(num_ids - 1)) % num_ids
    if kind == 5:
        ids_T[at:] = np.concatenate([[separator], text_T[at:-1]])
    if ids_T[at] == text_T[at]:
        ids_T[at] = (text_T[at] + 1 + draw.integers(num_ids - 1)) % num_ids
    return Change(at, ids_T)


class Leak(NamedTuple):
    """The largest change of an output that precedes the changed token."""

    nats: float
    at: int
    changes: int  #: number of changed texts


def leak(
    hidden: Forward,
    distance: Callable[[np.ndarray, np.ndarray], float],
    rows_RT: np.ndarray,
    batch: int,
    num_ids: int,
    separator: int,
    draw: np.random.Generator,
) -> Leak:
    """Change the ends of texts and compare every output before the change.

    Args:
        hidden: ids [B, T] to outputs [B, T, D].
        distance: between outputs [N, D], in nats.
        rows_RT: texts, an even number.
        batch: B.
        num_ids: size of the vocabulary.
        separator: id that opens a document.
        draw: random generator.
    """
    groups = [
        (
            text_T,
            [
                changed(text_T, at, int(kind), rows_RT, num_ids, separator, draw)
                for at in places
                for kind in draw.choice(_KINDS, 2, replace=False)
            ],
        )
        for text_T, places in texts(rows_RT, separator, draw)
    ]
    ids = [ids_T for text_T, changes in groups for ids_T in (text_T, *(change.ids_T for change in changes))]
    outputs = _in_batches(hidden, ids, batch)
    found = Leak(0.0, -1, sum(len(changes) for _, changes in groups))
    for _, changes in groups:
        before_TD = next(outputs)
        for change in changes:
            after_TD = next(outputs)
            differ = np.flatnonzero((before_TD[: change.at] != after_TD[: change.at]).any(axis=1))
            if len(differ):
                nats = distance(before_TD[differ], after_TD[differ])
                if not nats <= found.nats:  # true for NaN, too
                    found = found._replace(nats=nats, at=int(differ[-1]))
    return found


def _in_batches(hidden: Forward, ids: list[np.ndarray], batch: int) -> Iterator[np.ndarray]:
    for start in range(0, len(ids), batch):
        rows = ids[start : start + batch]
        yield from hidden(np.stack([*rows, *[rows[-1]] * (batch - len(rows))]))[: len(rows)]
