"""`source.txt`: the source closure of a record as one text. `record.source` splits it.

A marker with path, digest and number of lines precedes each file, so a file may contain a line like a marker.
"""

import hashlib
import importlib.util
import os
import re
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType

from speedrun.base.errors import UsageError

#: The folder of the package: paths in a source text are relative to it.
ROOT = Path(__file__).parent.parent.parent
#: The folder of recipes, in the package and in a source text.
RECIPES = "speedrun/recipes"
#: Further folders of recipes, separated as in PATH. `recipe_files.resolve` adds to it.
RECIPES_VARIABLE = "SPEEDRUN_RECIPES"

#: Texts of recipes by path, as imported; the files may have changed since.
IMPORTED: dict[str, str] = {}

#: The line before each file's text.
MARKER = "#### file: {path} sha256:{sha256} lines:{lines}\n"

_MAX_PATH = 200  #: characters
_PATH = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*/)*[A-Za-z0-9_][A-Za-z0-9_.-]*\.(?:py|toml)")


def recipe_folders() -> list[Path]:
    """Return the folders of recipes outside the package."""
    folders = os.environ.get(RECIPES_VARIABLE, "").split(os.pathsep)
    return [Path(folder).absolute() for folder in folders if folder]


def find(module: str) -> tuple[str, Path] | None:
    """Return the path of a module in a source text, and its file here or in a folder of recipes; packages first.

    `RecipeFinder` imports the same file, so that a record carries what was imported.
    """
    base = module.replace(".", "/")
    inside = base.removeprefix(f"{RECIPES}/")
    roots = [ROOT / base, *(folder / inside for folder in recipe_folders() if inside != base)]
    places = ((base + end, Path(f"{root}{end}")) for root in roots for end in ("/__init__.py", ".py"))
    return next((place for place in places if place[1].is_file()), None)


class _Text(SourceFileLoader):
    """Compiles the text, since cached bytecode may be of another text of the same second."""

    def get_code(self, fullname: str) -> CodeType:
        try:
            text = IMPORTED[self.path] = importlib.util.decode_source(self.get_data(self.path))
            return compile(text, self.path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, LookupError, RecursionError) as error:
            if getattr(error, "lineno", None):
                raise
            raise UsageError(f"{self.path}: {error}; need Python in UTF-8") from error


class RecipeFinder:
    """Imports recipes from the files that `find` returns."""

    def __init__(self, package: str, reserved: frozenset[str]) -> None:
        self._prefix, self._reserved = f"{package}.", reserved

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return the spec of a recipe's module, or None for other modules."""
        found = find(name) if name.startswith(self._prefix) else None
        if found and name.removeprefix(self._prefix) in self._reserved:
            raise UsageError(f"{found[1]}: this package uses the name; rename the file")
        loader = found and _Text(name, str(found[1]))
        return found and importlib.util.spec_from_file_location(name, found[1], loader=loader)


def check_path(path: str) -> str:
    """Return `path`; raise ValueError unless it is relative, of plain ASCII names, and ends in .py or .toml."""
    if len(path) > _MAX_PATH or not _PATH.fullmatch(path):
        need = "need a short relative path of plain names that ends in .py or .toml"
        raise ValueError(f"source path {path!r}; {need}")
    return path


def join_source(files: dict[str, str]) -> str:
    """Return one text of files, path -> text; raise ValueError for a path or a text without a last newline."""
    parts = []
    for path, text in files.items():
        if text and not text.endswith("\n"):
            raise ValueError(f"{path}: the last line has no newline; end the file with one")
        digest = hashlib.sha256(text.encode()).hexdigest()
        parts += [MARKER.format(path=check_path(path), sha256=digest, lines=text.count("\n")), text]
    return "".join(parts)
