"""Finds secrets, and traces of a person or a host, and reports their lines without their text.

The time is linear in the bytes: each pattern starts with a literal or with a short class after a boundary, its repeats
are bounded or at its end, and no two repeats match the same character.
"""

import json
import os
import re
import socket
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from speedrun.base.errors import UsageError

#: In the names of environment variables that hold secrets.
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSW|PASSPHRASE|CREDENTIAL", re.IGNORECASE)
#: Shorter values of such variables are switches, and occur in any text by chance.
_SHORTEST_BYTES = 8
_MOST_OF_A_KIND = 5  #: in one file


class Leak(msgspec.Struct, frozen=True):
    """One place in a file."""

    path: str  #: parts that are secrets are hidden
    line: int  #: from 1
    kind: str
    secret: bool  #: else a trace of a person or a machine, which is a warning


class Shape(NamedTuple):
    """The pattern of one kind of leak."""

    kind: str
    pattern: re.Pattern[bytes]
    secret: bool = True


def _token(kind: str, pattern: str) -> Shape:  # at the start of a word
    return Shape(kind, re.compile(rb"(?<![A-Za-z0-9_-])" + pattern.encode()))


#: An old key of wandb has 40 hex digits, like a git commit. The word before it decides.
_OLD_WANDB = rb"(?i:wandb|key|token|secret|passw(?:or)?d|login)\W{1,10}[0-9a-f]{40}(?![A-Za-z0-9])"
_HOME = rb"(?<![\w.])(?:/home/|/Users/|[A-Z]:(?:\\{1,2}|/)Users(?:\\{1,2}|/))[\w.-]"
_LOGIN = rb"""://[^\s/?#@:"'<>]{0,256}:[^\s/?#@"'<>]{1,256}@[A-Za-z0-9\[]"""


#: Lengths are lower bounds, because issuers change them.
SHAPES = (
    _token("a Hugging Face token", r"(?:hf|api_org)_[A-Za-z0-9]{30,}"),
    _token("a wandb key", r"wandb_v1_[A-Za-z0-9_]{40,}"),
    Shape("a wandb key", re.compile(_OLD_WANDB)),
    _token("a GitHub token", r"(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{40,})"),
    _token("a GitLab token", r"glpat-[A-Za-z0-9_-]{20,}"),
    _token("an AWS key id", r"(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
    _token("a Google key", r"AIza[A-Za-z0-9_-]{35}"),
    _token("a Slack token", r"xox[abeoprs]-[A-Za-z0-9-]{20,}"),
    _token("a PyPI token", r"pypi-[A-Za-z0-9_-]{50,}"),
    # Words with hyphens, such as sk-learn-something, are not keys.
    _token("an API key", r"sk-(?:(?:proj|ant|admin|svcacct|or)-[A-Za-z0-9_-]{20,}|[A-Za-z0-9]{20,})"),
    Shape("a private key", re.compile(rb"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY")),
    Shape("a URL with a password", re.compile(_LOGIN)),
    Shape("a home folder", re.compile(_HOME), secret=False),
)


def own_shapes(environ: Mapping[str, str] = os.environ, host: str | None = None) -> tuple[Shape, ...]:
    """Return shapes of the values of secret variables, the home folder and the host name (None: this host's)."""
    secrets = {name: value.strip() for name, value in environ.items() if _SECRET_NAME.search(name)}
    shapes = [
        Shape(f"the value of ${name}", re.compile(re.escape(spelling)))
        for name, value in secrets.items()
        if len(value.encode(errors="surrogateescape")) >= _SHORTEST_BYTES
        for spelling in _spellings(value)
    ]
    home, name = environ.get("HOME", ""), socket.gethostname() if host is None else host
    if len(Path(home).parts) > 2:  # /root names nobody
        shapes.append(_word("your home folder", home.rstrip("/")))
    parts = [part for part in sorted({name, name.partition(".")[0]}) if len(part) > 3 and part != "localhost"]
    return (*shapes, *(_word("the name of this machine", part) for part in parts))


def _word(kind: str, text: str) -> Shape:
    pattern = rb"(?i)(?<![A-Za-z0-9-])" + re.escape(os.fsencode(text)) + rb"(?![A-Za-z0-9-])"
    return Shape(kind, re.compile(pattern), secret=False)


def _spellings(value: str) -> set[bytes]:
    """Return a value as plain text, in JSON and in a URL."""
    escaped = json.dumps(value, ensure_ascii=False)[1:-1]
    raw = os.fsencode(value)
    return {raw, escaped.encode(errors="surrogateescape"), quote(raw, safe="").encode()}


def find(raw: bytes, own: Iterable[Shape] | None = None, path: str = "") -> list[Leak]:
    """Return the leaks by line, at most five of a kind; `own` is the result of `own_shapes`.

    Zero bytes are removed, so that UTF-16 is searched, too.
    """
    raw = raw.replace(b"\0", b"")
    found = {
        Leak(path, raw.count(b"\n", 0, match.start()) + 1, shape.kind, shape.secret)
        for shape in (*SHAPES, *(own_shapes() if own is None else own))
        for match in islice(shape.pattern.finditer(raw), _MOST_OF_A_KIND)
    }
    return sorted(found, key=lambda leak: (leak.line, not leak.secret, leak.kind))


def in_files(files: Mapping[str, bytes]) -> tuple[Leak, ...]:
    """Return the leaks of files and their names, by path and line."""
    own, found = own_shapes(), []
    for path, content in sorted(files.items()):
        shown = "/".join("(hidden)" if find(part.encode(), own) else part for part in path.split("/"))
        found += [*find(path.encode(), own, shown), *find(content, own, shown)]
    return tuple(found)


def refuse_secrets(files: Mapping[str, bytes], remedy: str) -> None:
    """Raise UsageError if one of these files holds a secret."""
    if secret := next((leak for leak in in_files(files) if leak.secret), None):
        raise UsageError(f"{secret.path}:{secret.line} holds {secret.kind}; nothing was written; {remedy}")
