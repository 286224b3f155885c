"""The reader of compiled programs, on hand-written text and on programs for absent GPUs."""

import anatomy
import deviceless
import jax
import jax.numpy as jnp
import pytest
from deviceless import compile_for_target
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from speedrun.base import accelerators
from speedrun.base.errors import UsageError
from speedrun.base.mesh import DATA

FUSIONS = """\
HloModule test, is_scheduled=true

%slicing (a: f32[100,8], i: s32[]) -> f32[1,8] {
  %a = f32[100,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %flat = f32[100,8]{1,0} bitcast(%a)
  %row = f32[1,8]{1,0} dynamic-slice(%flat, %i, %i), dynamic_slice_sizes={1,8}
  ROOT %twice = f32[1,8]{1,0} add(%row, %row)
}

%writing (b: f32[100,8], c: f32[1,8], j: s32[]) -> f32[100,8] {
  %b = f32[100,8]{1,0} parameter(0)
  %c = f32[1,8]{1,0} parameter(1)
  %j = s32[] parameter(2)
  ROOT %new = f32[100,8]{1,0} dynamic-update-slice(%b, %c, %j, %j)
}

ENTRY %main (p: f32[100,8], k: s32[]) -> f32[100,8] {
  %p = f32[100,8]{1,0} parameter(0)
  %k = s32[] parameter(1)
  %row = f32[1,8]{1,0} fusion(%p, %k), kind=kLoop, calls=%slicing
  ROOT %out = f32[100,8]{1,0} fusion(%p, %row, %k), kind=kLoop, calls=%writing
}
"""


def test_slices_and_updates_in_place_count_as_such_inside_fusions():
    row, index = 32, 4
    assert anatomy.read(FUSIONS).traffic == {"fusion": (row + index + row) + (row + index + row)}


def rows(mesh: Mesh, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(DATA)))


@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize("kind", accelerators.DEVICES)
def test_the_compiler_accepts_every_target(kind):
    mesh = deviceless.target_mesh(kind, 2)
    assert mesh.devices.flat[0].device_kind == accelerators.load(kind).name
    compiled = compile_for_target(jax.jit(lambda x: x + 1), rows(mesh, (8, 8), jnp.float32))
    assert anatomy.dissect(compiled).traffic_bytes == 2 * 4 * 8 * 4


def test_a_program_for_a_target_is_not_stored(h100, request):
    """The suite's cache on disk is in use, and a warning is an error: the second compilation would read the first."""
    setting = "jax_persistent_cache_min_compile_time_secs"
    before_s = getattr(jax.config, setting)
    request.addfinalizer(lambda: jax.config.update(setting, before_s))
    jax.config.update(setting, 0.0)
    x = rows(h100(1), (8, 8), jnp.float32)
    texts = {compile_for_target(jax.jit(lambda x: x + 2), x).as_text() for _ in range(2)}
    assert len(texts) == 1
    assert getattr(jax.config, setting) == 0.0


def test_a_missing_compiler_is_said_with_the_command(monkeypatch):
    none = ("jax-no-such-plugin", "no-such-nvcc")
    monkeypatch.setattr(deviceless, "COMPILERS", (none, none))
    command = f"pip install --no-deps jax-no-such-plugin=={jax.__version__} no-such-nvcc"
    with pytest.raises(UsageError, match=f"found no jax-no-such-plugin, no-such-nvcc; .*{command}"):
        deviceless.target_mesh("h100", 8)
    monkeypatch.setattr(deviceless, "COMPILERS", (none, ("jax", "jaxlib")))
    assert not deviceless.missing_wheels(), "either will do"
    with pytest.raises(UsageError, match="unknown device kind 'h10'; did you mean 'h100'"):
        deviceless.target_mesh("h10", 8)
