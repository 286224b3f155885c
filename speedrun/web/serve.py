"""Serves folders of models in the browser on this machine: the page of the first, and the models of all."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

import msgspec

from speedrun.ground.errors import UsageError
from speedrun.ground.serving import Answer, Reply, content_type

_LIST = "models.json"


def answering(folders: Sequence[Path]) -> Answer:
    """Return what answers requests for files of these folders, and of no others.

    Models of one name are told apart by the number of the folder.

    Raises:
        UsageError: if a folder is not one that 'speedrun export --to web' made.
    """
    roots = [folder.resolve() for folder in folders]
    models: dict[str, Path] = {}
    for number, root in enumerate(roots, 1):
        for name in _names(root):
            models[name if name not in models else f"{name} ({number})"] = root / "models" / name

    def answer(path: str, _: dict[str, str]) -> Reply | None:
        if "\0" in unquote(path):
            return None
        parts = [part for part in unquote(path).split("/") if part] or ["index.html"]
        if parts == [_LIST]:
            return Reply(msgspec.json.encode(list(models)), content_type(_LIST))
        folder, rest = roots[0], parts
        if parts[0] == "models" and len(parts) > 1:
            if parts[1] not in models:
                return None
            folder, rest = models[parts[1]], parts[2:]
        file = folder.joinpath(*rest).resolve()
        if not file.is_relative_to(folder) or not file.is_file():
            return None
        return Reply(file.read_bytes(), content_type(file.name))

    return answer


def _names(root: Path) -> list[str]:
    try:
        return msgspec.json.decode((root / _LIST).read_bytes(), type=list[str])
    except (OSError, msgspec.DecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{root / _LIST}: {reason}; need a folder that 'speedrun export RUN --to web' made"
        ) from None
