"""Requests that make a logged run again, or go on with it. Imports no JAX."""

import shlex
from pathlib import Path

import msgspec

from speedrun.base.errors import CheckpointError, UsageError, translate_read_errors
from speedrun.base.recipe_files import look_in
from speedrun.record import layout
from speedrun.record.logged_run import Run
from speedrun.record.reader import load
from speedrun.record.salvage import salvage
from speedrun.train.run_config import RUN, Resumable, RunConfig, folder_of, read_sealed


def asked(run: Run, out: Path, data: Path | None = None) -> RunConfig:
    """Return the request for the same run in another folder."""
    start, config = run.start, run.start.config
    return RunConfig(
        track=start.track.rpartition("@")[0],
        out=out,
        recipe=start.recipe,
        seed=start.seed,
        overrides=start.overrides,
        data=data,
        num_devices=run.hardware[0] or None,
        replicas=config.get("replicas"),
        microbatches=config.get("microbatches"),
        attention=config.get("attention", "auto"),
    )


def finished(out: Path) -> RunConfig | None:
    """Return the settings of the finished run in a folder, if there is one."""
    return next((asked(run, out) for run in (load(out).finished if out.is_dir() else ())), None)


def repair(out: Path) -> None:
    """Mark a run that was killed as one that crashed; refuse a record that cannot be read."""
    salvage(out)
    for problem in load(out).malformed:
        raise UsageError(f"{out}: {problem}; restore that file, or start a new run with another --out")


def resumed(out: Path, *, is_first: bool = True) -> RunConfig:
    """Return the settings of the run in a folder; `resume` is unset if it finished and only its record is missing.

    The first process marks a run that was killed as one that crashed.
    """
    if (out / layout.BATCH).exists():
        raise UsageError(f"{out} is a batch; type: speedrun batch --resume {shlex.quote(str(out))}")
    if (done := finished(out)) is not None:
        return done
    path = folder_of(out) / RUN
    if not path.exists():
        if not out.exists():
            killed = "the run was killed before its settings were written; start it again"
            none = "no such run; need the folder of one, as in: speedrun run --resume runs/first"
            raise UsageError(f"{out}: {killed if path.parent.exists() else none}")
        hint = "start a new run with another --out, and with --checkpoint-every if you want to resume it"
        raise UsageError(f"{out} has no checkpoints: {path} is missing; {hint}")
    kept = read_settings(path.parent)
    find_recipe(kept, out)
    if is_first and out.exists():
        repair(out)
    return msgspec.structs.replace(kept.config, out=out, resume=True)


def read_settings(folder: Path) -> Resumable:
    """Read the settings of a run in the folder of its checkpoints."""
    path = folder / RUN
    with translate_read_errors(path, "start a new run with another --out", kind=CheckpointError):
        return read_sealed(path, Resumable)


def find_recipe(kept: Resumable, record: Path) -> None:
    """Look for a recipe where the run found it, but not beside its files, which may be a stranger's."""
    theirs = record.resolve(), folder_of(record)
    folders = [Path(folder) for folder in kept.recipe_folders]
    own = [one for one in folders if one.is_absolute() and not any(map(one.resolve().is_relative_to, theirs))]
    look_in(*own)
