"""`speedrun leaderboard`: the board of all records."""

from pathlib import Path

import click
from msgspec.structs import replace

from speedrun.base.console import clean
from speedrun.base.errors import SpeedrunError, UsageError
from speedrun.base.wholefile import write_whole
from speedrun.board import figures, pages
from speedrun.board.progress_plot import pictures
from speedrun.board.standings import BOARD, Board, read
from speedrun.cli import options as cli
from speedrun.record.layout import encode

_records_option = cli.option("--records DIR", cli.PATH, "Folder of <track>/<record>/.", Path("records"))
_OTHERS = "What others published or claim is in italics: unranked, not verified by us."


@cli.new_command("speedrun leaderboard build", "speedrun leaderboard check", cls=cli.Group)
def command() -> None:
    """Build the board from records, or check that it is up to date."""


@cli.new_command("speedrun leaderboard build", "speedrun leaderboard build --records DIR --json", of=command)
@_records_option
def build(*, records: Path) -> cli.Answer:
    """Validate every record again and write LEADERBOARD.md, leaderboard.json and leaderboard.html.

    They go into the folder of records. If it is called records, README.md beside it gets the board between its marks. A
    record that cannot be judged is left out and named, and the exit code is 1.
    """
    board = read(records)
    for path, content in _files(board, records).items():
        write_whole(path, content)
    # Not in `_files`, which `check` compares: pictures differ between versions of matplotlib.
    write_whole(records / "leaderboard.html", pages.page(board, pictures(board)).encode())
    rows = [f"{row.track:<16} {row.rank or '':>3} {row.standing:<12} {row.path}" for row in board.rows]
    places = [f"board   {records / 'LEADERBOARD.md'}", f"page    {records / 'leaderboard.html'}"]
    for one in board.left_out:
        click.echo(clean(f"left out {one.path}: {one.why}"), err=True)
    error = f"{len(board.left_out)} records cannot be judged and are not on the board; 'speedrun validate' says why"
    return cli.Answer(board, [*rows, *places], error=error if board.left_out else None)


@cli.new_command("speedrun leaderboard check", of=command, cls=click.Command)
@_records_option
def check(*, records: Path) -> None:
    """Exit with 1 if the board is out of date."""
    files = _files(read(records), records).items()
    stale = [path for path, content in files if not path.is_file() or path.read_bytes() != content]
    if stale:
        raise SpeedrunError(f"{', '.join(map(str, stale))}: out of date; run 'speedrun leaderboard build'")
    click.echo("board   up to date")


def _files(board: Board, records: Path) -> dict[Path, bytes]:
    """Return every generated file by its path, but the page in HTML."""
    table = pages.markdown(board, records=".")
    files = {
        records / "LEADERBOARD.md": f"# The board\n\n{_OTHERS}\n\n{table}".encode(),
        records / BOARD: encode(board),
    }
    readme = records.absolute().parent / "README.md"
    if records.absolute().name != "records" or not readme.exists():
        return files
    known = tuple(one for one in board.published if not one.claim)  # a first page is no place for claims
    block = pages.markdown(replace(board, published=known), records=records.name)
    page = readme.read_text(encoding="utf-8")
    try:
        new = figures.filled(page, {figures.BOARD: f"\n\n{block}\n"})
    except UsageError as error:
        raise UsageError(f"{readme}: {error}") from None
    return files | {readme: new.encode()} if figures.END in page else files
