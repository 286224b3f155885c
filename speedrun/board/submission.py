"""Prepares the submission of a record: scans and packs it, and writes its pull request and the commands to type.

Each file of the record is read once: the validated bytes are scanned and packed. Text from a record goes into code
spans, where it cannot become a mention, a link or markup.
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

from speedrun.base.atomic_files import write_whole
from speedrun.base.console import clean, quantity
from speedrun.base.errors import SpeedrunError, UsageError, translate_os_errors
from speedrun.board import leaks
from speedrun.board.leaderboard import status_of
from speedrun.board.leaks import Leak
from speedrun.record.layout import sha256
from speedrun.record.reader import Record
from speedrun.record.summary import facts, summarize
from speedrun.record.validate import Report

_NAME = re.compile(r"\d{4}-\d\d-\d\d-[a-z0-9][a-z0-9-]{0,59}")
_BOARD = ("records/LEADERBOARD.md", "records/leaderboard.json")

_LONGEST = 200  #: characters of a stranger's text

#: The rules of RULES.md that no check can verify.
PROMISES = (
    "Every run that was started for this record is in it, including those that failed.",
    "No seed, no number of steps and no run was chosen by its loss, and no batch by that of one in private before it.",
    "No trained weights were loaded, and no training token was read before the clock started.",
    "The validation text was used for scoring and for nothing else.",
    "`changes` names every difference from the parent, and the lines it adds are worth their price.",
    "What I took from others is credited, and its licence allows it.",
)


class Submission(msgspec.Struct, frozen=True):
    """A record to send, its pull request, and the commands to type in a checkout."""

    record: str  #: its folder
    place: str  #: `records/<track>/<date>-<slug>`
    archive: str  #: path
    archive_bytes: int
    archive_sha256: str
    title: str
    text: str  #: Markdown
    text_path: str
    commands: tuple[str, ...]
    findings: tuple[Leak, ...]  #: secrets stop the submission; the others are warnings
    written: bool = False


def require_acceptable(record: Record, report: Report, *, missed: bool) -> None:
    """Raise SpeedrunError unless all checks pass and the target is reached, or missed if `missed`."""
    root = record.root
    if report.exit_code:
        problems = (*report.having("failed"), *report.having("warning"))
        bad = ", ".join(f"{one.check.id} {one.status}" for one in problems)
        why = f"'speedrun validate --strict {root}' says why and what to do"
        raise SpeedrunError(f"{root} is refused: {bad}; {why}")
    loss, target = record.mean_loss, record.rules.target.loss
    if status_of(record, report) == "missed" and not missed:
        found = f"{root} missed its target: mean loss {loss:.4f}, need at most {target:g}"
        raise SpeedrunError(f"{found}; train longer, or pass --missed to submit it as a run that missed")


def require_outside(record: Path, out: Path) -> None:
    """Raise UsageError if the output folder is inside the record, or its checkpoints."""
    held = [Path(f"{record.resolve()}{end}") for end in ("", ".checkpoints", ".islands")]
    if any(map(out.resolve().is_relative_to, held)):
        raise UsageError(f"{out} is inside the record, which may hold nothing else; choose another --out")


def slug(text: str) -> str:
    """Return a text as lower-case letters, digits and hyphens; it may be empty."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub("[^a-z0-9]+", "-", plain).strip("-")[:50].strip("-")


def name_of(record: Record, wanted: str | None = None) -> str:
    """Return the name of the record's folder in the repository, `<yyyy-mm-dd>-<slug>`.

    The folder's own name is kept if it has this form. The slug is that of `wanted`, or of the title.
    """
    if wanted is None and _NAME.fullmatch(name := record.root.resolve().name):
        return name
    words = slug(record.about.title if wanted is None else wanted)
    name = f"{record.created_utc[:10]}-{words}"
    if not _NAME.fullmatch(name):
        raise UsageError(f"the record would be named {name!r}; need a date and a word; give one with --name")
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


