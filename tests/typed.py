"""What tests type: a command of ours in this process, or in one of its own; and programs that stand in for others."""

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
from click.testing import CliRunner, Result

from speedrun import cli
from speedrun.cli import schema
from speedrun.commands import COMMANDS, is_here


def invoke(*words: object) -> Result:
    texts = [*map(str, words)]
    done = CliRunner().invoke(cli.command, texts, prog_name="speedrun")
    if "--json" in texts and isinstance(done.exception, SystemExit | None):
        assert promised(texts, done.stdout) is not None, f"not of its schema: {done.stdout}"
    return done


def speedrun(*words: object, **more: Any) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "speedrun", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, **more)


def promised(words: list[str], text: str) -> Any:
    """What a command printed, as a value of the first type of its schema that says all of it; None if none does."""
    said, known = json.loads(text), dict(schema.commands(cli.command))
    named = [command for name, command in known.items() if words[: len(name.split())] == name.split()]
    # A failure is tried first: the types of answers may be heavy.
    for kind in (schema.Failure, *(kind for command in named for kind in schema.types_of(command))):
        try:
            value = msgspec.json.decode(text, type=kind)
        except msgspec.ValidationError:
            continue
        if json.loads(msgspec.json.encode(value)) == said:
            return value
    return None


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
