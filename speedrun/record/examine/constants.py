"""Counts the bytes that the constants of programs hold, and so bounds the text that they may have memorised.

A code of b bits has room for one of 2^b texts. So it lowers the mean loss of N tokens by at most b ln 2 / N nats, on
average over texts, however a program uses it. The code is public: equal constants count once; an array is the shortest
of its values, their differences and second differences along its first axis (a schedule is nearly linear); LZMA packs
all of them. Source of the bound: the MDL principle, Rissanen 1978.
"""

import lzma
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

#: A constant as MLIR prints it: the hex digits of an array, or nested numbers; and its type.
_CONSTANT = re.compile(r'\bdense(?:_resource)?<("0x[0-9A-F]*"|[^">]*)>(?: : tensor<([^>]*)>)?')
#: The bytes of arrays that are printed elsewhere, and texts that look like them.
_HEX = re.compile(r'"0x([0-9A-F]*)"')
_LOCATION = re.compile(r'^#loc.*\n| loc\((?:#loc\d*|"[^"]*"(?:\(#loc\d*\))?|[^()\n]*)\)', re.MULTILINE)
_DTYPES = {"f32": np.float32, "i32": np.int32, "ui32": np.uint32}
_LZMA: Any = {"format": lzma.FORMAT_RAW, "filters": [{"id": lzma.FILTER_LZMA2, "preset": 6}]}


class Held(NamedTuple):
    """What the constants of programs hold."""

    num_bytes: int  #: of their code
    num_literals: int  #: distinct numbers that stand alone, each a part of a program's structure


def held(texts: Iterable[str], tables: str = "") -> Held:
    """Code all distinct constants of programs, given as MLIR prints them, together.

    Of `tables`, the program that computes constants, the whole text counts: its operations could spell a table.
    """
    found, hexes = dict[tuple[str, str], None](), set[str]()
    for text in texts:
        found |= dict.fromkeys(_CONSTANT.findall(text))
        hexes |= {*_HEX.findall(text)}
    arrays = {value[3:-1]: type_ for value, type_ in found if value.startswith('"')}
    numbers = sorted({value for value, _ in found if not value.startswith('"')})
    coded = [_shortest(bytes.fromhex(value), arrays.get(value, "")) for value in sorted(hexes)]
    literals = [value for value in numbers if "[" not in value]
    whole = "\n".join([*numbers, _LOCATION.sub("", tables)])
    return Held(len(_packed(b"".join(coded) + whole.encode())), len(literals))


def _packed(raw: bytes) -> bytes:
    return lzma.compress(raw, **_LZMA)


def _shortest(raw: bytes, type_: str) -> bytes:
    """Return the form of an array that packs best."""
    return min(_forms(raw, type_), key=lambda form: len(_packed(form)))


def _forms(raw: bytes, type_: str) -> Iterator[bytes]:
    """Yield forms of an array from which it can be made again, each column after the other."""
    yield raw
    *shape, dtype = type_.split("x")
    if dtype not in _DTYPES or not shape or not raw:
        return
    x_NK = np.frombuffer(raw, _DTYPES[dtype])
    if len(x_NK) % int(shape[0]):
        return
    x_NK = x_NK.reshape(int(shape[0]), -1)
    bits_NK = x_NK.view(np.int32)
    yield np.diff(bits_NK, axis=0, prepend=0).T.tobytes()  # wraps around, which can be undone
    next_NK = np.zeros_like(x_NK)
    with np.errstate(all="ignore"):
        next_NK[2:] = 2 * x_NK[1:-1].astype(np.float64) - x_NK[:-2]
    yield (bits_NK - next_NK.view(np.int32)).T.tobytes()
