"""The process beside a run: it stamps what the run tells with its own clock, writes the log, and ends what hangs.

The run is a child process, with JAX and the recipe. It sends events through a pipe and has neither this clock nor this
file. A child that dies in any way leaves a log that says so. Of a run in several processes, each has a keeper, and the
first one the log. Imports no JAX.
"""

import hashlib
import os
import platform
import secrets
import select
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from subprocess import PIPE, Popen
from threading import Event, Thread
from typing import IO, NamedTuple

import msgspec

from speedrun.base import messages, runlog, subprocesses
from speedrun.base import track as tracks
from speedrun.base.atomic_files import write_whole
from speedrun.base.budget import Budget, Meter, flops
from speedrun.base.clock import Phase, Phases, Stamp, now
from speedrun.base.console import Printer
from speedrun.base.errors import HANG, SpeedrunError, StorageError, Terminated
from speedrun.base.exit_codes import meaning
from speedrun.data import generated
from speedrun.record import layout
from speedrun.train.connect import HEARTBEAT_S, MEET_S, Group
from speedrun.train.run_config import RunConfig

#: Limits for one stay in a phase, such as one step.
DEADLINES_S: dict[Phase, float] = {
    **dict.fromkeys(("compile", "warm-up", "evaluation", "checkpoint", "end"), 3600.0),
    **dict.fromkeys(("start", "step", "data"), 900.0),
}
CHILD = "speedrun.train.child"
_LINGER_S = 2.0  #: to write stacks; and for other keepers, whose children would take this one's for lost
_LOOK_S = 0.5
_BLOCKED_S = 60.0  #: for a terminal, or a program behind a pipe, that takes no output
_LONGEST_LINE = 2**16  #: of other output; the rest is another line
_MOST_MESSAGE_BYTES = 2**26
_LAST_WORDS_S = 5.0  #: after the end of a child, if one of its own children left its group, with its pipes


class Job(msgspec.Struct, frozen=True):
    """What a child is to do."""

    config: RunConfig
    group: Group | None = None  #: None: it trains alone
    heartbeat_s: int = HEARTBEAT_S
    meet_s: int = MEET_S
    init_from: Path | None = None  #: initial weights
    budget: Budget | None = None

    @property
    def is_first(self) -> bool:
        """Whether its process writes the record."""
        return self.group is None or self.group.index == 0


class Ended(NamedTuple):
    """The end of a child."""

    code: int  #: as from `subprocesses.wait_for`, or of an error that this process found
    error: str  #: in one line; empty if there is none, or the child has told it


def trained(job: Job, printer: Printer, *, module: str = CHILD) -> Ended:
    """Train in a child process, which ends with this one; write and print its log, and print its other output.

    Its standard error goes to ours, except an error in the last line.
    """
    generated.ensure(tracks.load(job.config.track), job.config.data, printer.say)
    shown, done = SimpleQueue[str | runlog.Line | None](), Event()
    kept, said = Kept(job, shown.put), LastWords()
    reads, writes = os.pipe()
    with open(reads, "rb", 0) as events, tempfile.TemporaryFile() as stacks:
        passed = writes, stacks.fileno()
        pipes = {**dict.fromkeys(("stdin", "stdout", "stderr"), PIPE), "errors": "backslashreplace"}
        # JAX's cache is written by one of several processes, and then the others would compile alone.
        more = {"pass_fds": passed, "env": with_kept_programs() if job.group is None else None, **pipes}
        with subprocesses.started(module, job, *map(str, passed), **more) as child:
            os.close(writes)
            readers = [
                Thread(target=_read, args=(child.stdout, shown.put), daemon=True),
                Thread(target=_read, args=(child.stderr, said), daemon=True),
                Thread(target=_keep, args=(events, kept, child, stacks, done), daemon=True),
            ]
            printing = Thread(target=_print, args=(shown, printer), daemon=True)
            for thread in (*readers, printing):
                thread.start()
            assert child.stdin is not None
            with child.stdin:  # its end would end the child
                code = subprocesses.wait_for(child)
            done.set()
            subprocesses.kill(child)  # its own children, which may hold pipes
            for thread in readers:
                thread.join(_LAST_WORDS_S)
    kept.close(code)
    shown.put(None)
    printing.join(_BLOCKED_S)
    if printing.is_alive():  # Python's own cleanup would wait for it, too
        os.write(2, b"error: standard output takes nothing; the log of the run is whole\n")
        os._exit(StorageError.exit_code)
    if kept.error is not None:
        return Ended(kept.error.exit_code, str(kept.error))
    code = 0 if kept.has_result else code  # however the process ended afterwards
    return Ended(code, said.error(code, job.group))


def _read(lines: IO[str], take: Callable[[str], None]) -> None:
    with lines:
        for line in iter(partial(lines.readline, _LONGEST_LINE), ""):
            if text := line.rstrip():
                take(text)


