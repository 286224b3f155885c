"""The recipes, oldest first. Names only: each file is imported when it is asked for."""

import importlib
from pathlib import Path

from speedrun.ground.errors import UsageError, unknown
from speedrun.science.recipe import Recipe


def names() -> list[str]:
    """All recipes that ship with this version."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__")


def load(name: str) -> Recipe:
    """The recipe of this name.

    Raises:
        UsageError: if there is none, or its file holds another one: a record names the file by its recipe.
    """
    if name not in names():
        raise unknown("recipe", name, names())
    recipe = getattr(importlib.import_module(f"speedrun.science.recipes.{name}"), "RECIPE", None)
    if not isinstance(recipe, Recipe) or recipe.name != name:
        raise UsageError(f"recipes/{name}.py holds no RECIPE of name={name!r}; give it the name of its file")
    return recipe
