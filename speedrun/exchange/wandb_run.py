"""A run as wandb shows it: the numbers of its log, and nothing of the machine that it ran on.

wandb adds its own version, that of Python and the platform.
"""

from typing import Any, Literal

from speedrun.exchange.scalars import scalars, utc_s
from speedrun.ground import runlog

#: What wandb takes as the id of a run; names of run folders fit but for their length.
_ID_LIMIT = 64
_INIT_TIMEOUT_S = 20.0  #: wandb's own is 90: a server that is dead shall be told of while somebody looks

#: wandb reads them when it is imported. The first would tell its makers of crashes.
ENVIRONMENT = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}


class WandbRun:
    """One run of ours in wandb; is given the lines of its log in their order."""

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
        """Begins it.

        Args:
            wandb: the library.
            start: first line of the log.
            scratch: folder for what wandb writes, logs full of paths and settings among it.
            mode: whether to send, or to write files that `wandb sync` sends.
            project: of wandb.
            group: of wandb; the runs of one record.
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
            x_start_time=utc_s(start),
        )
        self._run = wandb.init(
            mode=mode, project=project, id=self.id, name=event.run_id, group=group, config=event.config,
            dir=scratch, settings=settings, reinit="create_new",
        )  # fmt: skip

    def __call__(self, line: runlog.Line) -> None:
        """Takes over the numbers of a line. Those of one step become one row: wandb waits for the next step."""
        for step, key, number in scalars(line.event):
            self._run.log({key: number, "_timestamp": utc_s(line)}, step=step)

    def finish(self, *, succeeded: bool = True) -> None:
        """Ends it; returns when wandb has everything."""
        self._run.finish(exit_code=0 if succeeded else 1)
