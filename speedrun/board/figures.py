"""`context.toml`: what others published; and the marks between which pages state figures.

A page has a figure between two marks, `<!-- figure: NAME -->1.23<!-- end -->`, and `filled` writes it again.
"""

import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from speedrun.base.errors import UsageError

CONTEXT = "context.toml"
BEGIN, END = "<!-- figure: {} -->", "<!-- end -->"
BOARD = "board"  #: the name of the board in a page
_MARK = re.compile(f"({BEGIN.format('(.+?)')})(.*?)({END})", re.DOTALL)

Minutes = Annotated[float, Meta(gt=1e-3, lt=1e6)]


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A result that somebody else published."""

    name: str
    track: str
    hardware: str
    minutes: Minutes
    link: Annotated[str, Meta(pattern="^https://")]
    caveat: str
    date: Annotated[str, Meta(pattern=r"^(\d{4}-\d\d(-\d\d)?)?$")] = ""
    claim: Literal["", "merged", "open", "closed"] = ""  #: state of its thread, if it is only claimed there
    rules: str = ""  #: what RULES.md says of it

    def __post_init__(self) -> None:
        if self.claim and len(self.date) != len("2026-07-17"):
            raise ValueError(f"{self.name!r} is claimed on {self.date!r}; need year, month and day")

    @property
    def standing(self) -> str:
        """What the board says of it."""
        return f"claimed, {self.claim}" if self.claim else "published"


class PastRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A record of the PyTorch speedrun. One that was timed again is listed again; the last listing holds."""

    record: int
    date: date
    minutes: Minutes
    label: str = ""  #: shown beside the point
    recipe: str = ""  #: of this repository, if one implements the record
    link: Annotated[str, Meta(pattern="^(https://.+)?$")] = ""  #: with one, the record is also on the board
    caveat: str = ""
    rules: str = ""

    @property
    def published(self) -> Published:
        """As the board shows it."""
        name = f"PyTorch, record {self.record}" + (f": {self.label}" if self.label else "")
        where, when = ("main-8xh100", "8 H100", self.minutes, self.link), self.date.isoformat()
        return Published(name, *where, self.caveat, when, rules=self.rules)


class Rung(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A recipe of the ladder, oldest first."""

    recipe: str
    #: That it mirrors; the minutes of the last one are its own.
    records: Annotated[str, Meta(pattern=r"^(\d+-)?\d+$")]
    #: At the end of runs on a small track, one for each seed.
    losses: Annotated[tuple[float, ...], Meta(min_length=2)]


class Prediction(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What `speedrun plan` says of a recipe."""

    recipe: str
    kind: str  #: a key of `accelerators.DEVICES`
    num_devices: int
    total_s: float  #: of all steps
    step_ms: float  #: in the mean
    memory_gb: float  #: 10^9 bytes, on one device
    mfu: float  #: of the first stage


class Context(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`context.toml`."""

    history: tuple[PastRecord, ...] = ()
    published: tuple[Published, ...] = ()
    ladder: tuple[Rung, ...] = ()
    predicted: tuple[Prediction, ...] = ()
    scaling: str = ""  #: what `speedrun plan --nodes` prints

    @property
    def results(self) -> tuple[Published, ...]:
        """Everything of others that the board shows."""
        return (*(one.published for one in self.history if one.link), *self.published)


def read(folder: Path) -> Context:
    """Return the context of a folder of records, which is empty without its file.

    Raises:
        UsageError: if it is malformed.
    """
    path = folder / CONTEXT
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Context)
    except FileNotFoundError:
        return Context()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}; correct it") from None


def filled(page: str, figures: Mapping[str, str]) -> str:
    """Return a page with these figures between their marks; raise UsageError for a mark without its end."""
    if page.count(BEGIN.partition("{")[0]) != len(_MARK.findall(page)):
        raise UsageError(f"a mark {BEGIN.format('NAME')} has no {END}; restore the marks")
    return _MARK.sub(lambda mark: f"{mark[1]}{figures.get(mark[2], mark[3])}{mark[4]}", page)