def _print(shown: "SimpleQueue[str | runlog.Line | None]", printer: Printer) -> None:
    """Print in a thread of its own: a terminal that waits must not delay the stamps."""
    for line in iter(shown.get, None):
        with suppress(OSError):
            printer.say(line) if isinstance(line, str) else printer(line)


def with_kept_programs() -> dict[str, str]:
    """Return the variables with which JAX keeps what it compiles, in 4 GiB for each kind of CPU, if none says where.

    JAX's keys have the program, its options, XLA's flags and versions, and what GPU it is for. A CPU's program also
    depends on the instructions that it knows, so each kind has a folder. Only its owner may write there: who can write
    programs, runs code.
    """
    known = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1", **os.environ}
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return known
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else ()
    knows = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    kind = f"{platform.machine()}-{hashlib.sha256(knows.encode()).hexdigest()[:8]}"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(cache, "speedrun", "programs", kind)
    with suppress(OSError):  # JAX warns
        folder.mkdir(0o700, parents=True, exist_ok=True)
    return known | {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**32)}


def _keep(events: IO[bytes], kept: "Kept", child: "Popen[str]", stacks: IO[bytes], done: Event) -> None:
    """Take what comes, until the child is `done`; end it if that is an error, or if it hangs."""
    ready, rest, is_open, is_told = select.poll(), b"", True, False
    ready.register(events, select.POLLIN)
    while is_open or not done.wait(_LOOK_S):
        if is_open and ready.poll(_LOOK_S * 1000):
            is_open = bool(raw := events.read(1 << 16))
            *messages, rest = (rest + raw).split(b"\n")
            for message in messages if len(rest) < _MOST_MESSAGE_BYTES else [rest]:
                if (answer := kept.take(message)) and child.stdin:
                    with suppress(OSError, ValueError):  # it has ended
                        os.write(child.stdin.fileno(), answer.encode())
        elif done.is_set():
            return
        if kept.error is not None and not is_told:
            subprocesses.kill(child) if kept.is_over else child.terminate()
            is_told = True
        if not done.is_set() and (number := kept.overspends()):
            child.send_signal(number)
        if not done.is_set() and kept.hangs():
            child.send_signal(signal.SIGUSR1)  # it writes its stacks
            done.wait(_LINGER_S)
            subprocesses.kill(child)
            text = os.pread(stacks.fileno(), 1 << 20, 0)
            with suppress(OSError, SpeedrunError):  # log and exit code matter more
                kept.stacks.parent.mkdir(parents=True, exist_ok=True)
                write_whole(kept.stacks, text)
            for line in text.decode(errors="replace").splitlines():
                subprocesses.say(line)


class LastWords:
    """The standard error of a child. An error in the last line is kept back."""

    def __init__(self) -> None:
        self._last, self._is_held = "", False

    def __call__(self, line: str) -> None:
        """Take a line."""
        if self._is_held:
            subprocesses.say(self._last)
        self._last, self._is_held = line, line.startswith("error: ")
        if not self._is_held:
            subprocesses.say(line)

    def error(self, code: int, group: Group | None) -> str:
        """Return the error of a child that ended so; nothing if one of a group has told it, or leaves it to another."""
        if self._is_held and code:
            return self._last.removeprefix("error: ")
        if self._is_held:
            subprocesses.say(self._last)
        if not code or (group and code > 0 and (group.index or ": error: " in self._last)):
            return ""
        crashed = code == SpeedrunError.exit_code
        return f"the process of the run {'crashed, as it says above' if crashed else f'ended with {meaning(code)}'}"


