"""Serves folders of models in the browser on this machine: the page of the first, and the models of all."""

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

import msgspec

from speedrun.base.errors import UsageError, translate_read_errors
from speedrun.base.serving import CONTENT_TYPES, Answer, Reply, file_below
from speedrun.base.wholefile import read_regular

_LIST = "models.json"
_LIST_BYTES = 2**20  #: at most


def answering(folders: Sequence[Path]) -> Answer:
    """Return what answers requests for files of these folders, and of no others.

    Models of one name are told apart by the number of the folder.

    Raises:
        UsageError: if a folder is not one that 'speedrun export --to web' made.
    """
    roots = [Path(os.path.realpath(folder)) for folder in folders]
    models: dict[str, tuple[Path, str]] = {}
    advice = "need a folder that 'speedrun export RUN --to web' made"
    for number, root in enumerate(roots, 1):
        with translate_read_errors(root / _LIST, advice, kind=UsageError):
            names = msgspec.json.decode(read_regular(root / _LIST, _LIST_BYTES), type=list[str])
        for name in names:
            models[name if name not in models else f"{name} ({number})"] = root, name

    def answer(path: str, _: dict[str, str]) -> Reply | None:
        root, names = roots[0], [name for name in unquote(path).split("/") if name] or ["index.html"]
        if names == [_LIST]:
            return Reply([msgspec.json.encode(list(models))], CONTENT_TYPES["json"])
        if names[0] == "models" and len(names) > 1:
            if names[1] not in models:
                return None
            root, names[1] = models[names[1]]
        return file_below(root, *names)

    return answer
