"""Reads a record folder, which is untrusted.

Only files with known names and limited sizes are opened, never through a link; each is decoded once. Everything else is
listed with the reason for its refusal.
"""

import lzma
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import msgspec

from speedrun.base import track
from speedrun.base.atomic_files import LOCK, PARTIAL, read_regular
from speedrun.base.console import clean
from speedrun.base.errors import UsageError
from speedrun.base.track import Track
from speedrun.record import archive
from speedrun.record.batch import Preregistration
from speedrun.record.examination import Findings
from speedrun.record.layout import ABOUT, BATCH, LOG, RUNNING, SOURCE, Strict, sha256
from speedrun.record.logged_run import FormatError, Run, check_moment, check_range, read_run
from speedrun.record.reproduction import REPRODUCTION, Reproduction
from speedrun.record.source import split_source

_LOCKS = (LOCK, RUNNING + LOCK)
_MIB = MOST_ABOUT_BYTES = 2**20

_RUN = r"runs/[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"
_FOLDERS = re.compile(rf"runs|plots|{_RUN}")
#: The files that a record may hold, and their largest sizes in bytes.
_FILES = (
    (re.compile(r"(about|batch|reproduction)\.json"), MOST_ABOUT_BYTES),
    (re.compile(r"source\.txt"), 4 * _MIB),
    (re.compile(r"unlogged-\d+\.txt"), 64),  # of a budget: seconds that no log has
    (archive.NAME, archive.MOST_BYTES),
    (re.compile(r"README\.md"), _MIB),
    (re.compile(rf"{_RUN}/metrics\.jsonl"), 32 * _MIB),
    (re.compile(r"plots/[a-z0-9-]{1,60}\.png"), 4 * _MIB),
)
MAX_FILES = 1000
_MOST_UNPACKED_BYTES = 2**26  #: of an archive of programs
MAX_BYTES = 256 * _MIB

_Read = TypeVar("_Read")
_File = TypeVar("_File", bound=Strict)


class About(Strict, frozen=True, tag_field="schema", tag="speedrun.about/1"):
    """`about.json`: the authors' description of a record."""

    title: str = "untitled"
    authors: tuple[str, ...] = ()
    parent_record: str | None = None
    changes: tuple[str, ...] = ()  #: from the parent; one sentence each


class UnknownTrack(LookupError):
    """A track that this version does not have byte for byte."""


@dataclass(frozen=True)
class Record:
    """A record folder, as far as it could be read."""

    root: Path
    raw: dict[str, bytes]  #: content of each permitted file, by path from the root
    refused: dict[str, str]  #: reason for refusing each other file, by path
    malformed: tuple[str, ...]  #: one line for each file that cannot be decoded
    runs: tuple[Run, ...]  #: sorted by folder name
    about: About
    declaration: Preregistration | None  #: None without a batch
    reproduction: Reproduction | None
    track: Track | None  #: None if this version does not know it
    whole: bool  #: whether every run could be read
    #: Of the runs that were examined, by folder.
    findings: Mapping[str, Findings] = field(default_factory=dict)

    @property
    def finished(self) -> tuple[Run, ...]:
        """The runs that finished."""
        return tuple(run for run in self.runs if run.finished)

    @property
    def mean_loss(self) -> float:
        """Mean final loss of the finished runs, of which there must be one, in nats per token."""
        return fmean(run.val_loss for run in self.finished)

    @property
    def reference_run(self) -> Run:
        """The run for facts in which all agree: the first finished one, or else the first."""
        return next(iter(self.finished), self.runs[0])

    @property
    def created_utc(self) -> str:
        """Start of the first run."""
        return min(run.lines[0].t_utc for run in self.runs)

    @cached_property
    def id(self) -> str:
        """Digest of the evidence: source, declaration and logs."""
        paths = (path for path in sorted(self.raw) if path in (SOURCE, BATCH) or path.startswith("runs/"))
        return sha256("".join(f"{sha256(self.raw[path])} {path}\n" for path in paths).encode())

    @cached_property
    def source_sha256(self) -> str:
        """Digest of `source.txt`."""
        return sha256(self.raw.get(SOURCE, b""))

    @property
    def source_lines(self) -> int:
        """Lines of the files in `source.txt`."""
        return sum(text.count("\n") for text in self.source_files.values())

    @cached_property
    def source_files(self) -> dict[str, str]:
        """The files inside `source.txt`; empty if it cannot be split, which V003 reports."""
        try:
            return split_source(self.raw.get(SOURCE, b"").decode())
        except ValueError:
            return {}

    @property
    def rules(self) -> Track:
        """The track; raises UnknownTrack if this version does not know it, which skips a check."""
        if self.track is None:
            raise UnknownTrack("the track is not known: see V006")
        return self.track


