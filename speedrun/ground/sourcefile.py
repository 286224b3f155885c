"""`source.txt`: the source closure of a record as one readable text, and back.

Before the text of each file stands a marker with its path, digest and number of lines. The line count,
not a search for the next marker, says where a file ends, so a file may hold a line that looks like one.
"""

import hashlib
import os
import re
from pathlib import Path

#: Above the package: paths in a source text are relative to it.
ROOT = Path(__file__).parent.parent.parent
#: Where recipes lie, in the package and in a source text; folders of other people's recipes are laid over it.
RECIPES = "speedrun/science/recipes"
#: Environment variable: those folders, separated as in PATH. `plugins.resolve` adds to it.
RECIPES_VARIABLE = "SPEEDRUN_RECIPES"

#: Texts of recipes, by path, as this process imported them; the files may have changed since.
IMPORTED: dict[str, str] = {}

#: The line before each file's text.
MARKER = "#### file: {path} sha256:{sha256} lines:{lines}\n"

_MAX_PATH = 200  #: characters
_MARKER = re.compile(r"#### file: (\S+) sha256:([0-9a-f]{64}) lines:(0|[1-9][0-9]{0,6})")
_PATH = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*/)*[A-Za-z0-9_][A-Za-z0-9_.-]*\.(?:py|toml)")


def recipe_folders() -> list[Path]:
    """Folders of recipes outside the package."""
    return [Path(folder) for folder in os.environ.get(RECIPES_VARIABLE, "").split(os.pathsep) if folder]


def find(module: str) -> tuple[str, Path] | None:
    """Where a module stands in a source text, and its file, here or in a folder of recipes; packages first.

    An import of a recipe takes that very file (`science.recipes`), so that a record carries what was imported.
    """
    base = module.replace(".", "/")
    inside = base.removeprefix(f"{RECIPES}/")
    roots = [ROOT / base, *(folder / inside for folder in recipe_folders() if inside != base)]
    places = ((base + end, Path(f"{root}{end}")) for root in roots for end in ("/__init__.py", ".py"))
    return next((place for place in places if place[1].is_file()), None)


def check_path(path: str) -> str:
    """Returns `path` if it may stand in a source text.

    Raises:
        ValueError: unless it is relative, plain ASCII, without dot folders, and ends in .py or .toml.
    """
    if len(path) > _MAX_PATH or not _PATH.fullmatch(path):
        raise ValueError(
            f"source path {path!r}; need a short relative path of plain names that ends in .py or .toml"
        )
    return path


def join_source(files: dict[str, str]) -> str:
    """One text of many files, in the order given.

    Args:
        files: relative path -> text; each text is empty or ends in a newline.

    Raises:
        ValueError: a path that may not stand here, or a text whose last line has no newline.
    """
    parts = []
    for path, text in files.items():
        if text and not text.endswith("\n"):
            raise ValueError(f"{path}: the last line has no newline; end the file with one")
        parts += [MARKER.format(path=check_path(path), sha256=sha256(text), lines=text.count("\n")), text]
    return "".join(parts)


def split_source(text: str) -> dict[str, str]:
    """The files of a source text: relative path -> text, in their order.

    Raises:
        ValueError: a missing, malformed or repeated marker, a path that may not stand here, a text
            shorter than its marker says, or one with another digest.
    """
    files: dict[str, str] = {}
    lines = text.split("\n")
    if lines.pop():
        raise ValueError("the source text does not end in a newline; it was cut")
    at = 0
    while at < len(lines):
        marker = _MARKER.fullmatch(lines[at])
        if not marker:
            raise ValueError(f"line {at + 1}: want a file marker, got {lines[at][:80]!r}")
        path, digest, count = check_path(marker[1]), marker[2], int(marker[3])
        body = lines[at + 1 : at + 1 + count]
        content = "".join(f"{line}\n" for line in body)
        if path in files:
            raise ValueError(f"line {at + 1}: {path} stands here twice")
        if len(body) != count or sha256(content) != digest:
            raise ValueError(f"{path}: the text is not the one its marker was written for")
        files[path] = content
        at += 1 + count
    return files


def sha256(text: str) -> str:
    """Digest of the text as UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()
