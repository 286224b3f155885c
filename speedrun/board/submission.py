"""A record made ready to be sent: what leaks, one archive, the text of the pull request, what to type.

Validated, scanned and packed are the same bytes: each file of the record was read once. Nothing here runs a command
or reaches a network.
"""

import gzip
import io
import re
import shlex
import tarfile
import unicodedata
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import msgspec

from speedrun.board import leaks, pull_request
from speedrun.ground.errors import UsageError
from speedrun.ground.wholefile import write_whole
from speedrun.ledger.format import Manifest
from speedrun.ledger.record import Record
from speedrun.ledger.runfile import sha256
from speedrun.ledger.validate import Report

_NAME = re.compile(r"\d{4}-\d\d-\d\d-[a-z0-9][a-z0-9-]{0,59}")
_BOARD = ("records/LEADERBOARD.md", "records/leaderboard.json", "records/leaderboard.html", "README.md")


class Finding(msgspec.Struct, frozen=True):
    """Something in an outgoing file that should perhaps not go out."""

    path: str  #: from the record's root; a part that is itself a secret is left out
    line: int
    kind: str
    secret: bool  #: stops the submission; else a warning


class Submission(msgspec.Struct, frozen=True):
    """All that is to be sent, and where to."""

    record: str  #: its folder
    place: str  #: its folder in the repository, as `records/<track>/<date>-<slug>`
    archive: str  #: path
    archive_bytes: int
    archive_sha256: str
    title: str
    text: str  #: Markdown
    text_path: str
    commands: tuple[str, ...]  #: to be typed in the checkout; none is run
    findings: tuple[Finding, ...]


def slug(text: str) -> str:
    """A text as a name of small letters, digits and hyphens; may be empty."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub("[^a-z0-9]+", "-", plain).strip("-")[:50].strip("-")


def name_of(root: Path, manifest: Manifest, wanted: str | None = None) -> str:
    """Name of the record's folder in the repository: `<yyyy-mm-dd>-<slug>`.

    That of its folder if that is such a name already; else the day of the first run and its title.

    Args:
        root: folder of the record.
        manifest: of the record.
        wanted: another slug.

    Raises:
        UsageError: if there is nothing to make it of.
    """
    if wanted is None and _NAME.fullmatch(root.resolve().name):
        return root.resolve().name
    words = slug(manifest.about.title if wanted is None else wanted)
    name = f"{manifest.created_utc[:10]}-{words}"
    if not _NAME.fullmatch(name):
        raise UsageError(f"the record would be named {name!r}; need a date and a word, say one with --name")
    return name


def findings(files: Mapping[str, bytes]) -> tuple[Finding, ...]:
    """What leaks from any of these files or from their names, by path and line."""
    own = leaks.own_shapes()
    return tuple(
        Finding(_shown(path, own), leak.line, leak.kind, leak.secret)
        for path, content in sorted(files.items())
        for leak in [*leaks.find(path.encode(), own), *leaks.find(content, own)]
    )


def _shown(path: str, own: tuple[leaks.Shape, ...]) -> str:
    hidden = [part if not leaks.find(part.encode(), own) else "(hidden)" for part in path.split("/")]
    return "/".join(hidden)


def pack(files: Mapping[str, bytes], folder: str) -> bytes:
    """One tar.gz of some files below one folder: the same bytes for the same files, whenever and by whomever."""
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


def prepare(
    record: Record, manifest: Manifest, report: Report, *, name: str, out: Path
) -> tuple[Submission, bytes]:
    """Scans, packs and describes a record that passed every check; writes nothing.

    Args:
        record: what was read.
        manifest: of the record.
        report: of all checks.
        name: what `name_of` gave.
        out: folder for the archive.

    Returns:
        The submission and the bytes of its archive.
    """
    place = PurePosixPath("records", record.rules.name, name)
    archive, content = out / f"{name}.tar.gz", pack(record.raw, name)
    about_archive = (f"`{archive.name}`", f"{len(content):,} bytes", f"sha256 `{sha256(content)}`")
    title = pull_request.title(record, f"{record.rules.name}/{name}")
    text = pull_request.text(record, manifest, report, about_archive)
    text_path = out / f"{name}.pull-request.md"
    outgoing = {**record.raw, text_path.name: text.encode(), "title": title.encode()}
    return (
        Submission(
            record=str(record.root),
            place=str(place),
            archive=str(archive),
            archive_bytes=len(content),
            archive_sha256=sha256(content),
            title=title,
            text=text,
            text_path=str(text_path),
            commands=_commands(record.root, place, archive, title, text_path),
            findings=findings(outgoing),
        ),
        content,
    )


def _commands(root: Path, place: PurePosixPath, archive: Path, title: str, text: Path) -> tuple[str, ...]:
    """What to type in the checkout. The copy comes out of the archive: what was scanned is what is sent.

    Raises:
        UsageError: if another folder is there already.
    """
    branch = f"record/{place.parent.name}/{place.name}"
    copy = [f"mkdir -p {place.parent}", shlex.join(["tar", "-xzf", str(archive), "-C", str(place.parent)])]
    if Path(place).exists():
        if not Path(place).samefile(root):
            raise UsageError(f"{place} is there already, and is not {root}; choose another --name")
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
    """Writes the archive and the text, each whole or not at all, into an `out` that may be new.

    Raises:
        UsageError: if the folder cannot be made.
        DataError: if the disk refuses.
    """
    archive = Path(submission.archive)
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{archive.parent}: {error.strerror}; choose another --out") from None
    write_whole(archive, content)
    write_whole(Path(submission.text_path), submission.text.encode())
