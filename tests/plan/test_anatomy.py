"""The reader of compiled programs, on hand-written text and on programs for absent GPUs."""

import anatomy
import deviceless
import hlo
import jax
import jax.numpy as jnp
import pytest
from deviceless import compile_for_target
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from speedrun.base import accelerators
from speedrun.base.errors import UsageError
from speedrun.base.mesh import DATA

HEADER = "HloModule test, is_scheduled=true\n"


def read(text: str) -> anatomy.Anatomy:
    return anatomy.read(HEADER + text)


def entry(*lines: str) -> str:
    return "\n".join(["ENTRY %main (p: f32[8]) -> f32[8] {", *(f"  {line}" for line in lines), "}\n"])


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [("bf16", 12), ("f8e4m3fn", 6), ("pred", 6), ("s4", 3), ("token", 0)],
)
def test_bytes_of_an_array(dtype, num_bytes):
    assert hlo.Array(dtype, (2, 3)).num_bytes == num_bytes


def test_a_kernel_reads_its_operands_once_and_writes_its_result():
    text = entry(
        "%p = f32[8]{0} parameter(0)",
        "%view = f32[2,4]{1,0} bitcast(%p)",
        "%sum = f32[2,4]{1,0} add(%view, %view)",
        "ROOT %half = bf16[2,4]{1,0} convert(%sum)",
    )
    got = read(text)
    assert got.traffic == {"add": 32 + 32, "convert": 32 + 16}
    assert "f32[2,4]" in got.arrays
    assert "f32[8]" not in got.arrays, "a parameter or a view is no new array"


FUSIONS = """
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

"""


def test_slices_and_updates_in_place_count_as_such_inside_fusions():
    text = entry(
        "%p = f32[100,8]{1,0} parameter(0)",
        "%k = s32[] parameter(1)",
        "%row = f32[1,8]{1,0} fusion(%p, %k), kind=kLoop, calls=%slicing",
        "ROOT %out = f32[100,8]{1,0} fusion(%p, %row, %k), kind=kLoop, calls=%writing",
    )
    row, index = 32, 4
    assert read(FUSIONS + text).traffic == {"fusion": (row + index + row) + (row + index + row)}


def test_a_gather_reads_what_it_returns_and_a_use_beside_it_reads_all():
    gather = "%rows = f32[2,8]{1,0} gather(%p, %k), offset_dims={1}"
    table, rows, index = 3200, 64, 8
    one = entry("%p = f32[100,8]{1,0} parameter(0)", "%k = s32[2]{0} parameter(1)", gather)
    assert read(one).traffic == {"gather": rows + index + rows}
    both = FUSIONS.replace("add(%row, %row)", "reduce(%row, %a), to_apply=%slicing")
    text = both + entry(
        "%p = f32[100,8]{1,0} parameter(0)",
        "%k = s32[] parameter(1)",
        "ROOT %row = f32[1,8]{1,0} fusion(%p, %k), kind=kLoop, calls=%slicing",
    )
    assert read(text).traffic == {"fusion": table + 4 + 32}


LOOP = """
%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8]{0} get-tuple-element(%s), index=1
  %y = f32[8]{0} negate(%x)
  %call = (f32[8]{0}, s8[4096]{0}) custom-call(%y, /*index=1*/%y), custom_call_target="gemm"
  %z = f32[8]{0} get-tuple-element(%call), index=0
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %z)
}

%cond (s2: (s32[], f32[8])) -> pred[] {
  %s2 = (s32[], f32[8]{0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

"""


@pytest.mark.parametrize(
    ("known", "times", "unknown_loops"),
    [(', backend_config={"known_trip_count":{"n":"5"}}', 5, 0), ("", 1, 1)],
)
def test_a_loop_counts_as_often_as_it_runs(known, times, unknown_loops):
    loop = "ROOT %w = (s32[], f32[8]{0}) while(%s), condition=%cond, body=%body" + known
    got = read(LOOP + entry("%s = (s32[], f32[8]{0}) parameter(0)", loop))
    assert got.traffic == {"negate": times * 64, "gemm": times * 64}, "the scratch of the call does not count"
    assert got.custom_calls == {"gemm": times}
    assert got.unknown_loops == unknown_loops


def test_every_branch_counts():
    text = """
%one (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%a)
}

%two (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  ROOT %m = f32[8]{0} exponential(%b)
}

"""
    choose = "ROOT %c = f32[8]{0} conditional(%q, %p, %p), branch_computations={%one, %two}"
    got = read(text + entry("%p = f32[8]{0} parameter(0)", "%q = s32[] parameter(1)", choose))
    assert got.traffic == {"negate": 64, "exponential": 64}


COLLECTIVES = entry(
    "%p = bf16[4]{0} parameter(0)",
    "%q = f32[16]{0} parameter(1)",
    "%ag = ((bf16[4]{0}, f32[16]{0}), (bf16[32]{0}, f32[128]{0})) all-gather-start(%p, %q), "
    'metadata={op_name="jit(f)/gather"}, backend_config={"collective_backend_config":{"is_sync":false}}',
    "%agd = (bf16[32]{0}, f32[128]{0}) all-gather-done(%ag)",
    "%rs = ((f32[16]{0}), f32[2]{0}) reduce-scatter-start(%q), "
    'backend_config={"collective_backend_config":{"is_sync":true}}',
    "%rsd = f32[2]{0} reduce-scatter-done(%rs)",
    "ROOT %a2a = f32[16]{0} all-to-all(%q), dimensions={0}",
)


def test_collectives_are_named_with_the_bytes_of_the_whole():
    got = read(COLLECTIVES)
    gather, scatter, exchange = got.collectives
    assert (gather.kind, gather.dtype, gather.num_bytes) == ("all-gather", "bf16+f32", 64 + 512)
    assert (scatter.kind, scatter.dtype, scatter.num_bytes) == ("reduce-scatter", "f32", 64)
    assert (exchange.kind, exchange.times) == ("all-to-all", 1)
    assert [one.is_synchronous for one in got.collectives] == [False, True, True]
    assert (gather.times, gather.name) == (1, "jit(f)/gather")
    assert got.sent_bytes("all-gather") == 576
    assert got.traffic == {"all-gather": 72 + 576, "reduce-scatter": 64 + 8, "all-to-all": 64 + 64}


def test_text_that_is_not_scheduled_is_refused():
    with pytest.raises(ValueError, match="need the text of a compiled, scheduled HLO module"):
        hlo.parse("HloModule jit_f, entry_computation_layout={()->f32[]}")


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
