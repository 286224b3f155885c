"""Import a file of somebody else's curves, in any supported dialect.

The file is not trusted. It is read once, up to a limit that also holds after decompression. Bytes that are not UTF-8
are replaced, and lines that cannot be read are reported by number.
"""

import gzip
import io
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

from speedrun.exchange import classic_log, curve_table
from speedrun.exchange.curves import Context, Problems
from speedrun.ground.console import clean
from speedrun.ground.errors import UsageError
from speedrun.ledger.runfile import sha256

_MIB = 2**20
MAX_BYTES = 32 * _MIB
_GZIP = b"\x1f\x8b"


def import_file(path: Path, name: str) -> Context:
    """Return the runs of a text log or a CSV table, either compressed by gzip or not.

    `name` is that of a text log's run; a table names its own.

    Raises:
        UsageError: the file cannot be read, is larger than 32 MiB, or holds no curve.
    """
    raw = _bytes_of(path)
    context = import_bytes(_inflated(path, raw), name, source=path.name, digest=sha256(raw))
    if not context.runs:
        first = next(iter(context.problems), None)
        why = f" (line {first.line}: {first.message})" if first else ""
        raise UsageError(
            f"{clean(str(path))} holds no line of a known log{why}; need lines like 'step:125/1770 val_loss:4.6539 "
            "train_time:12051ms', or a CSV with columns log,step,val_loss"
        )
    return context


def import_bytes(raw: bytes, name: str, *, source: str, digest: str) -> Context:
    """Return the runs of uncompressed bytes; there may be none."""
    problems = Problems()
    text = raw.decode("utf-8-sig", errors="replace")
    if curve_table.is_table(text):
        runs = curve_table.read(text, problems)
    else:
        runs = classic_log.read(name, text, problems)
    return Context(clean(source, limit=200), digest, tuple(runs), tuple(problems.kept), problems.count)


def names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each file: its path from the parent of the folder that all share, without machine paths."""
    absolute = [Path(os.path.abspath(path)) for path in paths]
    shared = Path(os.path.commonpath([path.parent for path in absolute])).parent
    return [path.relative_to(shared).as_posix() for path in absolute]


def _bytes_of(path: Path) -> bytes:
    if not path.is_file():
        raise UsageError(f"{clean(str(path))} is not a file; give a text log or a CSV of curves")
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{clean(str(path))} cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise UsageError(
            f"{clean(str(path))} has more than {MAX_BYTES:,} bytes; a log of one run has about 0.2 MB"
        )
    return raw


def _inflated(path: Path, raw: bytes) -> bytes:
    """Return the content of a gzip file, or the bytes unchanged."""
    if not raw.startswith(_GZIP):
        return raw
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            inflated = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{clean(str(path))} is a damaged gzip file ({error}); download it again") from None
    if len(inflated) > MAX_BYTES:
        raise UsageError(f"{clean(str(path))} unpacks to more than {MAX_BYTES:,} bytes; need a log")
    return inflated
