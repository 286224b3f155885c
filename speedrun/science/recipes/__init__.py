"""Recipes by name, imported on demand. Folders in $SPEEDRUN_RECIPES extend this package."""

import importlib
from pathlib import Path

from speedrun.ground.errors import UsageError, unknown
from speedrun.ground.sourcefile import RECIPES_VARIABLE, recipe_folders
from speedrun.science.recipe import Recipe


def names() -> list[str]:
    """Return the names of the recipes of this version."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__")


def load(name: str) -> Recipe:
    """Return the recipe of this name, from this package or a folder of $SPEEDRUN_RECIPES.

    Raises:
        UsageError: if there is none, or if its name is not that of its file.
    """
    __path__[1:] = map(str, recipe_folders())
    if name in _TAKEN:
        raise UsageError(f"recipe {name}: this package uses the name; rename the file and its recipe")
    if not name.isidentifier() or not any(Path(folder, f"{name}.py").is_file() for folder in __path__):
        raise UsageError(f"{unknown('recipe', name, names())}; or name its folder in ${RECIPES_VARIABLE}")
    recipe = getattr(importlib.import_module(f"speedrun.science.recipes.{name}"), "RECIPE", None)
    if not isinstance(recipe, Recipe) or recipe.name != name:
        raise UsageError(f"{name}.py holds no RECIPE of name={name!r}; name the recipe after its file")
    return recipe


_TAKEN = frozenset(globals())  # a module of such a name would replace it
