"""Processes that share a run on this machine: started together, stopped together, and none is left alone."""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from subprocess import Popen

import click

from speedrun.cli.options import Decorator, Integer
from speedrun.ground import signals
from speedrun.ground.errors import EXIT_CODES, INTERRUPTED, LOST, SpeedrunError, Terminated
from speedrun.training.meet import HEARTBEAT_S, MEET_S

_GRACE_S = 30.0  #: for the others to come to the same end, after one ended with a code of ours
_DIES_WITH_PARENT = 1  #: PR_SET_PDEATHSIG of Linux


_OPTIONS: tuple[Decorator, ...] = (
    click.option(
        "--local-processes",
        type=Integer(1),
        metavar="N",
        help="Start N processes on this machine that share its devices. For trying out what a cluster does.",
    ),
    click.option(
        "--coordinator",
        metavar="HOST:PORT",
        help="Of process 0, where several share the run. Tasks of SLURM and Open MPI need no such options.",
    ),
    click.option("--processes", type=Integer(1), metavar="N", help="How many share the run."),
    click.option("--process", type=Integer(0), metavar="I", help="Which of them this one is."),
    click.option(
        "--heartbeat",
        type=Integer(5),
        default=HEARTBEAT_S,
        show_default=True,
        metavar="SECONDS",
        help="A process that is silent for so long is lost, and the run ends.",
    ),
    click.option(
        "--meet-within",
        type=Integer(1),
        default=MEET_S,
        show_default=True,
        metavar="SECONDS",
        help="For all processes to be there.",
    ),
)
#: The names of the arguments that `options` gives.
ARGUMENTS = ("local_processes", "coordinator", "processes", "process", "heartbeat", "meet_within")


def options(command: Callable[..., object]) -> Callable[..., object]:
    """The options of a run in several processes, for `meet.asked`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def ended(num_processes: int, words: list[str]) -> int:
    """The exit code of `speedrun run` in several processes on this machine: of the first one, if none was lost.

    A first signal goes on to all of them, which stop at the same step; a second one kills them.

    Raises:
        SpeedrunError: if one was lost; which, and how.
    """
    coordinator = f"127.0.0.1:{_free_port()}"
    argv = [sys.executable, "-m", "speedrun", "run", *words]
    argv += ["--coordinator", coordinator, "--processes", str(num_processes)]
    children: list[Popen[bytes]] = []
    got: list[int] = []

    def forward(number: int, _frame: object) -> None:
        got.append(number)
        for child in children:
            child.send_signal(number if len(got) == 1 else signal.SIGKILL)

    with signals.handled_by(forward), ThreadPoolExecutor(num_processes) as threads:
        children += [_started([*argv, "--process", str(i)]) for i in range(num_processes)]
        ends = [threads.submit(_ended_well, child) for child in children]
        lost = ""
        try:
            _, others = wait(ends, return_when=FIRST_EXCEPTION)
            if others and not _lost(children):
                wait(others, _GRACE_S)
            lost = "" if got else _lost(children)
        finally:
            for child, end in zip(children, ends, strict=True):
                if not end.done():
                    os.killpg(child.pid, signal.SIGKILL)
    if lost:
        error = SpeedrunError(
            f"{lost}; the others cannot go on without it and were ended; what log and checkpoints hold is kept, "
            "and --resume goes on from the newest checkpoint"
        )
        error.exit_code = LOST
        raise error
    codes = [child.returncode for child in children]
    if got:
        were_stopped = all(code in (0, Terminated.exit_code, -got[0]) for code in codes)
        return (Terminated.exit_code if any(codes) else 0) if were_stopped else INTERRUPTED
    return next((code for code in codes if code > 0), 0)


def _started(argv: list[str]) -> Popen[bytes]:
    """In a group of its own: a terminal's Ctrl-C reaches it through us only."""
    return Popen(argv, process_group=0, preexec_fn=_die_with_parent if sys.platform == "linux" else None)


def _ended_well(child: Popen[bytes]) -> None:
    """Waits for it; the exception that ends the waiting for the others carries nothing."""
    if child.wait():
        raise RuntimeError


def _is_loss(i: int, code: int | None) -> bool:
    """Whether a process ended as none does that can say why. Only the first one has a target to miss: code 1."""
    return code is not None and (code not in EXIT_CODES or (i > 0 and code == SpeedrunError.exit_code))


def _lost(children: list[Popen[bytes]]) -> str:
    """Which process was lost, and how; empty if none was.

    JAX aborts a process that misses the heartbeat of another: the abort is told of only if nothing else is found.
    """
    ends = {i: child.returncode for i, child in enumerate(children) if _is_loss(i, child.returncode)}
    if not ends:
        return ""
    own = {i: _how(code) for i, code in ends.items() if code != -signal.SIGABRT}
    held = {i: "it was stopped" for i, child in enumerate(children) if _is_stopped(child)}
    found = own or held or {i: _how(code) for i, code in ends.items()}
    return ", ".join(f"process {i} lost: {how}" for i, how in found.items())


def _how(code: int) -> str:
    return (
        f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}, see above"
    )


def _is_stopped(child: Popen[bytes]) -> bool:
    if child.returncode is not None:
        return False
    options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, child.pid, options) is not None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _die_with_parent() -> None:
    """Whoever kills this launcher at once ends the run, too."""
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
