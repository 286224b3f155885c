"""The loss head with several weighted targets and a shifted cap: each form against record 89's formulas in float64.

The golden file units2026.npz has loss and gradients by record 89's own code.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import golden_files
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from speedrun.base.errors import UsageError
from speedrun.base.mesh import DATA, make_mesh
from speedrun.science.kernels import cross_entropy as head
from speedrun.science.kernels import cross_entropy_gpu as gpu
from speedrun.science.kernels.cross_entropy import Cap, Losses, Targets, weighted_cross_entropy
from speedrun.science.kernels.dispatch import Kernels

CAP = Cap(height=11.5, unit=15.0, shift=5.0)
WEIGHTS = np.array([1.0, 0.5, 0.25, 0.25], np.float32)
PREFIX = 3  #: the column of prefixes
FORMS: dict[str, Callable[..., Losses]] = {
    "definition": weighted_cross_entropy,
    "cpu": head.weighted_on_cpu,
    "gpu": gpu.weighted_cross_entropy,
    "gpu in chunks": partial(gpu.weighted_cross_entropy, num_chunks=4),
}
RULES = ["recipe", "exact"]


def ahead(next_N: np.ndarray, prefix_N: np.ndarray) -> np.ndarray:
    """The next three tokens and the prefix of the next one; -1 if there is none."""
    longer_N = np.concatenate([next_N, [-1, -1]])
    return np.stack([next_N, longer_N[1:-1], longer_N[2:], prefix_N], axis=1).astype(np.int32)


def weighted_targets(ids_NM: jax.Array, weights_M: jax.Array) -> Targets:
    """Return targets with one weight for each column, and the derivative as gradient."""
    weights_NM = jnp.where(ids_NM >= 0, weights_M[None, :], 0.0)
    return Targets(ids_NM, weights_NM, jnp.sum(weights_NM, axis=1))


def targets_of(ids_NM: np.ndarray, weights_M: Any, rule: str) -> Targets:
    """Record 89 also counts weights beyond the last token, but only those of existing prefixes."""
    targets = weighted_targets(jnp.asarray(ids_NM), jnp.asarray(weights_M, jnp.float32))
    if rule == "exact":
        return targets
    has_prefix_N = jnp.asarray(ids_NM[:, PREFIX] >= 0)
    softmax_N = jnp.sum(weights_M[:PREFIX]) + jnp.where(has_prefix_N, weights_M[PREFIX], 0.0)
    return targets._replace(softmax_N=softmax_N)


class Oracle:
    """Losses and gradients by the formulas of record 89, 23 sigmoid((z + 5) / 7.5), in float64."""

    def __init__(self, ids_NM: np.ndarray, weights_M: np.ndarray, rule: str) -> None:
        self.ids_NM, self.weights_M, self.rule = ids_NM, weights_M.astype(np.float64), rule

    def nll_N(self, z_NV: np.ndarray, weights_M: np.ndarray) -> np.ndarray:
        capped_NV = 23 / (1 + np.exp(-(z_NV + 5) / 7.5))
        lse_N = np.log(np.exp(capped_NV).sum(1))
        nll_NM = lse_N[:, None] - np.take_along_axis(capped_NV, np.maximum(self.ids_NM, 0), axis=1)
        return np.where(self.ids_NM >= 0, nll_NM, 0.0) @ weights_M

    def dz_NV(self, z_NV: np.ndarray) -> np.ndarray:
        s_NV = 1 / (1 + np.exp(-(z_NV + 5) / 7.5))
        p_NV = np.exp(23 * s_NV) / np.exp(23 * s_NV).sum(1, keepdims=True)
        dz_NV = np.zeros_like(z_NV)
        for n, ids_M in enumerate(self.ids_NM):
            for m, (i, w) in enumerate(zip(ids_M, self.weights_M, strict=True)):
                if i >= 0:
                    dz_NV[n, i] -= w
                if i >= 0 or (self.rule == "recipe" and m != PREFIX):
                    dz_NV[n] += w * p_NV[n]
        return 23 / 7.5 * s_NV * (1 - s_NV) * dz_NV


def inputs(num_tokens: int = 24, vocab_size: int = 33) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States and weights with logits far into the cap, and targets of which some coincide or are missing."""
    rng = np.random.default_rng(0)
    x_ND, head_VD = rng.normal(size=(num_tokens, 12)), 2 * rng.normal(size=(vocab_size, 12))
    next_N, prefix_N = rng.integers(0, vocab_size, (2, num_tokens))
    prefix_N[::3] = -1
    next_N[4], prefix_N[4] = next_N[3], next_N[3]
    next_N[7], prefix_N[7] = vocab_size - 1, -1  # -1 as an index is the last column
    next_N[5] = 0
    return x_ND.astype(np.float32), head_VD.astype(np.float32), ahead(next_N, prefix_N)


