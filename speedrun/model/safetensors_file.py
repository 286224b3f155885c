"""The tensors of `.safetensors` files, which are untrusted: headers are checked before any data is read.

The library checks that tensors cover the file without gaps or overlaps, so no shape can claim more than is there.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from speedrun.base.errors import DataError, translate_read_errors
from speedrun.base.wholefile import read_regular

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: As a header names them. The dtypes of trained parameters.
DTYPES = {"float32": "F32", "bfloat16": "BF16"}

_T = TypeVar("_T")


class Form(NamedTuple):
    """A tensor, as a header describes it."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{[*self.shape]}"


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class Tensors:
    """The tensors of `model.safetensors` in a folder, or of the files that its index names."""

    def __init__(self, folder: Path) -> None:
        """Check the headers.

        Raises:
            DataError: if a file is missing or damaged.
        """
        self.folder = folder
        self.forms: dict[str, Form] = {}
        self._files: dict[str, Any] = {}
        index = folder / INDEX
        names = [WEIGHTS] if not index.exists() else _shards(index)
        for name in names:
            opened, forms = _opened(folder / name)
            self.forms |= forms
            self._files |= dict.fromkeys(forms, opened)

    def read(self, wanted: Mapping[str, tuple[Form, ...]]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield tensors by name, after the forms of all of them are compared with those that they may have.

        Raises:
            DataError: if one is missing, not wanted, of another form, or holds NaN or infinity.
        """
        folder = self.folder
        for name in sorted({*wanted} | {*self.forms}):
            got, need = self.forms.get(name), wanted.get(name)
            if got is None or need is None or got not in need:
                what = "is missing" if got is None else f"is {got}"
                needs = f"need {' or '.join(map(str, need))}" if need else "the model has no such parameter"
                raise DataError(f"{folder}: parameter {name} {what}; {needs}; name the model's own recipe")
        for name in wanted:
            x = self._files[name].get_tensor(name)
            if not np.isfinite(x.astype(np.float32, copy=False)).all():
                raise DataError(f"{folder}: {name} holds NaN or infinity; need finite weights; copy it again")
            yield name, x


def read_json(path: Path, kind: type[_T]) -> _T:
    """Read a file of JSON; raise DataError if it is missing or has another form."""
    with translate_read_errors(path, "copy or export the folder again"):
        return msgspec.json.decode(read_regular(path), type=kind)


def _shards(index: Path) -> list[str]:
    names = sorted({*read_json(index, _Index).weight_map.values()})
    if wrong := [name for name in names if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name)]:
        raise DataError(f"{index} names {wrong[0]!r}; need files of this folder; copy it again")
    return names


def _opened(path: Path) -> tuple[Any, dict[str, Form]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        what = "not a file" if path.exists() else "no such file"
        raise DataError(f"{path}: {what}; need the weights; copy the folder again")
    with translate_read_errors(path, "need a whole file of safetensors; copy it again", SafetensorError):
        file = safe_open(path, framework="np")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        return file, {name: Form(x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}
