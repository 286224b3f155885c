"""Options of the commands that train: `run`, `batch` and `sweep`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from speedrun.cli.options import (
    Decorator,
    Integer,
    attention_option,
    data_option,
    devices_option,
    microbatches_option,
    out_option,
    recipe_option,
    track_option,
)
from speedrun.ground import clock
from speedrun.ground.errors import UsageError, unknown
from speedrun.training import watchdog
from speedrun.training.meet import HEARTBEAT_S, MEET_S
from speedrun.training.request import RunConfig
from speedrun.watch import PORT

#: `--ghost RECORD`, as the argument `ghost` for `race.find`.
ghost_option: Decorator = click.option(
    "--ghost",
    metavar="RECORD|best",
    help="Show on the step lines how far ahead of this record the run is, in seconds and loss; 'best': of the "
    "fastest qualified record of the track in records/.",
)

#: `--wandb PROJECT`, as the argument `wandb` for `relay.relayed`.
wandb_option: Decorator = click.option(
    "--wandb", metavar="PROJECT", help="Send the log to wandb from a child process. It cannot stop the run."
)


def combined(*options: Decorator) -> Decorator:
    """Return a decorator that adds all options."""

    def add(command: Callable[..., object]) -> Callable[..., object]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


#: The options that `request_of` reads.
config_options = combined(
    track_option(),
    recipe_option(),
    devices_option,
    attention_option,
    microbatches_option,
    data_option,
    out_option("A new folder. Default: below runs/, with date, track and a number."),
)


def deadlines_s(texts: tuple[str, ...]) -> dict[str, float]:
    """Parse `phase=seconds` texts, as `--deadline` takes them."""
    found: dict[str, float] = {}
    for text in texts:
        phase, _, seconds = text.partition("=")
        if phase not in watchdog.DEADLINES_S:
            raise unknown("phase", phase, watchdog.DEADLINES_S)
        if not seconds.isdecimal():
            raise UsageError(f"--deadline {text!r}; need whole seconds, for example --deadline step=60")
        found[phase] = float(seconds)
    return found


def _checked_deadlines(
    _ctx: click.Context, _option: click.Parameter, texts: tuple[str, ...]
) -> tuple[str, ...]:
    deadlines_s(texts)
    return texts


#: The options of a run that keeps checkpoints, resumes, or must not hang.
checkpoint_options = combined(
    click.option(
        "--checkpoint-every",
        type=Integer(1),
        metavar="N",
        help="Steps between checkpoints, in DIR.checkpoints; writing them counts as train time. Default: none.",
    ),
    click.option(
        "--keep-checkpoints",
        type=Integer(0),
        default=2,
        show_default=True,
        metavar="N",
        help="How many of the newest to keep; 0: all.",
    ),
    click.option(
        "--resume",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Resume the run in DIR from its newest checkpoint, with its settings. Never ranked.",
    ),
    click.option(
        "--deadline",
        "deadlines",
        multiple=True,
        callback=_checked_deadlines,
        metavar="PHASE=SECONDS",
        help=f"End a run that stays longer in one phase: {', '.join(watchdog.DEADLINES_S)}; 0: no limit. Repeatable.",
    ),
)
#: The options of a run in several processes.
process_options = combined(
    click.option(
        "--local-processes",
        type=Integer(1),
        metavar="N",
        help="Start N processes on this machine that share its devices, to try out what a cluster does.",
    ),
    click.option(
        "--coordinator",
        metavar="HOST:PORT",
        help="Of process 0, if several share the run. SLURM and Open MPI need no such options.",
    ),
    click.option("--processes", type=Integer(1), metavar="N", help="How many share the run."),
    click.option("--process", type=Integer(0), metavar="I", help="The number of this process."),
    click.option(
        "--heartbeat",
        type=Integer(5),
        default=HEARTBEAT_S,
        show_default=True,
        metavar="SECONDS",
        help="A process that is silent for so long is lost, and the run ends.",
    ),
    click.option(
        "--meet-within",
        type=Integer(1),
        default=MEET_S,
        show_default=True,
        metavar="SECONDS",
        help="Time for all processes to connect.",
    ),
)
#: The arguments of `process_options`.
PROCESS_ARGUMENTS = ("local_processes", "coordinator", "processes", "process", "heartbeat", "meet_within")


#: The options of what a single run does beside training, or starts from.
extra_options = combined(
    click.option(
        "--watch", is_flag=True, help="Serve a page of the run from a child process. It cannot stop the run."
    ),
    click.option(
        "--watch-port",
        type=Integer(1, 65_535),
        show_default=str(PORT),
        metavar="N",
        help="Serve it at this port of this machine.",
    ),
    click.option(
        "--sample-every",
        type=Integer(1),
        metavar="N",
        help="Let the checkpoints of each N steps write a text, beside the record; a child process does it. "
        "Without --checkpoint-every, it makes them.",
    ),
    click.option(
        "--sample-prompt",
        "sample_prompts",
        multiple=True,
        metavar="TEXT",
        help="What these texts begin with; repeatable. Default: the start of a document.",
    ),
    click.option(
        "--init-from",
        type=click.Path(path_type=Path),
        metavar="SOURCE",
        help="Start from the weights of an exported folder or a GPT-2, as 'speedrun eval' takes them. Never ranked.",
    ),
)
#: Those that a resumed run takes, too.
EXTRA_ARGUMENTS = ("ghost", "wandb", "watch", "watch_port", "sample_every", "sample_prompts")


def request_of(given: dict[str, Any], overrides: dict[str, str], out: Path, **more: Any) -> RunConfig:
    """Return the request that the options of a command say, with `more` of its fields."""
    same = {key: given[key] for key in ("track", "recipe", "data", "microbatches", "attention")}
    return RunConfig(**same, out=out, overrides=overrides, num_devices=given["devices"], **more)


def new_folder(name: str) -> Path:
    """Return the first of today's folders below `runs/` that does not exist: `runs/<date>-<name>-<n>`."""
    candidates = (Path("runs") / f"{clock.now().utc[:10]}-{name}-{i}" for i in range(1, 10_000))
    return next(path for path in candidates if not path.exists())
