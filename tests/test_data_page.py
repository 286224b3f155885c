"""docs/data.md: its commands and options are there."""

import re
import shlex
from pathlib import Path

import click
import pytest

from speedrun import cli

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "data.md").read_text()
SCRIPT = "python data/fineweb_prep.py"


def commands() -> list[list[str]]:
    """The words of every line of a block that calls us; the script is `speedrun data prep`."""
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
        for line in block.split("\n")
    ]
    ours = [line.replace(SCRIPT, "speedrun data prep") for line in lines]
    return [shlex.split(line, comments=True)[1:] for line in ours if line.startswith("speedrun ")]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_of_the_page_can_be_given(words: list[str]):
    command: click.Command = cli.command
    with click.Context(command) as ctx:
        while isinstance(command, click.Group):
            found = command.get_command(ctx, words.pop(0))
            assert found is not None
            command = found
        command.make_context("it", words)  # reads every option; raises what a user would be told


def test_the_page_names_every_option_of_prep():
    from speedrun.cli.data_prep import command

    options = {name for param in command.params for name in param.opts} - {
        "--json",
        "--column",
        "--workers",
        "--engine",
    }
    assert (ROOT / "data" / "fineweb_prep.py").exists()
    missing = [name for name in options if name not in PAGE]
    assert not missing
