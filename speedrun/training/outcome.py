"""The results of a run: the last line of its log, and `run.json`."""

from pathlib import Path
from typing import Any

import msgspec

from speedrun.data import shards
from speedrun.ground import provenance, runlog
from speedrun.ground import track as tracks
from speedrun.ground.clock import cold_wall_s
from speedrun.ledger import runfile
from speedrun.training.trainer import Trainer


def run_end(trainer: Trainer, outcome: str) -> runlog.RunEnd:
    """Return the last line of the log."""
    tally = trainer.tally
    return runlog.RunEnd(
        status=outcome,
        val_loss=tally.val_loss if outcome == "finished" else None,
        train_time_s=trainer.clock.seconds,
        cold_wall_s=tally.cold_wall_s or cold_wall_s(),
        compile_s=tally.compile_s,
        warmup_s=tally.warmup_s,
        val_s=tally.val_s,
        data_wait_s=tally.data_wait_s,
        peak_bytes=tally.peak_bytes,
        final_hash=tally.final_hash,
        throttled_s=tally.throttled_s,
        phases={**trainer.phases.seconds()},
        lost_s=tally.lost_s,
        matmul_gflops=tally.matmul_gflops,
    )


def lost_s(record: Path, step: int) -> float:
    """Return the seconds that earlier processes of a run spent after its checkpoint of `step`; they are repeated."""
    lost_ns = 0
    for path in record.glob("runs/*/metrics.jsonl"):
        lines = list(runlog.read(path))
        saved = (runlog.Checkpoint, runlog.Resume)
        since = [x.t_mono_ns for x in lines if isinstance(x.event, saved) and x.event.step == step]
        lost_ns += lines[-1].t_mono_ns - since[-1] if since else 0
    return lost_ns / 1e9


def latest(record: Path) -> str:
    """Return the id of the latest run that ended; empty if there is none."""
    raws = [path.read_bytes() for path in record.glob("runs/*/run.json")]
    found = [msgspec.json.decode(raw, type=runfile.RunFile) for raw in raws]
    return max(found, key=lambda run: run.created_utc).run_id if found else ""


def run_file(trainer: Trainer, outcome: Any) -> runfile.RunFile:
    """Return the facts of the run: its `run.json`."""
    ready, tally = trainer.ready, trainer.tally
    device = ready.program.mesh.devices.flat[0]
    return runfile.RunFile(
        run_id=trainer.run_id,
        seed=ready.config.seed,
        track=ready.track.id,
        track_sha256=tracks.sha256(ready.track.name),
        recipe=ready.recipe.name,
        recipe_revision=ready.recipe.revision,
        overrides=ready.config.overrides,
        config_sha256=runfile.config_sha256(ready.described),
        source_sha256=ready.source_sha256,
        created_utc=trainer.created_utc,
        outcome=outcome,
        init_hash=tally.init_hash,
        final_hash=tally.final_hash,
        first_batch_sha256=tally.first_batch_sha256,
        first_loss=None if tally.first_loss is None else tally.first_loss.hex(),
        platform=device.platform,
        device_kind=device.device_kind,
        num_devices=ready.program.num_devices,
        software=provenance.software(),
        environment=provenance.environment(),
        data=tally.read or data_read(trainer),
        peak_bytes=tally.peak_bytes,
    )


def data_read(trainer: Trainer) -> runfile.DataRead:
    """Return the data read so far, with the digest of every shard."""
    ready, tally = trainer.ready, trainer.tally
    folder, val = ready.folder, ready.shards.val[0]
    ranges = [
        runfile.ShardRange(r.name, _digest(folder / r.name), r.shard_tokens, r.start, r.stop, r.skipped)
        for r in tally.ranges
    ]
    num_scored = ready.track.data.val_tokens
    scored = runfile.ShardRange(val.path.name, _digest(val.path), val.num_tokens, 0, num_scored)
    return runfile.DataRead(tuple(ranges), scored, tally.val_sha256)


def _digest(path: Path) -> str:
    """Return the digest of a shard; empty if it was deleted, so that `run.json` can still be written."""
    try:
        return shards.sha256(path)
    except OSError:
        return ""
