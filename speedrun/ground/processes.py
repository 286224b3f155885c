"""One run in several processes: who they are, how they agree, and how they stop at the same moment.

Each has the devices of its node, and all run the same program on all devices; process 0 alone writes. How they meet
and leave stands in `meet`. One that dies is noticed by its missing heartbeat, and JAX ends the others with SIGABRT:
nothing that Python has planned for its end is done then, so what must not be lost is on disk before.
"""

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count as counter
from typing import Any, TypeVar

import msgspec

from speedrun.ground import signals
from speedrun.ground.errors import SpeedrunError, Terminated, UsageError

T = TypeVar("T")

_PATIENCE_MS = 3_600_000  #: one may have to make data that the others have; of the dead JAX knows sooner

_here = (1, 0, 1)
_meetings = counter()


def are(count: int, index: int, num_nodes: int = 1) -> None:
    """Says how many processes there are, which one this is, and on how many machines; before devices are used."""
    global _here
    _here = count, index, num_nodes


def count() -> int:
    """How many processes share this run."""
    return _here[0]


def index() -> int:
    """Which of them this one is."""
    return _here[1]


def num_nodes() -> int:
    """On how many machines they run; each has as many."""
    return _here[2]


def is_first() -> bool:
    """Whether this is the one that writes."""
    return index() == 0


def client() -> Any:
    """JAX's client of the service that all are joined to."""
    from jax._src import distributed

    return distributed.global_state.client


def barrier() -> None:
    """Waits until all processes are here; nothing to wait for in one."""
    if count() > 1:
        client().wait_at_barrier(f"speedrun {next(_meetings)}", _PATIENCE_MS)


class _Said(msgspec.Struct):
    facts: dict[str, str] = {}
    refused: str = ""
    exit_code: int = 0


def agreed(
    work: Callable[[], T],
    facts: Callable[[T], dict[str, str]],
    otherwise: str = "start all of them with the same flags, code, packages and data",
    refuse: type[SpeedrunError] = UsageError,
) -> T:
    """Does some work, and goes on only if all processes could do it and found the same.

    Args:
        work: runs in every process, unsynchronised.
        facts: what must be the same of its outcome, by name; is not asked for in one process.
        otherwise: what to do if it is not.
        refuse: the error that says so.

    Raises:
        SpeedrunError: what `work` raised here or in another process; names it, and what differs.
    """
    if count() == 1:
        return work()
    try:
        done = work()
        mine = _Said(facts(done))
    except SpeedrunError as error:
        done, mine = None, _Said(refused=str(error), exit_code=error.exit_code)
    all_said = _exchanged(mine)
    for i, said in enumerate(all_said):
        if said.refused:
            error = SpeedrunError(said.refused if all_said[0].refused else f"process {i}: {said.refused}")
            error.exit_code = said.exit_code
            raise error
    for i, said in enumerate(all_said):
        for name, value in said.facts.items():
            if value != (first := all_said[0].facts.get(name, "none")):
                raise refuse(f"process {i} has {name} {value}, process 0 has {first}; {otherwise}")
    return done  # pyright: ignore[reportReturnType] - None only where somebody refused


def _exchanged(mine: _Said) -> list[_Said]:
    service, key = client(), f"speedrun {next(_meetings)}"
    service.key_value_set(f"{key}/{index()}", msgspec.json.encode(mine).decode())
    return [
        msgspec.json.decode(service.blocking_key_value_get(f"{key}/{i}", _PATIENCE_MS), type=_Said)
        for i in range(count())
    ]


def handled_by(handler: Any) -> AbstractContextManager[None]:
    """`signals.handled_by`; in several processes of SIGINT only: JAX has SIGTERM, and tells the others of it."""
    return signals.handled_by(handler, *([signal.SIGINT] if count() > 1 else signals.STOPS))


def at_once() -> Any:
    """The handler that stops a run which has nothing to keep yet; of several processes, as soon as all can."""
    return _pass_on if count() > 1 else signals.stop


def _pass_on(_number: int, _frame: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class _Together(signals.Later):
    """Of several processes: the first signal to any of them stops all at the same call of `asked` or `check`.

    All must make the same calls in the same order. A call costs no communication.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls, self._reached = counter(), False

    def __call__(self, number: int, frame: object) -> None:
        super().__call__(number, frame)
        _pass_on(number, frame)

    @property
    def asked(self) -> bool:
        from jax.experimental import multihost_utils

        if not self._reached:
            self._reached = multihost_utils.reached_preemption_sync_point(next(self._calls))
        return self._reached

    def check(self) -> None:
        if self.asked:
            raise Terminated(f"stopped by a signal to one of {count()} processes")


def stopping() -> signals.Later:
    """The handler that waits for a moment at which the run, in all its processes, can stop."""
    return _Together() if count() > 1 else signals.Later()
