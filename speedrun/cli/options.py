"""Options that several commands share, so that one name means one thing everywhere. No heavy imports."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from speedrun.ground.errors import UsageError, unknown
from speedrun.ground.plugins import resolve

Decorator = Callable[[Callable[..., object]], Callable[..., object]]


def example(*lines: str) -> str:
    """Return the examples at the end of a command's help. Every command has some."""
    return "\n".join(["\b", "Example:", *(f"  {line}" for line in lines)])


class Group(click.Group):
    """A group of commands that suggests the nearest name for an unknown one."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name; raise UsageError if there is none."""
        if cmd_name not in self.list_commands(ctx):
            raise unknown("command", cmd_name, self.list_commands(ctx))
        return self.load(ctx, cmd_name)

    def load(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return the command of a name that exists."""
        return super().get_command(ctx, name)


class Integer(click.IntRange):
    """A whole number in a range, which click's errors call "integer range" otherwise."""

    name = "integer"


class Number(click.FloatRange):
    """A finite number in a range. Infinity and NaN are refused."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse a number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


#: `--json`, as the argument `as_json`.
json_option: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout, also for an error."
)

#: `--data DIR`, as the argument `data`; None means the track's own folder.
data_option: Decorator = click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of shards. Default: the track's, in $SPEEDRUN_DATA or ./data.",
)

#: `--unsafe-here`, as the argument `unsafe`, of every command that executes a record's source.
unsafe_option: Decorator = click.option(
    "--unsafe-here",
    "unsafe",
    is_flag=True,
    help="Run the record's code even where it cannot be isolated from your network, files and processes.",
)


def track_option(default: str = "smoke-cpu") -> Decorator:
    """`--track NAME`, as the argument `track`."""
    return click.option(
        "--track", default=default, show_default=True, metavar="NAME", help="Rules of the run."
    )


#: `--set KEY=VALUE`, as the argument `settings` for `parse_settings`.
settings_option: Decorator = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change a number of the recipe. Repeatable."
)


class RecipeName(click.ParamType):
    """A recipe by its name or its file; the argument is its name."""

    name = "recipe"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Adds the folder of a file to $SPEEDRUN_RECIPES."""
        return resolve(value)


_OWN_RECIPE = "What to train: a name, or your own file, path/to/mine.py. Default: the track's own recipe."


def recipe_option(default: str | None = None, text: str = _OWN_RECIPE) -> Decorator:
    """`--recipe NAME|FILE`, as the argument `recipe`; None means the track's own."""
    return click.option(
        "--recipe",
        type=RecipeName(),
        metavar="NAME|FILE",
        default=default,
        show_default=default is not None,
        help=text,
    )


def out_option(text: str) -> Decorator:
    """`--out DIR`, as the argument `out`."""
    return click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help=text)


def port_option(default: int) -> Decorator:
    """`--port N`, as the argument `port`."""
    return click.option(
        "--port",
        type=Integer(0, 65_535),
        default=default,
        show_default=True,
        metavar="N",
        help="Of the page, on this machine only; 0: any that is free.",
    )


#: `--devices N`, as the argument `devices`; None means what the track asks for.
devices_option: Decorator = click.option(
    "--devices", type=Integer(1), metavar="N", help="Default: what the track asks for, or all there are."
)

#: `--attention FORM`, as the argument `attention`.
attention_option: Decorator = click.option(
    "--attention", default="auto", show_default=True, metavar="FORM", help="Attention kernels."
)

#: `--microbatches N`, as the argument `microbatches`; None means 8, or one for each device if there are more.
microbatches_option: Decorator = click.option(
    "--microbatches",
    type=Integer(1),
    metavar="N",
    help="Parts of a step's batch. Default: 8, or one for each device if there are more.",
)

#: `--dollars X`, as the argument `dollars`.
price_option: Decorator = click.option(
    "--dollars",
    type=Number(0),
    default=2.5,
    show_default=True,
    envvar="SPEEDRUN_DOLLARS",
    show_envvar=True,
    metavar="X",
    help="Price of a GPU and hour.",
)


def only_with_resume(ctx: click.Context, *others: str) -> None:
    """Refuse options that `--resume` does not take, because a resumed run keeps its settings.

    Allowed are `--json` and the `others`.

    Raises:
        UsageError: names the first other option.
    """
    for name in ctx.params:
        given = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if given and name not in ("resume", "as_json", *others):
            option = name.replace("_", "-")
            raise UsageError(
                f"--resume keeps the settings of the run, got --{option} as well; leave it out, or start a new run"
            )


def parse_settings(texts: tuple[str, ...]) -> dict[str, str]:
    """Parse `key=value` texts; raise UsageError for a text without `=` or a key given twice."""
    settings: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise UsageError(f"--set {text!r}; need key=value, for example --set optimizer.muon_lr=0.05")
        if key in settings:
            raise UsageError(f"--set {key} was given twice; keep one")
        settings[key] = value
    return settings
