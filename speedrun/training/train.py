"""One run of one recipe on one track, from its first line in the log to its last. The loop itself is `loop`.

    python -m speedrun.training.train CONFIG.json      prints the log; `speedrun replay` runs this on an unpacked record

Everything that can be refused is refused; then the folder is made; then `loop.run`; and however that ends, what
was found out is written down.
"""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from speedrun.data import stream
from speedrun.ground import faults, lock, processes, provenance, runlog, signals
from speedrun.ground import mesh as meshes
from speedrun.ground import track as tracks
from speedrun.ground.clock import now
from speedrun.ground.errors import NonFiniteError, refusals_told
from speedrun.ground.output import told
from speedrun.ground.wholefile import make_folder, write_whole
from speedrun.ledger import runfile
from speedrun.training import checkpoint, health, loop, watchdog
from speedrun.training.checkpoint import Checkpoints
from speedrun.training.outcome import run_end, run_file
from speedrun.training.prepare import Ready, RunConfig, decoded, prepare
from speedrun.training.trainer import Trainer


def train(config: RunConfig, reader: runlog.Reader | None = None) -> runfile.RunFile:
    """Trains once and writes `source.txt` and `runs/<run id>/` into the record folder.

    Args:
        config: what to run.
        reader: receives every line of the log, for a console.

    Returns:
        The facts of the run, as in its `run.json`.

    Raises:
        SpeedrunError: with no folder made, if `prepare` refuses; with an ended log, if the run breaks off.
    """
    ready = processes.agreed(lambda: prepare(config), lambda ready: ready.facts)
    alone = lock.alone_with(config.out) if processes.is_first() else nullcontext()
    with alone, _checkpoints(ready) as checkpoints:
        return _logged(ready, checkpoints, reader)


@contextmanager
def _checkpoints(ready: Ready) -> Iterator[Checkpoints | None]:
    """The folder of checkpoints, if some are wanted."""
    config = ready.config
    if not config.checkpoint_every:
        yield None
        return
    folder, every, keep = checkpoint.folder_of(config.out), config.checkpoint_every, config.keep_checkpoints
    with checkpoint.opened(folder, ready.begun, every=every, keep=keep) as kept:
        yield kept


def _logged(ready: Ready, checkpoints: Checkpoints | None, reader: runlog.Reader | None) -> runfile.RunFile:
    """A run from its first line to its last."""
    config, started = ready.config, now()
    nonce = hashlib.sha256(f"{started}".encode()).hexdigest()[:4]
    run_id = f"{ready.recipe.name}-{config.seed}-{nonce}"
    run_dir = config.out / "runs" / run_id
    path = _begun(ready, run_dir) if processes.is_first() else None
    with runlog.RunLog(path, now) as log, processes.handled_by(signals.ignore):
        if reader is not None:
            log.subscribe(reader)
        trainer, outcome = Trainer(run_id, started.utc, ready, log, checkpoints), "aborted"
        try:
            watched = watchdog.watching(trainer.phases, config.deadlines_s, log, _stacks(config.out))
            with watched, processes.handled_by(processes.at_once()):
                _announce(trainer)
                loop.run(trainer)
            outcome = "finished"
        except BaseException as error:
            # Whatever ends a run is in its log, and goes on its way: a run that broke off stays visible.
            outcome = "non-finite" if isinstance(error, NonFiniteError) else "aborted"
            log.emit(runlog.Error(type(error).__name__, str(error) or "stopped from outside"))
            raise
        finally:
            trainer.phases.enter("end")
            trainer.tally.peak_bytes = meshes.peak_bytes(ready.program.mesh)
            faults.point("run.json")
            facts = run_file(trainer, outcome)
            if path is not None:
                write_whole(run_dir / "run.json", runfile.encode(facts))
            log.emit(run_end(trainer, outcome))  # the result: all else that it needs is on disk
    return facts


def _stacks(out: Path) -> Path:
    """Beside the record; of several processes, each has its own."""
    which = f".process-{processes.index()}" if processes.count() > 1 else ""
    return Path(f"{out.resolve()}{which}.stacks.txt")


def _begun(ready: Ready, run_dir: Path) -> Path:
    """The path of the log, in the new folder of the run."""
    out, begun, source = ready.config.out, ready.config.batch_sha256 or ready.config.resume, "source.txt"
    if begun and out.exists():
        write_whole(out / source, ready.source.encode())  # as it was, or what is missing
    else:
        make_folder(out, {source: ready.source.encode()})
    with refusals_told(run_dir):
        run_dir.mkdir(parents=True)
    return run_dir / "metrics.jsonl"


def _announce(trainer: Trainer) -> None:
    """What is about to run, on what, from which data."""
    ready, log = trainer.ready, trainer.log
    track, recipe, mesh = ready.track, ready.recipe, ready.program.mesh
    log.emit(
        runlog.RunStart(
            run_id=trainer.run_id,
            track=track.id,
            track_sha256=tracks.sha256(track.name),
            recipe=recipe.name,
            seed=ready.config.seed,
            num_steps=recipe.num_steps,
            source_sha256=ready.source_sha256,
            config=ready.described,
            config_sha256=runfile.config_sha256(ready.described),
            batch_sha256=ready.config.batch_sha256,
        )
    )
    device = mesh.devices.flat[0]
    log.emit(
        runlog.Preflight(
            platform=device.platform,
            device_kind=device.device_kind,
            num_devices=mesh.size,
            num_processes=processes.count(),
            num_replicas=ready.program.replicas,
            software=provenance.software(),
            environment=provenance.environment(),
            matmul_gflops=health.matmul_gflops(mesh),
            **provenance.code(),
        )
    )
    if mesh.size != (asked := track.rules.num_devices or mesh.size):
        log.emit(
            runlog.Warning(f"{mesh.size} devices, {track.id} asks for {asked}: the record will not pass V404")
        )
    val = ready.shards.val[0]
    trainer.tally.val_sha256 = stream.validation_sha256(val, track.data.val_tokens)
    log.emit(
        runlog.DataReady(
            folder=ready.folder.name,
            train_shards=[shard.path.name for shard in ready.shards.train],
            val_shard=val.path.name,
            val_tokens=track.data.val_tokens,
            val_sha256=trainer.tally.val_sha256,
        )
    )


if __name__ == "__main__":
    with told():
        raw = Path(sys.argv[1]).read_bytes()
        train(decoded(raw, RunConfig), lambda line: print(line.encode().decode(), flush=True))  # noqa: T201
