"""Attention: the mask, and every form that runs on a CPU against the definition."""

from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import hopper
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dispatch import ATTENTION

from speedrun.base import accelerators, mesh
from speedrun.recipes.record89.attention import Heads, View, attend
from speedrun.science import nn
from speedrun.science.kernels import attention_banded, attention_triton, qk_norm_triton
from speedrun.science.kernels.attention import Window, attention, first_key, visible
from speedrun.science.kernels.dispatch import choose_attention
from speedrun.science.kernels.qk_norm import qk_norm


def sees(t: int, s: int, doc: list[int], window: int, block: int) -> bool:
    return s <= t and doc[t] == doc[s] and t // block - s // block < window


@pytest.mark.parametrize(("window", "block"), [(1, 1), (1, 4), (2, 7), (3, 4), (99, 4)])
def test_visibility_is_the_rule(window, block):
    doc = [0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 4, 5, 5, 5, 5, 5, 5]
    first_BT = first_key(jnp.array([doc]), jnp.int32(window), block)
    want = [[sees(t, s, doc, window, block) for s in range(17)] for t in range(17)]
    np.testing.assert_array_equal(visible(first_BT)[0], want)


class Case(NamedTuple):
    """Two rows of documents, the second in reverse order, and a window."""

    lengths: list[int]  #: of the documents of a row
    window_blocks: int
    block_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def window_tokens(self) -> int:
        return self.window_blocks * self.block_tokens

    def first_key(self) -> jax.Array:
        rows = [np.repeat(np.arange(len(n)), n) for n in (self.lengths, self.lengths[::-1])]
        return first_key(jnp.asarray(rows), jnp.int32(self.window_blocks), self.block_tokens)


CASES = {
    "one document": Case([48], 2, 8),
    "one block": Case([32], 1, 4),
    "odd length": Case([20, 17], 2, 5),
    "one-token documents": Case([1] * 32, 3, 4),
    "mixed documents": Case([1, 1, 13, 1, 30, 2], 2, 8),
    "documents longer than the window": Case([40, 1, 7], 2, 4),
    "window longer than the sequence": Case([9, 23], 99, 4),
    "window in tokens": Case([1, 26, 1, 4, 16], 11, 1),
    "window of one token": Case([3, 13], 1, 1),
}


#: So small that every case has several.
TILES = attention_triton.Tiles(queries=16, keys=16, num_warps=4, num_stages=2)
SMALL = attention_triton.Tiling(TILES, TILES, TILES)
TRITON = partial(attention_triton.attention, tiling=SMALL, interpret=True)


