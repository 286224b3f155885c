"""Reads, inspects and compiles the StableHLO programs that a record carries."""

import math
import re
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import Mesh

from speedrun.base.console import clean
from speedrun.base.errors import UsageError
from speedrun.record.archive import Archive
from speedrun.record.examine.constants import Held, held
from speedrun.science.params import SHARDS
from speedrun.science.recipe import Vocabulary
from speedrun.science.step import COMPILER_OPTIONS
from speedrun.train.constants import derived
from speedrun.train.program import inspect

#: A type with fewer bits than float32.
_NARROW = re.compile(r"[x<](bf16|f16|f8)")


class Programs:
    """The programs of an archive for the devices of a mesh, by name. Each is read and compiled once."""

    def __init__(self, archive: Archive, mesh: Mesh, vocabulary: Vocabulary = ()) -> None:
        self.derived = [*derived(archive.derived, vocabulary).values()]
        self.mesh, self.platform = mesh, "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
        if self.platform not in archive.platforms:
            got = clean(", ".join(archive.platforms)) or "no platform"
            raise UsageError(f"its archive of programs is for {got}; this examination has {self.platform}")
        self.archive, self.lowered = archive, archive.platforms[self.platform]
        self._exported: dict[str, export.Exported] = {}
        self._executables: dict[str, Any] = {}

    def exported(self, name: str) -> export.Exported:
        """Return a program as `jax.export` represents it."""
        if name in self._exported:
            return self._exported[name]
        try:
            one = export.deserialize(bytearray(self.lowered.programs[name]))
        except Exception as error:  # noqa: BLE001 - parsing untrusted bytes can raise anything
            why = f"cannot be read by this JAX ({clean(repr(error), limit=120)})"
            raise UsageError(
                f"program {clean(name)} {why}; lower it again with the JAX of the record"
            ) from None
        if self.platform not in one.platforms or one.nr_devices not in (1, self.mesh.size):
            got = f"{one.nr_devices} devices of {'/'.join(one.platforms)}"
            raise UsageError(
                f"program {clean(name)} is for {clean(got)}; this examination has {self.mesh.size} of {self.platform}"
            )
        self._exported[name] = one
        return one

    @property
    def state(self) -> list[jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of each leaf of a state."""
        args, num_leaves = self._args(self.lowered.steps[0]), len(self.archive.leaves)
        num_constants = len(self.exported("constants").out_avals) + len(self.derived)
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

    def _args(self, name: str) -> list[jax.ShapeDtypeStruct]:
        """Return the arguments of a program; a program for a single device has no shardings."""
        one = self.exported(name)
        places = one.in_shardings_jax(self.mesh) if one.nr_devices > 1 else (None,) * len(one.in_avals)
        pairs = zip(one.in_avals, places, strict=True)
        return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x, place in pairs]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the last argument of a program: the ids or hidden states."""
        return self.exported(name).in_avals[-1].shape

    @cached_property
    def dtype(self) -> str:
        """The narrowest dtype of the training programs, which determines how much two machines differ."""
        texts = (self.text(name) for name in dict.fromkeys(self.lowered.steps))
        return "bfloat16" if any(map(_NARROW.search, texts)) else "float32"

    @cached_property
    def held(self) -> Held:
        """What the constants of all programs hold."""
        return held(map(self.text, self.lowered.programs))

    def scorer(self, part: str, step: int) -> str:
        """Return the name of the program of a part, "hidden" or "logits", in the validation at a step."""
        return f"{part}-{self.lowered.scored[step]}"

    @property
    def columns(self) -> int:
        """The fewest columns of all logits."""
        names = {self.scorer("logits", step) for step in self.lowered.scored}
        return min(self.exported(name).out_avals[0].shape[1] for name in names)

    def text(self, name: str) -> str:
        """Return a program as text."""
        return self.exported(name).mlir_module()

    @cached_property
    def constants(self) -> tuple[jax.Array, ...]:
        """The constants that the programs take as arguments."""
        return *self.compiled("constants")(), *map(jnp.asarray, self.derived)

    def compiled(self, name: str, *, outs: Any = None) -> Any:
        """Inspect and compile a program; with `outs`, the shardings of its results, donate the leaves of a state."""
        if name in self._executables:
            return self._executables[name]
        one, args = self.exported(name), self._args(name)
        inspect(one.mlir_module())
        options: Any = COMPILER_OPTIONS.get(jax.default_backend(), {})
        donate = tuple(range(len(self.archive.leaves))) if outs and len(args) > 1 else ()
        called = jax.jit(
            lambda *args: tuple(jax.tree.leaves(one.call(*args))), donate_argnums=donate, out_shardings=outs
        )
        self._executables[name] = called.lower(*args).compile(compiler_options=options)
        return self._executables[name]
