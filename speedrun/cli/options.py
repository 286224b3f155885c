"""Makes commands from functions: parameters become options, and the answer is printed as text or JSON.

`Annotated` gives a keyword a type of click, a usage such as "--steps N", and a help text; longer help texts are in the
docstring. No heavy imports.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from inspect import Parameter, cleandoc, signature
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import click

from speedrun.base import clock
from speedrun.base.errors import SpeedrunError, UsageError
from speedrun.base.progress import working
from speedrun.base.recipe_files import resolve
from speedrun.commands import added

_TEXTS = "\n\nOptions:\n"  #: begins the longer help texts in a docstring
Facts = TypeVar("Facts", covariant=True)


class Answer(NamedTuple, Generic[Facts]):
    """The output of a command. `speedrun schema` reads the type of the facts in the annotation of its function."""

    facts: Facts  #: for `--json`
    lines: Iterable[object]  #: otherwise
    exit_code: int = 0
    error: str | None = None  #: printed after the lines, with exit code 1; the facts include it


_Function = Callable[..., Answer[Any] | None]


class Command(click.Command):
    """A command with `--json`. A `silent` one shows no progress of its own."""

    silent = False
    answers: Any = None  #: annotation of the answer, as text if its types are heavy

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read a bare `--replay` as `--replay=some`, since click would take the record as its value."""
        has = any(parameter.name == "replay" for parameter in self.params)
        return super().parse_args(
            ctx, ["--replay=some" if has and word == "--replay" else word for word in args]
        )

    def invoke(self, ctx: click.Context) -> None:
        """Run the command, print its answer, and exit with its code."""
        assert self.callback is not None
        hints = get_type_hints(self.callback)
        given = {name: _given(ctx, name, kind) for name, kind in hints.items() if name != "return"}
        try:
            with working(ctx.command_path) if self.silent else nullcontext():
                answer = ctx.invoke(self.callback, **given)
        except SystemExit as ended:  # as a child ended, which has said why
            if not ctx.params["as_json"] or not isinstance(ended.code, int) or not ended.code:
                raise
            found = "ended by a process of its own; the last line on standard error says why"
            raise SpeedrunError(found, ended.code) from None
        if isinstance(answer, Answer):
            as_json = ctx.params["as_json"]
            show(answer.facts, answer.lines, as_json=as_json)
            if answer.error and not as_json:
                raise SpeedrunError(answer.error)
            ctx.exit(SpeedrunError.exit_code if answer.error else answer.exit_code)


def _given(ctx: click.Context, name: str, kind: Any) -> Any:
    """Return the value of a parameter of a command: the context, several options, or one."""
    if kind is click.Context:
        return ctx
    if hasattr(kind, "_fields"):
        return kind(**{field: ctx.params[field] for field in kind._fields})
    return ctx.params[name]


def command(
    *examples: str, of: click.Group | None = None, silent: bool = False
) -> Callable[[_Function], Command]:
    """Return a decorator that makes a command from a function; its help ends with the examples.

    Positional parameters are arguments. A NamedTuple stands for its fields.
    """

    def made(function: _Function) -> Command:
        text = "Print one JSON object on stdout, also for an error; 'speedrun schema' describes it."
        answers = function.__annotations__.pop("return")  # the others are types of this module
        found = Command(
            function.__name__.strip("_").replace("_", "-"),
            callback=function,
            params=[*_parameters(function), click.Option(["--json", "as_json"], is_flag=True, help=text)],
            help=cleandoc(function.__doc__ or "").partition(_TEXTS)[0],
            epilog=epilog(*examples),
        )
        found.silent, found.answers = silent, answers
        if of is not None:
            of.add_command(found)
        return found

    return made


def epilog(*examples: str) -> str:
    """Return the examples at the end of a help text."""
    return "\n".join(["\b", "Example:", *(f"  {line}" for line in examples)])


