"""The loss head: its choices, its cap, and its traffic on an H100; tests/test_several_targets.py has its values."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from speedrun.plan import deviceless
from speedrun.plan.deviceless import compile_for_target
from speedrun.science.kernels import cross_entropy_gpu as gpu
from speedrun.science.kernels.choose import HeadCall, choose_head
from speedrun.science.kernels.cross_entropy import Losses, as_cap, logits, single_targets, weighted_uncapped

CAP = 15.0


def summed(
    form: Callable[..., Losses], x_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array, *, cap: float
) -> jax.Array:
    """The loss of record 21, by a form."""
    return form(x_ND, head_VD, single_targets(targets_N), cap=as_cap(cap)).weighted


def summed_on_gpu(*args: jax.Array, cap: float, **options: Any) -> jax.Array:
    return summed(partial(gpu.weighted_cross_entropy, **options), *args, cap=cap)


def inputs(num_tokens: int, model_dim: int, vocab_size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return states of unit variance, weights whose logits reach about the cap, and targets."""
    kx, kw, kt = jax.random.split(jax.random.key(0), 3)
    head_VD = 3 / model_dim**0.5 * jax.random.normal(kw, (vocab_size, model_dim))
    targets_N = jax.random.randint(kt, (num_tokens,), 0, vocab_size)
    return jax.random.normal(kx, (num_tokens, model_dim)), head_VD, targets_N


def value_and_grads(form: Callable[..., jax.Array], *args: jax.Array, scale: float = 1.0) -> tuple[Any, Any]:
    """Differentiate `scale` times the sum, so that the incoming gradient matters."""
    return jax.jit(jax.value_and_grad(lambda *a: scale * form(*a, cap=CAP), (0, 1)))(*args)


