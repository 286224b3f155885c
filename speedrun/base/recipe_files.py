"""Recipes outside this package, by the path of their file."""

import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from speedrun.base import sourcefile
from speedrun.base.atomic_files import read_regular
from speedrun.base.errors import UsageError, translate_read_errors
from speedrun.base.sourcefile import IMPORTED, RECIPES, RECIPES_VARIABLE, ROOT, check_path, find

_MOST_BYTES = 2**20  #: of a recipe's file
_PACKAGE = RECIPES.replace("/", ".")


def resolve(choice: str) -> str:
    """Return the name of a recipe, given by its name or by a path that ends in `.py`; a package by its `__init__.py`.

    Put the folder that it is in first in $SPEEDRUN_RECIPES, also for child processes. The files there become modules of
    `speedrun.recipes`, so that a record carries them. If one of them changed, all are loaded again.
    """
    if not choice.endswith(".py"):
        return choice
    path = Path(os.path.abspath(choice))
    recipe = path.parent if path.name == "__init__.py" else path.with_suffix("")
    name, folder = recipe.name, recipe.parent
    if not (name.isidentifier() and name.isascii()):
        raise UsageError(f"{path}: cannot be imported by this name; rename it to letters, digits and _")
    if os.pathsep in str(folder):
        raise UsageError(f"{path}: its folder has a {os.pathsep!r} in its name; move or rename it")
    if is_shipped(name):
        raise UsageError(f"{path}: recipe {name} ships with this package; rename file and recipe")
    advice = "need a Python file in UTF-8 that defines RECIPE, so that a record can carry it"
    with translate_read_errors(path, advice, kind=UsageError):
        check_path(f"{RECIPES}/{path.relative_to(folder).as_posix()}")
        read_regular(path, _MOST_BYTES).decode()
    look_in(folder)
    return name


def is_shipped(name: str) -> bool:
    """Return whether a recipe comes with this package."""
    here = os.listdir(ROOT / RECIPES)  # no path is made of a stranger's name
    return f"{name}.py" in here or (name in here and (ROOT / RECIPES / name / "__init__.py").is_file())


def look_in(*folders: Path) -> None:
    """Look for recipes in these folders first, also in child processes."""
    both = dict.fromkeys([*folders, *sourcefile.recipe_folders()])
    os.environ[RECIPES_VARIABLE] = os.pathsep.join(map(str, both))
    _forget_outdated()


def _forget_outdated() -> None:
    """Drop all modules of recipes outside this package if the file of one changed, or another one hides it."""
    modules = {
        name: str(module.__file__)
        for name, module in sys.modules.items()
        if name.startswith(f"{_PACKAGE}.") and not Path(module.__file__ or "").is_relative_to(ROOT / RECIPES)
    }
    if any(_is_outdated(name, file) for name, file in modules.items()):
        forget(modules)
    importlib.invalidate_caches()


def forget(modules: Iterable[str]) -> None:
    """Drop modules, so that the next import loads them."""
    for name in modules:
        del sys.modules[name]
        above, _, last = name.rpartition(".")
        if above in sys.modules:  # where `from package import name` looks first
            vars(sys.modules[above]).pop(last, None)


def _is_outdated(name: str, file: str) -> bool:
    found = find(name)
    try:
        return found is None or str(found[1]) != file or IMPORTED[file] != found[1].read_text("utf-8-sig")
    except (OSError, ValueError):
        return True
