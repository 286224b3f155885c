"""One line of what the doctor says, for people and for programs."""

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

Fact = float | int | str | bool | None

#: The same for every machine: `ok`, worth knowing, or in the way.
Mark = Literal["ok", "note", "bad"]


class Check(msgspec.Struct, frozen=True):
    """What was looked at, what was found, and whether it is as it should be."""

    name: str
    found: str  #: one line; of what is not ok, the last part says what to do
    ok: bool
    needed: bool = True  #: for the track that was asked about
    facts: Mapping[str, Fact] = {}  #: the same as numbers; names carry their units

    @property
    def mark(self) -> Mark:
        """How to read it at a glance."""
        return "ok" if self.ok else "bad" if self.needed else "note"


def numbers(version: str) -> list[int]:
    """A version as something that compares: `0.10.2` is more than `0.9.9`."""
    return [int(number) for number in re.findall(r"\d+", version)]
