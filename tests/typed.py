"""What tests type: a command of ours in this process, or in one of its own; and programs that stand in for others."""

import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner, Result

from speedrun import cli
from speedrun.commands import COMMANDS, is_here


def invoke(*words: object) -> Result:
    return CliRunner().invoke(cli.command, [*map(str, words)], prog_name="speedrun")


def speedrun(*words: object, **more: Any) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "speedrun", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, **more)


def as_words(settings: Mapping[str, object]) -> list[str]:
    """Settings of a recipe, as `--set` takes them."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def program(path: Path, text: str) -> Path:
    """A file that can be executed, in a folder that may not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def git(folder: Path, *args: str) -> str:
    """What git says in a folder, as somebody who commits there."""
    person = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    argv = ["git", "-C", str(folder), *person, *args]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def free_port() -> int:
    """A port of this machine that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def read_options(line: str) -> None:
    """Parse a command line of ours."""
    words = shlex.split(line, comments=True)[1:]
    command: click.Command = cli.command
    with click.Context(command) as ctx:
        while isinstance(command, click.Group):
            found = command.get_command(ctx, words.pop(0))
            assert found is not None
            command = found
        command.make_context("it", words)


def is_typed_here(line: str) -> bool:
    """Whether the room of a command is there, which may have been taken out."""
    name = line.split()[0]
    return name not in COMMANDS or is_here(COMMANDS[name][0])
