"""Recipes by name, imported on demand. Folders in $SPEEDRUN_RECIPES extend this package."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType

from speedrun.ground.errors import UsageError, unknown
from speedrun.ground.sourcefile import IMPORTED, RECIPES_VARIABLE, find
from speedrun.science.recipe import Recipe


class _Text(SourceFileLoader):
    """Compiles the text. Bytecode beside it may be of another one, edited in the same second."""

    def get_code(self, fullname: str) -> CodeType:
        text = IMPORTED[self.path] = importlib.util.decode_source(self.get_data(self.path))
        return compile(text, self.path, "exec", dont_inherit=True)


class _Finder:
    """Finds a recipe in the file that a record of it carries."""

    @staticmethod
    def find_spec(name: str, *_: object) -> ModuleSpec | None:
        """Where to import a module from; None: not a recipe."""
        found = find(name) if name.startswith(f"{__name__}.") else None
        if found and name.removeprefix(f"{__name__}.") in _OURS:
            raise UsageError(f"{found[1]}: this package uses the name; rename the file")
        loader = found and _Text(name, str(found[1]))
        return found and importlib.util.spec_from_file_location(name, found[1], loader=loader)


def names() -> list[str]:
    """Return the names of the recipes of this version."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__")


def load(name: str) -> Recipe:
    """Return the recipe of this name, from this package or a folder of $SPEEDRUN_RECIPES.

    Raises:
        UsageError: if there is none, or if its name is not that of its file.
    """
    if not name.isidentifier() or find(f"{__name__}.{name}") is None:
        own = f"a file of your own: path/to/{name}.py, or its folder in ${RECIPES_VARIABLE}"
        raise UsageError(f"{unknown('recipe', name, names())} ({own})")
    recipe = getattr(importlib.import_module(f"{__name__}.{name}"), "RECIPE", None)
    if not isinstance(recipe, Recipe):
        raise UsageError(f"{name}.py defines no RECIPE; need one, a Recipe of name={name!r}")
    if recipe.name != name:
        raise UsageError(f"{name}.py: its RECIPE is named {recipe.name!r}; name the recipe after its file")
    return recipe


_OURS = frozenset(globals())  # the import of a submodule of this name would replace it
sys.meta_path.insert(0, _Finder)
