"""The table of commands, which alone knows the rooms beside the core. No heavy imports.

The core is base, science, recipes, data, train, record, cli and api. Other folders may be taken out: then the help
lacks their commands, and who types one is told what it needs.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

#: Each command in the order of the help: a module of the core, or the room whose `commands` have it, and what it does.
GROUPS = {
    "Train": {
        "data": ("cli.data", "Fetch, make, list and check shards."),
        "recipes": ("cli.train", "List recipes, or the settings of one."),
        "run": ("cli.train", "Train on a track, under the clock."),
        "batch": ("cli.train", "Declare several runs, run them, and test their mean loss."),
        "islands": ("islands", "Train on islands that may come and go, or replay such a run."),
    },
    "Check": {
        "validate": ("cli.check", "Check a record offline, and recompute every claim."),
        "reproduce": ("cli.check", "Run a record again and judge its result, or compare two in turns."),
    },
    "Study": {
        "plot": ("board", "Draw the loss and step times of records."),
        "stats": ("lab", "Report what the runs of a record prove, and how many more a proof takes."),
        "sweep": ("lab", "Compare settings or features of a recipe, or a recipe with its ancestors."),
        "try": ("lab", "Try a recipe against its parent, pair by pair, until the answer is known."),
        "import-log": ("board", "Read other people's logs, and report the noise between equal runs."),
    },
    "Use": {
        "watch": ("model", "Show runs on a page, while they train or afterwards."),
        "sample": ("model", "Sample texts from a trained model."),
        "play": ("model", "Sample from exported models in a browser."),
        "eval": ("model", "Score a trained model on other text."),
    },
    "Publish": {
        "describe": ("board", "Set title, authors, changes and parent of a record."),
        "submit": ("board", "Validate a record, scan it for secrets, and pack it for a pull request."),
        "leaderboard": ("board", "Build the board of all records, or check that it is up to date."),
        "export": ("board", "Write a record as text logs or CSV, or export its model."),
    },
    "Machine": {
        "schema": ("cli.schema", "Print the JSON Schema of what a command prints with --json."),
        "doctor": ("machine", "Report what this machine can run, and the next command."),
        "plan": ("plan", "Estimate memory and time without the devices, on one node or many."),
        "bench": ("machine", "Time operations against their bounds."),
        "profile": ("machine", "Report where the time of a training step goes."),
    },
}
COMMANDS = {name: told for group in GROUPS.values() for name, told in group.items()}
#: What other rooms add to the core's commands, and to runs and replays.
ADDED = {
    "afford": "lab.afford:afford",
    "budget": "lab.budget:budget",
    "ghost": "board.ghost:chosen",
    "nodes": "islands.remote_runs:trainer",
    "plot": "board.plots:plot",
    "rounds": "islands.replay:examined",
    "samples": "model.samples:beside",
    "wandb": "board.exports:relayed",
    "watch": "model.watch_server:watched",
    "weights": "model.weight_sources:start_from",
}


def is_here(place: str) -> bool:
    """Whether the room of a module is in this installation, and not just a folder that held caches."""
    return (Path(__file__).parent / place.partition(".")[0] / "__init__.py").is_file()


def added(name: str) -> Any:
    """Return a function of another room; raise ModuleNotFoundError, which the command line reports, without it."""
    module, _, function = ADDED[name].partition(":")
    return getattr(import_module(f"speedrun.{module}"), function)


def pictures(record: Path) -> list[Path]:
    """Draw a record where there is a room that draws; return the files."""
    return added("plot")(record) if is_here(ADDED["plot"]) else []
