"""Curves of other people's runs, as context beside our records: shown, never ranked.

Logs from elsewhere have no seed, no digest of data and no chain of hashes, so nothing here is a `Record`, and nothing
can become one. A source is one file that was imported; it may hold many runs. Losses are nats per token, times are
seconds on the clock of whoever made the log: what it counted is not known here.
"""

import itertools
from collections.abc import Sequence

import msgspec

from speedrun.ground.console import clean
from speedrun.ledger.runfile import FormatError

CONTEXT_SCHEMA = "speedrun.context/1"

_NAME_LIMIT = 200  #: characters
_MOST_STEPS = 10**12
_MOST_NUMBER = 1e12  #: of a loss, of seconds


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base: every key is known."""


class Point(_Strict, frozen=True):
    """One loss of a curve."""

    step: int  #: steps done
    loss: float | None  #: None where it was not a finite number
    train_time_s: float | None = None  #: None where the log tells none, or one that goes back


class Problem(_Strict, frozen=True):
    """A line that was not taken as it stands, and what came of it."""

    line: int  #: from 1
    message: str


class ContextRun(_Strict, frozen=True):
    """One run of a source: what was read, and what follows from it."""

    name: str
    num_steps: int | None  #: the planned ones; the last validation may come earlier
    validations: tuple[Point, ...]
    final_loss: float | None
    train_time_s: float | None  #: at the last validation
    train_losses: tuple[Point, ...] = ()
    software: dict[str, str] = {}
    device: str | None = None
    num_devices: int | None = None


class Context(_Strict, frozen=True, tag_field="schema", tag=CONTEXT_SCHEMA):
    """What was found in one file."""

    source: str  #: its name, without folders
    sha256: str  #: of the file as it was
    runs: tuple[ContextRun, ...]
    problems: tuple[Problem, ...] = ()
    num_problems: int = 0  #: with those that were too many to be kept


def context_run(
    name: str, num_steps: int | None, validations: Sequence[Point], train_losses: Sequence[Point] = ()
) -> ContextRun:
    """A run; what follows from its curves is derived here, and its name is made safe to print."""
    last = validations[-1] if validations else Point(0, None)
    return ContextRun(
        name=_shown(name),
        num_steps=num_steps,
        validations=tuple(validations),
        final_loss=last.loss,
        train_time_s=last.train_time_s,
        train_losses=tuple(train_losses),
    )


def on_machine(
    run: ContextRun, *, software: dict[str, str], device: str | None, num_devices: int | None
) -> ContextRun:
    """The same run with what its log says of where it ran; texts are made safe to print."""
    return msgspec.structs.replace(
        run,
        software={_shown(name): _shown(version) for name, version in software.items()},
        device=None if device is None else _shown(device),
        num_devices=num_devices,
    )


def _shown(text: str) -> str:
    return clean(text, limit=_NAME_LIMIT)


def encode(context: Context) -> bytes:
    """The one way to write a context file."""
    return msgspec.json.format(msgspec.json.encode(context), indent=1) + b"\n"


def decode(raw: bytes) -> Context:
    """Reads what `encode` wrote, and nothing else.

    Raises:
        FormatError: not JSON, an unknown or missing key, other spacing, steps that do not rise, a wrong derived number.
    """
    try:
        context = msgspec.json.decode(raw, type=Context)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(str(error)) from None
    if encode(context) != raw:
        raise FormatError("not in canonical form (a key twice, or other spacing)")
    for run in context.runs:
        if problem := _problem(run):
            raise FormatError(f"run {_shown(run.name)}: {problem}")
    return context


def _problem(run: ContextRun) -> str | None:
    """What is wrong with a run, or None."""
    again = on_machine(
        context_run(run.name, run.num_steps, run.validations, run.train_losses),
        software=run.software,
        device=run.device,
        num_devices=run.num_devices,
    )
    if again != run:
        return "a derived number is not the one that follows, or a name holds what cannot be shown"
    for curve in (run.validations, run.train_losses):
        if any(not plausible(point) for point in curve):
            return "a number is out of range"
        steps = [point.step for point in curve]
        if any(after <= before for before, after in itertools.pairwise(steps)):
            return "steps must rise"
    return None


def plausible(point: Point) -> bool:
    """Whether the numbers of a point are ones that a log can tell; NaN and infinity are not."""
    numbers = [number for number in (point.loss, point.train_time_s) if number is not None]
    return 0 <= point.step <= _MOST_STEPS and all(0 <= number <= _MOST_NUMBER for number in numbers)


def is_telling(points: Sequence[Point]) -> bool:
    """Whether equal curves like this one are copies: a lone loss of four digits without a time may be chance."""
    return len(points) > 1 or any(point.train_time_s is not None for point in points)
