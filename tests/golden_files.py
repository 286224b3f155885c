"""Golden files: what independent implementations computed in float32. The script beside a file says what is in it.

`SPEEDRUN_GOLDEN` names a folder that takes the place of tests/golden and ../shared/golden.
"""

import json
import os
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

_HERE = Path(__file__).parent
_OTHER = os.environ.get("SPEEDRUN_GOLDEN")
FOLDERS = [Path(_OTHER)] if _OTHER else [_HERE / "golden", _HERE.parents[1] / "shared" / "golden"]

Arrays = Mapping[str, Any]
#: What conftest.py switches off. Worth its compile time from the third step on.
OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


def paths(pattern: str) -> list[Path]:
    """The files in the first folder that has some."""
    return next(filter(None, (sorted(folder.glob(pattern)) for folder in FOLDERS)), [])


def path_of(name: str) -> Path:
    """A file; a test without it is skipped."""
    for path in paths(name):
        return path
    pytest.skip(f"no {name} in {' or '.join(map(str, FOLDERS))}; SPEEDRUN_GOLDEN names another folder")


def arrays(name: str) -> dict[str, Any]:
    with np.load(path_of(name)) as file:
        return dict(file)


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(path_of(name)))


def fixture(pattern: str, load: Callable[[str], Any]) -> Any:
    """The fixture `golden`: each file that fits, loaded by its name. All but the first are for the night."""
    found = [path.name for path in paths(pattern)]
    params = [pytest.param(name, marks=pytest.mark.compile if name in found[1:] else ()) for name in found]
    return pytest.fixture(scope="module", name="golden", params=params)(lambda request: load(request.param))


def probe(x: Any) -> np.ndarray:
    """The 16 entries of an array that files keep."""
    flat = np.asarray(x).reshape(-1)
    return flat[:: max(1, flat.size // 16)][:16]


def leaves(opt_state: Any, field: str) -> dict[str, Any]:
    """The arrays of an optimiser's state below a field, by parameter."""
    paths = jax.tree_util.tree_leaves_with_path(opt_state)
    is_in = lambda path: field in {getattr(key, "name", "") for key in path}  # noqa: E731
    return {path[-1].key: leaf for path, leaf in paths if is_in(path)}


class File:
    """A golden run: its arrays and settings, and the starting values and tolerances of its script."""

    def __init__(self, name: str, made_by: str) -> None:
        self.arrays, made = arrays(name), script(made_by)
        self.config = json.loads(str(self.arrays["config"]))
        self.starts = made["initial_parameters"](self.config)
        # By the first words of each key of the table.
        self.tolerance = {
            key.split("/")[0].split(",")[0].strip(): x for key, x in made.get("TOLERANCE", {}).items()
        }

    def below(self, prefix: str) -> dict[str, np.ndarray]:
        return {key.removeprefix(prefix): x for key, x in self.arrays.items() if key.startswith(prefix)}

    def assert_agrees(self, got: Arrays, kind: str, norm: float, probes: float, own: float = 0) -> None:
        """Compare arrays by norm and by 16 entries: relative to their root mean square, and `own` to themselves."""
        norms, wanted = self.below(f"{kind}_norm/"), self.below(f"{kind}_probe/")
        assert {*got} == {*norms} == {*wanted}
        for name, x in got.items():
            x64 = np.asarray(x, np.float64)
            np.testing.assert_allclose(np.linalg.norm(x64), norms[name], rtol=norm, err_msg=name)
            unit = max(float(norms[name]) / np.sqrt(x64.size), 1e-30)
            pair = probe(x64) / unit, wanted[name] / unit
            np.testing.assert_allclose(*pair, rtol=own, atol=probes, err_msg=name)
