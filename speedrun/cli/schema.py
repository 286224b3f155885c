"""The command `schema`: what the others print with `--json`, from the types of their answers."""

import ast
import sys
from collections.abc import Iterator
from inspect import getsource
from types import UnionType
from typing import Annotated, Any, TypedDict, Union, get_args, get_origin

import click
import msgspec

from speedrun.base.errors import unknown
from speedrun.base.exit_codes import code_of
from speedrun.cli import options as cli
from speedrun.commands import ADDED, added, is_here

Listed = TypedDict("Listed", {"commands": list[str]})


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a command prints if it fails or is refused."""

    error: str  #: one line: what we got, what we need, what to do
    exit_code: int
    code: Annotated[str, msgspec.Meta(extra_json_schema={"enum": sorted({*map(code_of, range(1, 256))})})]
    option: str | None = None  #: the option or argument at fault, if it is one


@cli.command("speedrun schema", "speedrun schema run", "speedrun schema data list")
def schema(
    ctx: click.Context, command: Annotated[tuple[str, ...], "[COMMAND]..."] = ()
) -> cli.Answer[Listed | dict[str, Any]]:
    """Print the JSON Schema of what COMMAND prints with --json; without COMMAND, list all commands."""
    known, name = dict(commands(ctx.find_root().command)), " ".join(command)
    if not name:
        return cli.Answer({"commands": [*known]}, known)
    if name not in known:
        raise unknown("command", name, known)
    parts, named = msgspec.json.schema_components(types_of(known[name]), ref_template="#/$defs/{name}")
    told = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"speedrun {name} --json"}
    told |= {"anyOf": parts, "$defs": named}
    return cli.Answer(told, [msgspec.json.format(msgspec.json.encode(told)).decode()])


def commands(of: click.Command, words: str = "") -> Iterator[tuple[str, cli.Command]]:
    """Yield all commands with `--json` below a group, by their words."""
    if isinstance(of, cli.Command):
        yield words.strip(), of
    elif isinstance(of, click.Group):
        for name in of.list_commands(ctx := click.Context(of)):
            if found := of.get_command(ctx, name):
                yield from commands(found, f"{words} {name}")


def types_of(command: cli.Command) -> list[Any]:
    """Return the types of what a command prints: of each of its answers, and of a failure."""
    module = sys.modules[str(command.callback.__module__)]
    for block in ast.parse(getsource(module)).body:  # what is too heavy to be imported for every command
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(block.body, []), str(module.__file__), "exec"), vars(module))
    answers = command.answers if not isinstance(command.answers, str) else eval(command.answers, vars(module))
    facts = [get_args(one)[0] for one in _members(answers) if get_origin(one) is cli.Answer]
    return [kind for one in facts for kind in _members(one)] + [Failure]


def _members(hint: Any) -> list[Any]:
    """Return the members of a union; for the name of a function of another room, what that returns."""
    if get_origin(hint) in (Union, UnionType):
        return [one for part in get_args(hint) for one in _members(part)]
    if get_origin(hint) is Annotated:
        name = get_args(hint)[1]
        return [added(name).__annotations__["return"]] if is_here(ADDED[name]) else []
    return [hint]