def _parameters(function: Callable[..., Any]) -> Iterator[click.Parameter]:
    """Yield the arguments and options of a function or NamedTuple."""
    hints = get_type_hints(function, include_extras=True)
    told = cleandoc(function.__doc__ or "").partition(_TEXTS)[2]
    texts = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", told, re.MULTILINE))
    own = {name for name, hint in hints.items() if not hasattr(hint, "_fields")}
    for name, parameter in signature(function).parameters.items():
        if hasattr(hints[name], "_fields"):
            yield from (one for one in _parameters(hints[name]) if one.name not in own)
        elif hints[name] is not click.Context:
            is_option = isinstance(function, type) or parameter.kind is Parameter.KEYWORD_ONLY
            text = " ".join(texts.get(name, "").split())
            yield _parameter(name, Annotated[hints[name], text], parameter.default, is_option=is_option)


def _parameter(name: str, hint: Any, default: Any, *, is_option: bool) -> click.Parameter:
    kind, notes = _unwrapped(hint)
    is_settings = get_origin(kind) is Mapping
    is_several = is_settings or (get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis)
    if is_several:
        kind, more = _unwrapped(get_args(kind)[0])
        notes += more
    types = [note for note in notes if not isinstance(note, str)]
    texts = [note for note in notes if isinstance(note, str) and note]
    if get_origin(kind) is Literal:
        types.append(click.Choice(get_args(kind)))
    given: dict[str, Any] = {"type": [*types, _KINDS.get(kind) or get_args(kind) or kind][0]}
    given |= {"required": True} if default is Parameter.empty else {"required": False, "default": default}
    if is_settings:
        given |= {"default": (), "callback": lambda _, __, texts: parse_settings(texts)}
    if not is_option:
        return click.Argument([name], nargs=-1 if is_several else 1, metavar=[*texts, None][0], **given)
    usage = next((text for text in texts if text[0] == "-"), f"--{name.replace('_', '-')}")
    flags, _, metavar = usage.partition(" ")
    return click.Option(
        [*flags.split(","), name],
        help=next((text for text in texts if text[0] != "-"), "") + " Repeatable." * is_several,
        metavar=metavar or _METAVARS.get(kind),
        multiple=is_several,
        is_flag=kind is bool,
        show_default=kind is not bool,
        **given,
    )


def _unwrapped(hint: Any) -> tuple[Any, list[Any]]:
    """Return a type without None, and its `Annotated` notes, the outermost first."""
    if get_origin(hint) is Annotated:
        kind, notes = _unwrapped(hint.__origin__)
        return kind, [*reversed(hint.__metadata__), *notes]
    if NoneType in get_args(hint):
        return _unwrapped(next(kind for kind in get_args(hint) if kind is not NoneType))
    return hint, []


class Integer(click.IntRange):
    """A whole number in a range, with a name that suits click's errors."""

    name = "integer"


class Number(click.FloatRange):
    """A finite number in a range."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse a number; refuse infinity and NaN."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class Place(click.Path):
    """A path; none through a link that leads nowhere, or to itself, on which a run would end late or never."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path, or fail in one line."""
        path = Path(str(super().convert(value, param, ctx)))
        for link in (path, *path.parents):
            if os.path.islink(link) and not os.path.exists(link):
                self.fail(
                    f"{link} is a link to nothing, or to itself; remove it, or name another path", param, ctx
                )
        return path


_KINDS = {Path: Place()}
_METAVARS = {int: "N", float: "X", Path: "PATH"}

