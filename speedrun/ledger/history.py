"""Files of a commit, as the repository that this code lies in holds them. Offline; nothing is checked out."""

import os
import re
import subprocess
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

#: Where the code of this version lies, and the files of its repository beside it.
ROOT = Path(__file__).parent.parent.parent

_COMMIT = re.compile(r"[0-9a-f]{40}")
_ANSWER_S = 20.0
#: No question to a person, no lock, and none to a server of which this repository is a partial copy.
_QUIET = {"GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"}


def files_here(paths: Iterable[str]) -> dict[str, bytes]:
    """Those of these files that this version has; paths are relative to the root, as in `source.txt`."""
    return {path: (ROOT / path).read_bytes() for path in paths if (ROOT / path).is_file()}


def is_commit(name: str) -> bool:
    """Whether a text could name a commit and nothing else."""
    return _COMMIT.fullmatch(name) is not None and len(set(name)) > 1


def knows(commit: str) -> bool | None:
    """Whether a commit is in the repository here; None where there is no repository, or not all of one."""
    if files_at(commit, ()) is not None:
        return True
    git = ROOT / ".git"
    return None if not git.is_dir() or (git / "shallow").exists() else False


@lru_cache(maxsize=256)
def files_at(commit: str, paths: tuple[str, ...]) -> dict[str, bytes] | None:
    """Those of these files that a commit has.

    Args:
        commit: 40 hex digits, from wherever: nothing else is handed on.
        paths: relative to the root, of plain names (`sourcefile.check_path`).

    Returns:
        None where the commit is not known: no git, no repository, or not in this one.
    """
    if not _COMMIT.fullmatch(commit) or not (ROOT / ".git").exists():
        return None
    asked = [f"{commit}^{{commit}}", *(f"{commit}:{path}" for path in paths)]
    try:
        answer = subprocess.run(
            ["git", "-C", str(ROOT), "cat-file", "--batch"],
            input="".join(f"{one}\n" for one in asked).encode(),
            env={**os.environ, **_QUIET}, capture_output=True, timeout=_ANSWER_S, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    found = _objects(answer, asked)
    if found.pop(asked[0]) is None:
        return None
    return {name.partition(":")[2]: content for name, content in found.items() if content is not None}


def _objects(answer: bytes, asked: list[str]) -> dict[str, bytes | None]:
    """What `git cat-file --batch` says of each name: `ID TYPE SIZE`, a newline, the content, a newline."""
    found: dict[str, bytes | None] = {}
    for name in asked:
        head, _, answer = answer.partition(b"\n")
        match head.split():
            case [_, _, size]:
                found[name], answer = answer[: int(size)], answer[int(size) + 1 :]
            case _:
                found[name] = None
    return found
