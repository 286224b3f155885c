"""A run whose process was killed: what is left of it becomes a run that broke off, so that it stays visible."""

from pathlib import Path

from msgspec import DecodeError

from speedrun import console, runlog
from speedrun.ledger import format

LOG, FACTS, TEXT = "metrics.jsonl", "run.json", "log.txt"


def salvage(root: Path, declaration: format.Declaration) -> list[str]:
    """Gives every run without a `run.json` one, from its log; a torn last line is cut off.

    Args:
        root: a record folder in which nothing runs.
        declaration: what the runs were declared as.

    Returns:
        The names of the runs.
    """
    left = [folder for folder in sorted(root.glob("runs/*")) if not (folder / FACTS).exists()]
    return [folder.name for folder in left if _salvage(folder, declaration)]


def _salvage(folder: Path, declaration: format.Declaration) -> bool:
    """Whether there was a first line, which says what the run was; a folder without one is removed."""
    raw = (folder / LOG).read_bytes() if (folder / LOG).exists() else b""
    lines = _readable(raw[: raw.rfind(b"\n") + 1])
    if not lines or not isinstance(start := lines[0].event, runlog.RunStart):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        return False
    (folder / LOG).write_bytes(b"".join(line.encode() + b"\n" for line in lines))
    (folder / TEXT).write_text(console.render(lines), encoding="utf-8")
    hardware = next((line.event for line in lines if isinstance(line.event, runlog.Preflight)), None)
    data = next((line.event for line in lines if isinstance(line.event, runlog.DataReady)), None)
    step = next((line.event for line in lines if isinstance(line.event, runlog.Step)), None)
    warm = next((line.event for line in lines if isinstance(line.event, runlog.WarmupStart)), None)
    val_shard = format.ShardRange(data.val_shard if data else "", "", 0, 0, 0)
    facts = format.RunFile(
        run_id=start.run_id,
        seed=start.seed,
        track=start.track,
        track_sha256=start.track_sha256,
        recipe=start.recipe,
        recipe_revision=declaration.recipe.revision,
        overrides=declaration.recipe.overrides,
        config_sha256=start.config_sha256,
        source_sha256=start.source_sha256,
        created_utc=lines[0].t_utc,
        outcome="aborted",
        init_hash=warm.state_hash if warm else "",
        final_hash="",
        first_batch_sha256=None,
        first_loss=step.loss.hex() if step else None,
        platform=hardware.platform if hardware else "",
        device_kind=hardware.device_kind if hardware else "",
        num_devices=hardware.num_devices if hardware else declaration.num_devices,
        software=hardware.software if hardware else {},
        environment=hardware.environment if hardware else {},
        data=format.DataRead((), val_shard, data.val_sha256 if data else ""),
        peak_bytes=0,
    )
    (folder / FACTS).write_bytes(format.encode(facts))
    return True


def _readable(raw: bytes) -> list[runlog.Line]:
    """The lines before the end of the run, which is not reached without `run.json`; none if one is no event."""
    try:
        lines = [runlog.decode(line) for line in raw.splitlines()]
    except DecodeError:
        return []
    return [line for line in lines if not isinstance(line.event, runlog.RunEnd)]
