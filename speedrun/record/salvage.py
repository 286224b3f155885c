"""Repairs the logs of killed runs, so that they stay visible as runs that broke off."""

from pathlib import Path

from msgspec import DecodeError

from speedrun.base import runlog
from speedrun.base.errors import UsageError, translate_os_errors
from speedrun.base.wholefile import lock_record, read_regular, write_whole
from speedrun.record.layout import LOG
from speedrun.record.reader import discard_partials


def salvage(root: Path) -> list[str]:
    """Cut unreadable ends off logs, remove programs that no log names, and return the names of killed runs.

    Raise UsageError if another process writes into the record.
    """
    with lock_record(root):
        discard_partials(root)
        folders = [path for path in sorted(root.glob("runs/*")) if path.is_dir()]
        killed = [folder.name for folder in folders if not ended(folder) and _salvage(folder)]
        logs = [_read(folder / LOG) for folder in folders]
        for path in root.glob("programs-*.xz"):  # a run may be killed before its log names them
            if not any(path.stem.removeprefix("programs-").encode() in log for log in logs):
                path.unlink()
        return killed


def ended(folder: Path) -> bool:
    """Return whether a log has its end."""
    raw = _read(folder / LOG)
    return raw.endswith(b"\n") and _is_end(raw.splitlines()[-1])


def _is_end(line: bytes) -> bool:
    return b'"ev":"run_end"' in line and line.endswith(b"}}")


def _read(path: Path) -> bytes:
    with translate_os_errors(path, UsageError):
        return read_regular(path) if path.exists() else b""


def _salvage(folder: Path) -> bool:
    """Salvage one run. Without a first line, which says what it ran, remove it and return False."""
    raw = _read(folder / LOG)
    if _is_end(raw.rpartition(b"\n")[2]):  # only the last newline is missing, so the result counts
        write_whole(folder / LOG, raw, b"\n")
        return False
    lines = _readable(raw)
    if not lines or not isinstance(lines[0].event, runlog.RunStart):
        (folder / LOG).unlink(missing_ok=True)
        if not any(folder.iterdir()):  # `assemble` reports other files
            folder.rmdir()
        return False
    # The result is printed after the end of the log, so nobody has seen it yet.
    for stop in (line.i for line in lines if isinstance(line.event, runlog.ClockStop)):
        result = next((line.i for line in lines[stop:] if isinstance(line.event, runlog.Val)), len(lines))
        del lines[result:]
    if (whole := b"".join(line.encode() + b"\n" for line in lines)) != raw:
        write_whole(folder / LOG, whole)
    return True


def _readable(raw: bytes) -> list[runlog.Line]:
    """Return the lines before the end of the run, or before the first unreadable one."""
    lines: list[runlog.Line] = []
    for one in raw.split(b"\n")[:-1]:  # a power cut may leave zeros
        try:
            line = runlog.decode(one)
        except DecodeError:
            break
        if isinstance(line.event, runlog.RunEnd):
            break
        lines.append(line)
    return lines
