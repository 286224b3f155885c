"""Declarations of parameters, and their layout on devices.

A model's table maps flat dotted names ("block.3.qkv") to `ParamSpec`. `Layout` packs parameters into a few arrays that
FSDP can divide evenly:

    matrices  -> banks [8, m, n], m <= n, sharded over matrices: a device owns whole matrices, so Muon needs no
                 communication. Tall matrices are transposed; the last bank is padded with zero matrices.
                 Banks follow the depth of the model, so that the first layers need not wait for the last.
    tables    -> [rows, ...], sharded over rows, which are padded with zeros. Where the table declares which rows a
                 batch reads, only those travel (`science.rows`).
    the rest  -> one replicated vector for each group, so that all scalars cost one all-reduce

Legend: K matrices of a bank, m rows, n columns.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from speedrun.base.errors import UsageError
from speedrun.base.mesh import DATA

Params = dict[str, jax.Array]
Init = Callable[[jax.Array, tuple[int, ...]], jax.Array]
Packing = Literal["bank", "rows", "vector"]
Dtype = Literal["float32", "bfloat16"]

#: Banks and tables are padded to a multiple of this: packed arrays are the same on 1, 2, 4 and 8 devices.
SHARDS = 8
#: How a group's parameters are packed by default; other groups by "rows".
PACKINGS: dict[str, Packing] = {"matrix": "bank", "scalar": "vector"}


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """Declaration of a parameter."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]  #: names of the dimensions
    init: Init
    group: str  #: selects the optimiser; tables of group "head" multiply every token, others are looked up
    dtype: Dtype = "float32"  #: of the stored parameter and its moments
    packing: Packing | None = None  #: how it is packed; None: by `PACKINGS`
    like: str | None = None  #: a parameter with the same initial values
    #: tokens_BT -> ids_BN of rows that they read, spread evenly; models get these, [B, N, D], not the table, and
    #: optimisers get gradients as `science.rows.Rows`
    reads: Callable[[jax.Array], jax.Array] | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape}, axes {self.axes}; need a name for each dimension")
        if len(self.shape) < {"bank": 2, "rows": 1, "vector": 0}[self.packed]:
            raise ValueError(f"shape {self.shape} has too few dimensions for a {self.packed}")
        if self.reads and (self.packed != "rows" or self.shape[0] < SHARDS):
            found = f"a {self.packed} of shape {self.shape} is read"
            raise ValueError(f"{found}; need a table of {SHARDS} rows or more")

    @property
    def size(self) -> int:
        """Number of scalars."""
        return math.prod(self.shape)

    @property
    def packed(self) -> Packing:
        """How the parameter is packed."""
        return self.packing or PACKINGS.get(self.group, "rows")


Table = dict[str, ParamSpec]


def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draw from a standard normal, as record 21 does for embeddings."""
    return jax.random.normal(key, shape, jnp.float32)


def gaussian(sd: float) -> Init:
    """Return an initialiser: normal with this standard deviation."""
    return lambda key, shape: sd * normal(key, shape)


def zeros(_: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return zeros, for the head and projections into the stream (record 2024-10-14)."""
    return jnp.zeros(shape, jnp.float32)