def differentiate(form: Callable[..., Losses], *args: Any, scale: float = 1.0, cap: Cap = CAP) -> Any:
    """Losses, and gradients of `scale` times the weighted one."""

    def loss(x_ND: jax.Array, head_VD: jax.Array, targets: Targets) -> tuple[jax.Array, Losses]:
        losses = form(x_ND, head_VD, targets, cap=cap)
        return scale * losses.weighted, losses

    (_, losses), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*args)
    return losses, grads


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_form_computes_the_formulas(form, rule):
    x_ND, head_VD, ids_NM = inputs()
    oracle = Oracle(ids_NM, WEIGHTS, rule)
    targets = targets_of(ids_NM, WEIGHTS, rule)
    losses, (dx_ND, dhead_VD) = differentiate(form, x_ND, head_VD, targets, scale=0.25)
    x, w = x_ND.astype(np.float64), head_VD.astype(np.float64)
    np.testing.assert_allclose(losses.weighted, oracle.nll_N(x @ w.T, oracle.weights_M).sum(), rtol=2e-6)
    np.testing.assert_allclose(losses.first, oracle.nll_N(x @ w.T, np.eye(4)[0]).sum(), rtol=2e-6)
    dz_NV = 0.25 * oracle.dz_NV(x @ w.T)
    np.testing.assert_allclose(dx_ND, dz_NV @ w, atol=2e-5)
    np.testing.assert_allclose(dhead_VD, dz_NV.T @ x, atol=2e-5)
    value = form(x_ND, head_VD, targets, cap=CAP)  # without a derivative
    np.testing.assert_allclose(value, losses, rtol=1e-6)


@pytest.fixture(scope="module")
def units() -> Mapping[str, np.ndarray]:
    arrays = golden_files.arrays("units2026.npz")
    return {name.removeprefix("loss/"): x for name, x in arrays.items() if name.startswith("loss/")}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", FORMS, ids=FORMS)
def test_record_89s_own_code_agrees(form, rule, units):
    """The states are logits before the cap, and the head is the identity."""
    z_NV, weights_M = units["logits"], np.append(units["mtp"], units["prefix_weight"]).astype(np.float32)
    ids_NM = ahead(units["targets"], units["prefix_targets"])
    head_VV = np.eye(z_NV.shape[1], dtype=np.float32)
    run = partial(FORMS[form], num_chunks=5) if form == "gpu in chunks" else FORMS[form]
    losses, (dz_NV, _) = differentiate(run, z_NV, head_VV, targets_of(ids_NM, weights_M, rule))
    np.testing.assert_allclose(losses.weighted, units["per_token"].sum(dtype=np.float64), rtol=1e-6)
    np.testing.assert_allclose(dz_NV, units[f"grad_{rule}"], atol=1e-6)
    for n, want in enumerate(units["per_token"]):
        one = targets_of(ids_NM[n : n + 1], weights_M, rule)
        got = FORMS[form.removesuffix(" in chunks")](z_NV[n : n + 1], head_VV, one, cap=CAP)
        np.testing.assert_allclose(got.weighted, want, rtol=2e-6)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_loss_for_logs_has_no_gradient_and_skips_what_is_missing(form):
    x_ND, head_VD, ids_NM = inputs()
    ids_NM[5, 0] = -1
    targets = targets_of(ids_NM, WEIGHTS, "recipe")
    first, grads = jax.value_and_grad(lambda *a: form(*a, targets, cap=CAP).first, (0, 1))(x_ND, head_VD)
    z_NV = x_ND.astype(np.float64) @ head_VD.T
    want = Oracle(ids_NM, WEIGHTS, "exact").nll_N(z_NV, np.eye(4)[0]).sum()
    np.testing.assert_allclose(first, want, rtol=2e-6)
    assert not any(np.any(g) for g in grads)


