"""Isolates a process that runs untrusted code: namespaces, read-only mounts, limits.

    network     none: a network namespace without an interface
    processes   only its own: a process namespace with its own /proc, read-only, because root could set the kernel there
    files       a root of its own, read-only: the system's libraries, this Python, named folders; one writable folder
    privileges  none: a user namespace without capabilities, and no way to gain any
    terminal    none: its own session, and a pipe whose lines are sanitised before they are shown
    limits      of time, memory, files and processes

It needs `unshare`, `setpriv` and `mount` of util-linux. A probe tests them first.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from typing import IO, TextIO

from speedrun.base import console, subprocesses
from speedrun.base.errors import SpeedrunError, UsageError
from speedrun.base.exit_codes import EXIT_CODES

#: What programs need to load. Nothing else of /etc, which holds names and keys.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
#: The sandbox ends with our process, so that a killed referee leaves no processes.
_DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
_NAMESPACES = ("--user", "--map-root-user", "--mount", "--net", "--pid", "--ipc", "--uts")
_UNSHARE = ("unshare", *_NAMESPACES, "--kill-child")
_UNPRIVILEGED = ("setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all")

#: Makes the root and enters it. Arguments: the root, the memory limit in KiB or "unlimited", `ro:PATH`, `rw:PATH` and
#: `ln:PATH:TARGET`, `--`, the command. The shell remains the first process of the namespace, because the kernel drops
#: signals that the first process does not handle.
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

#: Runs inside, and prints each protection that does not hold.
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
print(";".join(["probed", *lost]))
"""

_PROBE_S = 60.0
_LAST_WORDS_S = 10.0  #: to show the last output, since a grandchild may keep the pipe open
_LONGEST_LINE, _MOST_LINES = 4096, 10_000  #: of the output: bytes, and number shown
_SHELL = 128  #: a shell adds this to the signal that ended a program
_MOST_BYTES = 32 << 30  #: of address space; more if the machine has more


@cache
def problem() -> str | None:
    """Probe the sandbox; return why this machine has none, or None."""
    if not sys.platform.startswith("linux"):
        return "namespaces need Linux"
    with tempfile.TemporaryDirectory(prefix="speedrun-probe-") as scratch, ExitStack() as stack:
        argv = _argv(stack, [sys.executable, "-I", "-c", _PROBE], Path(scratch), (), gpu=False)
        try:
            done = subprocess.run(
                argv, env={}, capture_output=True, text=True, timeout=_PROBE_S, check=False, cwd="/"
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    first, *lost = done.stdout.strip().split(";")
    if done.returncode or first != "probed":
        return (done.stderr.strip().splitlines() or ["unshare said nothing"])[-1]
    return f"not available: {', '.join(lost)}" if lost else None


def protections(*, unsafe: bool) -> str:
    """Return a line about the protections in force; without a sandbox, raise UsageError unless `unsafe`."""
    why = problem()
    if why is None:
        return "sandbox: no network, no other processes, writes only to its own folder, no privileges, limits"
    if not unsafe:
        raise UsageError(
            f"there is no sandbox for the record's code here ({why}): it could use your network, files and processes; "
            "run in a container (docs/referee.md), or pass --unsafe-here if this machine holds nothing of value"
        )
    return f"NO SANDBOX ({why}): the record's code can use this user's network, files and processes; only limits hold"


class _Group(subprocess.Popen[bytes]):
    """A child whose signals reach its process group."""

    def send_signal(self, sig: int) -> None:
        """Signal the process group."""
        if self.poll() is None:
            os.killpg(self.pid, sig)


def run(
    argv: Sequence[str],
    scratch: Path,
    *,
    readable: Iterable[Path] = (),
    environment: Mapping[str, str],
    stdout: TextIO,
    hear: Callable[[bytes], None] = lambda _: None,
    wall_s: float,
    gpu: bool = False,
    unsafe: bool,
) -> int:
    """Run a command in the sandbox, with this whole environment, and return its exit code.

    It can write to `scratch`, its working folder and home. It can read `readable`, the system and this Python. Its
    sanitised output goes to `stdout`, and each line, as it comes, to `hear`. It is killed after `wall_s`. With `gpu`,
    it can use the GPUs and has no memory limit, because their driver maps more memory than there is.
    """
    protections(unsafe=unsafe)
    env = {**environment, "HOME": str(scratch), "TMPDIR": str(scratch)}
    with ExitStack() as stack:
        if problem() is None:
            argv = _argv(stack, argv, scratch, readable, gpu=gpu)
        # In our session, it could type into our terminal.
        child = _Group(
            argv, cwd=scratch, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        shown = console.Printer(stdout)
        relay = threading.Thread(target=_relay, args=(child.stdout, shown, hear), daemon=True)
        relay.start()
        timer = threading.Timer(wall_s, child.send_signal, (signal.SIGKILL,))
        timer.daemon = True
        timer.start()
        code = subprocesses.wait_for(child)
        relay.join(_LAST_WORDS_S)
        if timer.finished.is_set():
            found = f"the record's code was still running after {wall_s:.0f} s"
            raise SpeedrunError(f"{found}; nothing was judged")
        timer.cancel()
    return _SHELL - code if _SHELL < code <= _SHELL + 64 and code not in EXIT_CODES else code


def _relay(pipe: IO[bytes], reader: console.Printer, hear: Callable[[bytes], None]) -> None:
    """Show the output up to the limit, and read the rest, so that the child does not block on a full pipe."""
    with pipe:
        for number, raw in enumerate(iter(partial(pipe.readline, _LONGEST_LINE), b"")):
            hear(raw)
            if number < _MOST_LINES:
                with suppress(OSError):
                    reader.relay(raw.decode(errors="replace").rstrip("\n"))


def _argv(
    stack: ExitStack, argv: Sequence[str], scratch: Path, readable: Iterable[Path], *, gpu: bool
) -> list[str]:
    """Return the command that makes the sandbox and runs another one in it."""
    root = stack.enter_context(tempfile.TemporaryDirectory(prefix="speedrun-root-"))
    memory_bytes = max(_MOST_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    memory, devices = str(memory_bytes // 1024), [*_DEVICES]
    seen = [Path(sys.prefix), Path(sys.base_prefix), *(path.absolute() for path in readable)]
    if gpu:
        memory = "unlimited"
        seen.append(Path("/sys"))
        devices += sorted(str(path) for path in Path("/dev").glob("nvidia*") if not path.is_dir())
    words = [_mount("ro", Path(path)) for path in _SYSTEM if Path(path).exists()]
    words += [_mount("ro", path) for path in sorted(set(seen), key=lambda path: len(path.parts))]
    # Devices that are mounted read-only can still be written; only their modes are fixed.
    words += [f"ro:{path}" for path in devices]
    words += [f"rw:{scratch.absolute()}"]
    script = ("sh", "-c", _SCRIPT, "sh", root, memory, *words)
    command = (*_UNPRIVILEGED, "env", f"--chdir={scratch.absolute()}", *argv)
    return [*_DIES_WITH_US, *_UNSHARE, *script, "--", *command]


def _mount(kind: str, path: Path) -> str:
    return f"ln:{path}:{os.readlink(path)}" if path.is_symlink() else f"{kind}:{path}"
