"""What a run sends to the process that keeps its log: `train.keeper`."""

import os
import signal
import threading
from queue import SimpleQueue
from typing import Protocol

import msgspec

from speedrun.base.clock import Phase
from speedrun.base.runlog import AnyEvent


class Told(msgspec.Struct, frozen=True, tag="told"):
    """An event; one that is held counts only with the next."""

    event: AnyEvent
    hold: bool = False


class Entered(msgspec.Struct, frozen=True, tag="entered"):
    """A phase begins."""

    phase: Phase


class Asked(msgspec.Struct, frozen=True, tag="asked"):
    """The result is told; a nonce is due."""


Message = Told | Entered | Asked

#: Return a message from its bytes; raise msgspec.DecodeError for anything else.
received = msgspec.json.Decoder(Message).decode


class Log(Protocol):
    """Takes the events of a run: a `Sender`, or a `RunLog` in the same process."""

    def emit(self, event: AnyEvent, *, hold: bool = False) -> None:
        """Take an event."""

    def nonce(self) -> str:
        """Return a nonce that was unknown until the result was emitted."""
        ...


class Sender:
    """Sends events through a pipe. Without a keeper this process ends: it must save nothing that no log has."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - it has no name
        self._pipe, self._turn = os.fdopen(descriptor, "wb"), threading.Lock()
        self.answers = SimpleQueue[str]()  #: of the keeper

    def emit(self, event: AnyEvent, *, hold: bool = False) -> None:
        """Send an event."""
        self._send(Told(event, hold))

    def entered(self, phase: Phase) -> None:
        """Send that a phase begins."""
        self._send(Entered(phase))

    def nonce(self) -> str:
        """Ask the keeper for the nonce."""
        self._send(Asked())
        return self.answers.get()

    def _send(self, message: Message) -> None:
        with self._turn:
            try:
                self._pipe.write(msgspec.json.encode(message) + b"\n")
                self._pipe.flush()
            except BrokenPipeError:
                os.kill(os.getpid(), signal.SIGKILL)
