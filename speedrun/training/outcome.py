"""What a run read, and what earlier processes of it left in its record."""

from collections.abc import Iterable
from pathlib import Path

from speedrun.data import shards, stream
from speedrun.ground import runlog
from speedrun.training.prepare import Ready


def lost_s(record: Path, step: int) -> float:
    """Return the seconds that earlier processes of a run spent after its checkpoint of `step`; they are repeated."""
    lost_ns = 0
    for path in record.glob("runs/*/metrics.jsonl"):
        lines = list(runlog.read(path))
        saved = (runlog.Checkpoint, runlog.Resume)
        since = [x.t_mono_ns for x in lines if isinstance(x.event, saved) and x.event.step == step]
        lost_ns += lines[-1].t_mono_ns - since[-1] if since else 0
    return lost_ns / 1e9


def latest(record: Path, but: str) -> str:
    """Return the id of the latest run in a record but one; empty if there is no other."""
    logs = {path.parent.name: path for path in record.glob("runs/*/metrics.jsonl")}
    # On another node the log of this run may be missing, or still empty.
    firsts = {run_id: next(runlog.read(path)) for run_id, path in logs.items() if run_id != but}
    return max(firsts, key=lambda run_id: firsts[run_id].t_utc, default="")


def data_read(ready: Ready, spans: Iterable[stream.Span]) -> runlog.DataRead:
    """Return the data read so far, with the digest of every shard."""
    folder, val = ready.folder, ready.shards.val[0]
    ranges = [
        runlog.ShardRange(r.name, _digest(folder / r.name), r.shard_tokens, r.start, r.stop, r.skipped)
        for r in spans
    ]
    num_scored = ready.track.data.val_tokens
    scored = runlog.ShardRange(val.path.name, _digest(val.path), val.num_tokens, 0, num_scored)
    return runlog.DataRead(tuple(ranges), scored, ready.val_sha256)


def _digest(path: Path) -> str:
    """Return the digest of a shard; empty if it was deleted, so that the log can still be ended."""
    try:
        return shards.sha256(path)
    except OSError:
        return ""
