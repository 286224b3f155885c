"""Trains one run, or resumes it, and writes its record, also if the run breaks off."""

import os
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from speedrun.base import processes, runlog
from speedrun.base import track as tracks
from speedrun.base.children import samples_of
from speedrun.base.console import Printer
from speedrun.base.errors import NonFiniteError, SpeedrunError, UsageError
from speedrun.commands import added, pictures
from speedrun.data import generated, overview, shards
from speedrun.record.about import Summary, assemble
from speedrun.record.layout import SOURCE
from speedrun.record.salvage import ended
from speedrun.record.validate import Report, validate
from speedrun.train.checkpoint import folder_of, steps_in
from speedrun.train.ranked import train
from speedrun.train.request import RunConfig
from speedrun.train.resume_settings import resumed

_say = partial(print, file=sys.stderr, flush=True)


class Extras(NamedTuple):
    """What the first process does during training."""

    ghost: str | None = None  #: as in `--ghost`
    wandb: str | None = None  #: project that gets the log
    watch_port: int | None = None  #: of the page; None: no page
    sample_every: int | None = None  #: steps
    sample_prompts: tuple[str, ...] = ()
    init_from: Path | None = None  #: initial weights
    to_stderr: bool = False

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

    def facts(self) -> dict[str, object]:
        """Return the result as a JSON object."""
        return {
            "record": str(self.config.out),
            "plot": self.picture and str(self.picture),
            "summary": self.summary,
            "bits_per_byte": self.bits_per_byte,
            "failed_checks": {r.check.id: r.messages for r in self.report.having("failed")},
        }


def run(
    config: RunConfig,
    joined: AbstractContextManager[object],
    extras: Extras,
    train: Callable[..., object] = train,
    resumed: Callable[[Path], RunConfig] = resumed,
) -> Single | None:
    """Train, or resume, and write the record; return None in all processes but the first.

    `joined` connects the processes of the run. With `config.resume`, all settings but `out` come from the folder, by
    `resumed`. `train` trains a request.
    """
    is_ours = config.resume or not os.path.exists(config.out / SOURCE)
    is_done = False
    try:
        with joined:
            if config.resume:
                kept = resumed(config.out)
                config = replace(kept, purpose=config.purpose or kept.purpose)
                is_done = not config.resume
                if is_done and processes.is_first():
                    _say(f"{config.out} is finished; nothing to resume; writing its record again")
            if not is_done:
                extras = extras if processes.is_first() else Extras(init_from=extras.init_from)
                config = _trained(config, extras, train)
    except BaseException as error:
        if is_ours and processes.is_first():
            _assemble_broken(config, resumes=not isinstance(error, NonFiniteError | UsageError))
        raise
    if not processes.is_first():
        return None
    summary = assemble(config.out, default_title=_title(config))
    picture = next(iter(pictures(config.out)), None)
    return Single(config, tracks.load(config.track), picture, summary, validate(config.out))


def _trained(config: RunConfig, extras: Extras, train: Callable[..., object]) -> RunConfig:
    """Generate the data of a synthetic track, and train; return the settings, which `init_from` changes."""
    beside, rules = extras.beside(config), tracks.load(config.track)
    say = _say if processes.is_first() else lambda _: None
    processes.agreed(lambda: generated.ensure(rules, config.data, say), lambda _: {})
    if extras.init_from is not None:
        config = added("weights")(config, extras.init_from)
    with ExitStack() as stack:
        for one in beside:
            stack.enter_context(one)
        if processes.is_first():
            ghost = added("ghost")(extras.ghost, rules.id) if extras.ghost else None
            with Printer(sys.stderr if extras.to_stderr else sys.stdout, ghost) as reader:
                train(config, partial(runlog.RunLog, reader=reader))
        else:
            train(config)
        if extras.sample_every is not None:
            _say(f"samples {samples_of(config.out)}: reading the last checkpoints")
    return config


def _title(config: RunConfig) -> str:
    rules = tracks.load(config.track)
    return f"{config.recipe or rules.recipe} on {rules.id}"


def _assemble_broken(config: RunConfig, *, resumes: bool) -> None:
    if not any(map(ended, config.out.glob("runs/*"))):
        return
    try:
        assemble(config.out, default_title=_title(config))
        _say(f"record  {config.out} says where the run broke off")
        if resumes and steps_in(folder_of(config.out)):
            _say(f"resume  speedrun run --resume {shlex.quote(str(config.out))}")
    except SpeedrunError as error:  # the error that broke the run matters more
        _say(f"warning: the record of the broken run is incomplete: {error}")