Count = Annotated[int, Integer(1)]
Natural = Annotated[int, Integer(0, 2**31 - 1)]  #: as large as JAX counts
Amount = Annotated[float, Number(0)]
Folder = Annotated[Path, Place(file_okay=False)]
Track = Annotated[str, "--track NAME", "Rules of the run; 'speedrun data list' has all tracks."]
Recipe = Annotated[str, click.types.FuncParamType(resolve), "--recipe NAME|FILE"]
Settings = Annotated[Mapping[str, str], "--set KEY=VALUE", "Change a setting of the recipe."]
UNCHANGED: Mapping[str, str] = MappingProxyType({})
Attention = Annotated[str, "--attention NAME", "Attention kernels: auto, banded, definition or triton."]
FirstStep = Annotated[Natural, "--first-step I", "First step of the schedule."]
Data = Annotated[
    Path | None, "--data DIR", "Folder of shards. Default: the track's, in $SPEEDRUN_DATA or ./data."
]
Unsafe = Annotated[
    bool,
    "--unsafe-here",
    "Run the record's code even where it cannot be isolated from your network, files and processes.",
]
Ghost = Annotated[
    str | None,
    "--ghost RECORD|best",
    "Show on the step lines how far the run is ahead of this record, in seconds and loss; 'best': the fastest "
    "qualified record of the track in records/.",
]
Wandb = Annotated[str | None, "--wandb PROJECT", "Send the log to wandb. This cannot stop the run."]
Unranked = Annotated[
    bool,
    "Start on a ranked track even if no ranked record could hold it; the log says so, and it never ranks.",
]
Dtype = Annotated[Literal["float32", "bfloat16"] | None, "Type of the computation. Default: the recipe's."]
Port = Annotated[int, Integer(0, 65_535), "Port of the page, on this machine only; 0: any free port."]
WATCH_PORT = 3280  #: default of the page of `watch`


class Weights(NamedTuple):
    """Options that choose the weights of a trained model."""

    step: Annotated[Natural | None, "Step of the checkpoint. Default: the newest."] = None
    recipe: Annotated[Recipe | None, "Recipe of the model, if it is your own file."] = None
    data: Data = None


def show(facts: Any, lines: Iterable[object], *, as_json: bool) -> None:
    """Print one JSON object, or lines."""
    import msgspec  # not light enough for --help

    for line in [msgspec.json.encode(facts)] if as_json else lines:
        click.echo(line)


def only_with_resume(ctx: click.Context, *others: str) -> None:
    """Raise UsageError for an option that does not go with `--resume`; `--json` and the `others` do."""
    for param in typed(ctx):
        if param.name not in ("resume", "as_json", *others):
            got = f"--resume keeps the settings of the run, got also {param.opts[-1]}"
            raise UsageError(f"{got}; leave it out, or start a new run")


def typed(ctx: click.Context) -> list[click.Parameter]:
    """Return the options of the command line."""
    source = click.core.ParameterSource.COMMANDLINE
    return [param for param in ctx.command.params if ctx.get_parameter_source(str(param.name)) is source]


def parse_settings(texts: Iterable[str]) -> dict[str, str]:
    """Parse `key=value` texts."""
    settings: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise UsageError(f"--set {text!r}; need key=value, for example --set optimizer.muon_lr=0.04")
        if key in settings:
            raise UsageError(f"--set {key} was given twice; keep one")
        settings[key] = value
    return settings


On = Annotated[
    str | None, "--on HOST:PORT", "Train on the nodes of the Ray there, one run at a time on each."
]


def on_nodes(ctx: click.Context, address: str | None, say: Callable[[str], None]) -> Any:
    """Return the `train.batch.Trainer` of the Ray there; None: this machine. Call it before JAX is imported."""
    return None if address is None else ctx.with_resource(added("nodes")(address, say))


def numbers(option: str, text: str) -> list[int]:
    """Parse `1,2,3`."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        need = f"need whole numbers with commas between them: {option} 1,2,3"
        raise UsageError(f"{option} {text!r}; {need}") from None


def new_folder(name: str) -> Path:
    """Return the first folder `runs/<date>-<name>-<n>` that does not exist."""
    candidates = (Path("runs") / f"{clock.now().utc[:10]}-{name}-{i}" for i in range(1, 10_000))
    return next(path for path in candidates if not path.exists())
