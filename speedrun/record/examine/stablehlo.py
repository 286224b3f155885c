"""Reads, inspects and compiles the StableHLO programs that a record carries."""

import dataclasses
import math
import re
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from speedrun.base.console import clean
from speedrun.base.errors import UsageError
from speedrun.record import layout
from speedrun.record.archive import Archive, Array, Portable
from speedrun.record.examine.constants import Held, held
from speedrun.science.params import SHARDS
from speedrun.science.recipe import Vocabulary
from speedrun.science.step import COMPILER_OPTIONS
from speedrun.train.constants import derived
from speedrun.train.program import inspect

#: A type with fewer bits than float32.
_NARROW = re.compile(r"[x<](bf16|f16|f8)")


class Readable(NamedTuple):
    """A program, in whichever form it was stored."""

    ins: list[jax.ShapeDtypeStruct]  #: with shardings, if it is for several devices
    outs: list[jax.ShapeDtypeStruct]
    num_devices: int
    text: str
    call: Callable[..., Any]


def of_jax(raw: bytes, mesh: Mesh, platform: str) -> Readable:
    """Read a program that `jax.export` wrote, which it reads for half a year."""
    one = export.deserialize(bytearray(raw))
    if platform not in one.platforms or one.nr_devices not in (1, mesh.size):
        got = f"{one.nr_devices} devices of {'/'.join(one.platforms)}"
        raise UsageError(f"a program is for {clean(got)}; this examination has {mesh.size} of {platform}")
    places = one.in_shardings_jax(mesh) if one.nr_devices > 1 else (None,) * len(one.in_avals)
    pairs = zip(one.in_avals, places, strict=True)
    ins = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x, place in pairs]
    outs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in one.out_avals]
    return Readable(ins, outs, one.nr_devices, one.mlir_module(), one.call)


def of_portable(one: Portable, mesh: Mesh, platform: str) -> Readable:
    """Read StableHLO for one device with the JAX of today: it replaces the module of a program of the same types."""
    if layout.sha256(one.module) != one.sha256 or one.mesh != dict(mesh.shape):
        raise UsageError(f"a program is damaged, or for a mesh of {one.mesh}; need {dict(mesh.shape)}")
    ins, outs = (_arrays(some, mesh if one.per_device else None) for some in (one.ins, one.outs))
    own_outs = [*map(_of_device, outs)]
    zeros = jax.jit(lambda *_: [jnp.zeros(x.shape, x.dtype) for x in own_outs], keep_unused=True)
    stub = export.export(zeros, platforms=[platform])(*map(_of_device, ins))
    made = dataclasses.replace(stub, mlir_module_serialized=one.module, module_kept_var_idx=one.kept)
    call, num_devices = made.call, 1
    if one.per_device:
        in_specs, out_specs = (tuple(x.sharding.spec for x in some) for some in (ins, outs))
        split = partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        call, num_devices = split(lambda *args: tuple(made.call(*args))), mesh.size
    return Readable(ins, outs, num_devices, made.mlir_module(), call)


def _arrays(some: tuple[Array, ...], mesh: Mesh | None) -> list[jax.ShapeDtypeStruct]:
    def place(x: Array) -> NamedSharding | None:
        return mesh and NamedSharding(mesh, P(*(axes or None for axes in x.axes)))

    return [jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype), sharding=place(x)) for x in some]


def _of_device(x: Any) -> jax.ShapeDtypeStruct:
    """Return the part of an array that a device has."""
    return jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape) if x.sharding else x.shape, x.dtype)


