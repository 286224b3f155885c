"""Parameters are declared once; their layout on devices is derived from the declaration.

A model's table maps flat dotted names ("block.3.qkv") to `ParamSpec`. `Layout` packs the named
parameters into a few arrays that FSDP can divide evenly:

    matrices  -> banks [8, m, n], m <= n, sharded over matrices: a device owns whole matrices, so Muon needs no
                 communication. Tall matrices are transposed; the last bank is padded with zero matrices.
                 Banks follow the depth of the model, so that the first layers need not wait for the last.
    tables    -> [rows, D], sharded over rows, which are padded with zeros ("vocab" is their first axis)
    the rest  -> one replicated vector, so that all scalars cost one all-reduce

Legend: K matrices of a bank, m rows, n columns.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from speedrun.ground.mesh import DATA

Params = dict[str, jax.Array]
Init = Callable[[jax.Array, tuple[int, ...]], jax.Array]
Group = Literal["matrix", "embed", "head", "scalar"]
Dtype = Literal["float32", "bfloat16"]

#: Banks and tables are padded to a multiple of this on any number of devices, so that packed arrays are the same on
#: 1, 2, 4 and 8 devices. A node has at most eight.
SHARDS = 8
SCALARS = "scalars"


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """Declaration of a parameter."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]  #: a name for each dimension
    init: Init
    group: Group  #: selects the optimiser
    dtype: Dtype = "float32"  #: of the stored parameter and its moments

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(
                f"shape {self.shape} has {len(self.shape)} dimensions, axes {self.axes} name {len(self.axes)}"
            )

    @property
    def size(self) -> int:
        """Number of scalars."""
        return math.prod(self.shape)


Table = dict[str, ParamSpec]


def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draw from a standard normal: embedding tables (record 21)."""
    return jax.random.normal(key, shape, jnp.float32)


def zeros(_: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return zeros: the head, and projections into the residual stream (muP-like; record 2024-10-14)."""
    return jnp.zeros(shape, jnp.float32)


def uniform_fan_in(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draw uniformly with standard deviation 0.5 / sqrt(fan in); fan in is the last axis (record 21)."""
    bound = math.sqrt(3) * 0.5 / math.sqrt(shape[-1])
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def constant(*values: float) -> Init:
    """Return an initialiser with fixed values: lambdas and skip weights."""
    return lambda _, shape: jnp.broadcast_to(jnp.array(values, jnp.float32), shape)


class Member(NamedTuple):
    """Matrix number `place` of parameter `name`, declared as [rows, cols]."""

    name: str
    place: int
    rows: int
    cols: int


@dataclass(frozen=True)
class Layout:
    """Mapping between named parameters and packed arrays. All shapes are global."""

    table: Table

    @cached_property
    def banks(self) -> dict[str, tuple[Member, ...]]:
        """Groups of up to SHARDS matrices of one shape (up to transposition), in the order of the table."""
        alike: dict[str, list[Member]] = {}
        for name, spec in self.table.items():
            if spec.group == "matrix":
                rows, cols = spec.shape[-2:]
                members = alike.setdefault(f"{min(rows, cols)}x{max(rows, cols)}", [])
                members += [Member(name, i, rows, cols) for i in range(math.prod(spec.shape[:-2]))]
        return {
            f"bank.{shape}.{start // SHARDS}": tuple(members[start : start + SHARDS])
            for shape, members in alike.items()
            for start in range(0, len(members), SHARDS)
        }

    @cached_property
    def tables(self) -> tuple[str, ...]:
        """Names of parameters that are sharded by rows."""
        return tuple(name for name, spec in self.table.items() if spec.group in ("embed", "head"))

    @cached_property
    def scalars(self) -> tuple[str, ...]:
        """Names of parameters in the replicated vector."""
        return tuple(name for name, spec in self.table.items() if spec.group == "scalar")

    @property
    def groups(self) -> dict[str, Group]:
        """Optimiser group of each packed array."""
        return {
            **dict.fromkeys(self.banks, "matrix"),
            **{name: self.table[name].group for name in self.tables},
            **dict.fromkeys(self._vector, "scalar"),
        }

    @property
    def specs(self) -> dict[str, P]:
        """Partition spec of each packed array."""
        return {**dict.fromkeys([*self.banks, *self.tables], P(DATA)), **dict.fromkeys(self._vector, P())}

    @property
    def _vector(self) -> tuple[str, ...]:
        """Name of the replicated vector, if the table declares scalars."""
        return (SCALARS,) if self.scalars else ()

    def per_matrix(self, number: Callable[[int, int], float]) -> dict[str, np.ndarray]:
        """Return `number(rows, cols)` of each matrix as declared: f32[K] by bank, 1 for padding."""
        return {
            name: np.array([number(m.rows, m.cols) for m in bank] + [1.0] * (-len(bank) % SHARDS), np.float32)
            for name, bank in self.banks.items()
        }

    def pack(self, params: Params) -> Params:
        """Pack named parameters or gradients."""
        packed: Params = {}
        for name, bank in self.banks.items():
            wide = [_wide(params[m.name].reshape(-1, m.rows, m.cols)[m.place]) for m in bank]
            packed[name] = _pad_rows(jnp.stack(wide))
        for name in self.tables:
            packed[name] = _pad_rows(params[name])
        for vector in self._vector:
            packed[vector] = jnp.concatenate([params[name].reshape(-1) for name in self.scalars])
        return packed

    def unpack(self, packed: Params) -> Params:
        """Unpack named parameters; the inverse of `pack`."""
        slices: dict[str, list[jax.Array]] = {}
        for name, bank in self.banks.items():
            for k, m in enumerate(bank):
                x = packed[name][k]
                slices.setdefault(m.name, []).append(x if m.rows <= m.cols else x.T)
        offset = 0
        params: Params = {}
        for name, spec in self.table.items():
            if name in slices:
                x = slices[name][0] if len(spec.shape) == 2 else jnp.stack(slices[name])
                params[name] = x.reshape(spec.shape)
            elif name in self.tables:
                params[name] = packed[name][: spec.shape[0]]
            else:
                params[name] = packed[SCALARS][offset : offset + spec.size].reshape(spec.shape)
                offset += spec.size
        return params

    def init(self, key: jax.Array) -> Params:
        """Return packed initial values. A parameter's key depends on its name, not on its position in the table."""
        return self.pack(
            {
                name: spec.init(_key_of(name, key), spec.shape).astype(spec.dtype)
                for name, spec in self.table.items()
            }
        )


def count(table: Mapping[str, ParamSpec]) -> int:
    """Return the number of declared scalars, without padding."""
    return sum(spec.size for spec in table.values())


def _key_of(name: str, key: jax.Array) -> jax.Array:
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def _wide(x: jax.Array) -> jax.Array:
    return x if x.shape[0] <= x.shape[1] else x.T


def _pad_rows(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, -x.shape[0] % SHARDS),) + ((0, 0),) * (x.ndim - 1))
