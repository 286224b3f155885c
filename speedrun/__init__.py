"""A speedrun harness for FineWeb in JAX. `speedrun.api` is imported on first use: no `source.txt` has it."""

import importlib

__version__ = "0.1.0"
_NAMES = ("Record", "load", "run")


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module 'speedrun' has no attribute {name!r}; it exports {', '.join(_NAMES)}")
    return getattr(importlib.import_module("speedrun.api"), name)


def __dir__() -> list[str]:
    return [*globals(), *_NAMES]