def load(root: Path) -> Record:
    """Read a record folder; problems become part of the result. Raise UsageError if `root` is not a folder."""
    raw, refused = read_files(root)
    folders = sorted({path.split("/")[1] for path in raw if path.startswith("runs/")})
    malformed: list[str] = [] if folders else ["the record holds no runs"]

    def attempt(path: str, read: Callable[..., _Read], *given: object) -> _Read | None:
        """Return None and note the problem if it fails, unless the file was refused."""
        try:
            return read(*given)
        except FormatError as error:
            if path not in refused:
                malformed.append(f"{path}: {error}")
            return None

    read = [attempt(f"runs/{folder}/{LOG}", read_run, raw, folder) for folder in folders]
    runs = tuple(run for run in read if run is not None)

    def file(path: str, kind: type[_File]) -> _File | None:
        return attempt(path, decode, raw[path], kind) if path in raw else None

    return Record(
        root=root,
        raw=raw,
        refused=refused,
        runs=runs,
        about=file(ABOUT, About) or About(),
        declaration=file(BATCH, Preregistration),
        reproduction=file(REPRODUCTION, Reproduction),
        track=known_track(runs),
        whole=0 < len(runs) == len(folders),
        malformed=tuple(malformed),  # complete, since all files above are read
    )


def encode(file: msgspec.Struct) -> bytes:
    """Return the canonical bytes of a file: JSON, indented for people and `diff`."""
    return msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"


def decode(raw: bytes, kind: type[_File]) -> _File:
    """Decode an untrusted file of a record; raise FormatError unless `encode` could have written it."""
    try:
        file = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(str(error)) from None
    if encode(file) != raw:
        raise FormatError("not in canonical form (a key twice, or other spacing)")
    check_range(file)
    check_moment(getattr(file, "created_utc", "2026-01-01T00:00:00Z"))  # not every file has one
    return file


def read_programs(raw: bytes) -> archive.Archive:
    """Read an untrusted archive; raise UsageError if it is too large, malformed or inconsistent."""
    opened = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MOST_UNPACKED_BYTES)
    try:
        unpacked = opened.decompress(raw, _MOST_UNPACKED_BYTES)
        if not opened.eof or opened.unused_data:
            need = f"need one stream of at most {_MOST_UNPACKED_BYTES:,} bytes when unpacked"
            raise UsageError(f"its archive of programs is cut or too long; {need}; restore it, or run again")
        found = msgspec.msgpack.decode(unpacked, type=archive.Archive)
    except (lzma.LZMAError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"its archive of programs: {clean(str(error))}; restore it, or run again") from None
    for one in found.platforms.values():
        scored = {f"{part}-{name}" for name in one.scored.values() for part in ("hidden", "logits")}
        held = {*one.steps, *scored, "init", "constants"} == one.programs.keys() | one.portable.keys()
        is_whole = 0 < len(one.steps) == len(found.document_tokens) and found.num_params < len(found.leaves)
        if not (held and is_whole):
            raise UsageError(
                "its archive holds other programs than it names, or contradicts itself; run again"
            )
    return found


