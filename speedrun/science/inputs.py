"""Scheduled inputs: values by name that a recipe's schedule returns for each step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from speedrun.base.errors import UsageError
from speedrun.science.kernels.attention import Window

MOST_NUMBERS = 2**12  #: per input and step
Arrays = dict[str, np.ndarray]
Static = tuple[tuple[str, Any], ...]  #: inputs that are compiled into an executable


@dataclass(frozen=True)
class Inputs:
    """The inputs of one step."""

    values: Mapping[str, Any]  #: arrays, or compiled-in Python values
    spans: Mapping[str, tuple[int, int]]  #: minimum and maximum of each integer over all steps

    def __getitem__(self, name: str) -> Any:
        """Return an input; raise UsageError if the schedule does not define it."""
        if name not in self.values:
            given = ", ".join(self.values)
            raise UsageError(f"its schedule and constants give no input {name!r}; they give {given}")
        return self.values[name]

    def window(self, name: str) -> Window:
        """Return an input as a window in blocks; raise UsageError if it can be below 1."""
        blocks = self[name]
        least, most = (blocks, blocks) if isinstance(blocks, int) else self.spans[name]
        if least < 1:
            raise UsageError(f"its schedule gives a window {name!r} of {least} blocks; need at least 1")
        return Window(blocks, most)


class InputPlan(NamedTuple):
    """The inputs of all steps and the last validation."""

    rows: tuple[dict[str, Any], ...]  #: by step: NumPy values are traced, Python values are compiled in
    schedule: Arrays  #: traced inputs, [num_steps + 1, ...], and constants
    spans: dict[str, tuple[int, int]]  #: minimum and maximum of each traced integer
    constants: Arrays  #: never compiled in, and not in `spans`

    @classmethod
    def of(cls, inputs_at: Callable[[int], dict[str, Any]], num_steps: int, constants: Arrays) -> Self:
        """Collect the inputs of all steps; raise UsageError if one is invalid, missing or also a constant."""
        given = map(inputs_at, range(num_steps + 1))
        rows = tuple({name: _plain(name, value) for name, value in row.items()} for row in given)
        names = set[str]().union(*rows)
        if both := sorted(names & {*constants}):
            raise UsageError(f"its schedule and its constants give {both[0]!r}; rename one of them")
        for step, row in enumerate(rows):
            if lacks := names - {*row}:
                raise UsageError(f"its schedule gives no input {min(lacks)!r} at step {step}")
            if changed := [name for name in names if np.shape(row[name]) != np.shape(rows[0][name])]:
                raise UsageError(f"its schedule gives {changed[0]!r} another shape at step {step}")
        traced = [name for name in rows[0] if any(isinstance(row[name], np.ndarray) for row in rows)]
        schedule = {name: np.stack([row[name] for row in rows]) for name in traced}
        integers = {name: x for name, x in schedule.items() if np.issubdtype(x.dtype, np.integer)}
        spans = {name: (int(x.min()), int(x.max())) for name, x in integers.items()}
        return cls(rows, schedule | constants, spans, constants)

    def static_at(self, step: int, *, integers: bool) -> Static:
        """Return the Python values that are compiled into a step, with traced `integers` if requested."""
        row = {name: value for name, value in self.rows[step].items() if name not in self.schedule}
        if integers:
            row |= {name: int(self.rows[step][name]) for name in self.spans if self.schedule[name].ndim == 1}
        return tuple(row.items())

    def at(self, step: jax.Array | int, schedule: Mapping[str, Any], static: Static) -> Inputs:
        """Return the inputs of a step from the schedule on the device."""
        values = {name: jnp.asarray(x) if name in self.constants else x[step] for name, x in schedule.items()}
        values |= dict(static)
        return Inputs(MappingProxyType(values), MappingProxyType(self.spans))


def _plain(name: str, value: Any) -> Any:
    """Return a copy of a plain type, so that the schedule cannot change it later."""
    if isinstance(value, np.generic | np.ndarray) and value.size <= MOST_NUMBERS:
        if np.isrealobj(value) and (value.dtype == bool or jnp.issubdtype(value.dtype, jnp.number)):
            return np.array(value)
    elif isinstance(value, int | str):
        return str(value) if isinstance(value, str) else value if isinstance(value, bool) else int(value)
    need = f"a bool, int or str, which is compiled in, or up to {MOST_NUMBERS:,} numbers of NumPy, which are traced"
    raise UsageError(f"its schedule gives {name!r} as {' '.join(repr(value).split())[:60]}; need {need}")
