"""`speedrun describe`: the title, authors, changes and parent of a record."""

from pathlib import Path
from typing import Any

import click

from speedrun.base.errors import UsageError
from speedrun.cli import options as cli
from speedrun.record.about import assemble
from speedrun.record.reader import need_record


@cli.new_command(
    "speedrun describe RECORD --title 'smoke in 264 steps' --author ada --change 'sixteen steps fewer'",
    "speedrun describe RECORD --parent records/smoke-cpu/2026-11-25-first",
    cls=click.Command,
)
@click.argument("record", type=cli.PATH)
@cli.option("--title TEXT", str, "What it is, in a few words.")
@cli.option("--author NAME", str, "A name or handle.", name="authors", multiple=True)
@cli.option("--change TEXT", str, "A change from the parent, in one sentence.", name="changes", multiple=True)
@cli.option("--parent RECORD", cli.PATH, "The record it was made from.")
def command(*, record: Path, parent: Path | None, **given: Any) -> None:
    """Write title, authors, changes and parent of RECORD into its about.json and the head of its README.

    Fields that are not given stay as they are. README.md below its head is yours to write.
    """
    need_record(record)
    if parent is not None and not (parent / "source.txt").is_file():
        raise UsageError(f"{parent} is not a record; give --parent a folder that holds source.txt")
    if parent is not None and parent.resolve() == record.resolve():
        raise UsageError(f"{parent} is the record itself; give --parent the record that it was made from")
    if parent is None and not any(given.values()):
        raise UsageError("nothing to change; give --title, --author, --change or --parent")
    place = None if parent is None else "/".join(parent.resolve().parts[-2:])
    told: dict[str, Any] = {name: value or None for name, value in given.items()}
    assemble(record, **told, parent_record=place)
    click.echo(f"record  {record}")