class Kept:
    """The log of a child, as it comes."""

    def __init__(self, job: Job, show: runlog.Reader) -> None:
        group, limits_s = job.group, {**DEADLINES_S, **job.config.deadlines_s}
        limits_s["start"] += job.meet_s if group and limits_s["start"] else 0
        self._job, self._show, self._limits_s = job, show, limits_s
        self._phases = Phases()
        self._phases.enter("start")
        self._log: runlog.RunLog | None = None
        self._held: list[tuple[runlog.AnyEvent, Stamp]] = []
        self._is_whole = self.is_over = self._has_hung = self.has_result = False
        self.error: SpeedrunError | None = None  #: the first one
        self._nonce = ""  #: of the held-out text, once there is a result
        self._newest = dict[type, runlog.AnyEvent]()
        self._meter = Meter(job.budget if job.is_first else None)
        which = f".process-{group.index}" if group else ""
        self.stacks = Path(f"{job.config.out.resolve()}{which}.stacks.txt")  #: of the child, if it hangs

    def take(self, raw: bytes) -> str:
        """Write what a message says; answer, if it asks. The first event names the folder, which the child has made."""
        if self.is_over:
            return ""
        try:
            message = messages.received(raw)
            if isinstance(message, messages.Entered):
                self._phases.enter(message.phase)
            elif isinstance(message, messages.Asked):
                return self._draw()
            else:
                self._take(message)
        except SpeedrunError as error:
            self.error = self.error or error
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            self._refuse(f"the run sent what is no event: {error}; see its recipe")
        return ""

    def _take(self, message: messages.Told) -> None:
        told, over = message.event, self._meter.over
        if isinstance(told, runlog.Budget):
            return self._refuse("the run told of a budget, which is not its own; see its recipe")
        if isinstance(told, runlog.HeldOut) and told.nonce != self._nonce:
            return self._refuse("the run scored other held-out text than was drawn; see its recipe")
        if isinstance(told, runlog.Val) and self._nonce:
            return self._refuse("the run validated again after its held-out text was drawn; see its recipe")
        if self._log is None:
            self._log = self._opened(message.event)
        if isinstance(told, runlog.Error) and over and told.kind == Terminated.__name__:
            told = runlog.Error("Budget", over)  # not just from outside
        self._held.append((told, now()))
        if isinstance(told, runlog.RunStart) and self._meter.budget:
            self._held.append((runlog.Budget(str(self._meter.budget), self._meter.watch.seconds), now()))
        while self._held and not message.hold:
            event, stamp = self._held.pop(0)
            self._newest[type(event)] = event
            self._log.emit(event, hold=bool(self._held), stamp=stamp)
            self._meter.logged()
            self._is_whole = isinstance(event, runlog.RunEnd)
            self.has_result = isinstance(event, runlog.RunEnd) and event.status == "finished"

    def _draw(self) -> str:
        """Draw the nonce of the held-out text, once; the run cannot change its result afterwards."""
        if self._nonce or not any(isinstance(event, runlog.Val) for event, _ in self._held):
            self._refuse("the run asked for its held-out text without a result; see its recipe")
        else:
            self._nonce = secrets.token_hex(8)
        return self._nonce

    def _refuse(self, why: str) -> None:
        self.error = self.error or SpeedrunError(why)
        self._last("Refused", why)

    def hangs(self) -> bool:
        """Return whether a phase takes longer than it may. Then that is the last line: the rest is a consequence."""
        phase, spent_s = self._phases.current()
        limit_s = self._limits_s.get(phase, 0.0)
        if self._has_hung or not limit_s or spent_s <= limit_s:
            return False
        took = f"{phase} has taken {spent_s:.1f} s; its deadline is {limit_s:g} s"
        hint = f"--deadline {phase}=SECONDS sets it; {self.stacks.name} has the stacks of all threads"
        self.error = self.error or SpeedrunError(f"{took}; {hint}", HANG)
        self._has_hung = True
        self._last("Hang", f"{took}; {hint}")
        return True

    def overspends(self) -> int:
        """Return the signal that the budget sends to the run, if any: that of a user, then that of a kill."""
        meter = self._meter
        meter.keep_unlogged(has_log=self._log is not None)
        if self._held or self.has_result:  # a result is scored to its end
            return 0
        number = meter.signal(
            flops(self._newest), may_stay=self._phases.current()[0] in ("checkpoint", "end")
        )
        if number == signal.SIGKILL:
            self._last("Budget", f"{meter.over}; the run did not end by itself")
        return number

    def _last(self, kind: str, why: str) -> None:
        """Take nothing more: what follows is a consequence."""
        was_over, self.is_over = self.is_over, True
        if self._log is not None and not was_over:
            with suppress(SpeedrunError):
                self._log.emit(runlog.Error(kind, why))

    def _opened(self, first: runlog.AnyEvent) -> runlog.RunLog:
        if not isinstance(first, runlog.RunStart):
            raise SpeedrunError(f"the run began with a {type(first).__name__}; see its recipe")
        return runlog.RunLog(self._job.config.out / "runs" / first.run_id / layout.LOG, self._show)

    def close(self, code: int) -> None:
        """Say why a log has no end, without a result that nobody has seen; check that the file is as written."""
        if self._meter.over and not self.has_result:
            self.error = self.error or SpeedrunError(f"budget: {self._meter.over}", Terminated.exit_code)
        if not (code or self._is_whole or self.error) and self._job.is_first:
            self.error = SpeedrunError("the process of the run ended without a result; see its recipe")
        if self._log is None:
            return self._meter.keep_unlogged(has_log=False)
        self._meter.logged()  # its end is written now
        with self._log as log:
            try:
                if not (self._is_whole or self.is_over):
                    log.emit(runlog.Error("Killed", f"the process of the run ended with {meaning(code)}"))
                if not self.error and not log.is_as_written():
                    self.error = SpeedrunError("something else changed the log of the run; see its recipe")
            except SpeedrunError as error:
                self.error = self.error or error
