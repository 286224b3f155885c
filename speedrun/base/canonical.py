"""Pairs of ids that a byte-pair tokenizer never emits one after the other: the mask of modded-nanogpt's #350.

If the last piece of one token and the first piece of the next could be merged at some point, the tokenizer would have
merged them. Only ranks and GPT-2's pattern decide it, no text. Other pairs may be impossible, too.
"""

import re
import unicodedata
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

#: GPT-2's pattern ends a word after these.
_CONTRACTION = re.compile(r"(^|[^\W_])'(s|t|re|ve|m|ll|d)$")
_NEVER = 2**31 - 1  #: a rank that no merge has


class Pairs(NamedTuple):
    """Impossible pairs: bit `column_of[next]` of row `row_of[id]`, the lowest bit of a byte first."""

    bits: np.ndarray  #: u8 [rows, columns / 8]
    row_of: np.ndarray  #: u16 [V]
    column_of: np.ndarray  #: u16 [V]


class _Piece(NamedTuple):
    """The first or last bytes of a token while ranks are in a range; `end` is exclusive."""

    text: bytes
    start: int
    end: int


#: Merges that a piece of a token would enter; the character at the seam: S space, N digit, L letter, O other, ? cut.
_Key = tuple[tuple[int, ...], str]


def impossible_pairs(tokens: Sequence[bytes]) -> Pairs:
    """Return the pairs, given the bytes of each id in the order of its merges; b"" is a special token.

    For GPT-2's 50,257 ids it takes seconds and 18.5 MB, as rows and columns that are equal are kept once.
    """
    ranks = {token: rank for rank, token in enumerate(tokens) if token}
    firsts, lasts, pairs = zip(*(_replayed(token, ranks) for token in tokens), strict=True)
    lefts, rights = defaultdict[bytes, list[int]](list), defaultdict[bytes, list[int]](list)
    for rank, pair in enumerate(pairs):
        if pair:
            lefts[pair[0]].append(rank)
            rights[pair[1]].append(rank)
    row_of, rows = _numbered((_entered(lasts[i], lefts), _last(token)) for i, token in enumerate(tokens))
    column_of, columns = _numbered(
        (_entered(firsts[i], rights), _first(token)) for i, token in enumerate(tokens)
    )
    found, by_row, by_column = np.zeros((len(rows), len(columns)), bool), _by_merge(rows), _by_merge(columns)
    for rank in by_row.keys() & by_column.keys():
        found[np.ix_(by_row[rank], by_column[rank])] = True
    kinds = np.array([kind for _, kind in rows]), np.array([kind for _, kind in columns])
    for last, first in product(*(np.unique(kind) for kind in kinds)):
        if not _joined(str(last), str(first)):
            found[np.ix_(kinds[0] == last, kinds[1] == first)] = False
    (first_row, same_row), (first_column, same_column) = _distinct(found), _distinct(found.T)
    bits = np.packbits(found[first_row][:, first_column], axis=1, bitorder="little")
    return Pairs(bits, same_row[row_of], same_column[column_of])


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each distinct row is first, and its number for every row: u16."""
    numbers: dict[bytes, int] = {}
    of = [numbers.setdefault(row.tobytes(), len(numbers)) for row in np.packbits(rows, axis=1)]
    return np.unique(of, return_index=True)[1], np.array(of, np.uint16)


def _replayed(
    token: bytes, ranks: Mapping[bytes, int]
) -> tuple[list[_Piece], list[_Piece], tuple[bytes, bytes] | None]:
    """Merge the bytes of a token; return its first pieces, its last pieces, and the merge that makes it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    firsts, lasts, pair = [(token[:1], 0)], [(token[-1:], 0)], None
    while len(parts) > 1:
        rank, at = min((ranks.get(a + b, _NEVER), i) for i, (a, b) in enumerate(pairwise(parts)))
        if rank == _NEVER:
            break
        pair = parts[at], parts[at + 1]
        parts[at : at + 2] = [pair[0] + pair[1]]
        # A merge of this rank at the seam comes after one to its left, before one to its right.
        if at == 0:
            firsts.append((parts[0], rank + 1))
        if at == len(parts) - 1:
            lasts.append((parts[-1], rank))
    return _pieces(firsts), _pieces(lasts), pair


def _pieces(starts: list[tuple[bytes, int]]) -> list[_Piece]:
    ends = [*(start for _, start in starts[1:]), _NEVER]
    return [_Piece(text, start, end) for (text, start), end in zip(starts, ends, strict=True)]


def _entered(pieces: list[_Piece], merges: Mapping[bytes, list[int]]) -> tuple[int, ...]:
    """Return the ranks of all merges that a piece would enter while it exists."""
    found: list[int] = []
    for text, start, end in pieces:
        ranks = merges.get(text, [])
        found += ranks[bisect_left(ranks, start) : bisect_left(ranks, end)]
    return tuple(found)


def _numbered(keys: Iterable[_Key]) -> tuple[np.ndarray, list[_Key]]:
    """Return the number of each key, and the distinct keys."""
    numbers: dict[_Key, int] = {}
    of = [numbers.setdefault(key, len(numbers)) for key in keys]
    return np.array(of), [*numbers]


def _by_merge(keys: list[_Key]) -> dict[int, list[int]]:
    found = defaultdict[int, list[int]](list)
    for number, (ranks, _) in enumerate(keys):
        for rank in ranks:
            found[rank].append(number)
    return found


def _joined(last: str, first: str) -> bool:
    """Say whether GPT-2's pattern can keep both sides of a seam in one word."""
    return first != "?" and last != "'" and last + first not in ("SS", "OL")


def _last(token: bytes) -> str:
    """Return the kind of the last character, or ' for a contraction."""
    text = token.decode(errors="surrogateescape")
    return "'" if _CONTRACTION.search(text) else _kind(text[-1:])


def _first(token: bytes) -> str:
    return _kind(token.decode(errors="surrogateescape")[:1])


def _kind(character: str) -> str:
    if not character or "\udc80" <= character <= "\udcff":  # a byte that is no whole character
        return "?"
    if character.isspace():
        return "S"
    category = unicodedata.category(character)[0]
    return category if category in "LN" else "O"
