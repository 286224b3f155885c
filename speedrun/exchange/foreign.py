"""Import a file of somebody else's curves, in any supported dialect.

The file is not trusted. It is read once, up to a limit that also holds after decompression. Bytes that are not UTF-8
are replaced, and lines that cannot be read are reported by number.
"""

import errno
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
from speedrun.ground.wholefile import read_regular
from speedrun.ledger.format import sha256

MAX_BYTES = 32 * 2**20
_GZIP = b"\x1f\x8b"


def import_file(path: Path, name: str) -> Context:
    """Return the runs of a text log or a CSV table, either compressed by gzip or not.

    `name` is that of a text log's run; a table names its own.

    Raises:
        UsageError: the file cannot be read, is larger than 32 MiB, or holds no curve.
    """
    try:
        raw = read_regular(path, MAX_BYTES)
        inflated = _inflated(raw)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{clean(str(path))}: {reason}; need a text log or a CSV of curves") from None
    context = import_bytes(inflated, name, source=path.name, digest=sha256(raw))
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


def _inflated(raw: bytes) -> bytes:
    """Return the content of a gzip file, or the bytes unchanged."""
    if not raw.startswith(_GZIP):
        return raw
    with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
        inflated = file.read(MAX_BYTES + 1)
    if len(inflated) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"more than {MAX_BYTES:,} bytes, unpacked")
    return inflated