def in_turns(*args: jax.Array, **more: Any) -> jax.Array:
    """Banded attention of which only one tile at a time fits into its limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_banded, "MOST_SCORE_BYTES", 1)
        return attention_banded.attention(*args, **more)


#: Each form, bound to the static facts of a case.
FORMS: dict[str, Callable[[Case], Callable[..., jax.Array]]] = {
    "definition": lambda _: attention,
    "banded": lambda case: partial(attention_banded.attention, window_tokens=case.window_tokens),
    "banded in turns": lambda case: partial(in_turns, window_tokens=case.window_tokens, tile_tokens=5),
    "banded in small tiles": lambda case: partial(
        attention_banded.attention, window_tokens=case.window_tokens, tile_tokens=5
    ),
    "triton": lambda _: TRITON,
    "triton in oblong tiles": lambda _: partial(
        TRITON,
        tiling=attention_triton.Tiling(
            TILES._replace(queries=8), TILES._replace(keys=8), TILES._replace(queries=8)
        ),
    ),
}


def inputs(case: Case, dtype: Any = jnp.float32) -> jax.Array:
    """Return queries, keys, values and a cotangent: [4, B, T, H, K]."""
    return jax.random.normal(jax.random.key(0), (4, 2, case.num_tokens, 2, 16)).astype(dtype)


def differentiated(form: Callable[..., jax.Array], case: Case) -> Callable[..., list[jax.Array]]:
    """Return the function of queries, keys, values and a cotangent to value and gradients, as float32."""

    @jax.jit
    def run(seen: jax.Array, *qkvg: jax.Array) -> list[jax.Array]:
        *qkv, g_BTHK = qkvg
        o_BTHK, pull = jax.vjp(lambda *qkv: form(*qkv, seen, scale=0.3), *qkv)
        return [x.astype(jnp.float32) for x in (o_BTHK, *pull(g_BTHK))]

    return partial(run, case.first_key())


@cache
def defined(case: str) -> list[jax.Array]:
    return differentiated(attention, CASES[case])(*inputs(CASES[case]))


#: Forms that are not interpreted; the others in other tiles differ from theirs only where tiles meet.
QUICK = {"definition", "banded"}
IN_TILES = {"mixed documents", "documents longer than the window", "window of one token"}
EACH = [pytest.param(name, marks=pytest.mark.compile if "tiles" in name else ()) for name in FORMS]
PAIRS = [
    pytest.param(name, case, marks=pytest.mark.compile if name not in QUICK and case not in IN_TILES else ())
    for name in FORMS
    for case in CASES
    if "triton" not in name or CASES[case].num_tokens % TILES.keys == 0
]


class TestForms:
    @pytest.mark.parametrize(("name", "case_name"), PAIRS)
    def test_float32(self, name, case_name):
        case = CASES[case_name]
        run = differentiated(FORMS[name](case), case)
        for got, want in zip(run(*inputs(case)), defined(case_name), strict=True):
            np.testing.assert_allclose(got, want, atol=3e-6)

    @pytest.mark.parametrize("name", EACH)
    def test_bfloat16(self, name):
        case = CASES["mixed documents"]
        run = differentiated(FORMS[name](case), case)
        q, k, v, g = inputs(case, jnp.bfloat16)
        for a, b in zip(run(q, k, v, g), defined("mixed documents"), strict=True):
            assert jnp.linalg.norm(a - b) < 0.02 * jnp.linalg.norm(b)
        # Scores of about 300, of which 16 bits leave even numbers.
        q, k = q.at[..., 0].set(32), k.at[..., 0].set(32)
        q32, k32, v32 = (x.astype(jnp.float32) for x in (q, k, v))
        want = attention(q32, k32, v32, case.first_key(), scale=0.3)
        assert jnp.linalg.norm(run(q, k, v, g)[0] - want) < 0.01 * jnp.linalg.norm(want)
        # Where all values are equal, a score has no gradient: two sums cancel, of which none may be rounded.
        _, dq, dk, dv = run(q, k, jnp.broadcast_to(v[:, :1], v.shape), g)
        assert max(jnp.abs(dq).max(), jnp.abs(dk).max()) < 1e-4 * jnp.abs(dv).max()

    @pytest.mark.parametrize(("keys", "values"), [(8, 16), (16, 8)])
    @pytest.mark.parametrize("name", [name for name in FORMS if name != "definition"])
    def test_values_have_a_width_of_their_own(self, name, keys, values):
        """Record 92 has queries and keys of half a head. The definition is computed with zeros in the other half."""
        case = CASES["mixed documents"]
        q, k, v, g = inputs(case)
        q, k, v, g = q[..., :keys], k[..., :keys], v[..., :values], g[..., :values]
        wide = [jnp.pad(x, [(0, 0)] * 3 + [(0, 16 - x.shape[-1])]) for x in (q, k, v, g)]
        found = differentiated(FORMS[name](case), case)(q, k, v, g)
        for x, want in zip(found, differentiated(attention, case)(*wide), strict=True):
            np.testing.assert_allclose(x, want[..., : x.shape[-1]], atol=3e-6)

    @pytest.mark.parametrize("name", FORMS)
    def test_no_window_shows_a_later_token(self, name):
        """A window without blocks shows nothing: NaN, which ends a run."""
        case, t = Case([48], 2, 8), 40
        form, (q, k, v, _) = jax.jit(partial(FORMS[name](case), scale=0.3)), inputs(case)
        for blocks in (-(2**31), -3, 0, 1, 2):
            seen = first_key(jnp.zeros((2, 48), jnp.int32), jnp.int32(blocks), 8)
            now, later = form(q, k, v, seen), form(q, k.at[:, t].add(1), v.at[:, t].add(1), seen)
            np.testing.assert_array_equal(now[:, :t], later[:, :t])
            np.testing.assert_array_equal(jnp.isnan(now), blocks < 1)

    @pytest.mark.parametrize("name", EACH)
    def test_inside_shard_map(self, name):
        """One row per device, with varying mesh axes checked, but not by Pallas's interpreter, which cannot."""
        case, rows = CASES["one document"], jax.sharding.PartitionSpec("data")
        q, k, v, _ = inputs(case)
        form = partial(FORMS[name](case), scale=0.3)
        grads = jax.grad(lambda *args: form(*args).sum(), (0, 1, 2))
        over = {"mesh": mesh.make_mesh(2), "in_specs": rows, "out_specs": rows}
        sharded = jax.shard_map(grads, **over, check_vma="triton" not in name)
        args = q, k, v, case.first_key()
        for a, b in zip(jax.jit(sharded)(*args), jax.jit(grads)(*args), strict=True):
            np.testing.assert_allclose(a, b, atol=3e-6)