def literal(text: str) -> str:
    """Return a stranger's text as a code span of one line."""
    shown = clean(text, limit=_LONGEST)
    if not shown.strip():
        return "(empty)"
    # A span may hold shorter runs of backticks than those around it. Markdown strips one space at either end.
    fence = "`" * (max(map(len, re.findall("`+", shown)), default=0) + 1)
    pad = " " if shown[0] in " `" or shown[-1] in " `" else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def cell(text: str) -> str:
    """Return `literal` for a table, where a bar ends a cell even inside a code span."""
    return literal(text).replace("|", r"\|")


def pull_request_text(record: Record, report: Report, archive: str) -> str:
    """Return the pull request as Markdown; `archive` describes the archive."""
    summary, lead = summarize(record), record.reference_run
    test, proof = summary.test, "none: no declared batch is complete"
    if test is not None:
        proof = f"p = {test.p:.2g} by {test.rule}, need less than {test.alpha:g}: {'' if test.passed else 'not '}proven"
    rows = [
        *facts(record, summary),
        ("status", status_of(record, report)),
        ("test of the mean", proof),
        (
            "reproduced",
            "see reproduction.json" if record.reproduction else "by nobody: its seeds follow from its source",
        ),
        ("settings", ", ".join(map("=".join, lead.start.overrides.items())) or "the recipe's"),
        ("matmul", quantity(lead.preflight.matmul_gflops * 1e9, "flop/s")),
        ("versions", ", ".join(map(" ".join, lead.preflight.software.items()))),
        ("record id", record.id),
        ("archive", archive),
    ]
    changes = "\n".join(f"- {literal(change)}" for change in record.about.changes)
    passed = ", ".join(result.check.id for result in report.having("ok"))
    skipped = ", ".join(result.check.id for result in report.having("skipped"))
    blocks = [
        literal(record.about.title),
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {cell(value)} |" for name, value in rows)]),
        f"## What changed\n\n{changes or 'No change is named.'}",
        "## Rules",
        f"- [x] `speedrun validate --strict` passes: {passed}\n"
        f"- [x] Skipped for such a record: {skipped or 'none'}\n"
        "- [x] No file holds anything that looks like a secret",
        "To be ticked by the submitter, since no check can verify it:",
        "\n".join(f"- [ ] {promise}" for promise in PROMISES),
    ]
    return "\n\n".join(blocks) + "\n"


def prepare(record: Record, report: Report, *, name: str, out: Path) -> tuple[Submission, bytes]:
    """Scan, pack and describe an acceptable record, and write nothing; return also the bytes of its archive."""
    place = PurePosixPath("records", record.rules.name, name)
    archive, content = out / f"{name}.tar.gz", pack(record.raw, name)
    about_archive = f"{archive.name}, {len(content):,} bytes, sha256 {sha256(content)}"
    done, target = record.finished, record.rules.target.loss
    time_s, loss = fmean(run.train_time_s for run in done), record.mean_loss
    missed = f", missed {target:g}" if loss > target else ""
    # No text of the record: the subject of a commit can close issues.
    title = f"Record {record.rules.name}/{name}: {time_s:.2f} s at {loss:.4f}, n = {len(done)}{missed}"
    text = pull_request_text(record, report, about_archive)
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
    """Return the commands to type in any checkout. They copy the archive, which was scanned."""
    branch = f"record/{place.parent.name}/{place.name}"
    copy = [
        f"mkdir -p {place.parent}",
        shlex.join(["tar", "-xzf", str(archive.resolve()), "-C", str(place.parent)]),
    ]
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
        shlex.join(["gh", "pr", "create", "--title", title, "--body-file", str(text.resolve())]),
    )


def write(submission: Submission, content: bytes) -> None:
    """Write the archive and the text."""
    archive = Path(submission.archive)
    with translate_os_errors(archive.parent, UsageError):
        archive.parent.mkdir(parents=True, exist_ok=True)
    write_whole(archive, content)
    write_whole(Path(submission.text_path), submission.text.encode())
