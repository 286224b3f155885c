"""Splits `source.txt` into its files: the reverse of `base.sourcefile.join_source`."""

import re

from speedrun.base.sourcefile import check_path
from speedrun.record.layout import sha256

_MARKER = re.compile(r"#### file: (\S+) sha256:([0-9a-f]{64}) lines:(0|[1-9][0-9]{0,6})")


def split_source(text: str) -> dict[str, str]:
    """Return the files of a source text: relative path -> text, in their order.

    Raises:
        ValueError: a missing, malformed or repeated marker, a path that `check_path` refuses, a text shorter than its
            marker says, or one with another digest.
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
        if len(body) != count or sha256(content.encode()) != digest:
            raise ValueError(f"{path}: the text is not the one its marker was written for")
        files[path] = content
        at += 1 + count
    return files
