"""A speedrun harness for FineWeb in JAX, and the recipes that run on it.

`speedrun.library` has the names that are given here. No import statement names it: no closure shall hold it.
"""

import importlib

__version__ = "0.1.0"
_NAMES = ("Record", "load", "run")


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"speedrun has no {name!r}; it has {', '.join(_NAMES)}, and its modules")
    return getattr(importlib.import_module("speedrun.library"), name)
