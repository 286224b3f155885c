"""What a run sends to the process that keeps its log: `train.keeper`."""

import os
import threading
from contextlib import suppress
from typing import Protocol

import msgspec

from speedrun.base.runlog import AnyEvent


class Message(msgspec.Struct, frozen=True):
    """An event; one that is held counts only with the next."""

    event: AnyEvent
    hold: bool = False


#: Return a message from its bytes; raise msgspec.DecodeError for anything else.
received = msgspec.json.Decoder(Message).decode


class Log(Protocol):
    """Takes the events of a run: a `Sender`, or a `RunLog` in the same process."""

    def emit(self, event: AnyEvent, *, hold: bool = False) -> None:
        """Take an event."""
        ...


class Sender:
    """Sends events through a pipe. If the keeper has died, this process is about to end, too."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - it has no name
        self._pipe, self._turn = os.fdopen(descriptor, "wb"), threading.Lock()

    def emit(self, event: AnyEvent, *, hold: bool = False) -> None:
        """Send an event."""
        with self._turn, suppress(BrokenPipeError):
            self._pipe.write(msgspec.json.encode(Message(event, hold)) + b"\n")
            self._pipe.flush()
