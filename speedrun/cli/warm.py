"""Run commands of `speedrun` one after the other in one process, which imports and compiles once for all of them.

A request is a line of JSON on standard input, an answer one on the original standard output. Output of commands goes to
files. An unexpected error ends the process, with its traceback in the file of the command, as devices may be broken.
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
    limit_s: float  #: then all stacks are written to its `.err` file


class Answer(msgspec.Struct, frozen=True):
    """The end of a command."""

    exit_code: int


def serve(command: click.Command) -> None:
    """Answer requests until standard input ends."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "wb", buffering=0)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    for line in requests:
        asked = msgspec.json.decode(line, type=Request)
        with _output_to(Path(asked.stem)):
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
def _output_to(stem: Path) -> Iterator[None]:
    """Redirect standard output and error to files, also for libraries."""
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
