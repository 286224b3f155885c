"""Hand a rendered file to the cluster's own client."""

import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen

from speedrun.ground import signals
from speedrun.ground.errors import UsageError
from speedrun.ground.wholefile import write_whole

#: Command lines by cluster. FILE and NAME are replaced; without FILE the text goes to standard input.
CLIENTS = {
    "slurm": ("sbatch",),
    "kubernetes": ("kubectl", "create", "--filename=-"),  # `apply` says "unchanged" of a finished job
    "skypilot": ("sky", "launch", "--cluster", "NAME", "FILE"),  # it asks before it rents
    "ssh": ("bash", "FILE"),
}


def submit(on: str, name: str, text: str, *, to_stderr: bool) -> int:
    """Run the client `on`, a key of `CLIENTS`, on a file, and return its exit code.

    Raises:
        UsageError: if the client is not installed.
    """
    for program in {CLIENTS[on][0], *(["ssh"] if on == "ssh" else [])}:
        if shutil.which(program) is None:
            raise UsageError(
                f"--submit needs {program}, which is not on the PATH; go where it is, or --save FILE and take it there"
            )
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, f"{name}.{'sh' if on == 'ssh' else 'yaml'}")
        write_whole(path, text.encode())
        argv = [{"FILE": str(path), "NAME": name}.get(word) or word for word in CLIENTS[on]]
        stdin = None if "FILE" in CLIENTS[on] else PIPE
        child = Popen(argv, stdin=stdin, stdout=sys.stderr if to_stderr else None, text=True)
        with _forwarding_sigterm(child):
            child.communicate(text if stdin else None)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


@contextlib.contextmanager
def _forwarding_sigterm(child: Popen[str]) -> Iterator[None]:
    """The client stays in our process group, as it may ask questions; Ctrl-C reaches it from the terminal."""

    def forward(number: int, _frame: object) -> None:
        if number == signal.SIGTERM:
            child.send_signal(number)

    with signals.handled_by(forward):
        yield
