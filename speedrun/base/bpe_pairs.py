"""Pairs of ids that a byte-pair tokenizer never emits one after the other: the mask of modded-nanogpt's #350.

It would have merged their pieces at the seam, as ranks and GPT-2's pattern tell. Other pairs may be impossible, too.
"""

import re
import unicodedata
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

#: Among the constants of a recipe, the inputs NAME.bits, NAME.row_of and NAME.column_of.
IMPOSSIBLE_PAIRS = "impossible pairs"
#: GPT-2's pattern ends a word after these.
_ENDINGS = ("s", "t", "re", "ve", "m", "ll", "d")
_CONTRACTION = re.compile(rf"(^|[^\W_])'({'|'.join(_ENDINGS)})$")
_NEVER = 2**31 - 1  #: a rank that no merge has


class Pairs(NamedTuple):
    """Impossible pairs: bit `column_of[next]` of row `row_of[id]`, the lowest bit of a byte first."""

    bits: np.ndarray  #: u8 [rows, columns / 8]
    row_of: np.ndarray  #: u16 [V]
    column_of: np.ndarray  #: u16 [V]


#: Bytes of a token's first or last piece, and the ranks at which it begins and ends to be that.
_Piece = tuple[bytes, int, int]
#: Merges that a piece would enter; the seam's character: S space, N digit, L letter, O other, ? cut, ' contraction.
_Key = tuple[tuple[int, ...], str]


def impossible_pairs(tokens: Sequence[bytes]) -> Pairs:
    """Return the pairs, given the bytes of each id in the order of its merges; b"" is a special token.

    For GPT-2's 50,257 ids it takes seconds and 18.5 MB, as rows and columns that are equal are kept once.
    """
    ranks = {token: rank for rank, token in enumerate(tokens) if token}
    firsts, lasts, pairs = zip(*(replayed(token, ranks) for token in tokens), strict=True)
    lefts, rights = defaultdict[bytes, list[int]](list), defaultdict[bytes, list[int]](list)
    for rank, pair in enumerate(pairs):
        if pair:
            lefts[pair[0]].append(rank)
            rights[pair[1]].append(rank)
    texts = [token.decode(errors="surrogateescape") for token in tokens]
    # An ending that is not one token with its apostrophe may come after it in pieces.
    loose = {end[i:] for end in _ENDINGS if f"'{end}".encode() not in ranks for i in range(len(end))}
    ends = ("'" if text in loose or _CONTRACTION.search(text) else _kind(text[-1:]) for text in texts)
    starts = (_kind(text[:1]) for text in texts)
    row_of, last_R, by_row = _numbered((_entered(p, lefts), end) for p, end in zip(lasts, ends, strict=True))
    column_of, first_C, by_column = _numbered(
        (_entered(p, rights), start) for p, start in zip(firsts, starts, strict=True)
    )
    found = np.zeros((len(last_R), len(first_C)), bool)
    for rank in by_row.keys() & by_column.keys():
        found[np.ix_(by_row[rank], by_column[rank])] = True
    # GPT-2's pattern splits the text at these seams.
    for last, first in product(map(str, np.unique(last_R)), map(str, np.unique(first_C))):
        if first == "?" or last == "'" or last + first in ("SS", "OL"):
            found[np.ix_(last_R == last, first_C == first)] = False
    (first_row, same_row), (first_column, same_column) = _distinct(found), _distinct(found.T)
    bits = np.packbits(found[first_row][:, first_column], axis=1, bitorder="little")
    return Pairs(bits, same_row[row_of], same_column[column_of])


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each distinct row is first, and its number for every row: u16."""
    numbers: dict[bytes, int] = {}
    of = [numbers.setdefault(row.tobytes(), len(numbers)) for row in np.packbits(rows, axis=1)]
    return np.unique(of, return_index=True)[1], np.array(of, np.uint16)


def replayed(token: bytes, ranks: Mapping[bytes, int]) -> tuple[list[_Piece], list[_Piece], list[bytes]]:
    """Merge the bytes of a token; return its first pieces, its last pieces, and both sides of the last merge."""
    parts = [token[i : i + 1] for i in range(len(token))]
    firsts, lasts, pair = [(token[:1], 0, _NEVER)], [(token[-1:], 0, _NEVER)], []
    while len(parts) > 1:
        rank, at = min((ranks.get(a + b, _NEVER), i) for i, (a, b) in enumerate(pairwise(parts)))
        if rank == _NEVER:
            break
        pair = parts[at : at + 2]
        parts[at : at + 2] = [b"".join(pair)]
        # A merge of this rank at the seam comes after one to its left, before one to its right.
        for pieces, changed, start in ((firsts, at == 0, rank + 1), (lasts, at == len(parts) - 1, rank)):
            if changed:
                pieces[-1] = (*pieces[-1][:2], start)
                pieces.append((parts[at], start, _NEVER))
    return firsts, lasts, pair


def _entered(pieces: list[_Piece], merges: Mapping[bytes, list[int]]) -> tuple[int, ...]:
    """Return the ranks of all merges that a piece would enter while it exists."""
    found: list[int] = []
    for text, start, end in pieces:
        ranks = merges.get(text, [])
        found += ranks[bisect_left(ranks, start) : bisect_left(ranks, end)]
    return tuple(found)


def _numbered(keys: Iterable[_Key]) -> tuple[np.ndarray, np.ndarray, dict[int, list[int]]]:
    """Return the number of each key; the characters of the distinct keys, and their numbers by merge."""
    numbers, by_merge = dict[_Key, int](), defaultdict[int, list[int]](list)
    of = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
    for (ranks, _), number in numbers.items():
        for rank in ranks:
            by_merge[rank].append(number)
    return of, np.array([kind for _, kind in numbers]), by_merge


def _kind(character: str) -> str:
    if not character or "\udc80" <= character <= "\udcff":  # a byte that is no whole character
        return "?"
    category = unicodedata.category(character)[0]
    return "S" if character.isspace() else category if category in "LN" else "O"
