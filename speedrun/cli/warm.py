"""Commands of `speedrun` in one process, one after the other: what is imported and compiled once serves all of them.

A request is a line of JSON on standard input, an answer one on what was standard output. What a command says goes to
files. An error that no command expects ends the process, with its traceback in the command's file: whatever it did to
the devices is gone with it, and whoever asks starts another process.
"""

import faulthandler
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec

from speedrun import cli


class Request(msgspec.Struct, frozen=True):
    """One command."""

    argv: list[str]
    stem: str  #: of its files: `<stem>.out` and `<stem>.err`
    limit_s: float  #: after so long, all stacks are written to its file


class Answer(msgspec.Struct, frozen=True):
    """How it ended."""

    exit_code: int


def serve(command: click.Command) -> None:
    """Answers requests until there are no more."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "wb", buffering=0)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    for line in requests:
        asked = msgspec.json.decode(line, type=Request)
        with _saying(Path(asked.stem)):
            faulthandler.dump_traceback_later(asked.limit_s)
            code = _run(command, asked.argv)
            faulthandler.cancel_dump_traceback_later()
        answers.write(msgspec.json.encode(Answer(code)) + b"\n")
        if jax := sys.modules.get("jax"):
            jax.clear_caches()  # programs hold memory of devices
            gc.collect()


def _run(command: click.Command, argv: list[str]) -> int:
    try:
        command.main(argv, prog_name="speedrun")
    except SystemExit as ended:
        return int(ended.code) if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


@contextmanager
def _saying(stem: Path) -> Iterator[None]:
    """Standard output and error go to files, also what libraries write."""
    for descriptor, stream, suffix in ((1, sys.stdout, ".out"), (2, sys.stderr, ".err")):
        stream.flush()
        with stem.with_name(stem.name + suffix).open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    serve(cli.command)
