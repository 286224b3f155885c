"""An H100 where there is none: XLA's compiler, told what the device is like, and JAX's interpreter of kernels."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from speedrun.ground.mesh import DATA
from speedrun.predict import deviceless

needs_compiler = pytest.mark.usefixtures("h100")


def compiled(function: Callable[..., Any], *args: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
    """What eight H100s run, each on its part of the first axis, with every type of variation checked."""
    mesh, parts = deviceless.target_mesh("h100", 8), jax.sharding.PartitionSpec(DATA)
    placing = jax.sharding.NamedSharding(mesh, parts)
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placing) for x in args]
    step = jax.shard_map(function, mesh=mesh, in_specs=parts, out_specs=parts)
    return deviceless.compile_for_target(jax.jit(step), *placed)


def teach_interpreter_transposes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of JAX 0.10 knows no transposed factor of a product; that of 0.11 does."""
    if jax.__version_info__ >= (0, 11):
        return
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    plain, is_transposed = gpu_callbacks.wgmma, threading.local()  # warpgroups are threads

    class Products:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        def matmul(self, a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
            return np.matmul(a, b.T if is_transposed.here else b, dtype=dtype)

    def wgmma(*, b_transforms: tuple[Any, ...], **rest: Any) -> Any:
        others = tuple(x for x in b_transforms if type(x).__name__ != "TransposeTransform")
        is_transposed.here = len(others) < len(b_transforms)
        return plain(b_transforms=others, **rest)

    monkeypatch.setattr(gpu_callbacks, "np", Products())
    monkeypatch.setattr(gpu_callbacks, "wgmma", wgmma)
