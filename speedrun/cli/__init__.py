"""The command `speedrun`: a table of commands, each imported when it is called, and one handler of errors.

`speedrun --help` must stay fast, so this file imports nothing that is heavy. A command is a module
`speedrun.cli.<name>` with a click command named `command`.
"""

import importlib
import json

import click

from speedrun import __version__
from speedrun.cli.options import wants_json
from speedrun.errors import EXIT_CODES, SpeedrunError, unknown

COMMANDS = {
    "doctor": "Say what this machine can run, and what to type next.",
    "data": "Make and check shards.",
    "run": "Train on a track, under the clock.",
    "validate": "Check a record offline: every claim that can be computed is computed again.",
    "plot": "Draw the loss and the steps of a record.",
    "replay": "Run the source that a record carries.",
    "bench": "Time operations against their bounds.",
}
INTERRUPTED = 130


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in COMMANDS:
            raise unknown("command", cmd_name, COMMANDS)
        return importlib.import_module(f"speedrun.cli.{cmd_name}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES.items()])
        with formatter.section("Example"):
            formatter.write_text("speedrun doctor")

    def invoke(self, ctx: click.Context) -> object:
        """Runs a command. An expected error is one line and an exit code; others keep their traceback."""
        try:
            return super().invoke(ctx)
        except SpeedrunError as error:
            if wants_json(ctx):
                click.echo(json.dumps({"error": str(error), "exit_code": error.exit_code}))
            else:
                click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="speedrun %(version)s")
def command() -> None:
    """Time to 3.28: a speedrun harness for language models in JAX, with numbers that can be believed."""


def main() -> None:
    """Runs the command line of this process and exits."""
    command(prog_name="speedrun")
