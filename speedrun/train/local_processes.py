"""Starts a run on this machine: in a child process, or in several processes that end together.

Whoever asks for a run in a child holds no device, and shows its log.
"""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from subprocess import PIPE, Popen
from threading import Thread

from speedrun.base import children, signals
from speedrun.base.console import Printer
from speedrun.base.errors import EXIT_CODES, INTERRUPTED, LOST, SpeedrunError, Terminated
from speedrun.train.request import RunConfig

_GRACE_S = 30.0  #: for the other processes to end, after one failed with an exit code of ours
_PR_SET_PDEATHSIG = 1  #: of Linux


def trained(
    config: RunConfig, printer: Printer, *, keep_open: Sequence[int] = (), stderr: int | None = None
) -> tuple[int, str]:
    """Train in a process of its own; show each line of its log, and whatever else it prints.

    It inherits the descriptors `keep_open`. Its standard error goes to `stderr`, as for `Popen`; None: to ours.

    Returns:
        What `children.wait_for` returns, and the last line that was none of the log.
    """
    said, pipes = [""], {"stdout": PIPE, "stderr": stderr, "text": True, "pass_fds": keep_open}
    with children.started("speedrun.train.run", config, **pipes) as process:

        def show() -> None:
            assert process.stdout is not None
            with process.stdout as lines:
                for line in map(str.rstrip, lines):
                    if not printer.relay(line) and line:
                        said[0] = line

        shown = Thread(target=show)
        shown.start()
        code = children.wait_for(process)
        shown.join()
    return code, said[0]


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
    members: list[Popen[bytes]] = []
    got: list[int] = []

    def forward(number: int, _frame: object) -> None:
        got.append(number)
        for child in members:
            child.send_signal(number if len(got) == 1 else signal.SIGKILL)

    with signals.handled_by(forward), ThreadPoolExecutor(num_processes) as threads:
        members += [_child([*argv, "--process", str(i)]) for i in range(num_processes)]
        ends = [threads.submit(_wait_for, child) for child in members]
        lost = ""
        try:
            _, running = wait(ends, return_when=FIRST_EXCEPTION)
            if running and not _lost(members):
                wait(running, _GRACE_S)
            lost = "" if got else _lost(members)
        finally:
            for child, end in zip(members, ends, strict=True):
                if not end.done():
                    os.killpg(child.pid, signal.SIGKILL)
    if lost:
        raise SpeedrunError(
            f"{lost}; the others cannot go on without it and were ended; log and checkpoints are kept, and --resume "
            "continues from the newest checkpoint",
            LOST,
        )
    codes = [child.returncode for child in members]
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


def _lost(members: list[Popen[bytes]]) -> str:
    """Return which processes were lost, and how; empty if none was.

    JAX aborts a process that misses the heartbeat of another, so an abort is reported only if nothing else is found.
    """
    # Only process 0 has a target to miss, so exit code 1 of another one is a loss.
    ends = {
        i: child.returncode
        for i, child in enumerate(members)
        if child.returncode is not None
        and (child.returncode not in EXIT_CODES or (i > 0 and child.returncode == SpeedrunError.exit_code))
    }
    if not ends:
        return ""
    causes = {i: _cause(code) for i, code in ends.items() if code != -signal.SIGABRT}
    stopped = {i: "it was stopped" for i, child in enumerate(members) if _is_stopped(child)}
    found = causes or stopped or {i: _cause(code) for i, code in ends.items()}
    return ", ".join(f"process {i} lost: {cause}" for i, cause in found.items())


def _cause(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}, see above"


def _is_stopped(child: Popen[bytes]) -> bool:
    if child.returncode is not None:
        return False
    return os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
