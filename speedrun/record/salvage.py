"""Repairs the logs of runs whose keeper was killed, too, so that they stay visible as runs that crashed."""

from pathlib import Path

from msgspec import DecodeError

from speedrun.base import runlog
from speedrun.base.atomic_files import lock_record, read_regular, write_whole
from speedrun.base.errors import UsageError, translate_os_errors
from speedrun.record.layout import LOG
from speedrun.record.reader import discard_partials


def salvage(root: Path) -> list[str]:
    """Cut unreadable ends off logs, remove programs that no log names, and return the names of killed runs.

    Raise UsageError if another process writes into the record.
    """
    with lock_record(root):
        discard_partials(root)
        folders = [path for path in sorted(root.glob("runs/*")) if path.is_dir()]
        killed = [folder.name for folder in folders if _was_killed(folder)]
        logs = [_read(folder / LOG) for folder in folders]
        for path in root.glob("programs-*.xz"):  # a run may be killed before its log names them
            if not any(path.stem.removeprefix("programs-").encode() in log for log in logs):
                path.unlink()
        return killed


def _read(path: Path) -> bytes:
    with translate_os_errors(path, UsageError):
        return read_regular(path) if path.exists() else b""


def _was_killed(folder: Path) -> bool:
    """Salvage a log without an end. Remove one without a first line, which says what it ran, and return False.

    Raise UsageError for a log that is damaged before its end, which no kill does; it stays as it is.
    """
    raw, lines = _read(folder / LOG), list[runlog.Line]()
    last = raw.removesuffix(b"\n").rpartition(b"\n")[2]
    if b'"ev":"run_end"' in last and last.endswith(b"}}"):
        if not raw.endswith(b"\n"):  # only that is missing, so the result counts
            write_whole(folder / LOG, raw, b"\n")
        return False
    whole = raw.split(b"\n")[:-1]
    for number, one in enumerate(whole, 1):
        try:
            line = runlog.decode(one)
        except DecodeError:  # a power cut may leave zeros
            if any(map(_is_line, whole[number:])):
                raise UsageError(
                    f"{folder / LOG}: line {number} is damaged, and lines after it are not; restore the file, or move "
                    f"{folder.name} out of the record; nothing was changed"
                ) from None
            break
        if isinstance(line.event, runlog.RunEnd):  # with more after it
            break
        lines.append(line)
    if not lines or not isinstance(lines[0].event, runlog.RunStart):
        (folder / LOG).unlink(missing_ok=True)
        if not any(folder.iterdir()):  # `assemble` reports other files
            folder.rmdir()
        return False
    # The result is printed after the end of the log, so nobody has seen it yet.
    for stop in (line.i for line in lines if isinstance(line.event, runlog.ClockStop)):
        result = next((line.i for line in lines[stop:] if isinstance(line.event, runlog.Val)), len(lines))
        del lines[result:]
    if (kept := b"".join(line.encode() + b"\n" for line in lines)) != raw:
        write_whole(folder / LOG, kept)
    return True


def _is_line(raw: bytes) -> bool:
    try:
        return bool(runlog.decode(raw))
    except DecodeError:
        return False
