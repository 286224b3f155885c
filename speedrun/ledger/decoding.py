"""Decodes the files of a record, which are untrusted."""

from typing import TypeVar

import msgspec

from speedrun.ledger.format import Strict, encode

_File = TypeVar("_File", bound=Strict)


class FormatError(ValueError):
    """A file of a record that does not have the declared form."""


def decode(raw: bytes, kind: type[_File]) -> _File:
    """Decode an untrusted file of a record, in exactly the form that `encode` writes.

    Raises:
        FormatError: no JSON, a missing, unknown or repeated key, a wrong type, other spacing, a number out of range, or
            another schema.
    """
    try:
        file = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(str(error)) from None
    if encode(file) != raw:
        raise FormatError("not in canonical form (a key twice, or other spacing)")
    check_range(file)
    return file


#: The end of float32: above every honest number of a record. Squares of it, and sums of those, are finite.
_LARGEST = 2.0**128


def check_range(holder: object) -> None:
    """Check every number in a file or event, at any depth.

    Raises:
        FormatError: if one is not finite, or its magnitude is above 2^128.
    """
    left = [msgspec.to_builtins(holder)]
    while left:
        match left.pop():
            case dict() as table:
                left += table.values()
            case list() | tuple() as row:
                left += row
            case int() | float() as number if not -_LARGEST <= number <= _LARGEST:
                raise FormatError("a number is out of range; at most 2^128 is permitted")
