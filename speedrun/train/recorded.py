"""One run of a recipe on a track, with its folder and its log.

python -m speedrun.train.recorded REQUEST.json      prints the log
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from speedrun.base import faults, messages, processes, provenance, runlog, signals
from speedrun.base import track as tracks
from speedrun.base.atomic_files import lock_record, make_folder, write_whole
from speedrun.base.clock import Phases, now
from speedrun.base.errors import NonFiniteError, translate_os_errors
from speedrun.base.output import expected, reported, text_of
from speedrun.record import layout
from speedrun.train import checkpoint, device_benchmark
from speedrun.train.attempt import Attempt
from speedrun.train.preflight import Ready, prepare
from speedrun.train.run import Maker, Mesh, run
from speedrun.train.run_config import RunConfig, decoded, folder_of

Opening = tuple[runlog.RunStart, runlog.Preflight, runlog.DataReady]


def train(
    config: RunConfig,
    opened: Callable[[Path | None], AbstractContextManager[messages.Log]] = runlog.RunLog,
    steps: Maker = Mesh,
    approve: Callable[[Ready, Opening], list[str]] = lambda *_: [],
    roots: Sequence[str] = (),
    phases: Phases | None = None,
) -> runlog.RunEnd:
    """Train once; write `source.txt` and `runs/<run id>/` into the record; return the last event of the log.

    If `prepare` or `approve` refuses, no folder is made; `approve` gets the first events of the log, and returns
    warnings for it. If the run crashes, its log says why. `steps` makes the steps of the run; `roots` are the
    modules with its source; `phases` takes those of the run.
    """
    phases = phases or Phases()
    phases.enter("start")
    ready = processes.all_processes_agree(lambda: prepare(config, roots), lambda ready: ready.facts)
    first = opening(ready)
    warnings = processes.all_processes_agree(lambda: approve(ready, first), lambda _: {})
    locked = lock_record(config.out) if processes.is_first() else nullcontext()
    kept = nullcontext()
    if config.checkpoint_every:
        kept = checkpoint.opened(folder_of(config.out), ready.resumable, keep=config.keep_checkpoints)
    run_id, told = first[0].run_id, [*first, *map(runlog.Warning, warnings)]
    with locked, kept as checkpoints:
        path = _make_folders(ready, config.out / "runs" / run_id) if processes.is_first() else None
        with opened(path) as log, processes.handled_by(signals.ignore):
            return _logged(Attempt(run_id, ready, log, checkpoints, phases), told, steps)


def _logged(this: Attempt, told: Sequence[runlog.AnyEvent], steps: Maker) -> runlog.RunEnd:
    """Write the first events, run, and write the last one, whatever happens."""
    outcome: runlog.Outcome = "aborted"
    try:
        with processes.handled_by(processes.immediate_stop()):
            for event in told:
                this.log.emit(event)
            run(this, steps)
        outcome = "finished"
    except BaseException as error:
        # A run that crashed stays visible, whatever the cause.
        known = expected(error) or error
        outcome = "non-finite" if isinstance(known, NonFiniteError) else "aborted"
        this.log.emit(runlog.Error(type(known).__name__, text_of(known) or "stopped from outside"))
        raise
    finally:
        this.phases.enter("end")
        faults.point("end")
        this.log.emit(end := this.end(outcome))  # last, when everything else is on disk
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


def opening(ready: Ready) -> Opening:
    """Return the first events of a log: the run, its devices and its data. Measures the devices."""
    track, recipe, mesh, config = ready.track, ready.recipe, ready.program.mesh, ready.config
    nonce = layout.sha256(f"{now()}".encode())[:4]
    start = runlog.RunStart(
        format=2,
        run_id=f"{recipe.name}-{config.seed}-{nonce}",
        track=track.id,
        track_sha256=tracks.sha256(track.name),
        recipe=recipe.name,
        recipe_revision=recipe.revision,
        overrides=dict(recipe.overrides),
        seed=config.seed,
        num_steps=recipe.num_steps,
        source_sha256=ready.source_sha256,
        config=ready.described,
        config_sha256=layout.config_sha256(ready.described),
        batch_sha256=config.batch_sha256,
        purpose=config.purpose,
    )
    device, val = mesh.devices.flat[0], ready.shards.val[0]
    preflight = runlog.Preflight(
        platform=device.platform,
        device_kind=device.device_kind,
        num_devices=mesh.size,
        num_processes=processes.count(),
        num_replicas=ready.program.replicas,
        software=provenance.software(),
        environment=provenance.environment(),
        matmul_gflops=device_benchmark.matmul_gflops(mesh),
        **provenance.code(),
    )
    data = runlog.DataReady(
        folder=ready.folder.name,
        train_shards=[shard.path.name for shard in ready.shards.train],
        val_shard=val.path.name,
        val_tokens=track.data.val_tokens,
        val_sha256=ready.val_sha256,
    )
    return start, preflight, data


def main() -> None:
    """Train the request that the command line names, and print each line of the log."""
    with reported():
        config = decoded(Path(sys.argv[1]).read_bytes(), RunConfig)
        train(config, partial(runlog.RunLog, reader=lambda line: print(line.encode().decode(), flush=True)))  # noqa: T201


if __name__ == "__main__":
    main()
