"""Options of the commands that train: `run`, `batch` and `sweep`."""

from pathlib import Path
from typing import Any

from speedrun.base import clock
from speedrun.base.errors import UsageError, unknown
from speedrun.cli import options as cli
from speedrun.model.watch_server import PORT
from speedrun.train import watchdog
from speedrun.train.connect import HEARTBEAT_S, MEET_S
from speedrun.train.request import RunConfig

#: `--ghost RECORD`, as the argument `ghost` for `race.find`.
ghost_option = cli.option(
    "--ghost RECORD|best",
    str,
    "Show on the step lines how far ahead of this record the run is, in seconds and loss; 'best': of the fastest "
    "qualified record of the track in records/.",
)

#: `--wandb PROJECT`, as the argument `wandb` for `relay.relayed`.
wandb_option = cli.option("--wandb PROJECT", str, "Send the log to wandb. This cannot stop the run.")

#: The options that `request_of` reads.
config_options = cli.combined(
    cli.track_option(),
    cli.recipe_option(),
    cli.option("--devices N", cli.COUNT, "Default: what the track asks for, or all there are."),
    cli.attention_option,
    cli.option(
        "--microbatches N",
        cli.COUNT,
        "Parts of a step's batch. Default: 8, or one for each device if there are more.",
    ),
    cli.data_option,
    cli.out_option("A new folder. Default: below runs/, with date, track and a number."),
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


#: The options of a run that keeps checkpoints, resumes, or must not hang.
checkpoint_options = cli.combined(
    cli.option(
        "--checkpoint-every N",
        cli.COUNT,
        "Steps between checkpoints, in DIR.checkpoints; writing them counts as train time. Default: none.",
    ),
    cli.option("--keep-checkpoints N", cli.NATURAL, "How many of the newest to keep; 0: all.", 2),
    cli.option(
        "--resume DIR",
        cli.PATH,
        "Resume the run in DIR from its newest checkpoint, with its settings. Never ranked.",
    ),
    cli.option(
        "--deadline PHASE=SECONDS",
        str,
        f"End a run that stays longer in one phase: {', '.join(watchdog.DEADLINES_S)}; 0: no limit.",
        name="deadlines",
        multiple=True,
    ),
)
#: The options of a run in several processes.
process_options = cli.combined(
    cli.option(
        "--local-processes N",
        cli.COUNT,
        "Start N processes on this machine that share its devices, to try out what a cluster does.",
    ),
    cli.option(
        "--coordinator HOST:PORT",
        str,
        "Of process 0, if several share the run. SLURM and Open MPI need no such options.",
    ),
    cli.option("--processes N", cli.COUNT, "How many share the run."),
    cli.option("--process I", cli.NATURAL, "The number of this process."),
    cli.option(
        "--heartbeat SECONDS",
        cli.Integer(5),
        "A process that is silent for so long is lost, and the run ends.",
        HEARTBEAT_S,
    ),
    cli.option("--meet-within SECONDS", cli.COUNT, "Time for all processes to connect.", MEET_S),
)
#: The arguments of `process_options`.
PROCESS_ARGUMENTS = ("local_processes", "coordinator", "processes", "process", "heartbeat", "meet_within")

#: The options of what a single run does beside training, or starts from.
extra_options = cli.combined(
    cli.flag("--watch", "Serve a page of the run from a child process. It cannot stop the run."),
    cli.option("--watch-port N", cli.Integer(1, 65_535), f"Serve it at this port. Default: {PORT}."),
    cli.option(
        "--sample-every N",
        cli.COUNT,
        "Let the checkpoints of each N steps write a text, beside the record; a child process does it. Without "
        "--checkpoint-every, it makes them.",
    ),
    cli.option(
        "--sample-prompt TEXT",
        str,
        "What these texts begin with. Default: the start of a document.",
        name="sample_prompts",
        multiple=True,
    ),
    cli.option(
        "--init-from SOURCE",
        cli.PATH,
        "Start from the weights of an exported folder or a GPT-2, as 'speedrun eval' takes them. Never ranked.",
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
