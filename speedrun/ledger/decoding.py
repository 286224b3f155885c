"""Decodes the files of a record, which are untrusted."""

from typing import TypeVar

import msgspec

from speedrun.ledger.format import ABOUT_SCHEMA, BATCH_SCHEMA, REPRODUCTION_SCHEMA, Strict, encode

_File = TypeVar("_File", bound=Strict)


class FormatError(ValueError):
    """A file of a record that does not have the declared form."""


def decode(raw: bytes, kind: type[_File]) -> _File:
    """Decode an untrusted file of a record, in exactly the form that `encode` writes.

    Raises:
        FormatError: no JSON, a missing, unknown or repeated key, a wrong type, other spacing, a number out of range, or
            a newer schema.
    """
    try:
        file = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(newer(raw) or str(error)) from None
    if encode(file) != raw:
        raise FormatError("not in canonical form (a key twice, or other spacing)")
    check_range(file)
    return file


_LONGEST_SCHEMA = 40  #: characters


class _Head(msgspec.Struct):
    schema: str = ""


def newer(raw: bytes) -> str:
    """Return the problem of a file whose schema is a later version of one of ours; else an empty text."""
    try:
        got = msgspec.json.decode(raw, type=_Head).schema
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    name, _, version = got[:_LONGEST_SCHEMA].partition("/")
    for own in (ABOUT_SCHEMA, BATCH_SCHEMA, REPRODUCTION_SCHEMA):
        own_name, _, own_version = own.partition("/")
        if name == own_name and version.isdecimal() and int(version) > int(own_version):
            return f"{name}/{version}, and this speedrun reads {own}: a newer one wrote it; update, and try again"
    return ""


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
                shown = (
                    f"{number:g}"
                    if isinstance(number, float)
                    else f"an integer of {number.bit_length():,} bits"
                )
                raise FormatError(f"{shown}: a number is out of range; at most 2^128 is permitted")