@pytest.mark.parametrize("num_tokens", [1, head.CHUNK_TOKENS + 1])
def test_numbers_of_tokens_do_not_matter(num_tokens):
    x_ND, head_VD, ids_NM = inputs(num_tokens + 8)
    x_ND, ids_NM = x_ND[8:], ids_NM[8:]
    args = x_ND, head_VD, targets_of(ids_NM, WEIGHTS, "recipe")
    want, want_grads = differentiate(weighted_cross_entropy, *args)
    for form in (head.weighted_on_cpu, partial(gpu.weighted_cross_entropy, num_chunks=num_tokens)):
        got, grads = differentiate(form, *args)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        for a, b in zip(grads, want_grads, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_form_runs_inside_shard_map(form):
    """Each device has four of the tokens, and scheduled weights that all devices share."""
    x_ND, head_VD, ids_NM = inputs(32)

    def local(x_ND: jax.Array, head_VD: jax.Array, ids_NM: jax.Array, weights_M: jax.Array) -> jax.Array:
        head_VD = jax.lax.pcast(head_VD, DATA, to="varying")
        targets = weighted_targets(ids_NM, weights_M)._replace(softmax_N=jnp.full(4, jnp.sum(weights_M)))
        return jax.lax.psum(differentiate(form, x_ND, head_VD, targets)[1][1], DATA)

    specs = P(DATA), P(), P(DATA), P()
    got = jax.jit(jax.shard_map(local, mesh=make_mesh(8), in_specs=specs, out_specs=P()))
    targets = weighted_targets(jnp.asarray(ids_NM), jnp.asarray(WEIGHTS))
    targets = targets._replace(softmax_N=jnp.full(32, 2.0))
    _, (_, want) = differentiate(weighted_cross_entropy, x_ND, head_VD, targets)
    np.testing.assert_allclose(got(x_ND, head_VD, ids_NM, WEIGHTS), want, atol=5e-5)


class TestNarrowFactors:
    """Products of 8 and 16 bits on the same bf16 inputs."""

    fp8 = staticmethod(partial(gpu.weighted_cross_entropy, fp8=gpu.RECORD89))

    @pytest.mark.parametrize(("num_chunks", "head_dtype"), [(1, jnp.bfloat16), (3, jnp.float32)])
    @pytest.mark.parametrize(
        ("fp8", "loss_error", "grad_error"),
        [
            # bf16 has 8 significant bits: relative errors of logits and gradients are up to 2^-9.
            (None, 1e-4, 0.006),
            # e4m3 has 3 mantissa bits: errors up to 2^-4, 2.6 % on average, in both factors. e5m2 has 2: 5.2 % on
            # average. The sum in quadrature is 6.4 %.
            (gpu.RECORD89, 3e-3, 0.08),
        ],
        ids=["bf16", "fp8"],
    )
    def test_errors_are_those_of_the_rounding(self, fp8, loss_error, grad_error, num_chunks, head_dtype):
        x_ND, head_VD, ids_NM = self.rounded()
        targets = targets_of(ids_NM, WEIGHTS, "recipe")
        form = partial(gpu.weighted_cross_entropy, fp8=fp8, num_chunks=num_chunks)
        got, got_grads = differentiate(form, x_ND, head_VD.astype(head_dtype), targets, scale=1 / 64)
        wide = (a.astype(jnp.float32) for a in (x_ND, head_VD))
        want, want_grads = differentiate(weighted_cross_entropy, *wide, targets, scale=1 / 64)
        assert [g.dtype for g in got_grads] == [jnp.bfloat16, head_dtype]
        keeps_precision = (got_grads[1].astype(jnp.bfloat16).astype(head_dtype) != got_grads[1]).any()
        assert keeps_precision == (head_dtype == jnp.float32)
        np.testing.assert_allclose(got, want, rtol=loss_error)
        for a, b in zip(got_grads, want_grads, strict=True):
            a, b = (np.asarray(g, np.float64) for g in (a, b))
            assert np.linalg.norm(a - b) < grad_error * np.linalg.norm(b)

    def rounded(self) -> tuple[jax.Array, jax.Array, np.ndarray]:
        x_ND, head_VD, ids_NM = inputs(93, 500)
        return jnp.asarray(x_ND, jnp.bfloat16), jnp.asarray(head_VD / 8, jnp.bfloat16), ids_NM

    def test_scales_are_not_rounded_to_the_dtype_of_the_states(self):
        """In bfloat16, 4.48 becomes 4.47, so all states would be too small. Reference: ml_dtypes."""
        x_ND, head_VD, ids_NM = self.rounded()
        targets = targets_of(ids_NM, WEIGHTS, "recipe")
        _, (_, got) = differentiate(self.fp8, x_ND, head_VD.astype(jnp.float32), targets)
        x, w = (np.asarray(a, np.float32) for a in (x_ND, head_VD))
        x = (x * np.float32(4.48)).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / 4.48
        w = (w * np.float32(280)).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / 280
        z_NV = x @ w.T
        dz_NV = Oracle(ids_NM, WEIGHTS, "recipe").dz_NV(z_NV)
        unit = 0.75 / 448
        dz_NV = (dz_NV / unit).astype(ml_dtypes.float8_e5m2).astype(np.float64) * unit
        want = dz_NV.T @ x
        size = np.sum(np.asarray(got, np.float64) * want) / np.sum(want * want)
        np.testing.assert_allclose(size, 1, atol=1e-3)

    def test_what_is_out_of_range_is_clipped(self):
        x_ND, head_VD, ids_NM = self.rounded()
        huge = x_ND.at[0, 0].set(1e4), head_VD.at[0, 0].set(-1e4)
        losses, grads = differentiate(self.fp8, *huge, targets_of(ids_NM, 1e3 * WEIGHTS, "recipe"))
        assert all(np.isfinite(np.asarray(a, np.float32)).all() for a in (*losses, *grads))


class TestChoice:
    """The operation as a model calls it."""

    def test_every_call_is_computed_and_kept(self):
        x, w, ids_NM = inputs()
        x_ND, head_VD = jnp.asarray(x), jnp.asarray(w / 8)  # within the limits of 8 bits
        targets, kernels = targets_of(ids_NM, WEIGHTS, "recipe"), Kernels("cpu", "")
        for fp8 in (None, gpu.RECORD89):
            losses = kernels.weighted_cross_entropy(x_ND, head_VD, targets, cap=CAP, fp8=fp8)
            want = weighted_cross_entropy(x_ND, head_VD, targets, cap=CAP)
            np.testing.assert_allclose(losses, want, rtol=0.01)
        assert {call: choice.name for call, choice in kernels.choices.items()} == {
            "head 24x12 float32, 33 columns, 4 targets": "chunks",
            "head 24x12 fp8, 33 columns, 4 targets": "fp8",
        }

    def test_several_targets_without_a_cap(self):
        x_ND, head_VD, ids_NM = (jnp.asarray(a) for a in inputs())
        targets, kernels = weighted_targets(ids_NM, jnp.asarray(WEIGHTS)), Kernels("cpu", "")
        losses = kernels.weighted_cross_entropy(x_ND, head_VD, targets, cap=float("inf"), fp8=None)
        nll_NV = -jax.nn.log_softmax(x_ND @ head_VD.T)
        nll_NM = jnp.where(ids_NM >= 0, jnp.take_along_axis(nll_NV, jnp.maximum(ids_NM, 0), axis=1), 0.0)
        np.testing.assert_allclose(losses, (np.sum(nll_NM @ WEIGHTS), np.sum(nll_NM[:, 0])), rtol=1e-5)
        with pytest.raises(UsageError, match="FP8 products only with a logit cap"):
            kernels.weighted_cross_entropy(x_ND, head_VD, targets, cap=float("inf"), fp8=gpu.RECORD89)
