"""`context.toml`: every published and every predicted figure, and the pages that state them.

A page has a figure between two marks, `<!-- figure: published 89 minutes -->1.23<!-- end -->`, and `filled` writes it
again.
"""

import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from speedrun.ground import devices
from speedrun.ground.errors import UsageError, unknown

CONTEXT = "context.toml"
BEGIN, END = "<!-- figure: {} -->", "<!-- end -->"
MAIN = ("h100", 8)  #: kind and number of devices of the published records
DOLLARS = 2.5  #: a GPU and hour, where a page states a price
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
    kind: str  #: a key of `devices.DEVICES`
    num_devices: int
    total_s: float  #: of all steps
    step_ms: float  #: in the mean
    memory_gb: float  #: 10^9 bytes, on one device
    mfu: float  #: of the first stage


class Context(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`context.toml`."""

    history: tuple[PastRecord, ...] = ()
    ladder: tuple[Rung, ...] = ()
    predicted: tuple[Prediction, ...] = ()
    scaling: str = ""  #: what `speedrun plan --nodes` prints
    published: tuple[Published, ...] = ()

    @property
    def results(self) -> tuple[Published, ...]:
        """Everything of others that the board shows."""
        return (*(one.published for one in self.history if one.link), *self.published)

    @property
    def rungs(self) -> list[tuple[Rung, float, float]]:
        """Each rung of the ladder with its published and its predicted minutes on eight H100.

        Raises:
            KeyError: if one of them is missing.
        """
        published = {one.record: one.minutes for one in self.history}
        predicted = {
            one.recipe: one.total_s / 60 for one in self.predicted if (one.kind, one.num_devices) == MAIN
        }
        return [
            (rung, published[int(rung.records.rpartition("-")[2])], predicted[rung.recipe])
            for rung in self.ladder
        ]


def read(folder: Path) -> Context:
    """Return the context of a folder of records, which is empty without its file.

    Raises:
        UsageError: if it is malformed, or a rung of its ladder has no minutes.
    """
    path = folder / CONTEXT
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=Context)
        _ = found.rungs
    except FileNotFoundError:
        return Context()
    except KeyError as error:
        raise UsageError(f"{path}: the ladder needs the minutes of {error}; add them") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}; correct it") from None
    return found


def texts(context: Context) -> dict[str, str]:
    """Return every figure by its name, as pages state it."""
    found: dict[str, str] = {}
    for past in context.history:
        name = f"published {past.record}"
        found |= {f"{name} minutes": _three(past.minutes), f"{name} seconds": _three(60 * past.minutes)}
        found[f"{name} dollars"] = _dollars(60 * past.minutes, MAIN[1])
    for one in context.predicted:
        name = f"predicted {one.recipe} {one.num_devices}x{one.kind}"
        memory = f"{one.memory_gb:.1f} | {devices.load(one.kind).memory_bytes / 1e9:.1f}"
        found |= {
            f"{name} minutes": _three(one.total_s / 60),
            f"{name} seconds": _three(one.total_s),
            f"{name} ms": _three(one.step_ms),
            f"{name} card": f"{memory} | {one.step_ms:,.0f} | {one.total_s / 60:.0f} | {one.mfu:.0%}",
            f"{name} dollars": _dollars(one.total_s, one.num_devices),
        }
    for rung, published, predicted in context.rungs:
        found[f"ladder {rung.recipe}"] = f"{_three(published)}, {_three(predicted)}"
    if context.ladder:
        ratios = [published / predicted for _, published, predicted in context.rungs]
        found["ladder ratios"] = f"{min(ratios):.2f} to {max(ratios):.2f}"
    found["scaling"] = f"\n```sh\n$ speedrun plan --recipe record21 --nodes 1,2,8,32\n{context.scaling}```\n"
    return found


def _three(number: float) -> str:
    """Return three digits, without an exponent."""
    return f"{number:.3g}" if number < 1000 else f"{float(f'{number:.3g}'):,.0f}"


def _dollars(time_s: float, num_devices: int) -> str:
    return f"{time_s / 3600 * num_devices * DOLLARS:.2f}"


def filled(page: str, figures: Mapping[str, str]) -> str:
    """Return a page with every figure as it is now.

    Raises:
        UsageError: for a name that there is not, or a mark without its end.
    """

    def now(found: re.Match[str]) -> str:
        if found[2] not in figures:
            raise unknown("figure", found[2], figures)
        return f"{found[1]}{figures[found[2]]}{found[4]}"

    if page.count(BEGIN.partition("{")[0]) != len(_MARK.findall(page)):
        raise UsageError(f"a mark {BEGIN.format('NAME')} has no {END}; restore the marks")
    return _MARK.sub(now, page)
