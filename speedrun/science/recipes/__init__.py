"""The recipes, oldest first. Names only: each file is imported when it is asked for."""

import importlib
from pathlib import Path

from speedrun.ground.errors import unknown
from speedrun.science.recipe import Recipe


def names() -> list[str]:
    """All recipes that ship with this version."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__")


def load(name: str) -> Recipe:
    """The recipe of this name.

    Raises:
        UsageError: if there is none; names the nearest one.
    """
    if name not in names():
        raise unknown("recipe", name, names())
    return importlib.import_module(f"speedrun.science.recipes.{name}").RECIPE
