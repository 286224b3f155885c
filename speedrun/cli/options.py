"""What commands are made of: options, examples and answers, so that one name means one thing everywhere.

No heavy imports.
"""

import functools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from speedrun.base import clock
from speedrun.base.errors import SpeedrunError, UsageError, unknown
from speedrun.base.recipe_files import resolve

if TYPE_CHECKING:
    from speedrun.train.request import RunConfig

Decorator = Callable[[Callable[..., object]], Callable[..., object]]


class Group(click.Group):
    """A group of commands that suggests the nearest name for an unknown one."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name; raise UsageError if there is none."""
        if cmd_name not in self.list_commands(ctx):
            raise unknown("command", cmd_name, self.list_commands(ctx))
        return super().get_command(ctx, cmd_name)


class Answer(NamedTuple):
    """What a command found."""

    facts: Any  #: for `--json`
    lines: Iterable[object]  #: for people
    exit_code: int = 0
    error: str | None = None  #: with exit code 1; for people, after the lines, as facts tell it themselves


class Command(click.Command):
    """A command with `--json`, which prints what its function answers, if anything."""

    def __init__(self, *args: Any, **more: Any) -> None:
        """Make a command as click does; `ctx.params["as_json"]` tells whether it was given."""
        super().__init__(*args, **more)
        text = "Print one JSON object on stdout, also for an error."
        self.params.append(click.Option(["--json", "as_json"], is_flag=True, help=text))

    def invoke(self, ctx: click.Context) -> None:
        """Run the command and exit with the code of its answer."""
        assert self.callback is not None
        given = {name: value for name, value in ctx.params.items() if name != "as_json"}
        if isinstance(answer := ctx.invoke(self.callback, **given), Answer):
            show(answer.facts, answer.lines, as_json=ctx.params["as_json"])
            if answer.error and not ctx.params["as_json"]:
                raise SpeedrunError(answer.error)
            ctx.exit(SpeedrunError.exit_code if answer.error else answer.exit_code)


def new_command(
    *examples: str, of: click.Group | None = None, cls: type[click.Command] = Command, **more: Any
) -> Callable[[Callable[..., object]], Any]:
    """Return a decorator that makes a command, of a group; its help ends with the examples. Every command has some."""
    epilog = "\n".join(["\b", "Example:", *(f"  {line}" for line in examples)])
    return (click.command if of is None else of.command)(cls=cls, epilog=epilog, **more)


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


PATH = click.Path(path_type=Path)
FOLDER = click.Path(path_type=Path, file_okay=False)
COUNT = Integer(1)
NATURAL = Integer(0)
SEED = Integer(0, 2**31 - 1)
WATCH_PORT = 3280  #: default of the page of `watch`


def option(
    usage: str, kind: Any, text: str, default: Any = None, *, name: str = "", **more: Any
) -> Decorator:
    """Add an option to a command.

    Args:
        usage: as in its help, for example "--steps N".
        kind: of its value, as click takes it.
        text: what it means. That it is repeatable, if `multiple`, is added.
        default: shown in the help, unless None.
        name: of the argument, if it differs.
        more: for `click.option`.
    """
    flags, _, metavar = usage.partition(" ")
    if more.get("multiple"):
        text += " Repeatable."
    shown = {"show_default": True, "default": default} if default is not None else {}
    names = [flags, name] if name else [flags]
    return click.option(*names, type=kind, metavar=metavar or None, help=text, **shown, **more)


def flag(name: str, text: str, argument: str = "") -> Decorator:
    """Add an option without a value, as `argument` if its name differs."""
    return click.option(*name.split("/"), *([argument] if argument else []), is_flag=True, help=text)


def combined(*options: Decorator) -> Decorator:
    """Return a decorator that adds all options."""
    return lambda command: functools.reduce(lambda made, add: add(made), reversed(options), command)


def show(facts: Any, lines: Iterable[object], *, as_json: bool) -> None:
    """Print one JSON object, or lines."""
    import msgspec  # not light enough for --help

    for line in [msgspec.json.encode(facts)] if as_json else lines:
        click.echo(line)


#: `--data DIR`, as the argument `data`; None means the track's own folder.
data_option = option(
    "--data DIR", PATH, "Folder of shards. Default: the track's, in $SPEEDRUN_DATA or ./data."
)

#: `--unsafe-here`, as the argument `unsafe`, of every command that executes a record's source.
unsafe_option = flag(
    "--unsafe-here",
    "Run the record's code even where it cannot be isolated from your network, files and processes.",
    "unsafe",
)

