"""One run in several processes on this machine: they start together, and none outlives the others."""

import ctypes
import os
import signal
import socket
import sys
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from subprocess import Popen

from speedrun.base import signals
from speedrun.base.errors import EXIT_CODES, INTERRUPTED, LOST, SpeedrunError, Terminated

_GRACE_S = 30.0  #: for the other processes to end, after one failed with an exit code of ours
_PR_SET_PDEATHSIG = 1  #: of Linux


def run(num_processes: int, words: list[str]) -> int:
    """Run `speedrun run` in several processes; return the exit code of the first, unless one was lost.

    A first signal is forwarded to all of them, which stop at the same step; a second one kills them.

    Raises:
        SpeedrunError: if one was lost; names it, and what ended it.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    argv = [sys.executable, "-m", "speedrun", "run", *words]
    argv += ["--coordinator", f"127.0.0.1:{port}", "--processes", str(num_processes)]
    children: list[Popen[bytes]] = []
    got: list[int] = []

    def forward(number: int, _frame: object) -> None:
        got.append(number)
        for child in children:
            child.send_signal(number if len(got) == 1 else signal.SIGKILL)

    with signals.handled_by(forward), ThreadPoolExecutor(num_processes) as threads:
        children += [_child([*argv, "--process", str(i)]) for i in range(num_processes)]
        ends = [threads.submit(_wait_for, child) for child in children]
        lost = ""
        try:
            _, running = wait(ends, return_when=FIRST_EXCEPTION)
            if running and not _lost(children):
                wait(running, _GRACE_S)
            lost = "" if got else _lost(children)
        finally:
            for child, end in zip(children, ends, strict=True):
                if not end.done():
                    os.killpg(child.pid, signal.SIGKILL)
    if lost:
        error = SpeedrunError(
            f"{lost}; the others cannot go on without it and were ended; log and checkpoints are kept, and --resume "
            "continues from the newest checkpoint"
        )
        error.exit_code = LOST
        raise error
    codes = [child.returncode for child in children]
    if got:
        were_stopped = all(code in (0, Terminated.exit_code, -got[0]) for code in codes)
        return (Terminated.exit_code if any(codes) else 0) if were_stopped else INTERRUPTED
    return next((code for code in codes if code > 0), 0)


def _child(argv: list[str]) -> Popen[bytes]:
    """Start a process in its own group, so that a terminal sends it no Ctrl-C besides ours."""
    return Popen(argv, process_group=0, preexec_fn=_die_with_parent if sys.platform == "linux" else None)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for(child: Popen[bytes]) -> None:
    """Wait for a process; raise if it failed, which ends the wait for the others."""
    if child.wait():
        raise RuntimeError


def _lost(children: list[Popen[bytes]]) -> str:
    """Return which processes were lost, and how; empty if none was.

    JAX aborts a process that misses the heartbeat of another, so an abort is reported only if nothing else is found.
    """
    # Only process 0 has a target to miss, so exit code 1 of another one is a loss.
    ends = {
        i: child.returncode
        for i, child in enumerate(children)
        if child.returncode is not None
        and (child.returncode not in EXIT_CODES or (i > 0 and child.returncode == SpeedrunError.exit_code))
    }
    if not ends:
        return ""
    causes = {i: _cause(code) for i, code in ends.items() if code != -signal.SIGABRT}
    stopped = {i: "it was stopped" for i, child in enumerate(children) if _is_stopped(child)}
    found = causes or stopped or {i: _cause(code) for i, code in ends.items()}
    return ", ".join(f"process {i} lost: {cause}" for i, cause in found.items())


def _cause(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}, see above"


def _is_stopped(child: Popen[bytes]) -> bool:
    if child.returncode is not None:
        return False
    return os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
