"""One finding of the doctor, for people and for programs."""

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

Fact = float | int | str | bool | None

#: `ok`, a note, or an obstacle.
Mark = Literal["ok", "note", "bad"]


class Check(msgspec.Struct, frozen=True):
    """What was checked, what was found, and whether that is fine."""

    name: str
    found: str  #: one line; if not ok, it ends with what to do
    ok: bool
    needed: bool = True  #: for the chosen track
    facts: Mapping[str, Fact] = {}  #: the finding as numbers; names have units

    @property
    def mark(self) -> Mark:
        """`ok`; `bad` if it is needed; else `note`."""
        return "ok" if self.ok else "bad" if self.needed else "note"


def numbers(version: str) -> list[int]:
    """Return the numbers of a version, which compare as versions do."""
    return [int(number) for number in re.findall(r"\d+", version)]