#: `--set KEY=VALUE`, as the argument `settings` for `parse_settings`.
settings_option = option("--set KEY=VALUE", str, "Change a recipe's number.", name="settings", multiple=True)

#: `--attention FORM`, as the argument `attention`.
attention_option = option("--attention FORM", str, "Attention kernels.", "auto")

#: `--first-step I`, as the argument `first_step`.
first_step_option = option("--first-step I", NATURAL, "Of the schedule.", 0)

_OWN_RECIPE = "What to train: a name, or your own file, path/to/mine.py. Default: the track's own recipe."


def track_option(default: str = "smoke-cpu") -> Decorator:
    """`--track NAME`, as the argument `track`."""
    return option("--track NAME", str, "Rules of the run.", default)


def recipe_option(default: str | None = None, text: str = _OWN_RECIPE) -> Decorator:
    """`--recipe NAME|FILE`, as the argument `recipe`; None means the track's own."""
    return option("--recipe NAME|FILE", resolve, text, default)


def out_option(text: str) -> Decorator:
    """`--out DIR`, as the argument `out`."""
    return option("--out DIR", PATH, text)


def port_option(default: int) -> Decorator:
    """`--port N`, as the argument `port`."""
    text = "Of the page, on this machine only; 0: any that is free."
    return option("--port N", Integer(0, 65_535), text, default)


#: `--ghost RECORD`, as the argument `ghost` for `ghost.chosen`.
ghost_option = option(
    "--ghost RECORD|best",
    str,
    "Show on the step lines how far ahead of this record the run is, in seconds and loss; 'best': of the fastest "
    "qualified record of the track in records/.",
)

#: `--wandb PROJECT`, as the argument `wandb` for `exports.relayed`.
wandb_option = option("--wandb PROJECT", str, "Send the log to wandb. This cannot stop the run.")

#: The options that `request_of` reads.
config_options = combined(
    track_option(),
    recipe_option(),
    option("--devices N", COUNT, "Default: what the track asks for, or all there are."),
    attention_option,
    option(
        "--microbatches N",
        COUNT,
        "Parts of a step's batch. Default: 8, or one for each device if there are more.",
    ),
    data_option,
    out_option("A new folder. Default: below runs/, with date, track and a number."),
)

#: The options that choose the weights of a trained model: for `model.weight_sources`.
weights_options = combined(
    option("--step N", NATURAL, "Of the checkpoint. Default: the newest."),
    recipe_option(text="The model's recipe, if it is in a file of your own."),
    data_option,
)
#: `--dtype NAME`, as the argument `dtype`; None means the recipe's own.
dtype_option = option(
    "--dtype", click.Choice(["float32", "bfloat16"]), "Of the computation. Default: as the recipe computes."
)


def only_with_resume(ctx: click.Context, *others: str) -> None:
    """Raise UsageError for an option that `--resume` does not take; it takes `--json` and the `others`."""
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


def begun(ctx: click.Context, module: str, asked: Callable[[], Any], *allowed: str) -> Path:
    """Return the folder of several runs: that of `--resume`, or a new one, where a child declares what is asked for.

    The child is a `module` of ours. `allowed` are the options beside `--resume`.
    """
    if ctx.params["resume"] is not None:
        only_with_resume(ctx, *allowed)
        return ctx.params["resume"]
    from speedrun.base import children, track
    from speedrun.data import generated  # NumPy comes with it

    request = asked()
    config = request.config
    generated.ensure(track.load(config.track), config.data, functools.partial(click.echo, err=True))
    if code := children.run_module(module, request):
        ctx.exit(children.shell_code(code))
    return config.out


def numbers(option: str, text: str) -> list[int]:
    """Parse `1,2,3`; raise UsageError for other text."""
    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        need = f"need whole numbers with commas between them: {option} 1,2,3"
        raise UsageError(f"{option} {text!r}; {need}") from None


def request_of(given: dict[str, Any], overrides: dict[str, str], out: Path, **more: Any) -> "RunConfig":
    """Return the request that the options of a command say, with `more` of its fields."""
    from speedrun.train.request import RunConfig

    same = {key: given[key] for key in ("track", "recipe", "data", "microbatches", "attention")}
    return RunConfig(**same, out=out, overrides=overrides, num_devices=given["devices"], **more)


def new_folder(name: str) -> Path:
    """Return the first of today's folders below `runs/` that does not exist: `runs/<date>-<name>-<n>`."""
    candidates = (Path("runs") / f"{clock.now().utc[:10]}-{name}-{i}" for i in range(1, 10_000))
    return next(path for path in candidates if not path.exists())
