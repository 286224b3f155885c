"""`speedrun describe`: the title, authors, changes and parent of a record."""

from pathlib import Path

import click

from speedrun.cli.options import PATH, new_command, option
from speedrun.ground.errors import UsageError
from speedrun.ledger.assemble import assemble
from speedrun.ledger.record import need_record


@new_command(
    "speedrun describe RECORD --title 'smoke in 264 steps' --author ada --change 'sixteen steps fewer'",
    "speedrun describe RECORD --parent records/smoke-cpu/2026-11-21-first",
)
@click.argument("record", type=PATH)
@option("--title TEXT", str, "What it is, in a few words.")
@option("--author NAME", str, "A name or handle.", name="authors", multiple=True)
@option("--change TEXT", str, "A change from the parent, in one sentence.", name="changes", multiple=True)
@option("--parent RECORD", PATH, "The record it was made from.")
def command(
    *,
    record: Path,
    title: str | None,
    authors: tuple[str, ...],
    changes: tuple[str, ...],
    parent: Path | None,
) -> None:
    """Write title, authors, changes and parent of RECORD into its about.json and the head of its README.

    Fields that are not given stay as they are. README.md below its head is yours to write.
    """
    need_record(record)
    if parent is not None and not (parent / "source.txt").is_file():
        raise UsageError(f"{parent} is not a record; give --parent a folder that holds source.txt")
    if parent is not None and parent.resolve() == record.resolve():
        raise UsageError(f"{parent} is the record itself; give --parent the record that it was made from")
    if not (title or authors or changes or parent):
        raise UsageError("nothing to change; give --title, --author, --change or --parent")
    place = None if parent is None else "/".join(parent.resolve().parts[-2:])
    assemble(record, title=title, authors=authors or None, changes=changes or None, parent_record=place)
    click.echo(f"record  {record}")
