"""Turns a run whose process was killed into a run that broke off, so that it stays visible."""

from pathlib import Path

from msgspec import DecodeError

from speedrun.ground import console, lock, runlog
from speedrun.ground.errors import NonFiniteError
from speedrun.ground.wholefile import write_whole
from speedrun.ledger import runfile
from speedrun.ledger.record import discard_partials

LOG, FACTS, TEXT = "metrics.jsonl", "run.json", "log.txt"
_FINISHED = b'"outcome": "finished"'


def salvage(root: Path, recipe: runfile.Recipe, num_devices: int) -> list[str]:
    """Turn every killed run into one that broke off, by its log. Cuts off an unreadable end of the log.

    Nothing may run in the record. All runs have one recipe and number of devices.

    Returns:
        The names of the runs.

    Raises:
        UsageError: if another program writes into it.
        StorageError: if the disk refuses; then every log is unchanged.
    """
    with lock.lock_record(root):
        discard_partials(root)
        folders = [path for path in sorted(root.glob("runs/*")) if path.is_dir()]
        left = [folder for folder in folders if not ended(folder)]
        return [folder.name for folder in left if _salvage(folder, recipe, num_devices)]


def ended(folder: Path) -> bool:
    """Return whether a run wrote all of its facts and, if it finished, the end of its log."""
    facts, log = _read(folder / FACTS), _read(folder / LOG)
    is_told = log.endswith(b"\n") and (b'"ev":"run_end"' in log.splitlines()[-1] or _FINISHED not in facts)
    return is_told and facts.endswith(b"\n}\n")


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _salvage(folder: Path, recipe: runfile.Recipe, num_devices: int) -> bool:
    """Salvage one run. Without a first line, which says what it ran, remove it and return False."""
    lines = _readable(_read(folder / LOG))
    if not lines or not isinstance(start := lines[0].event, runlog.RunStart):
        for name in (LOG, FACTS, TEXT):
            (folder / name).unlink(missing_ok=True)
        if not any(folder.iterdir()):  # other files are left, and reported by `assemble`
            folder.rmdir()
        return False
    # The result is printed with the end of the run; without that end, nobody has seen the result.
    if isinstance(lines[-1].event, runlog.Val) and _FINISHED in _read(folder / FACTS):
        lines.pop()
    write_whole(folder / LOG, b"".join(line.encode() + b"\n" for line in lines))
    write_whole(folder / TEXT, console.render(lines).encode())
    hardware = next((line.event for line in lines if isinstance(line.event, runlog.Preflight)), None)
    data = next((line.event for line in lines if isinstance(line.event, runlog.DataReady)), None)
    step = next((line.event for line in lines if isinstance(line.event, runlog.Step)), None)
    warm = next((line.event for line in lines if isinstance(line.event, runlog.WarmupStart)), None)
    val_shard = runfile.ShardRange(data.val_shard if data else "", "", 0, 0, 0)
    facts = runfile.RunFile(
        run_id=start.run_id,
        seed=start.seed,
        track=start.track,
        track_sha256=start.track_sha256,
        recipe=start.recipe,
        recipe_revision=recipe.revision,
        overrides=recipe.overrides,
        config_sha256=start.config_sha256,
        source_sha256=start.source_sha256,
        created_utc=lines[0].t_utc,
        outcome=_outcome(lines),
        init_hash=warm.state_hash if warm else "",
        final_hash="",
        first_batch_sha256=None,
        first_loss=step.loss.hex() if step else None,
        platform=hardware.platform if hardware else "",
        device_kind=hardware.device_kind if hardware else "",
        num_devices=hardware.num_devices if hardware else num_devices,
        software=hardware.software if hardware else {},
        environment=hardware.environment if hardware else {},
        data=runfile.DataRead((), val_shard, data.val_sha256 if data else ""),
        peak_bytes=0,
    )
    write_whole(folder / FACTS, runfile.encode(facts))
    return True


def _outcome(lines: list[runlog.Line]) -> runfile.Outcome:
    """Return the outcome: non-finite if the last error says so, even if the run was killed after it."""
    errors = [line.event.kind for line in lines if isinstance(line.event, runlog.Error)]
    return "non-finite" if errors[-1:] == [NonFiniteError.__name__] else "aborted"


def _readable(raw: bytes) -> list[runlog.Line]:
    """Return the lines before the end of the run or the first unreadable one; a power cut leaves zeros behind."""
    lines: list[runlog.Line] = []
    for one in raw.split(b"\n")[:-1]:
        try:
            line = runlog.decode(one)
        except DecodeError:
            break
        if isinstance(line.event, runlog.RunEnd):
            break
        lines.append(line)
    return lines