def load_result(folder: Path) -> Record:
    """Read a complete record of a known track with a finished run, unedited; raise UsageError for any other."""
    record = load(folder)
    is_edited = any(run.chain_break is not None for run in record.runs)
    if not record.finished or record.track is None or not record.whole or record.malformed or is_edited:
        need = "is not a complete record with a finished run of a known track and whole logs"
        raise UsageError(f"{folder} {need}; 'speedrun validate {folder}' lists the problems")
    return record


def read_declared(path: Path, kind: type[_File], command: str) -> tuple[_File, str]:
    """Read a file that a command declared; return it and its digest."""
    try:
        raw = read_regular(path)
        return decode(raw, kind), sha256(raw)
    except OSError:
        raise UsageError(f"{path.parent} holds no {path.name}; start with '{command}'") from None
    except FormatError as error:
        raise UsageError(f"{path}: {error}; restore it, or start anew with '{command}'") from None


def need_record(folder: Path) -> Path:
    """Return the folder; raise UsageError if it exists but holds no record."""
    if folder.is_dir() and not os.path.exists(folder / SOURCE):  # Path.exists raises without permission
        hint = "name the folder that 'speedrun run' printed"
        raise UsageError(f"{folder} holds no {SOURCE}, so it is not a record; {hint}")
    return folder


def known_track(runs: Sequence[Run]) -> Track | None:
    """Return the track that all runs name, if this version has it byte for byte."""
    named = {(run.start.track, run.start.track_sha256) for run in runs}
    if len(named) != 1:
        return None
    track_id, sha256 = named.pop()
    with suppress(UsageError):
        found = track.version(track_id)
        return found if track.sha256(track_id) == sha256 else None


def read_files(root: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the content of each permitted file, and the reason for each refusal, by path from the root."""
    if not root.is_dir():
        raise UsageError(f"{root} is not a folder; give the folder of a record (it holds {SOURCE})")
    raw: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    left_bytes = MAX_BYTES
    for number, (path, entry) in enumerate(_walk(root, "", refused)):
        if number == MAX_FILES:
            refused[path] = f"a record holds at most {MAX_FILES:,} files"
            break
        try:
            size_bytes = entry.stat(follow_symlinks=False).st_size
            if path in _LOCKS and entry.is_file(follow_symlinks=False) and not size_bytes:
                continue  # of whoever is writing
            if why := _objection(path, entry, size_bytes, left_bytes):
                refused[path] = why
            else:
                raw[path] = read_regular(Path(entry.path), size_bytes)
                left_bytes -= size_bytes
        except OSError as error:
            refused[path] = f"cannot be read: {error.strerror}"
    return raw, refused


def discard_partials(root: Path) -> None:
    """Remove the temporary files of killed writers; nobody may be writing."""
    for left in root.rglob("*" + PARTIAL):
        if left.is_file() or left.is_symlink():
            left.unlink()


def _objection(path: str, entry: os.DirEntry[str], size_bytes: int, left_bytes: int) -> str | None:
    if entry.is_dir(follow_symlinks=False):
        return "not a folder of a record"
    if not entry.is_file(follow_symlinks=False):
        return "a link or a special file; a record holds plain files only"
    cap_bytes = next((cap for pattern, cap in _FILES if pattern.fullmatch(path)), None)
    if cap_bytes is None:
        left = "left by a command that was killed; run the same command again to remove it"
        return left if path.endswith(PARTIAL) else "not a file of a record"
    if size_bytes > min(cap_bytes, left_bytes):
        return f"{size_bytes:,} bytes; at most {min(cap_bytes, left_bytes):,} are left for it"
    return None


def _walk(folder: Path, prefix: str, refused: dict[str, str]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield all files and unknown folders without following links; note folders that cannot be listed."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        refused[prefix or "."] = f"cannot be read: {error.strerror}"
        return
    for entry in entries:
        path = prefix + entry.name
        if entry.is_dir(follow_symlinks=False) and _FOLDERS.fullmatch(path):
            yield from _walk(folder / entry.name, f"{path}/", refused)
        else:
            yield path, entry
