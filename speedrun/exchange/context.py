"""Curves of other people's runs, for comparison with our records. They are never ranked.

Logs from elsewhere have no seed, no digest of the data and no chain of hashes, so none of them can become a `Record`. A
source is one imported file; it may hold many runs. Losses are nats per token. Times are seconds on the clock of whoever
made the log; what that clock counted is unknown.
"""

from collections.abc import Sequence

import msgspec

from speedrun.ground.console import clean

_NAME_LIMIT = 200  #: characters
_MOST_STEPS = 10**12
_MOST_NUMBER = 1e12  #: of a loss, of seconds


class Point(msgspec.Struct, frozen=True, omit_defaults=True):
    """One loss of a curve."""

    step: int  #: steps done
    loss: float | None  #: None where it was not finite
    train_time_s: float | None = None  #: None where the log has none, or one that goes back

    @property
    def plausible(self) -> bool:
        """Whether all numbers are in range; NaN and infinity are not."""
        numbers = [number for number in (self.loss, self.train_time_s) if number is not None]
        return 0 <= self.step <= _MOST_STEPS and all(0 <= number <= _MOST_NUMBER for number in numbers)


class Problem(msgspec.Struct, frozen=True):
    """A line that could not be taken as it is, and what was done with it."""

    line: int  #: from 1
    message: str


class ContextRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """One run of a source."""

    name: str
    num_steps: int | None  #: planned; the last validation may come earlier
    validations: tuple[Point, ...]
    final_loss: float | None
    train_time_s: float | None  #: at the last validation
    train_losses: tuple[Point, ...] = ()
    software: dict[str, str] = {}
    device: str | None = None
    num_devices: int | None = None


class Context(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="schema", tag="speedrun.context/1"):
    """The contents of one file."""

    source: str  #: its name, without folders
    sha256: str  #: of the file, before decompression
    runs: tuple[ContextRun, ...]
    problems: tuple[Problem, ...] = ()  #: the first ones
    num_problems: int = 0  #: all of them


def context_run(
    name: str, num_steps: int | None, validations: Sequence[Point], train_losses: Sequence[Point] = ()
) -> ContextRun:
    """Return a run with its final loss and time, and a name that is safe to print."""
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
    """Return the run with its software and hardware, as text that is safe to print."""
    return msgspec.structs.replace(
        run,
        software={_shown(name): _shown(version) for name, version in software.items()},
        device=None if device is None else _shown(device),
        num_devices=num_devices,
    )


def _shown(text: str) -> str:
    return clean(text, limit=_NAME_LIMIT)


def can_identify(points: Sequence[Point]) -> bool:
    """Whether two runs with these validations are copies; a single loss without a time may be equal by chance."""
    return len(points) > 1 or any(point.train_time_s is not None for point in points)