def rounded(head_dtype: Any, x_dtype: Any = jnp.bfloat16) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return bf16 values in the given dtypes, with an odd number of tokens."""
    x_ND, head_VD, targets_N = inputs(93, 128, 500)
    x_ND, head_VD = (a.astype(jnp.bfloat16) for a in (x_ND, head_VD / 4))
    return x_ND.astype(x_dtype), head_VD.astype(head_dtype), targets_N


def test_gradients_that_arrive_at_products_of_8_bits_may_be_tiny_or_large():
    """8-bit gradients are scaled as those of the sum and multiplied by the incoming gradient later."""
    form = partial(summed_on_gpu, fp8=gpu.RECORD21)
    _, want = value_and_grads(form, *rounded(jnp.float32))
    for scale in (2.0**-30, 2.0**30):
        _, got = value_and_grads(form, *rounded(jnp.float32), scale=scale)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32) / scale, np.asarray(b, np.float32))


def test_only_the_forward_product_sums_fast():
    """Only tensor cores make a difference, so the test reads the requested precision."""
    form = partial(summed_on_gpu, fp8=gpu.RECORD21, cap=CAP)
    text = jax.jit(jax.grad(form, (0, 1))).lower(*rounded(jnp.float32)).as_text()
    assert text.count("precision = [DEFAULT, DEFAULT]") == 1
    assert text.count("precision = [HIGHEST, HIGHEST]") == 2


def test_chunks_that_do_not_come_out_even_are_refused():
    with pytest.raises(ValueError, match="93 tokens cannot be split into 2 equal chunks"):
        summed_on_gpu(*rounded(jnp.float32), cap=CAP, num_chunks=2)


#: One device's part of record 21.
NUM_TOKENS, MODEL_DIM, VOCAB_SIZE = 49_152, 768, 50_304


def dissected(function: Callable[..., Any], mesh: Mesh) -> deviceless.Anatomy:
    """The function of states, head and targets, compiled for an H100."""
    whole = NamedSharding(mesh, P())
    x_ND = jax.ShapeDtypeStruct((NUM_TOKENS, MODEL_DIM), jnp.bfloat16, sharding=whole)
    head_VD = jax.ShapeDtypeStruct((VOCAB_SIZE, MODEL_DIM), jnp.float32, sharding=whole)
    targets_N = jax.ShapeDtypeStruct((NUM_TOKENS,), jnp.int32, sharding=whole)
    return deviceless.dissect(compile_for_target(jax.jit(function), x_ND, head_VD, targets_N))


@pytest.mark.parametrize(
    ("fp8", "num_chunks", "gigabytes", "calls"),
    [
        (None, 1, 31, {"__cublas$lt$matmul": 3}),
        (gpu.RECORD21, 1, 26, {"__cublas$lt$matmul$f8": 3}),
        (gpu.RECORD21, 4, 28, {"__cublas$lt$matmul$f8": 12}),
    ],
)
def test_its_traffic_is_within_the_budget(fp8, num_chunks, gigabytes, calls, h100):
    form = partial(summed_on_gpu, fp8=fp8, num_chunks=num_chunks)
    got = dissected(partial(value_and_grads, form, scale=1 / NUM_TOKENS), h100(1))
    assert got.custom_calls == calls, got
    assert got.traffic_bytes < gigabytes * 1e9, got
    most_bytes = 10.1e9 / num_chunks + 0.3e9
    assert got.memory.temp_size_in_bytes < most_bytes, "logits and their gradient, in bf16"
    chunk = NUM_TOKENS // num_chunks, VOCAB_SIZE
    assert got.holds("bf16", *chunk)
    assert got.holds("f8e5m2", *chunk) == bool(fp8), "the gradient: wide range, few bits"
    assert not got.holds("f32", *chunk)


def test_evaluation_reads_its_logits_once(h100):
    got = dissected(partial(summed_on_gpu, cap=CAP), h100(1))
    assert got.custom_calls == {"__cublas$lt$matmul": 1}
    assert got.traffic_bytes < 11e9, got


@pytest.mark.parametrize(("num_tokens", "num_chunks"), [(1, 1), (49_152, 1), (98_304, 2), (98_307, 3)])
def test_the_head_takes_as_few_chunks_as_fit(num_tokens, num_chunks):
    here = jnp.dtype(jnp.bfloat16), "gpu", "8.0"
    choice = choose_head(HeadCall(num_tokens, 50_304, *here, None, as_cap(CAP)))
    assert isinstance(choice.function, partial)
    assert choice.function.keywords == {"fp8": None, "num_chunks": num_chunks, "passes": gpu.PASSES}
    assert choice.name == "bfloat16"
    assert f"in {num_chunks} chunks" in choice.reason


@pytest.mark.parametrize("cap", [CAP, math.inf])
def test_where_memory_is_scarce_the_head_takes_more_chunks(cap):
    call = HeadCall(49_152, 50_304, jnp.dtype(jnp.bfloat16), "gpu", "8.9", None, as_cap(cap))
    few, many = (choose_head(one).function for one in (call, call._replace(chunk_tokens=12_288)))
    assert isinstance(few, partial)
    assert isinstance(many, partial)
    assert many.keywords["num_chunks"] == 4 * few.keywords["num_chunks"]


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_without_a_cap_it_is_plain_cross_entropy(num_chunks):
    """Against float64 on the host; the gradients are (softmax - one hot) W and (softmax - one hot)^T x."""
    x_ND, head_VD, targets_N = inputs(24, 12, 33)
    choice = choose_head(HeadCall(24, 50_304, jnp.dtype(jnp.float32), "cpu", "", None, as_cap(math.inf)))
    form = partial(summed, partial(choice.function, num_chunks=num_chunks), cap=math.inf)
    nll, (dx_ND, dhead_VD) = jax.value_and_grad(form, (0, 1))(x_ND, head_VD, targets_N)
    x, w = (np.asarray(a, np.float64) for a in (x_ND, head_VD))
    p_NV = np.exp(x @ w.T) / np.exp(x @ w.T).sum(1, keepdims=True)
    rows = np.arange(24), np.asarray(targets_N)
    np.testing.assert_allclose(nll, -np.log(p_NV[rows]).sum(), rtol=1e-6)
    p_NV[rows] -= 1
    np.testing.assert_allclose(dx_ND, p_NV @ w, atol=1e-5)
    np.testing.assert_allclose(dhead_VD, p_NV.T @ x, atol=1e-5)
    np.testing.assert_allclose(logits(x_ND, head_VD, cap=math.inf), x @ w.T, atol=1e-4)


def test_without_a_cap_the_heads_gradient_is_summed_in_float32():
    """One chunk in the middle gives 256, the others 1 each: in 16 bits, 256 + 1 is 256."""
    x_ND, targets_N = jnp.full((64, 1), 2, jnp.bfloat16).at[32].set(512), jnp.zeros(64, jnp.int32)
    form = partial(summed, partial(weighted_uncapped, num_chunks=64), cap=math.inf)
    grad = jax.jit(jax.grad(form, 1))(x_ND, jnp.zeros((2, 1), jnp.bfloat16), targets_N)
    assert grad.tolist() == [[-320.0], [320.0]]  # 319, rounded once
