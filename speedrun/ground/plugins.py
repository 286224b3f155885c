"""Recipes outside this package: files of one's own, by path or by entry point."""

import importlib
import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path

from speedrun.ground.errors import UsageError
from speedrun.ground.sourcefile import RECIPES, RECIPES_VARIABLE, ROOT, recipe_folders

#: Group of entry points: `mine = "theirlab.recipes.mine"` names the module of a recipe called mine.
GROUP = "speedrun.recipes"

#: The files in the folders when the modules were imported: name -> path, time of change, size.
_files: dict[str, tuple[Path, int, int]] = {}


def resolve(choice: str) -> str:
    """Return the name of a recipe that is given by its name, the path of its file, or its entry point.

    The folder of a file is put first in $SPEEDRUN_RECIPES, for this process and those that it starts: its files are
    then modules of `speedrun.science.recipes`, so that a record carries them like those of this package. If a file
    there changed, all are loaded anew.

    Args:
        choice: a name, or a path that ends in `.py`.

    Raises:
        UsageError: if the file is missing, is not UTF-8, or has a name that is taken or cannot be imported.
    """
    shipped = {path.stem for path in (ROOT / RECIPES).glob("*.py")}
    path = Path(choice).absolute() if choice.endswith(".py") else _entry_point(choice, shipped)
    if path is None:
        return choice
    _check(path, shipped)
    folders = [str(path.parent), *(str(folder) for folder in recipe_folders() if folder != path.parent)]
    os.environ[RECIPES_VARIABLE] = os.pathsep.join(folders)
    _forget_outdated()
    return path.stem


def own_file(name: str | None) -> Path | None:
    """Return the file of a recipe outside this package, or None for any other name."""
    if name is None or (ROOT / RECIPES / f"{name}.py").exists():
        return None
    return next((path for folder in recipe_folders() if (path := folder / f"{name}.py").is_file()), None)


def _entry_point(name: str, shipped: set[str]) -> Path | None:
    """The file that an installed package names for this recipe, if there is one."""
    if name in shipped or any((folder / f"{name}.py").is_file() for folder in recipe_folders()):
        return None
    from importlib import metadata  # not light enough for --help

    for entry in metadata.entry_points(group=GROUP, name=name):
        try:
            spec = importlib.util.find_spec(entry.module)
        except ImportError:
            spec = None
        if spec is None or spec.origin is None or Path(spec.origin).name != f"{name}.py":
            raise UsageError(
                f"entry point {name} of {GROUP} names {entry.value}; need a module in a file {name}.py"
            )
        return Path(spec.origin).absolute()
    return None


def _check(path: Path, shipped: set[str]) -> None:
    if not (path.stem.isidentifier() and path.stem.isascii()):
        raise UsageError(f"{path}: cannot be imported by this name; rename it to letters, digits and _")
    if os.pathsep in str(path.parent):
        raise UsageError(f"{path}: its folder has a {os.pathsep!r} in its name; move or rename it")
    if path.stem in shipped:
        raise UsageError(
            f"{path}: recipe {path.stem} ships with this package; rename the file and its recipe"
        )
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is not UTF-8; a record could not carry it; save it as UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; need a Python file that defines RECIPE") from None


def _forget_outdated() -> None:
    """Drop all modules of recipes outside this package if a file of them was edited or another one hides it now."""
    files = {}
    for path in (path for folder in reversed(recipe_folders()) for path in folder.glob("*.py")):
        with suppress(OSError):  # a link to nothing, as editors leave them
            files[path.name] = path, path.stat().st_mtime_ns, path.stat().st_size
    if not _files.items() <= files.items():
        _forget()
    _files.clear()
    _files.update(files)
    importlib.invalidate_caches()


def _forget() -> None:
    package = RECIPES.replace("/", ".")
    for name, module in [*sys.modules.items()]:
        outside = not Path(getattr(module, "__file__", None) or ROOT).is_relative_to(ROOT / RECIPES)
        if name.startswith(f"{package}.") and outside:
            del sys.modules[name]
            # `from package import module` would find the old one there.
            vars(sys.modules[package]).pop(name.removeprefix(f"{package}."), None)
