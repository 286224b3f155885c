"""Runs in wandb: the numbers of their logs, and nothing about the machine they ran on.

wandb adds its own version, that of Python and the platform. It is optional.
"""

import importlib
import os
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from speedrun.ground import runlog
from speedrun.ground.errors import UsageError
from speedrun.ledger.record import Record
from speedrun.ledger.run import loss_of

_ID_LIMIT = 64  #: characters of wandb's run ids; names of run folders fit but for their length
_INIT_TIMEOUT_S = 20.0  #: wandb's default is 90, too long to wait for a dead server

#: Read by wandb when it is imported. The first stops reports of crashes to its makers.
_ENVIRONMENT = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}


def library(**environment: str) -> Any:
    """Return wandb, with variables that it reads when it is imported; raise UsageError if it is not installed."""
    os.environ |= _ENVIRONMENT | environment
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        if error.name != "wandb":
            raise
        raise UsageError("wandb is not installed; type: pip install wandb") from None


def _scalars(event: runlog.AnyEvent) -> tuple[int, dict[str, float]]:
    """Return steps done, and the numbers of an event by name."""
    match event:
        case runlog.Val():
            return event.step, {"val/loss": loss_of(event)}
        case runlog.Step():
            found = {"loss": event.loss, "time_s": event.train_time_s, "tokens": event.tokens_seen}
            return event.step + 1, {f"train/{k}": float(x) for k, x in {**found, **event.inputs}.items()}
    return 0, {}


class WandbRun:
    """One run in wandb; called with the lines of its log in order."""

    def __init__(
        self,
        wandb: Any,
        start: runlog.Line,
        *,
        scratch: str,
        mode: Literal["online", "offline"] = "offline",
        project: str = "speedrun",
        group: str | None = None,
    ) -> None:
        """Start it.

        `start` is the first line of the log. `scratch` gets wandb's files, which include logs full of paths and
        settings. `mode`: send, or write files that `wandb sync` sends. The runs of one record share a `group`.
        """
        event = start.event
        assert isinstance(event, runlog.RunStart)
        self.id = event.run_id[:_ID_LIMIT]
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            host="-",
            init_timeout=_INIT_TIMEOUT_S,
            program="speedrun",
            silent=True,
            username="-",
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_viewer=True,
            x_save_requirements=False,
            x_start_time=datetime.fromisoformat(start.t_utc).timestamp(),
        )
        self._run = wandb.init(
            mode=mode, project=project, id=self.id, name=event.run_id, group=group, config=event.config,
            dir=scratch, settings=settings, reinit="create_new",
        )  # fmt: skip

    def __call__(self, line: runlog.Line) -> None:
        """Log the numbers of a line; wandb joins those of one step into one row."""
        step, numbers = _scalars(line.event)
        if numbers:
            now_s = datetime.fromisoformat(line.t_utc).timestamp()
            self._run.log({**numbers, "_timestamp": now_s}, step=step)

    def finish(self, *, succeeded: bool = True) -> None:
        """End it; returns when wandb has everything."""
        self._run.finish(exit_code=0 if succeeded else 1)


def offline_runs(record: Record) -> dict[str, bytes]:
    """Return the files of an offline run for each run, for `wandb sync`; raise UsageError without wandb."""
    files = {}
    # wandb also writes logs full of paths and settings. They stay in a temporary folder.
    with tempfile.TemporaryDirectory() as scratch:
        wandb = library(WANDB_CACHE_DIR=scratch)
        for run in record.runs:
            sent = WandbRun(wandb, run.lines[0], scratch=scratch)
            for line in run.lines:
                sent(line)
            sent.finish()
            (written,) = Path(scratch).glob(f"wandb/offline-run-*/run-{sent.id}.wandb")
            begun = datetime.fromisoformat(run.lines[0].t_utc)
            files[f"offline-run-{begun:%Y%m%d_%H%M%S}-{sent.id}/{written.name}"] = written.read_bytes()
        wandb.teardown()
    return files
