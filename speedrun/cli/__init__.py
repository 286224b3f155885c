"""The command `speedrun`: imports its commands on use, and handles errors.

No heavy imports: `speedrun --help` must be fast.
"""

import importlib
import keyword
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from speedrun import __version__
from speedrun.base.errors import INTERRUPTED, Terminated, UsageError, unknown
from speedrun.base.exit_codes import EXIT_CODES, code_of
from speedrun.base.output import DEBUG, LOST, expected, leave, own_process, show_traceback, text_of
from speedrun.commands import COMMANDS, GROUPS, is_here

#: Environment variables with names of folders, or that a run records.
_VARIABLES = ("SPEEDRUN_DATA", "XLA_FLAGS", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, (module, _) in COMMANDS.items() if is_here(module)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        place = COMMANDS[cmd_name][0]
        module = importlib.import_module(
            f"speedrun.{place}" if "." in place else f"speedrun.{place}.commands"
        )
        return getattr(module, cmd_name.replace("-", "_") + "_" * keyword.iskeyword(cmd_name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, group in GROUPS.items():
            if here := [(name.ljust(width), does) for name, (at, does) in group.items() if is_here(at)]:
                with formatter.section(title):
                    formatter.write_dl(here)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES.items()])
        with formatter.section("Example"):
            formatter.write_text("speedrun doctor")

    def main(self, args: Sequence[str] | None = None, *_: Any, **__: Any) -> NoReturn:
        """Run a command and exit; an expected error is one line, any other a traceback."""
        words = list(sys.argv[1:] if args is None else args)
        try:
            _check_words(words)
            with self.make_context("speedrun", words[:]) as ctx:
                self.invoke(ctx)
        except BaseException as error:
            if known := expected(error):  # first, since a recipe may raise click's exceptions
                show_traceback(error)
                _fail(text_of(known), known.exit_code, words)
            if isinstance(error, KeyboardInterrupt):
                click.echo(err=True)  # the line of the ^C
                _fail("interrupted", INTERRUPTED, words)
            if isinstance(error, click.exceptions.Exit):
                sys.exit(error.exit_code)
            if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("speedrun."):
                show_traceback(error)
                lacks = f"this needs {error.name}, which this installation lacks; install the whole package"
                _fail(lacks, UsageError.exit_code, words)
            if not isinstance(error, click.UsageError):
                raise
            show_traceback(error)
            if isinstance(error, click.exceptions.NoArgsIsHelpError):
                error.show()
                sys.exit(error.exit_code)
            param = getattr(error, "param", None)
            option = param.opts[-1] if param else getattr(error, "option_name", None)
            _fail(_usage(error), UsageError.exit_code, words, option)
        sys.exit()


def _fail(said: str, exit_code: int, words: list[str], option: str | None = None) -> NoReturn:
    """Print one line, or JSON if the words ask for it, and exit."""
    from speedrun.base.console import clean  # not light enough for --help

    said = clean(" ".join(said.split()), limit=len(said))  # it may quote a file
    if "--json" in words:
        from speedrun.cli.options import show
        from speedrun.cli.schema import Failure

        show(Failure(said, exit_code, code_of(exit_code), option), (), as_json=True)
    else:
        click.echo(f"error: {said}", err=True)
    sys.exit(exit_code)


def _check_words(words: list[str]) -> None:
    """Raise UsageError for arguments that are not UTF-8: no record could hold them."""
    named = {name: os.environ.get(name, "") for name in _VARIABLES}
    for name, word in [*named.items(), *(("", word) for word in words)]:
        if not word.isprintable() and any("\udc80" <= char <= "\udcff" for char in word):
            raise UsageError(
                f"{name and f'{name}='}{word!a} is not UTF-8; need arguments and {', '.join(_VARIABLES)} in UTF-8; "
                "rename the file, or encode it so"
            )


def _usage(error: click.UsageError) -> str:
    """Return click's error as one line that ends with what to do."""
    ctx = error.ctx
    if isinstance(error, click.NoSuchOption) and ctx is not None:
        options = [name for param in ctx.command.get_params(ctx) for name in param.opts if name[0] == "-"]
        if "steps" in error.option_name and "--set" in options:
            return f"unknown option {error.option_name!r}; steps are a setting: --set stages.0.num_steps=10"
        return str(unknown("option", error.option_name, options))
    if isinstance(error, click.NoSuchCommand) and ctx is not None and isinstance(ctx.command, click.Group):
        return str(unknown("command", error.command_name, ctx.command.list_commands(ctx)))
    said = " ".join(error.format_message().split()).rstrip(".")
    help_option = f"'{ctx.command_path} --help'" if ctx is not None else "--help"
    return f"{said[:1].lower()}{said[1:]}; {help_option} shows what is needed"


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="speedrun %(version)s")
@click.option("--debug", is_flag=True, help="Also show the traceback of an error. Goes before the command.")
def command(*, debug: bool) -> None:
    """Time to 3.28: a speedrun harness for language models in JAX, with results that anyone can check."""
    if debug:
        os.environ[DEBUG] = "1"  # also for child processes


def main() -> None:
    """Run the command line of this process and exit, with 2 if only standard output is incomplete."""
    if sys.getfilesystemencoding() != "utf-8":  # records are UTF-8 in any locale
        os.environ["PYTHONUTF8"] = "1"  # for child processes
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    own_process()
    try:
        command()
    except SystemExit as end:
        if end.code in (Terminated.exit_code, INTERRUPTED):
            leave(end.code)
        sys.stdout.flush()
        lost = LOST.get(sys.stdout.fileno())
        if lost is None or isinstance(lost, BrokenPipeError):  # complete, or its reader closed it
            raise
        said = f"{lost.strerror}; everything else is done; redirect it to a disk with room"
        click.echo(f"error: standard output: {said}", err=True)
        sys.exit(end.code or UsageError.exit_code)
