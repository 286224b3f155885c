"""Prepare a record to be sent: scan it for leaks, pack it, write the text of its pull request and list the commands.

The bytes that are validated, scanned and packed are the same: each file of the record is read once. Nothing here runs
a command or uses a network.
"""

import gzip
import io
import re
import shlex
import tarfile
import unicodedata
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from statistics import fmean

import msgspec

from speedrun.board import leaks, pull_request
from speedrun.board.leaks import Leak
from speedrun.board.standings import standing_of
from speedrun.ground.errors import SpeedrunError, UsageError, translate_os_errors
from speedrun.ground.wholefile import write_whole
from speedrun.ledger.format import sha256
from speedrun.ledger.record import Record
from speedrun.ledger.validate import Report

_NAME = re.compile(r"\d{4}-\d\d-\d\d-[a-z0-9][a-z0-9-]{0,59}")
_BOARD = ("records/LEADERBOARD.md", "records/leaderboard.json", "records/leaderboard.html", "README.md")


class Submission(msgspec.Struct, frozen=True):
    """What is sent, and where to."""

    record: str  #: its folder
    place: str  #: its folder in the repository, as `records/<track>/<date>-<slug>`
    archive: str  #: path
    archive_bytes: int
    archive_sha256: str
    title: str
    text: str  #: Markdown
    text_path: str
    commands: tuple[str, ...]  #: to be typed in the checkout; none is run
    findings: tuple[Leak, ...]  #: secrets stop the submission; the others are warnings


def require_acceptable(record: Record, report: Report, *, missed: bool) -> None:
    """Refuse a record unless it passes all checks and whose outcome is the expected one.

    Raises:
        SpeedrunError: a check failed or warned, or the record missed its target without `missed`.
        UsageError: it reached its target, and `missed` was given.
    """
    root = record.root
    if report.exit_code:
        problems = (*report.having("failed"), *report.having("warning"))
        bad = ", ".join(f"{one.check.id} {one.status}" for one in problems)
        raise SpeedrunError(
            f"{root} is refused: {bad}; 'speedrun validate --strict {root}' says why and what to do"
        )
    loss, target = fmean(run.val_loss for run in record.finished), record.rules.target.loss
    is_missed = standing_of(record, report) == "missed"
    if is_missed and not missed:
        raise SpeedrunError(
            f"{root} missed its target: mean loss {loss:.4f}, need at most {target:g}; train longer, or pass --missed "
            "to submit it as a run that missed"
        )
    if missed and not is_missed:
        raise UsageError(f"{root} reached its target ({loss:.4f}, {target:g}); leave out --missed")


def require_outside(record: Path, out: Path) -> None:
    """Raise UsageError if what is written about a record would become part of it."""
    if out.resolve().is_relative_to(record.resolve()):
        raise UsageError(f"{out} is inside the record, which may hold nothing else; choose another --out")


def slug(text: str) -> str:
    """Return a text as lower-case letters, digits and hyphens; it may be empty."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub("[^a-z0-9]+", "-", plain).strip("-")[:50].strip("-")


def name_of(record: Record, wanted: str | None = None) -> str:
    """Return the name of the record's folder in the repository: `<yyyy-mm-dd>-<slug>`.

    That is the folder's own name if it has that form, else the day of the first run and the title, or `wanted`.

    Raises:
        UsageError: if that gives no name.
    """
    if wanted is None and _NAME.fullmatch(name := record.root.resolve().name):
        return name
    words = slug(record.about.title if wanted is None else wanted)
    name = f"{record.created_utc[:10]}-{words}"
    if not _NAME.fullmatch(name):
        raise UsageError(f"the record would be named {name!r}; need a date and a word, give one with --name")
    return name


def pack(files: Mapping[str, bytes], folder: str) -> bytes:
    """Return a tar.gz of files in one folder; the same files give the same bytes."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, compresslevel=9, mtime=0) as squeezed,
        tarfile.open(fileobj=squeezed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path, content in sorted(files.items()):
            member = tarfile.TarInfo(f"{folder}/{path}")  # no time, no owner, mode 644
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def prepare(record: Record, report: Report, *, name: str, out: Path) -> tuple[Submission, bytes]:
    """Scan, pack and describe an acceptable record, named by `name_of`; write nothing.

    Returns:
        The submission, and the bytes of its archive, which belongs into `out`.

    Raises:
        UsageError: if another record already has this name.
    """
    place = PurePosixPath("records", record.rules.name, name)
    archive, content = out / f"{name}.tar.gz", pack(record.raw, name)
    about_archive = f"{archive.name}, {len(content):,} bytes, sha256 {sha256(content)}"
    title = pull_request.title(record, f"{record.rules.name}/{name}")
    text = pull_request.text(record, report, about_archive)
    text_path = out / f"{name}.pull-request.md"
    outgoing = {**record.raw, text_path.name: text.encode(), "title": title.encode()}
    submission = Submission(
        record=str(record.root),
        place=str(place),
        archive=str(archive),
        archive_bytes=len(content),
        archive_sha256=sha256(content),
        title=title,
        text=text,
        text_path=str(text_path),
        commands=_commands(record.root, place, archive, title, text_path),
        findings=leaks.in_files(outgoing),
    )
    return submission, content


def _commands(root: Path, place: PurePosixPath, archive: Path, title: str, text: Path) -> tuple[str, ...]:
    """Return what to type in the checkout. The copy comes from the archive: what was scanned is what is sent."""
    branch = f"record/{place.parent.name}/{place.name}"
    copy = [f"mkdir -p {place.parent}", shlex.join(["tar", "-xzf", str(archive), "-C", str(place.parent)])]
    if Path(place).exists():
        if not Path(place).samefile(root):
            raise UsageError(f"{place} already exists and is not {root}; choose another --name")
        copy = []
    return (
        f"git switch -c {branch}",
        *copy,
        "speedrun leaderboard build",
        shlex.join(["git", "add", str(place), *_BOARD]),
        shlex.join(["git", "commit", "-m", title]),
        f"git push -u origin {branch}",
        shlex.join(["gh", "pr", "create", "--title", title, "--body-file", str(text)]),
    )


def write(submission: Submission, content: bytes) -> None:
    """Write the archive and the text; their folder is made.

    Raises:
        UsageError: if the folder cannot be made.
    """
    archive = Path(submission.archive)
    with translate_os_errors(archive.parent, UsageError):
        archive.parent.mkdir(parents=True, exist_ok=True)
    write_whole(archive, content)
    write_whole(Path(submission.text_path), submission.text.encode())