class Programs:
    """The programs of an archive for the devices of a mesh, by name. Each is read and compiled once."""

    def __init__(self, archive: Archive, mesh: Mesh, vocabulary: Vocabulary = ()) -> None:
        self.derived = [*derived(archive.derived, vocabulary).values()]
        self.mesh, self.platform = mesh, "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
        if self.platform not in archive.platforms:
            got = clean(", ".join(archive.platforms)) or "no platform"
            raise UsageError(f"its archive of programs is for {got}; this examination has {self.platform}")
        self.archive, self.lowered = archive, archive.platforms[self.platform]
        self._read: dict[str, Readable] = {}
        self._executables: dict[str, Any] = {}

    def program(self, name: str) -> Readable:
        """Return a program in any of the forms that a record may have."""
        if name in self._read:
            return self._read[name]
        try:
            if name in self.lowered.portable:
                one = of_portable(self.lowered.portable[name], self.mesh, self.platform)
            else:
                one = of_jax(self.lowered.programs[name], self.mesh, self.platform)
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001 - parsing untrusted bytes can raise anything
            found = f"program {clean(name)} cannot be read by this JAX ({clean(repr(error), limit=120)})"
            raise UsageError(f"{found}; lower it again with the JAX of the record") from None
        self._read[name] = one
        return one

    @property
    def state(self) -> list[jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of each leaf of a state."""
        args, num_leaves = self.program(self.lowered.steps[0]).ins, len(self.archive.leaves)
        num_constants = len(self.program("constants").outs) + len(self.derived)
        if len(args) != (need := num_leaves + num_constants + 2):
            raise UsageError(f"a step takes {len(args)} arrays, its archive says {need}; run again")
        return args[:num_leaves]

    @property
    def num_params(self) -> tuple[int, int]:
        """The least and the most parameters of a state: some rows of each array may be padding."""
        params = self.state[1 : 1 + self.archive.num_params]
        most = sum(x.size for x in params)
        padding = sum(x.size // max(1, *x.shape[:1]) for x in params) * (SHARDS - 1)
        return most - padding, most

    @property
    def state_bytes_per_device(self) -> int:
        """Bytes of a state on each device."""
        shapes = ((x.sharding.shard_shape(x.shape) if x.sharding else x.shape, x.dtype) for x in self.state)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the last argument of a program: the ids or hidden states."""
        return self.program(name).ins[-1].shape

    @cached_property
    def dtype(self) -> str:
        """The narrowest dtype of the training programs, which determines how much two machines differ."""
        texts = (self.text(name) for name in dict.fromkeys(self.lowered.steps))
        return "bfloat16" if any(map(_NARROW.search, texts)) else "float32"

    @cached_property
    def held(self) -> Held:
        """What the constants of all programs hold."""
        return held(map(self.text, [*self.lowered.programs, *self.lowered.portable]), self.text("constants"))

    def scorer(self, part: str, step: int) -> str:
        """Return the name of the program of a part, "hidden" or "logits", in the validation at a step."""
        return f"{part}-{self.lowered.scored[step]}"

    @property
    def columns(self) -> int:
        """The fewest columns of all logits."""
        names = {self.scorer("logits", step) for step in self.lowered.scored}
        return min(self.program(name).outs[0].shape[1] for name in names)

    def text(self, name: str) -> str:
        """Return a program as text."""
        return self.program(name).text

    @cached_property
    def constants(self) -> tuple[jax.Array, ...]:
        """The constants that the programs take as arguments."""
        return *self.compiled("constants")(), *map(jnp.asarray, self.derived)

    def compiled(self, name: str, *, outs: Any = None) -> Any:
        """Inspect and compile a program; with `outs`, the shardings of its results, donate the leaves of a state."""
        if name in self._executables:
            return self._executables[name]
        one = self.program(name)
        inspect(one.text)
        options: Any = COMPILER_OPTIONS.get(jax.default_backend(), {})
        donate = tuple(range(len(self.archive.leaves))) if outs and len(one.ins) > 1 else ()
        inside = outs if one.num_devices > 1 else None
        called = jax.jit(
            lambda *args: tuple(jax.tree.leaves(one.call(*args))), donate_argnums=donate, out_shardings=inside
        )
        made = called.lower(*one.ins).compile(compiler_options=options)
        if inside is outs:
            self._executables[name] = made
        else:  # what one device computes is placed afterwards
            self._executables[name] = lambda *args: [*map(jax.device_put, made(*args), outs)]
        return self._executables[name]
