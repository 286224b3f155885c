"""Trains one run, or resumes it, and writes its record, also if the run crashes."""

import os
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from msgspec.structs import replace

from speedrun.base import subprocesses
from speedrun.base import track as tracks
from speedrun.base.console import Printer
from speedrun.base.errors import NonFiniteError, SpeedrunError, UsageError
from speedrun.base.subprocesses import samples_of
from speedrun.commands import added, pictures
from speedrun.data import overview, shards
from speedrun.record.layout import LOG, SOURCE
from speedrun.record.summary import Summary, assemble
from speedrun.record.validate import Report, validate
from speedrun.train import keeper
from speedrun.train.keeper import Job
from speedrun.train.resume_settings import resumed
from speedrun.train.run_config import RunConfig, folder_of, steps_in

_say = partial(print, file=sys.stderr, flush=True)


class Extras(NamedTuple):
    """What the first process does during training."""

    ghost: str | None = None  #: as in `--ghost`
    wandb: str | None = None  #: project that gets the log
    watch_port: int | None = None  #: of the page; None: no page
    sample_every: int | None = None  #: steps
    sample_prompts: tuple[str, ...] = ()
    stream: TextIO | None = None  #: for the log; None: standard output

    def beside(self, config: RunConfig) -> list[AbstractContextManager[None]]:
        """Return what other rooms do beside the training; refuse what does not fit."""
        found = list[AbstractContextManager[None]]()
        if self.watch_port is not None:
            found.append(added("watch")(config.out, self.watch_port, self.ghost))
        if self.wandb is not None:
            found.append(added("wandb")(config.out, self.wandb))
        if self.sample_every or self.sample_prompts:
            found.append(added("samples")(config, self.sample_every, self.sample_prompts))
        return found


class Single(NamedTuple):
    """A finished run with its record, plot and validation."""

    config: RunConfig
    rules: tracks.Track
    picture: Path | None  #: None where no room draws
    summary: Summary
    report: Report

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of validation text; None if the manifest of the data does not state its bytes."""
        if self.summary.val_loss_mean is None:
            return None
        folder = shards.data_folder(self.rules, self.config.data)
        return overview.bits_per_byte(self.summary.val_loss_mean, folder, self.rules.data)


def run(job: Job, extras: Extras, **how: Any) -> Single | None:
    """Train as `trained` does, and write the record; return None in all processes but the first."""
    config = trained(job, extras, **how)
    if not job.is_first:
        return None
    summary = assemble(config.out, default_title=_title(config))
    picture = next(iter(pictures(config.out)), None)
    return Single(config, tracks.load(config.track), picture, summary, validate(config.out))


def trained(
    job: Job, extras: Extras, *, resumed: Callable[..., RunConfig] = resumed, module: str = keeper.CHILD
) -> RunConfig:
    """Train, or resume, in a child that runs `module`; return the settings. The record of a broken run says where.

    With `resume`, all settings but `out` come from the folder, by `resumed`.
    """
    config = job.config
    is_ours = config.resume or not os.path.exists(config.out / SOURCE)
    if config.resume:
        settled = resumed(config.out, is_first=job.is_first)
        config = replace(settled, purpose=config.purpose or settled.purpose)
        if not config.resume:
            _say(f"{config.out} is finished; nothing to resume; writing its record again")
            return config
    rules = tracks.load(config.track)
    try:
        with ExitStack() as beside:
            for one in extras.beside(config) if job.is_first else []:
                beside.enter_context(one)
            ghost = added("ghost")(extras.ghost, rules.id) if extras.ghost and job.is_first else None
            printer = beside.enter_context(Printer(extras.stream or sys.stdout, ghost))
            code, error = keeper.trained(replace(job, config=config), printer, module=module)
            if error:
                raise SpeedrunError(error, subprocesses.shell_code(code))
            if code:
                raise SystemExit(subprocesses.shell_code(code))
    except BaseException as error:
        if is_ours and job.is_first:
            fails_again = getattr(error, "exit_code", 0) in (NonFiniteError.exit_code, UsageError.exit_code)
            more = " --budget MORE" * str(error).startswith("budget: ")
            _assemble_broken(config, None if fails_again else more)
        raise
    if extras.sample_every is not None and job.is_first:
        _say(f"samples {samples_of(config.out)}: reading the last checkpoints")
    return config


def _title(config: RunConfig) -> str:
    rules = tracks.load(config.track)
    return f"{config.recipe or rules.recipe} on {rules.id}"


def _assemble_broken(config: RunConfig, more: str | None) -> None:
    if not any(config.out.glob(f"runs/*/{LOG}")):
        return
    try:
        assemble(config.out, default_title=_title(config))
        _say(f"record  {config.out} says where the run ended")
        if more is not None and steps_in(folder_of(config.out)):
            _say(f"resume  speedrun run --resume {shlex.quote(str(config.out))}{more}")
    except SpeedrunError as error:  # the error that broke the run matters more
        _say(f"warning: the record of the broken run is incomplete: {error}")
