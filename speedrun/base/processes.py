"""A run in several processes: they agree on results, and stop at the same step.

Each process has the devices of its node, and only process 0 writes. If a process dies, JAX ends the others with SIGABRT
once its heartbeat is missing. Python does no cleanup then, so results must be on disk before.
"""

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count as counter
from typing import Any, TypeVar

import msgspec

from speedrun.base import signals
from speedrun.base.errors import SpeedrunError, Terminated, UsageError
from speedrun.base.output import expected

T = TypeVar("T")

#: One process may have to make data that the others have. JAX detects dead processes sooner.
_TIMEOUT_MS = 3_600_000

_group = (1, 0, 1)
_calls = counter()


def configure(count: int, index: int, num_nodes: int = 1) -> None:
    """Set the number of processes, the index of this one, and the number of nodes."""
    global _group
    _group = count, index, num_nodes


def count() -> int:
    """Return the number of processes of this run."""
    return _group[0]


def index() -> int:
    """Return the index of this process."""
    return _group[1]


def num_nodes() -> int:
    """Return the number of machines, which run equally many processes."""
    return _group[2]


def is_first() -> bool:
    """Return whether this is process 0, which writes."""
    return index() == 0


def client() -> Any:
    """Return JAX's client of its distributed service."""
    from jax._src import distributed

    return distributed.global_state.client


def barrier() -> None:
    """Wait until all processes are here."""
    if count() > 1:
        client().wait_at_barrier(f"speedrun {next(_calls)}", _TIMEOUT_MS)


class _Outcome(msgspec.Struct):
    facts: dict[str, str] = {}
    error: str = ""
    exit_code: int = 0


def all_processes_agree(
    work: Callable[[], T],
    facts: Callable[[T], dict[str, str]],
    otherwise: str = "start all of them with the same flags, code, packages and data",
    refuse: type[SpeedrunError] = UsageError,
) -> T:
    """Do some work in each process; raise in all of them unless all succeed with equal `facts` of their results.

    If facts differ, raise `refuse`, whose message ends with `otherwise`.
    """
    if count() == 1:
        return work()
    try:
        done = work()
        mine = _Outcome(facts(done))
    except BaseException as error:
        if not isinstance(known := expected(error), SpeedrunError):
            raise
        done, mine = None, _Outcome(error=str(known), exit_code=known.exit_code)
    service, key = client(), f"speedrun {next(_calls)}"
    service.key_value_set(f"{key}/{index()}", msgspec.json.encode(mine).decode())
    texts = [service.blocking_key_value_get(f"{key}/{i}", _TIMEOUT_MS) for i in range(count())]
    outcomes = [msgspec.json.decode(text, type=_Outcome) for text in texts]
    for i, found in enumerate(outcomes):
        if found.error:
            who = "" if outcomes[0].error else f"process {i}: "
            raise SpeedrunError(f"{who}{found.error}", found.exit_code)
    for i, found in enumerate(outcomes):
        for name, value in found.facts.items():
            if value != (first := outcomes[0].facts.get(name, "none")):
                raise refuse(f"process {i} has {name} {value}, process 0 has {first}; {otherwise}")
    return done  # pyright: ignore[reportReturnType] - None only after an error


def of_first(work: Callable[[], str]) -> str:
    """Return in all processes what process 0 makes."""
    if count() == 1:
        return work()
    key = f"speedrun {next(_calls)}"
    if is_first():
        client().key_value_set(key, work())
    return client().blocking_key_value_get(key, _TIMEOUT_MS)


def handled_by(handler: Any) -> AbstractContextManager[None]:
    """Use `signals.handled_by`; with several processes for SIGINT only, because JAX handles SIGTERM."""
    return signals.handled_by(handler, *([signal.SIGINT] if count() > 1 else signals.STOPS))


def immediate_stop() -> Any:
    """Return the handler for phases with nothing to save: stop now, or as soon as all processes can."""
    return _send_sigterm if count() > 1 else signals.stop


def _send_sigterm(_number: int, _frame: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class _Collective(signals.Deferred):
    """A signal to any process stops all of them at the same call of `requested` or `check`.

    All processes must make the same calls in the same order. A call does not communicate.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls, self._reached = counter(), False

    def __call__(self, number: int, frame: object) -> None:
        super().__call__(number, frame)
        _send_sigterm(number, frame)

    @property
    def requested(self) -> bool:
        from jax.experimental import multihost_utils

        if not self._reached:
            self._reached = multihost_utils.reached_preemption_sync_point(next(self._calls))
        return self._reached

    def check(self) -> None:
        if self.requested:
            raise Terminated(f"stopped by a signal to one of {count()} processes")


def deferred_stop() -> signals.Deferred:
    """Return a handler that stops the run, in all its processes, between two steps."""
    return _Collective() if count() > 1 else signals.Deferred()
