"""One run of a recipe on a track, with its folder and its log.

python -m speedrun.train.run REQUEST.json [attended]

It prints the log. Other commands run this as a child process; an attended one ends when its standard input does.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from speedrun.base import faults, processes, provenance, runlog, signals
from speedrun.base import track as tracks
from speedrun.base.clock import now
from speedrun.base.errors import NonFiniteError, translate_os_errors
from speedrun.base.output import expected, reported, text_of
from speedrun.base.wholefile import lock_record, make_folder, write_whole
from speedrun.record import layout
from speedrun.train import checkpoint, health, watchdog
from speedrun.train.loop import Training
from speedrun.train.preflight import Ready, prepare
from speedrun.train.request import RunConfig, decoded


def train(
    config: RunConfig, reader: runlog.Reader | None = None, kind: type[Training] = Training, **more: Any
) -> runlog.RunEnd:
    """Train once; write `source.txt` and `runs/<run id>/` into the record; return the last event of the log.

    If `prepare` refuses, no folder is made. If the run breaks off, its log says why. `more` are arguments of `kind`.
    """
    ready = processes.agreed(lambda: prepare(config, kind.__module__), lambda ready: ready.facts)
    locked = lock_record(config.out) if processes.is_first() else nullcontext()
    kept = nullcontext()
    if config.checkpoint_every:
        folder = checkpoint.folder_of(config.out)
        kept = checkpoint.opened(folder, ready.resumable, keep=config.keep_checkpoints)
    with locked, kept as checkpoints:
        return _logged(ready, reader, partial(kind, checkpoints=checkpoints, **more))


def _logged(ready: Ready, reader: runlog.Reader | None, make: Callable[..., Training]) -> runlog.RunEnd:
    config, started = ready.config, now()
    nonce = layout.sha256(f"{started}".encode())[:4]
    run_id = f"{ready.recipe.name}-{config.seed}-{nonce}"
    run_dir = config.out / "runs" / run_id
    path = _make_folders(ready, run_dir) if processes.is_first() else None
    with runlog.RunLog(path, reader) as log, processes.handled_by(signals.ignore):
        training = make(run_id, ready, log)
        outcome: runlog.Outcome = "aborted"
        training.phases.enter("start")  # its deadline counts from here
        try:
            stacks = watchdog.stacks_of(config.out)
            watched = watchdog.watching(training.phases, config.deadlines_s, log, stacks)
            with watched, processes.handled_by(processes.immediate_stop()):
                _announce(run_id, ready, log)
                training.run()
            outcome = "finished"
        except BaseException as error:
            # A run that broke off stays visible, whatever the cause.
            known = expected(error) or error
            outcome = "non-finite" if isinstance(known, NonFiniteError) else "aborted"
            log.emit(runlog.Error(type(known).__name__, text_of(known) or "stopped from outside"))
            raise
        finally:
            training.phases.enter("end")
            faults.point("end")
            log.emit(end := training.end(outcome))  # last, when everything else is on disk
    return end


def _make_folders(ready: Ready, run_dir: Path) -> Path:
    """Make the folders of the record and the run; return the path of the log."""
    out, source = ready.config.out, "source.txt"
    if (ready.config.batch_sha256 or ready.config.resume) and out.exists():
        write_whole(out / source, ready.source.encode())  # the same text, or missing
    else:
        make_folder(out, {source: ready.source.encode()})
    with translate_os_errors(run_dir):
        run_dir.mkdir(parents=True)
    return run_dir / "metrics.jsonl"


def _announce(run_id: str, ready: Ready, log: runlog.RunLog) -> None:
    """Log the run, its devices and its data."""
    track, recipe, mesh = ready.track, ready.recipe, ready.program.mesh
    log.emit(
        runlog.RunStart(
            format=2,
            run_id=run_id,
            track=track.id,
            track_sha256=tracks.sha256(track.name),
            recipe=recipe.name,
            recipe_revision=recipe.revision,
            overrides=ready.config.overrides,
            seed=ready.config.seed,
            num_steps=recipe.num_steps,
            source_sha256=ready.source_sha256,
            config=ready.described,
            config_sha256=layout.config_sha256(ready.described),
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
    kind, number = device.device_kind, mesh.size
    wanted = track.rules.num_devices or number, track.rules.device_kind or kind
    if (number, kind) != wanted:
        asks = f"{track.id} asks for {wanted[0]} x {wanted[1]}"
        log.emit(runlog.Warning(f"{number} x {kind}, {asks}: the record will not pass V404"))
    val = ready.shards.val[0]
    log.emit(
        runlog.DataReady(
            folder=ready.folder.name,
            train_shards=[shard.path.name for shard in ready.shards.train],
            val_shard=val.path.name,
            val_tokens=track.data.val_tokens,
            val_sha256=ready.val_sha256,
        )
    )


if __name__ == "__main__":  # with the path of a request: prints each line of the log
    with reported():
        if signals.ATTENDED in sys.argv[2:]:
            signals.end_with_parent()
        request = decoded(Path(sys.argv[1]).read_bytes(), RunConfig)
        train(request, lambda line: print(line.encode().decode(), flush=True))  # noqa: T201
