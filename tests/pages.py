"""Pages that are run, not believed: what their blocks hold, and a folder to run it in.

Lines of ```bash blocks are executed, as they stand, one after the other. Lines of ```sh blocks install, take an
evening, or need what is not here: of those that call us, every option must exist and every value be one.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click

from speedrun import cli

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 600
#: What stands in the tree for itself, and not for data, runs and records of the folder's own.
_OWN = ("data", "runs", "records", "README.md")


def blocks(language: str, text: str) -> list[list[str]]:
    """The lines of every fenced block of one language."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block.splitlines() for block in found]


def commands(language: str, text: str) -> list[str]:
    """Those lines that are commands."""
    return [line for block in blocks(language, text) for line in block if line and not line.startswith("#")]


def checkout(folder: Path) -> Path:
    """A folder with the files of the project, but with data, runs and records of its own."""
    for path in ROOT.iterdir():
        if path.name not in _OWN and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    shutil.copytree(ROOT / "records", folder / "records")
    shutil.copy(ROOT / "README.md", folder)
    return folder


def execute(lines: list[str], folder: Path) -> None:
    """Runs them as a shell would that stops at the first error; each has to say something."""
    bin_dir = Path(sys.executable).parent
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    env = {**env, "PATH": f"{bin_dir}:{env['PATH']}"}
    env.pop("SPEEDRUN_DATA", None)
    for line in lines:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"$ {line}\n{done.stdout}"
        assert done.stdout.strip(), f"$ {line}\nsays nothing"


def read_options(line: str) -> None:
    """Reads a line that calls us as the command would; raises what a user would be told."""
    words = shlex.split(line, comments=True)[1:]
    command: click.Command = cli.command
    with click.Context(command) as ctx:
        while isinstance(command, click.Group):
            found = command.get_command(ctx, words.pop(0))
            assert found is not None
            command = found
        command.make_context("it", words)
