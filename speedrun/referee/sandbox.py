"""Isolation for a process that runs untrusted code: namespaces, read-only mounts, limits.

    network     none: a network namespace without an interface
    processes   its own only: a process namespace with its own /proc, read-only, since root could set the kernel there
    files       a root of its own, read-only: the system's libraries, this Python and what is named; one folder to write
    privileges  none: a user namespace, no capability, and none to be had
    terminal    none: a session of its own, and a pipe whose lines are cleaned before they are shown
    limits      of time, memory, files and processes

`unshare`, `setpriv` and `mount` of util-linux do the work. Whether they may is asked before anything runs.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO, TextIO

from speedrun.ground import children, console
from speedrun.ground.errors import EXIT_CODES, SpeedrunError, UsageError

#: What every program needs to be loaded. Of /etc only this: no names, no keys.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork")
_UNPRIVILEGED = ("setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all")

#: Makes the root and enters it. Arguments: the root, the limit of memory in KiB or "unlimited", `ro:PATH`, `rw:PATH`
#: and `ln:PATH:TARGET`, `--`, the command. The shell stays: it is the first process, whose signals nothing handles.
_SCRIPT = r"""
set -eu
PATH=${PATH:-/usr/bin:/bin}:/usr/sbin:/sbin
root=$1 memory=$2
shift 2
mount -t tmpfs -o mode=755,size=16m tmpfs "$root"
mkdir -p "$root/proc" "$root/tmp" "$root/dev/shm"
while [ "$1" != -- ]; do
  kind=${1%%:*} path=${1#*:}
  case $kind in
    ln)
      mkdir -p "$root${path%%:*}" && rmdir "$root${path%%:*}"
      ln -s "${path#*:}" "$root${path%%:*}"
      ;;
    *)
      if [ -d "$path" ]; then
        mkdir -p "$root$path"
      elif [ ! -e "$root$path" ]; then
        mkdir -p "$root${path%/*}"
        : >"$root$path"
      fi
      mount --rbind "$path" "$root$path"
      if [ "$kind" = ro ]; then
        mount -o remount,bind,ro "$root$path"
        while read -r _ _ _ _ at _; do
          case $at in "$root$path"/*) mount -o remount,bind,ro "$at" ;; esac
        done </proc/self/mountinfo
      fi
      ;;
  esac
  shift
done
shift
mount -t proc -o ro,nosuid,nodev,noexec proc "$root/proc"
mount -t tmpfs -o nosuid,nodev tmpfs "$root/dev/shm"
mount -o remount,ro,mode=755 "$root"
ulimit -c 0
ulimit -n 4096
ulimit -f 134217728
ulimit -p 8192 2>/dev/null || ulimit -u 8192
ulimit -v "$memory"
trap : INT TERM
code=0
chroot "$root" "$@" || code=$?
exit "$code"
"""

#: Runs inside, and names what does not hold.
_PROBE = r"""
import os, socket
lost = []
if len(socket.if_nameindex()) > 1: lost.append("no network")
if sum(map(str.isdigit, os.listdir("/proc"))) > 2: lost.append("no /proc of others")
try: os.mkdir("/outside")
except OSError: pass
else: lost.append("no file written outside")
for path in "/proc/sys/kernel/core_pattern", "/proc/self/comm", "/dev/null":
    if not os.statvfs(path).f_flag & os.ST_RDONLY: lost.append(path + " read-only")
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
if int(status["CapEff"], 16) or int(status["CapBnd"], 16): lost.append("no privileges")
print(";".join(["asked", *lost]))
"""

_PROBE_S = 60.0
_LAST_WORDS_S = 10.0  #: to show what it wrote before it ended; a child that it left may hold the pipe
_LONGEST_LINE, _MOST_LINES = 4096, 10_000  #: of its output: bytes, and how many are shown
_SHELL = 128  #: what a shell adds to the signal that ended a program
_MOST_BYTES = 32 << 30  #: of address space; more where the machine has more


@dataclass(frozen=True)
class Limits:
    """What a process may use."""

    wall_s: float
    gpu: bool = False  #: whether it gets the GPUs; their driver maps more memory than there is, so that is not limited


@cache
def problem() -> str | None:
    """Why this machine cannot keep a stranger's process apart, or None. Asked by trying."""
    if not sys.platform.startswith("linux"):
        return "namespaces are Linux's"
    with tempfile.TemporaryDirectory(prefix="speedrun-probe-") as scratch, ExitStack() as stack:
        argv = _argv(stack, [sys.executable, "-I", "-c", _PROBE], Path(scratch), (), Limits(_PROBE_S))
        try:
            done = subprocess.run(
                argv, env={}, capture_output=True, text=True, timeout=_PROBE_S, check=False, cwd="/"
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    asked, *lost = done.stdout.strip().split(";")
    if done.returncode or asked != "asked":
        return (done.stderr.strip().splitlines() or ["unshare said nothing"])[-1]
    return f"cannot be had: {', '.join(lost)}" if lost else None


def protections(*, unsafe: bool) -> str:
    """One line on what holds, to be printed before anything runs.

    Args:
        unsafe: whether the user asked to go on without.

    Raises:
        UsageError: if something essential cannot be had and the user did not ask for that.
    """
    why = problem()
    if why is None:
        return (
            "apart: no network, no other process, no file but its own folder written, no privileges, limits"
        )
    if not unsafe:
        raise UsageError(
            f"cannot keep the record's code apart here ({why}): it would have your network, files and processes; "
            "run in a container (docs/referee.md), or pass --unsafe-here if this machine holds nothing of value"
        )
    return (
        f"NOT APART ({why}): the record's code has this user's network, files and processes; only limits hold"
    )


class _Group(subprocess.Popen[bytes]):
    """A child whose signals reach what it started."""

    def send_signal(self, sig: int) -> None:
        """To the whole group."""
        if self.poll() is None:
            os.killpg(self.pid, sig)


def run(
    argv: Sequence[str],
    scratch: Path,
    *,
    readable: Iterable[Path] = (),
    environment: Mapping[str, str],
    stdout: TextIO,
    limits: Limits,
    unsafe: bool,
) -> int:
    """Runs a command, apart where this machine can; its exit code.

    Args:
        argv: the command.
        scratch: its working folder, home, and the only place where it can write.
        readable: what else it can read, besides the system's libraries and this Python.
        environment: all of it.
        stdout: where its output goes, line by line, as text that is safe on a terminal.
        limits: what it may use.
        unsafe: run it without a world of its own where that cannot be had.

    Raises:
        UsageError: as `protections`.
        SpeedrunError: if it takes too long.
    """
    protections(unsafe=unsafe)
    env = {**environment, "HOME": str(scratch), "TMPDIR": str(scratch)}
    with ExitStack() as stack:
        if problem() is None:
            argv = _argv(stack, argv, scratch, readable, limits)
        # In our session, and with our terminal at hand, it could type on it.
        child = _Group(
            argv, cwd=scratch, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        relay = threading.Thread(target=_relay, args=(child.stdout, console.Printer(stdout)), daemon=True)
        relay.start()
        timer = threading.Timer(limits.wall_s, child.send_signal, (signal.SIGKILL,))
        timer.daemon = True
        timer.start()
        code = children.wait_for(child)
        relay.join(_LAST_WORDS_S)
        if timer.finished.is_set():
            raise SpeedrunError(
                f"the record's code was still running after {limits.wall_s:.0f} s; nothing was judged"
            )
        timer.cancel()
    return _SHELL - code if _SHELL < code <= _SHELL + 64 and code not in EXIT_CODES else code


def _relay(pipe: IO[bytes], reader: console.Printer) -> None:
    """Shows a stranger's lines, and reads on when there are too many: it must not wait for us."""
    with pipe:
        for number, raw in enumerate(iter(partial(pipe.readline, _LONGEST_LINE), b"")):
            if number < _MOST_LINES:
                with suppress(OSError):
                    reader.relay(raw.decode(errors="replace").rstrip("\n"))


def _argv(
    stack: ExitStack, argv: Sequence[str], scratch: Path, readable: Iterable[Path], limits: Limits
) -> list[str]:
    """The command, with what makes its world before it."""
    root = stack.enter_context(tempfile.TemporaryDirectory(prefix="speedrun-root-"))
    memory = "unlimited" if limits.gpu else str(max(_MOST_BYTES, _memory_bytes()) // 1024)
    seen = [Path(sys.prefix), Path(sys.base_prefix), *(path.absolute() for path in readable)]
    if limits.gpu:
        seen += [Path("/sys")]
    words = [_mount("ro", Path(path)) for path in _SYSTEM if Path(path).exists()]
    words += [_mount("ro", path) for path in sorted(set(seen), key=lambda path: len(path.parts))]
    # A device that is mounted read-only can be written to; only its mode cannot be changed.
    words += [f"ro:{path}" for path in (*_DEVICES, *(_gpus() if limits.gpu else ()))]
    words += [f"rw:{scratch.absolute()}"]
    at = ("env", f"--chdir={scratch.absolute()}")
    return [*_UNSHARE, "sh", "-c", _SCRIPT, "sh", root, memory, *words, "--", *_UNPRIVILEGED, *at, *argv]


def _mount(kind: str, path: Path) -> str:
    return f"ln:{path}:{os.readlink(path)}" if path.is_symlink() else f"{kind}:{path}"


def _gpus() -> list[str]:
    return sorted(str(path) for path in Path("/dev").glob("nvidia*") if not path.is_dir())


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
