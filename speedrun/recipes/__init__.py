"""Recipes by name, imported on demand. Folders in $SPEEDRUN_RECIPES extend this package."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

from speedrun.base.errors import UsageError, unknown
from speedrun.base.sourcefile import RECIPES_VARIABLE, RecipeFinder, find
from speedrun.science.recipe import Recipe


def names() -> list[str]:
    """Return the names of the recipes in this package."""
    folder = Path(__file__).parent
    packages = (path.parent.name for path in folder.glob("*/__init__.py"))
    return sorted([*packages, *(path.stem for path in folder.glob("*.py") if path.stem != "__init__")])


def load(name: str) -> Recipe:
    """Return a recipe of this package or of a folder of $SPEEDRUN_RECIPES; raise UsageError if there is none."""
    if not name.isidentifier() or find(f"{__name__}.{name}") is None:
        own = f"a file of your own: path/to/{name}.py, or its folder in ${RECIPES_VARIABLE}"
        raise UsageError(f"{unknown('recipe', name, names())} ({own})")
    recipe = getattr(importlib.import_module(f"{__name__}.{name}"), "RECIPE", None)
    if type(recipe) is not Recipe:  # a subclass could display one recipe and run another
        raise UsageError(f"{name}.py defines no RECIPE; need one, a Recipe of name={name!r}")
    if recipe.name != name:
        raise UsageError(f"{name}.py: its RECIPE is named {recipe.name!r}; name the recipe after its file")
    return replace(recipe, overrides={}) if recipe.overrides else recipe  # its file has them


# Importing a submodule with one of these names would replace it.
sys.meta_path.insert(0, RecipeFinder(__name__, frozenset(globals())))
