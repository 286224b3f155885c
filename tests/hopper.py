"""An H100 where there is none: XLA's compiler, told what the device is like, and JAX's interpreter of kernels."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import deviceless
import jax
import numpy as np
import pytest
from golden_files import OPTIMISED

from speedrun.base.mesh import DATA

needs_compiler = pytest.mark.usefixtures("h100")
#: Makes XLA refuse a program if a kernel spills registers, with LLVM as in a run.
NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True, **OPTIMISED}


def compiled(
    function: Callable[..., Any], *args: jax.ShapeDtypeStruct, kind: str = "h100", **options: int
) -> jax.stages.Compiled:
    """What eight GPUs run, each on its part of the first axis, with every type of variation checked."""
    mesh, parts = deviceless.target_mesh(kind, 8), jax.sharding.PartitionSpec(DATA)
    placing = jax.sharding.NamedSharding(mesh, parts)
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placing) for x in args]
    step = jax.shard_map(function, mesh=mesh, in_specs=parts, out_specs=parts)
    return deviceless.compile_for_target(
        jax.jit(step), *placed, options={**deviceless.CUBLAS_GEMMS, **options}
    )


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


def opcodes(code: str, folder: Path) -> list[list[str]]:
    """Return the instructions of each Mosaic GPU kernel that the code compiles; none may spill."""
    spec = find_spec("nvidia")
    places = [Path(place) / "cu13" for place in (spec and spec.submodule_search_locations) or ()]
    if not (roots := [place for place in places if (place / "bin" / "nvdisasm").exists()]):
        pytest.skip("no nvdisasm here; scripts/install.sh compile brings it")
    dumps = {"MOSAIC_GPU_DUMP_TO": str(folder), "CUDA_ROOT": str(roots[0]), "MOSAIC_GPU_DUMP_SASS": "1"}
    dumps |= {"MOSAIC_GPU_DUMP_PTX": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **dumps}, check=True, timeout=600)
    reports = [path.read_text() for path in folder.glob("*.ptxas")]
    assert reports
    assert all("0 bytes spill stores, 0 bytes spill loads" in report for report in reports)
    words = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)")
    return [words.findall(path.read_text()) for path in sorted(folder.glob("*.sass*"))]