@pytest.mark.parametrize("tiles", [TILES, pytest.param(TILES._replace(queries=8), marks=pytest.mark.compile)])
def test_norm_and_rotary_inside_the_kernels_are_those_before_them(tiles):
    """Angles have a length and differ between heads, as in record 89."""
    case = CASES["mixed documents"]
    cos_TJ, sin_TJ = (a.reshape(case.num_tokens, -1) for a in nn.rotary_angles(2 * case.num_tokens, 16))
    angles = 0.6 * cos_TJ, 0.6 * sin_TJ

    def inside(q: jax.Array, k: jax.Array, *args: jax.Array, scale: float) -> jax.Array:
        normed = qk_norm_triton.normed(k, angles, interpret=True)
        return TRITON(q, k, *args, scale=scale, normed=normed, tiling=attention_triton.Tiling(*[tiles] * 3))

    def before(q: jax.Array, k: jax.Array, *args: jax.Array, scale: float) -> jax.Array:
        return attention(*qk_norm(q, k, angles), *args, scale=scale)

    args = inputs(case)
    both = (differentiated(form, case)(*args) for form in (inside, before))
    for got, want in zip(*both, strict=True):
        np.testing.assert_allclose(got, want, atol=3e-6)


def test_paired_heads_are_one_softmax_for_each_query():
    """Half h // 2 of token t is number 2 t + h // 2 of its sequence; head h sees head h % 2 there, inside documents."""
    case, num_tokens = Case([2, 26, 6, 30], 9, 1), 32  # lengths in halves of tokens
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, num_tokens, 4, 16))
    kernels: Any = SimpleNamespace(attention=lambda *args, scale, **_: attention(*args, scale=scale))
    seen = View(case.first_key(), Window(case.window_blocks, case.window_blocks), None)
    got = jax.jit(lambda *qkv: attend(Heads(*qkv), seen, kernels))(q, k, v)
    for row, lengths in enumerate((case.lengths, case.lengths[::-1])):
        doc = np.repeat(np.arange(len(lengths)), lengths).tolist()
        for t, h in np.ndindex(num_tokens, 4):
            n, keys = 2 * t + h // 2, [(s, g) for s in range(num_tokens) for g in (h % 2, h % 2 + 2)]
            keys = [(s, g) for s, g in keys if sees(n, 2 * s + g // 2, doc, *case[1:])]
            weights = jax.nn.softmax(jnp.array([k[row, s, g] @ q[row, t, h] for s, g in keys]))
            want = weights @ jnp.array([v[row, s, g] for s, g in keys])
            np.testing.assert_allclose(got[row, t, h], want, atol=3e-6)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    window=st.integers(1, 9),
    block=st.integers(1, 9),
    query_tile=st.sampled_from([4, 8, 16]),
    key_tile=st.sampled_from([4, 8, 16]),
)
@settings(max_examples=100)
def test_bounds_hold_every_visible_tile_and_no_useless_one(lengths, window, block, query_tile, key_tile):
    doc = np.repeat(np.arange(len(lengths) + 1), [*lengths, 48])[:48]
    first_BT = first_key(jnp.asarray(doc)[None], jnp.int32(window), block)
    pairs_NCMS = np.asarray(visible(first_BT))[0].reshape(len(doc) // query_tile, query_tile, -1, key_tile)
    busy_NM = pairs_NCMS.any((1, 3))
    got = attention_triton.bounds(first_BT, TILES._replace(queries=query_tile, keys=key_tile))
    np.testing.assert_array_equal(got.first_key_tile_BN[0], busy_NM.argmax(1))
    np.testing.assert_array_equal(got.end_query_tile_BM[0], len(busy_NM) - busy_NM[::-1].argmax(0))


def compiled_for(kind: str, form: Callable[..., jax.Array], head_dim: int, **options: int) -> tuple[str, int]:
    """Return text and scratch bytes of value and gradients, at the size of record 21 on eight devices."""
    x_BTHK = jax.ShapeDtypeStruct((8, 49152, 6, head_dim), jnp.bfloat16)
    seen_BT = jax.ShapeDtypeStruct((8, 49152), jnp.int32)

    def run(do: jax.Array, first: jax.Array, *qkv: jax.Array) -> tuple[jax.Array, ...]:
        angles = nn.rotary_angles(49152, head_dim)

        def normed(*qkv: jax.Array) -> jax.Array:
            return form(*qkv, first, scale=0.12, normed=qk_norm_triton.normed(qkv[1], angles))

        o_BTHK, pull = jax.vjp(normed, *qkv)
        return o_BTHK, *pull(do)

    program = hopper.compiled(run, x_BTHK, seen_BT, *[x_BTHK] * 3, kind=kind, **options)
    text, memory = program.as_text(), program.memory_analysis()
    assert text
    assert memory
    return text, memory.temp_size_in_bytes


@hopper.needs_compiler
@pytest.mark.parametrize(
    ("kind", "head_dim"), [("h100", 64), ("h100", 128), ("a100", 128), ("l40s", 128), ("b200", 128)]
)
def test_what_auto_chooses_is_triton_and_fits_each_card(kind, head_dim):
    """XLA refuses kernels with more shared memory than a block may use, and here those that spill registers, too."""
    capability = "{}.{}".format(*accelerators.load(kind).compute_capability)
    choice = choose_attention("auto", ATTENTION._replace(compute_capability=capability))
    text, scratch_bytes = compiled_for(kind, choice.function, head_dim, **hopper.NO_SPILLS)
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 4, "keys have one of their own"
    tokens, heads = ATTENTION.shape_BTHK[1:3]
    kept_bytes = tokens * head_dim * (2 * heads * 2 + 4)  # queries and keys after their norm, and angles
    assert scratch_bytes < kept_bytes + 4 * 2**20


@pytest.mark.parametrize("window_tokens", [4, 5])
def test_banded_says_when_its_bound_is_too_small(window_tokens):
    case = Case([32], 3, 4)
    q, k, v, _ = inputs(case)
    form = partial(attention_banded.attention, window_tokens=window_tokens, tile_tokens=4, scale=0.3)
    got, want = form(q, k, v, case.first_key()), attention(q, k, v, case.first_key(), scale=0.3)
    np.testing.assert_allclose(got[:, :8], want[:, :8], atol=3e-6)
    assert jnp.isnan(got[:, 8:]).all()


@pytest.mark.parametrize("max_bytes", [1, attention_banded.MOST_SCORE_BYTES])
def test_banded_memory_is_linear_in_time(max_bytes, monkeypatch):
    monkeypatch.setattr(attention_banded, "MOST_SCORE_BYTES", max_bytes)

    def scratch_bytes(num_tokens: int) -> int:
        x_BTHK, zero_BT = jnp.zeros((1, num_tokens, 1, 8)), jnp.zeros((1, num_tokens), jnp.int32)
        form = partial(attention_banded.attention, window_tokens=16, tile_tokens=16, scale=0.3)
        grads = jax.jit(jax.grad(lambda *args: form(*args).sum(), (0, 1, 2)))
        memory = grads.lower(x_BTHK, x_BTHK, x_BTHK, zero_BT).compile().memory_analysis()
        assert memory
        return memory.temp_size_in_bytes

    assert scratch_bytes(4096) < 4.5 * scratch_bytes(1024)