def uniform_fan_in(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draw uniformly with standard deviation 0.5 / sqrt(fan in); fan in is the last axis (record 21)."""
    bound = math.sqrt(3) * 0.5 / math.sqrt(shape[-1])
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def uniform_within_fan_in(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draw uniformly within 1 / sqrt(fan in), PyTorch's default for linear layers; fan in is the last axis."""
    bound = shape[-1] ** -0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def constant(*values: float) -> Init:
    """Return an initialiser with fixed values."""
    return lambda _, shape: jnp.broadcast_to(jnp.array(values, jnp.float32), shape)


class Member(NamedTuple):
    """Matrix number `number` of parameter `name`, declared as [rows, cols]."""

    name: str
    number: int
    rows: int
    cols: int


@dataclass(frozen=True)
class Layout:
    """Mapping between named parameters and packed arrays. All shapes are global."""

    table: Table

    def __post_init__(self) -> None:
        for name, spec in self.table.items():
            twin = self.table.get(spec.like or name, spec)
            if (twin.shape, twin.init, twin.like) != (spec.shape, spec.init, None):
                need = "need one with its own draw, same shape and init"
                raise UsageError(f"its table draws {name!r} like {spec.like!r}; {need}")

    @cached_property
    def banks(self) -> dict[str, tuple[Member, ...]]:
        """Banks of up to SHARDS matrices of a group and a shape (up to transposition), in the order of the table."""
        alike: dict[str, list[Member]] = {}
        for name, spec in self.table.items():
            if spec.packed == "bank":
                rows, cols = spec.shape[-2:]
                group = "" if spec.group == "matrix" else f"{spec.group}."
                members = alike.setdefault(f"{group}{min(rows, cols)}x{max(rows, cols)}", [])
                members += [Member(name, i, rows, cols) for i in range(math.prod(spec.shape[:-2]))]
        banks = {}
        for shape, members in alike.items():
            parts = (members[start : start + SHARDS] for start in range(0, len(members), SHARDS))
            banks |= {f"bank.{shape}.{i}": tuple(part) for i, part in enumerate(parts)}
        return banks

    @cached_property
    def tables(self) -> tuple[str, ...]:
        """Names of the parameters that are sharded by rows."""
        return tuple(name for name, spec in self.table.items() if spec.packed == "rows")

    @cached_property
    def reads(self) -> dict[str, Callable[[jax.Array], jax.Array]]:
        """The tables of which only rows travel: tokens -> ids."""
        return {name: spec.reads for name, spec in self.table.items() if spec.reads}

    @cached_property
    def vectors(self) -> dict[str, tuple[str, ...]]:
        """Names of the parameters in each replicated vector: one vector per group, such as "scalars"."""
        members: dict[str, list[str]] = {}
        for name, spec in self.table.items():
            if spec.packed == "vector":
                members.setdefault(f"{spec.group}s", []).append(name)
        if clash := [name for name in members if name in self.tables]:
            raise UsageError(f"its table declares {clash[0]!r}, the name of a group's vector; rename either")
        return {name: tuple(names) for name, names in members.items()}

    @property
    def groups(self) -> dict[str, str]:
        """Optimiser group of each packed array."""
        firsts = {name: bank[0].name for name, bank in self.banks.items()}
        firsts |= {name: name for name in self.tables}
        firsts |= {name: names[0] for name, names in self.vectors.items()}
        return {name: self.table[first].group for name, first in firsts.items()}

    @property
    def specs(self) -> dict[str, P]:
        """Partition spec of each packed array."""
        return {**dict.fromkeys([*self.banks, *self.tables], P(DATA)), **dict.fromkeys(self.vectors, P())}

    def per_matrix(self, number: Callable[["Member"], float]) -> Params:
        """Return a number for each matrix of this device, 1 for padding: f32 [K / shards, 1, 1] by bank.

        Call it inside `shard_map`.
        """

        def local(bank: tuple[Member, ...]) -> jax.Array:
            of_all_K = np.array([*map(number, bank), *[1.0] * (-len(bank) % SHARDS)], np.float32)
            num_local = len(of_all_K) // jax.lax.axis_size(DATA)
            start = jax.lax.axis_index(DATA) * num_local
            return jax.lax.dynamic_slice_in_dim(jnp.asarray(of_all_K), start, num_local)[:, None, None]

        return {name: local(bank) for name, bank in self.banks.items()}

    def pack(self, params: Params) -> Params:
        """Pack named parameters or gradients, of tables that are read also a device's shard or `Rows`."""
        packed: Params = {}
        for name, bank in self.banks.items():
            wide = [_wide(params[m.name].reshape(-1, m.rows, m.cols)[m.number]) for m in bank]
            packed[name] = _pad_rows(jnp.stack(wide))
        for name in self.tables:
            is_whole = len(params[name]) == self.table[name].shape[0]  # shards are shorter, or padded
            packed[name] = _pad_rows(params[name]) if is_whole else params[name]
        for vector, names in self.vectors.items():
            packed[vector] = jnp.concatenate([params[name].reshape(-1) for name in names])
        return packed

    def unpack(self, packed: Params) -> Params:
        """Unpack named parameters."""
        slices: dict[str, list[jax.Array]] = {}
        for name, bank in self.banks.items():
            for k, m in enumerate(bank):
                x = packed[name][k]
                slices.setdefault(m.name, []).append(x if m.rows <= m.cols else x.T)
        params: Params = {name: packed[name][: self.table[name].shape[0]] for name in self.tables}
        for name, matrices in slices.items():
            shape = self.table[name].shape
            params[name] = (matrices[0] if len(shape) == 2 else jnp.stack(matrices)).reshape(shape)
        for vector in self.vectors:
            params |= self.split(vector, packed[vector])
        return {name: params[name] for name in self.table}

    def split(self, vector: str, values: Any) -> dict[str, Any]:
        """Split a replicated vector, or its flags, into named parameters."""
        specs = [self.table[name] for name in self.vectors[vector]]
        ends = np.cumsum([spec.size for spec in specs])
        named = zip(self.vectors[vector], specs, ends, strict=True)
        return {name: values[end - spec.size : end].reshape(spec.shape) for name, spec, end in named}

    def flags(self, packed: Mapping[str, Any]) -> Params:
        """Flag what is not finite, per matrix of a bank, per device of a table or its `Rows`, per entry of a vector."""
        bad = {name: ~jnp.isfinite(getattr(x, "values_ND", x)) for name, x in packed.items()}
        for name in sorted(bad.keys() - self.vectors.keys()):  # a set would give each process another program
            bad[name] = jnp.any(bad[name], axis=(1, 2)) if name in self.banks else jnp.any(bad[name])[None]
        return bad

    def first_flagged(self, flags: Mapping[str, Any]) -> str | None:
        """Return the first parameter in the table with a flag, given host arrays by packed name."""
        bad: set[str] = set()
        for packed, found in flags.items():
            if packed in self.vectors:
                bad |= {name for name, part in self.split(packed, found).items() if part.any()}
            else:
                members = self.banks.get(packed)
                names = [m.name for m in members] if members else [packed] * len(found)
                bad |= {name for name, flag in zip(names, found, strict=False) if flag}
        return next((name for name in self.table if name in bad), None)

    def init(self, key: jax.Array) -> Params:
        """Return packed initial values. A parameter's random key depends on its name, or on `like`."""

        def start(name: str, spec: ParamSpec) -> jax.Array:
            own = jax.random.fold_in(key, zlib.crc32((spec.like or name).encode()))
            return spec.init(own, spec.shape).astype(spec.dtype)

        return self.pack({name: start(name, spec) for name, spec in self.table.items()})


def count(table: Mapping[str, ParamSpec]) -> int:
    """Return the number of scalars, without padding."""
    return sum(spec.size for spec in table.values())


def _wide(x: jax.Array) -> jax.Array:
    return x if x.shape[0] <= x.shape[1] else x.T


def _pad_rows(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, -len(x) % SHARDS),) + ((0, 0),) * (x.ndim - 1)) if len(x) % SHARDS else x
