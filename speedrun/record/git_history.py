"""Files of commits in the repository that holds this code, read offline without a checkout."""

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

COMMIT = re.compile(r"[0-9a-f]{40}")
_ANSWER_S = 20.0
#: No prompts, no locks, and no requests from a partial clone to its server.
_QUIET = {"GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"}


def files_here(paths: Iterable[str]) -> dict[str, bytes]:
    """Return the content of those files that exist in this version, by path from the root."""
    return {path: (ROOT / path).read_bytes() for path in paths if (ROOT / path).is_file()}


def is_complete() -> bool:
    """Return whether this code is in a repository that is not shallow."""
    return _git("rev-parse", "--is-shallow-repository") == b"false\n"


@lru_cache(maxsize=256)
def files_at(commit: str, paths: tuple[str, ...]) -> dict[str, bytes] | None:
    """Return the content of those files that an untrusted commit holds, or None if it is unknown here."""
    if not COMMIT.fullmatch(commit):
        return None
    names = [f"{commit}^{{commit}}", *(f"{commit}:{path}" for path in paths)]
    answer = _git("cat-file", "--batch", text="".join(f"{one}\n" for one in names)) or b""
    found: dict[str, bytes] = {}
    for name in names if answer else ():
        # Each answer is `ID TYPE SIZE`, a newline, the content and a newline; or one line without a size.
        head, _, answer = answer.partition(b"\n")
        if len(words := head.split()) == 3:
            found[name], answer = answer[: int(words[2])], answer[int(words[2]) + 1 :]
    is_known = found.pop(names[0], None) is not None
    return {name.partition(":")[2]: content for name, content in found.items()} if is_known else None


def base(commit: str) -> str:
    """Return the newest commit that an untrusted one shares with this version, or "" without one."""
    if not COMMIT.fullmatch(commit):
        return ""
    return (_git("merge-base", commit, "HEAD") or b"").decode().strip()


def added_first(folder: Path, names: Sequence[str]) -> str | None:
    """Return which of some folders in a folder was merged first, or None if the history does not tell."""
    order = ("--first-parent", "--diff-merges=first-parent", "--reverse", "--diff-filter=A")
    shown = ("--name-only", "--relative", "--format=tformat:commit")
    answer = _git("-C", str(folder.resolve()), "log", *order, *shown, "--", *names) or b""
    for files in answer.decode(errors="replace").split("commit\n"):
        added = {name for name in names if any(path.startswith(f"{name}/") for path in files.split("\n"))}
        if added:
            return added.pop() if len(added) == 1 else None
    return None


def _git(*argv: str, text: str = "") -> bytes | None:
    """Return the output of git in this repository, or None if it fails."""
    # A repository further up belongs to another project.
    environment = {**os.environ, **_QUIET, "GIT_CEILING_DIRECTORIES": str(ROOT.parent)}
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), *argv],
            input=text.encode(),
            env=environment, capture_output=True, timeout=_ANSWER_S, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
