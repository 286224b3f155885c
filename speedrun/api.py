"""The Python API: load a recipe, run it, inspect the record. `import speedrun` exports these names.

import speedrun as sr

recipe = sr.load("smoke").override({"stages.0.num_steps": 100})
record = sr.run(recipe, track="smoke-cpu", out="runs/mine")
record.validate()
record.plot()
"""

import sys
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from speedrun.base.errors import UsageError
from speedrun.base.recipe_files import resolve
from speedrun.base.track import load as load_track
from speedrun.commands import added
from speedrun.record import reader as records
from speedrun.record.logged_run import Run
from speedrun.record.summary import Summary, assemble, summarize
from speedrun.record.validate import Report, validate
from speedrun.train import single_run
from speedrun.train.keeper import Job
from speedrun.train.run_config import RunConfig

if TYPE_CHECKING:
    from speedrun.science.recipe import Recipe


class Record:
    """A record on disk. Each property reads it again."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    def __repr__(self) -> str:
        return f"Record({str(self.folder)!r})"

    @property
    def summary(self) -> Summary:
        """Losses, times and counts, computed from the runs."""
        found = records.load(self.folder)
        if not found.whole or found.track is None:
            raise UsageError(f"{self.folder} cannot be read; 'speedrun validate {self.folder}' says why")
        return summarize(found)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs with their logs, as in `[(step.train_time_s, step.loss) for step in run.steps]`."""
        return tuple(records.load(self.folder).runs)

    def validate(self) -> Report:
        """Check all claims offline, without executing code of the record."""
        return validate(self.folder)

    def plot(self, *kinds: Literal["loss", "tokens", "steps"]) -> list[Path]:
        """Plot `loss` against time (the default), `tokens` or `steps`; return the paths of the files."""
        return added("plot")(self.folder, kinds or ("loss",))


def load(name: str) -> "Recipe":
    """Return a recipe of this package by name, or your own by the path of its file, which is read again."""
    from speedrun import recipes

    return recipes.load(resolve(name))


def run(
    recipe: "Recipe | str | None" = None,
    *,
    track: str,
    out: Path | str,
    seed: int = 0,
    data: Path | str | None = None,
    devices: int | None = None,
    quiet: bool = False,
    unranked: bool = False,
) -> Record:
    """Train once under the clock in a child process and write a record, like `speedrun run`.

    Args:
        recipe: a recipe from `load`, with or without overrides, or its name; None: the track's default.
        track: name of the track.
        out: new folder for the record.
        seed: seed of the initial weights.
        data: folder with shards; None: the track's folder.
        devices: number of devices; None: as the track requires, or all.
        quiet: print nothing; otherwise print the log during the run.
        unranked: start on a track that ranks even if no ranked record could hold the run.

    Raises:
        SpeedrunError: with the message and exit code of `speedrun run`.
    """
    rules = load_track(track)
    if recipe is None or isinstance(recipe, str):
        name, settings = recipe and resolve(recipe), {}
    else:
        name, settings = recipe.name, settings_of(recipe)
    out = Path(out).absolute()
    folder = None if data is None else Path(data).absolute()
    config = RunConfig(
        track, out, recipe=name, seed=seed, overrides=settings, data=folder, num_devices=devices,
        purpose="unranked" if unranked else "",
    )  # fmt: skip
    # In a child process: JAX may use other devices here.
    single_run.trained(Job(config), single_run.Extras(stream=StringIO() if quiet else sys.stdout))
    assemble(out, title=f"{name or rules.recipe} on {track}")
    return Record(out)


def settings_of(recipe: "Recipe") -> dict[str, str]:
    """Return the `--set` options that turn the recipe in its file into this one."""
    from speedrun import recipes

    if recipes.load(recipe.name).override(recipe.overrides) != recipe:
        raise UsageError(
            f"recipe {recipe.name} differs from its file in more than settings that `override` changed; need another "
            "file, since a record contains the source of its recipe; copy the file, change it, and load it by its path"
        )
    return dict(recipe.overrides)
