"""Kernels on a real GPU against their definitions: `SPEEDRUN_TEST_PLATFORM=gpu pytest tests/test_gpu.py`.

Everywhere else these are skipped; the same forms are compared on a CPU in test_attention, test_qk_norm and
test_cross_entropy.
"""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speedrun import mesh, nn
from speedrun.kernels import cross_entropy_gpu
from speedrun.kernels.attention import Sight, attention, sight
from speedrun.kernels.choose import ATTENTION, AttentionCall, QkNormCall, choose_attention, choose_qk_norm
from speedrun.kernels.cross_entropy import cross_entropy
from speedrun.kernels.qk_norm import qk_norm

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU here, or not asked for")

TOKENS, HEADS, WIDTH, BLOCK = 2048, 6, 128, 128


def documents(kind: str) -> jax.Array:
    """Ids of documents [1, T]: `mixed` holds documents of one token, and some longer than any window."""
    opens = np.zeros(TOKENS, bool)
    if kind == "mixed":
        opens[np.random.default_rng(0).integers(0, TOKENS, 12)] = True
        opens[100:140] = True
    return jnp.asarray(np.cumsum(opens))[None]


def value_and_gradients(form, qkv: list[jax.Array], do: jax.Array, seen: Sight) -> list[np.ndarray]:
    def run(seen: Sight, *qkv: jax.Array) -> tuple[jax.Array, ...]:
        o_BTHK, pull = jax.vjp(lambda *qkv: form(*qkv, seen, scale=0.12), *qkv)
        return o_BTHK, *pull(do.astype(o_BTHK.dtype))

    return [np.asarray(x, np.float32) for x in jax.jit(run)(seen, *qkv)]


@pytest.mark.parametrize("kind", ["one", "mixed"])
@pytest.mark.parametrize("window_blocks", [1, 2, 7, 16])
@pytest.mark.parametrize("name", [name for name in ATTENTION if name != "definition"])
def test_attention(name, window_blocks, kind):
    call = AttentionCall(
        (1, TOKENS, HEADS, WIDTH),
        jnp.dtype(jnp.bfloat16),
        *mesh.accelerator(mesh.make_mesh(1)),
        block_tokens=BLOCK,
        max_window_blocks=window_blocks,
        static_window_blocks=window_blocks,
        max_documents=64,
    )
    if name == "flash3" and importlib.util.find_spec("dew_flash_attn") is None:
        pytest.skip("no wheel of FlashAttention-3")
    if call.compute_capability != "9.0" and name != "banded":
        pytest.skip(f"the kernels are for 9.0, this is {call.compute_capability}")
    form = choose_attention(name, call).function
    seen = sight(documents(kind), jnp.int32(window_blocks), BLOCK)
    *qkv, do = jax.random.normal(jax.random.key(0), (4, *call.shape_BTHK), jnp.bfloat16)
    got = value_and_gradients(form, qkv, do, seen)
    want = value_and_gradients(attention, [x.astype(jnp.float32) for x in qkv], do, seen)
    for name_of, a, b in zip(("o", "dq", "dk", "dv"), got, want, strict=True):
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < 0.02, f"{name_of}: {error:.4f}"


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("tokens", [TOKENS, 101])
def test_qk_norm(tokens, width):
    """Also with an odd length, whose tiles are single tokens."""
    call = QkNormCall(width, jnp.dtype(jnp.bfloat16), *mesh.accelerator(mesh.make_mesh(1)))
    if call.compute_capability != "9.0":
        pytest.skip(f"the kernels are for 9.0, this is {call.compute_capability}")
    qk, dy = jax.random.normal(jax.random.key(0), (2, 2, 1, tokens, HEADS, width), jnp.bfloat16)
    angles = nn.rotary_angles(tokens, width)

    def run(form, *qk: jax.Array) -> list[np.ndarray]:
        y, pull = jax.vjp(lambda *qk: form(*qk, angles), *qk)
        dx = pull(tuple(g.astype(qk[0].dtype) for g in dy))
        return [np.asarray(x, np.float32) for x in (*y, *dx)]

    got = run(choose_qk_norm("triton", call).function, *qk)
    want = run(qk_norm, *(x.astype(jnp.float32) for x in qk))
    for name_of, a, b in zip(("q", "k", "dq", "dk"), got, want, strict=True):
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < 0.004, f"{name_of}: {error:.4f}"


@pytest.mark.parametrize(
    ("fp8", "most"), [(None, 0.01), (cross_entropy_gpu.RECORD21, 0.1)], ids=["bf16", "fp8"]
)
@pytest.mark.parametrize("num_chunks", [1, 4])
def test_the_head(fp8, most, num_chunks):
    kx, kw, kt = jax.random.split(jax.random.key(0), 3)
    x_ND = jax.random.normal(kx, (4096, 768), jnp.bfloat16)
    head_VD = 0.02 * jax.random.normal(kw, (50304, 768))
    targets_N = jax.random.randint(kt, (4096,), 0, 50257)
    form = partial(cross_entropy_gpu.summed_cross_entropy, fp8=fp8, num_chunks=num_chunks)

    def slow(x_ND: jax.Array, head_VD: jax.Array) -> jax.Array:
        return cross_entropy(x_ND.astype(jnp.float32), head_VD, targets_N, cap=15.0).sum()

    def fast(x_ND: jax.Array, head_VD: jax.Array) -> jax.Array:
        return form(x_ND, head_VD, targets_N, cap=15.0)

    (got, got_grads), (want, want_grads) = (
        jax.jit(jax.value_and_grad(f, (0, 1)))(x_ND, head_VD) for f in (fast, slow)
    )
    np.testing.assert_allclose(got, want, rtol=2e-3)
    for a, b in zip(got_grads, want_grads, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.linalg.norm(a - b) / np.linalg.norm(b) < most
