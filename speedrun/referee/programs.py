"""Programs that a record's source handed over: reads StableHLO, inspects and compiles it. Nothing is unpickled."""

import lzma
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.core import ShapedArray
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from speedrun.ledger.findings import Array, HandedOver, Lowered
from speedrun.science.step import COMPILER_OPTIONS
from speedrun.training.program import inspect

#: A constant, as MLIR prints it: hex digits of an array, or nested numbers.
_CONSTANT = re.compile(r'\bdense(?:_resource)?<("0x[0-9A-F]*"|[^">]*)>')
#: A number of fewer bits than float32.
_NARROW = re.compile(r"[x<](bf16|f16|f8)")


@dataclass(frozen=True)
class Programs:
    """The programs that were handed over, by name."""

    folder: Path
    handed: HandedOver
    mesh: Any

    def exported(self, name: str) -> export.Exported:
        """Return a program as `jax.export` represents it; built from plain fields, nothing is unpickled."""
        lowered = self.handed.programs[name]
        avals, places = self._arrays(lowered, lowered.inputs)
        results, result_places = self._arrays(lowered, lowered.outputs)
        # A field of JAX 0.10 alone.
        old_fields = {"_has_named_shardings": True} if jax.__version_info__ < (0, 11) else {}
        return export.Exported(
            fun_name=name.replace("-", "_"),
            in_tree=jax.tree.structure((avals, {})),
            in_avals=avals,
            out_tree=jax.tree.structure(results),
            out_avals=results,
            **old_fields,
            _in_named_shardings=places,
            _out_named_shardings=result_places,
            in_shardings_hlo=(None,) * len(avals),
            out_shardings_hlo=(None,) * len(results),
            nr_devices=lowered.num_devices,
            platforms=(jax.default_backend() if jax.default_backend() != "gpu" else "cuda",),
            ordered_effects=(),
            unordered_effects=(),
            disabled_safety_checks=(),
            mlir_module_serialized=(self.folder / f"{name}.mlir").read_bytes(),
            calling_convention_version=lowered.convention,
            module_kept_var_idx=lowered.kept,
            uses_global_constants=False,
            _get_vjp=None,
        )

    def _arrays(self, lowered: Lowered, arrays: tuple[Array, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        avals = tuple(ShapedArray(one.shape, np.dtype(jnp.dtype(one.dtype))) for one in arrays)
        if lowered.num_devices == 1:
            return avals, (None,) * len(avals)
        return avals, tuple(self.place(one) for one in arrays)

    def place(self, one: Array) -> NamedSharding:
        """Return the sharding of an array."""
        return NamedSharding(self.mesh, P(*(axes or None for axes in one.axes)))

    @cached_property
    def state_places(self) -> list[NamedSharding]:
        """Return the sharding of each leaf of a state."""
        inputs = self.handed.programs[self.handed.steps[0]].inputs
        return [self.place(one) for one in inputs[: len(self.handed.leaves)]]

    @cached_property
    def dtype(self) -> str:
        """By which two machines round training differently: the narrowest in its programs."""
        texts = (self.text(name) for name in dict.fromkeys(self.handed.steps))
        return "bfloat16" if any(map(_NARROW.search, texts)) else "float32"

    @cached_property
    def constant_bytes(self) -> int:
        """Bytes of all distinct constants, compressed together: schedules, declared constants, starts, memories."""
        found = {value for name in self.handed.programs for value in _CONSTANT.findall(self.text(name))}
        raw = [
            bytes.fromhex(value[3:-1]) if value.startswith('"0x') else value.encode()
            for value in sorted(found)
        ]
        return len(lzma.compress(b"\n".join(raw)))

    def text(self, name: str) -> str:
        """Return a program as text."""
        return self.exported(name).mlir_module()

    @cached_property
    def _executables(self) -> dict[str, Any]:
        return {}

    def compiled(self, name: str, *, outs: Any = None) -> Any:
        """Return the executable of a program, compiled once.

        Args:
            name: of the program.
            outs: shardings of its results; if given, all arguments but the last two are donated.

        Raises:
            UsageError: if it would call the host or foreign code.
        """
        if name in self._executables:
            return self._executables[name]
        one, lowered = self.exported(name), self.handed.programs[name]
        inspect(one.mlir_module())
        args = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
            for x, place in zip(*self._arrays(lowered, lowered.inputs), strict=True)
        ]
        options: Any = COMPILER_OPTIONS.get(jax.default_backend(), {})
        donate = tuple(range(max(0, len(args) - 2))) if outs else ()
        called = jax.jit(one.call, donate_argnums=donate, out_shardings=outs)
        self._executables[name] = called.lower(*args).compile(compiler_options=options)
        return self._executables[name]
