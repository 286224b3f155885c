"""Kernels against their definitions in float32, values and gradients: at full size on a GPU with
`SPEEDRUN_TEST_PLATFORM=gpu pytest tests/science/test_gpu.py`, else what a CPU runs, tiny.

Legend: B batch, T time, H heads, K head width, N tokens, D model, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speedrun.base import mesh as meshes
from speedrun.base.errors import UsageError
from speedrun.data import synthetic
from speedrun.recipes.record89 import model as record89
from speedrun.recipes.record89.normuon_and_adam import polar_express
from speedrun.recipes.record92 import anvil
from speedrun.science import nn
from speedrun.science.kernels import (
    attention_triton,
    cross_entropy_gpu,
    dispatch,
    lookup_triton,
    qk_norm_triton,
)
from speedrun.science.kernels import cross_entropy_mosaic as mosaic
from speedrun.science.kernels.attention import attention, first_key
from speedrun.science.kernels.cross_entropy import Targets, as_cap, single_targets, weighted_cross_entropy
from speedrun.science.kernels.mlp import mlp
from speedrun.science.kernels.qk_norm import qk_norm
from speedrun.science.optim.orthogonal import orthogonalize

PLATFORM, CAPABILITY = meshes.accelerator(meshes.make_mesh(1))
ON_GPU = PLATFORM == "gpu"
DTYPE = jnp.dtype(jnp.float32 if PLATFORM == "cpu" else jnp.bfloat16)  #: of attention and its norms
_LOSS = 2e-3  #: allowed error of a sum over tokens, whose roundings cancel
Results = dict[str, jax.Array]


class Size(NamedTuple):
    """Of the inputs."""

    tokens: int
    heads: int
    head_dim: int
    block_tokens: int
    windows: tuple[int, ...]
    model_dim: int
    mlp_dim: int
    vocab_size: int


FULL = Size(2048, 6, 128, 128, (1, 2, 7, 16), 768, 3072, 50304)
RECORD92 = FULL._replace(head_dim=64, mlp_dim=2816, vocab_size=14_336)  # narrow heads, and sampled columns
SIZES = (FULL, RECORD92) if ON_GPU else (Size(64, 2, 32, 16, (1, 2, 4), 64, 256, 256),)


_Case = tuple[str, Callable[..., Results], Callable[..., Results], tuple[Any, ...], float]


def _attention(name: str, size: Size) -> Iterator[_Case]:
    interpreted = name == "triton" and PLATFORM == "cpu"
    shape_BTHK = (1, size.tokens, size.heads, size.head_dim)
    ids = synthetic.imitated(size.tokens, vocab_size=2, document_token=1, seed=0)
    short_T = np.random.default_rng(0).random(size.tokens) < 0.02  # and one-token documents
    short_T[size.tokens // 20 : size.tokens // 15] = True
    documents = {"one document": ids * 0, "FineWeb's lengths": ids == 1, "short documents": short_T}
    for window_blocks, (kind, opens_T) in product(size.windows, documents.items()):
        call = dispatch.AttentionCall(
            shape_BTHK, size.head_dim, DTYPE, PLATFORM, CAPABILITY, window_blocks * size.block_tokens
        )
        form = _interpreted if interpreted else dispatch.choose_attention(name, call).function
        seen = first_key(jnp.asarray(np.cumsum(opens_T))[None], jnp.int32(window_blocks), size.block_tokens)
        *qkv, do = jax.random.normal(jax.random.key(0), (4, *shape_BTHK), DTYPE)

        def results(form: Callable[..., Any], do: jax.Array, seen: Any, *qkv: jax.Array) -> Results:
            o_BTHK, pull = jax.vjp(lambda *qkv: form(*qkv, seen, scale=0.12), *qkv)
            return dict(zip(("o", "dq", "dk", "dv"), (o_BTHK, *pull(do.astype(o_BTHK.dtype))), strict=True))

        case = f"{name}, window of {window_blocks} blocks, {kind}"
        yield case, partial(results, form), partial(results, attention), (do, seen, *qkv), 0.02
        if name == "triton":
            both = partial(results, _with_norm(form, interpreted)), partial(results, _after_norm)
            yield f"{case}, after QK-norm", *both, (do, seen, *qkv), 0.02


def _with_norm(form: Callable[..., Any], interpreted: bool) -> Callable[..., Any]:
    """Return attention with QK-norm and rotary inside its kernels."""

    def call(q: jax.Array, k: jax.Array, *args: Any, **settings: Any) -> jax.Array:
        normed = qk_norm_triton.normed(k, _angles(q), interpret=interpreted)
        return form(q, k, *args, normed=normed, **settings)

    return call


def _after_norm(q: jax.Array, k: jax.Array, *args: Any, **settings: Any) -> jax.Array:
    return attention(*qk_norm(q, k, _angles(q)), *args, **settings)


def _angles(q_BTHK: jax.Array) -> Any:
    return nn.rotary_angles(q_BTHK.shape[1], q_BTHK.shape[3])


_TILES = attention_triton.Tiles(queries=16, keys=16, num_warps=4, num_stages=2)
_TILING = attention_triton.Tiling(_TILES, _TILES, _TILES)
_interpreted = partial(attention_triton.attention, tiling=_TILING, interpret=True)


def _qk_norm(name: str, size: Size) -> Iterator[_Case]:
    for tokens in (size.tokens, size.tokens // 2 - 3):  # an odd length has tiles of single tokens
        call = dispatch.QkNormCall(size.head_dim, DTYPE, PLATFORM, CAPABILITY)
        fast = partial(qk_norm_triton.qk_norm, interpret=True)
        fast = fast if PLATFORM == "cpu" else dispatch.qk_norm_impl(call).function
        qk, dy = jax.random.normal(jax.random.key(0), (2, 2, 1, tokens, size.heads, size.head_dim), DTYPE)
        angles = tuple(0.36 * a for a in nn.rotary_angles(tokens, size.head_dim))  # with record 89's length

        def results(form: Callable[..., Any], angles: Any, dy: jax.Array, *qk: jax.Array) -> Results:
            y, pull = jax.vjp(lambda *qk: form(*qk, angles), *qk)
            return dict(zip(("q", "k", "dq", "dk"), (*y, *pull(tuple(dy))), strict=True))

        both = partial(results, fast), partial(results, qk_norm)
        yield f"{name}, {tokens} tokens", *both, (angles, dy, *qk), 0.004


def _lookup(name: str, size: Size) -> Iterator[_Case]:
    """Ids with the frequencies of words: the first is an eighth of all."""
    call = dispatch.LookupCall(size.tokens, 2 * size.model_dim, jnp.dtype(jnp.bfloat16), PLATFORM, CAPABILITY)
    interpreted = partial(lookup_triton.row_sums, interpret=True)
    fast = lambda *args: lookup_triton.lookup(*args, interpreted)  # noqa: E731
    fast = fast if PLATFORM == "cpu" else dispatch.lookup_impl(call).function
    for tokens in (size.tokens, 16 * size.tokens):
        ids_N = np.random.default_rng(0).zipf(1.1, 8 * tokens) - 1  # some have 63 bits
        ids_BT = jnp.asarray(ids_N[ids_N < size.vocab_size][:tokens].reshape(2, -1), jnp.int32)
        table_VD = jax.random.normal(jax.random.key(0), (size.vocab_size, call.model_dim), call.dtype)
        dy_BTD = jax.random.normal(jax.random.key(1), (*ids_BT.shape, call.model_dim), call.dtype)

        def results(form: Callable[..., Any], ids: Any, dy: jax.Array, table: jax.Array) -> Results:
            rows, pull = jax.vjp(lambda table: form(table, ids, lookup_triton.order(ids)), table)
            return {"rows": rows, "dtable": pull(dy.astype(rows.dtype))[0]}

        both = partial(results, fast), partial(results, lambda table, ids, _: nn.lookup(table, ids))
        yield f"{name}, {tokens} tokens", *both, (ids_BT, dy_BTD, table_VD), 0.004


MLPS: Mapping[str, Any] = {
    "mlp-bf16": {"factors": "bfloat16"},
    "mlp-fp8": {"factors": "float8_e4m3fn"},
    "mlp-fp8-gradients": {"gradient_scale": 2.0**-6},
}


def _mlp(name: str, size: Size) -> Iterator[_Case]:
    """In 8 bits, products are off by the rounding of each factor: 3 digits."""
    most, how = 0.01 if name == "mlp-bf16" else 0.1, MLPS[name]
    dim, wide = size.model_dim, size.mlp_dim

    def results(form: Callable[..., Any], dy: jax.Array, *given: jax.Array) -> Results:
        y, pull = jax.vjp(form, *given)
        return dict(zip(("y", "dx", "dup", "ddown"), (y, *pull(dy)), strict=True))

    for tokens in (size.tokens, 8 * size.tokens):
        on = jnp.dtype(jnp.bfloat16), PLATFORM, CAPABILITY
        call = dispatch.MlpCall(tokens, dim, wide, *on, rounds_gradients="gradient_scale" in how)
        if (choice := dispatch.mlp_impl(call)).name != "mosaic":
            raise UsageError(f"no kernel of the MLP can run: {choice.reason}")
        shapes = (tokens, dim), (tokens, dim), (wide, dim), (dim, wide)
        drawn = (jax.random.normal(jax.random.key(i), shape, call.dtype) for i, shape in enumerate(shapes))
        dy, x, *weights = drawn
        weights = [w / dim**0.5 for w in weights]  # gradients of 8 bits are clipped at 896
        fast = partial(results, partial(choice.function, **how))
        yield f"{name}, {tokens} tokens", fast, partial(results, mlp), (dy, nn.rms_norm(x), *weights), most


def _head(name: str, size: Size) -> Iterator[_Case]:
    """Compare one target of each token, as in record 21, and four, some equal or missing, as in record 89."""
    scales, most = (None, None), 0.01
    if name == "head-fp8":
        later = cross_entropy_gpu.RECORD92 if size == RECORD92 else cross_entropy_gpu.RECORD89
        scales, most = (cross_entropy_gpu.RECORD21, later), 0.1
    kx, kw, kt = jax.random.split(jax.random.key(0), 3)
    x_ND = jax.random.normal(kx, (2 * size.tokens, size.model_dim), jnp.bfloat16)
    head_VD = 0.02 * jax.random.normal(kw, (size.vocab_size, size.model_dim))
    ids_N4 = jax.random.randint(kt, (len(x_ND), 4), 0, size.vocab_size).at[::3, 3].set(-1)
    ids_N4 = ids_N4.at[::5, 1].set(ids_N4[::5, 0])
    weights_N4 = jnp.where(ids_N4 < 0, 0.0, jnp.array([1.0, 0.5, 0.25, 0.25]))
    four = Targets(ids_N4, weights_N4, jnp.full(len(x_ND), 2.0))
    kinds = zip((as_cap(15.0), record89.CAP), scales, (single_targets(ids_N4[:, 0]), four), strict=True)
    passes = {"XLA's passes": cross_entropy_gpu.PASSES}
    if (PLATFORM, CAPABILITY) == ("gpu", "9.0"):
        passes["mosaic's passes"] = mosaic.PASSES

    def results(form: Callable[..., Any], targets: Targets, x_ND: jax.Array, head_VD: jax.Array) -> Results:
        loss, grads = jax.value_and_grad(lambda *args: form(*args, targets).weighted, (0, 1))(x_ND, head_VD)
        return dict(zip(("loss", "dx", "dhead"), (loss, *grads), strict=True))

    for (cap, fp8, targets), by, num_chunks in product(kinds, passes, (1, 4)):
        chunk = len(x_ND) // num_chunks, len(head_VD), x_ND.dtype
        if passes[by] is mosaic.PASSES and mosaic.unsupported_reasons(*chunk):
            continue
        fast = partial(
            cross_entropy_gpu.weighted_cross_entropy,
            cap=cap,
            fp8=fp8,
            num_chunks=num_chunks,
            passes=passes[by],
        )
        yield (
            f"{name}, {targets.ids_NM.shape[1]} targets, {num_chunks} chunks, {by}",
            partial(results, fast),
            partial(results, partial(weighted_cross_entropy, cap=cap)),
            (targets, x_ND, head_VD),
            most,
        )


def _wide(tree: Any) -> Any:
    """Cast bfloat16 leaves to float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)


def wrong(fast: Callable[..., Results], definition: Callable[..., Results], args: Any, most: float) -> dict:
    """Relative errors, by norm, that are not within `most`; one that is no number is none."""
    got = jax.jit(fast)(*args)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(definition)(*(_wide(x) for x in args))
    found = {}
    for key in want:
        a, b = (np.asarray(x, np.float64) for x in (got[key], want[key]))
        error = float(np.linalg.norm(a - b) / np.linalg.norm(b))
        if not error < (_LOSS if key == "loss" else most):
            found[key] = error
    return found


KERNELS = {
    **dict.fromkeys(("triton", "banded"), _attention),
    "qk-norm": _qk_norm,
    "lookup": _lookup,
    **dict.fromkeys(MLPS, _mlp),
    **dict.fromkeys(("head-bf16", "head-fp8"), _head),
}
#: Those of which a CPU runs less in other tests. It interprets a kernel as slowly as it compiles one.
QUICK = {"head-fp8", "banded"}


@pytest.mark.parametrize(
    "name",
    [name if ON_GPU or name in QUICK else pytest.param(name, marks=pytest.mark.compile) for name in KERNELS],
)
def test_a_kernel_agrees_with_its_definition(name):
    try:
        cases = [case for size in SIZES for case in KERNELS[name](name, size)]
    except UsageError as error:
        pytest.skip(str(error))
    assert len(cases) >= 2
    for case, fast, definition, args, most in cases:
        assert not wrong(fast, definition, args, most), case


#: Of records 21 (and Muon of the ladder), 89 and 92.
ORTHOGONAL = {"muon": partial(orthogonalize, steps=5), "polar": polar_express, "anvil": anvil.orthogonal}


def hard_matrices(m: int, n: int) -> np.ndarray:
    """Of rank one, exactly and nearly. Some have equal entries, whose roundings add up."""
    rng = np.random.default_rng(m + n)
    kinds: list[Callable[[int], np.ndarray]] = [
        np.ones,
        lambda k: rng.choice([-1.0, 1.0], k),
        lambda k: rng.choice(rng.uniform(0.5, 2, 3), k),
        lambda k: rng.normal(size=k),
        lambda k: rng.normal(size=k) * (rng.random(k) < 0.2),
    ]
    exact = np.stack([np.outer(u(m), v(n)) for u, v in product(kinds, kinds) for _ in range(4)])
    exact /= np.linalg.norm(exact, axis=(1, 2), keepdims=True)
    noisy = exact[-8:] + np.geomspace(1e-4, 0.1, 8)[:, None, None] * rng.normal(size=(8, m, n)) / np.sqrt(
        m * n
    )
    return np.concatenate([exact, noisy, 1e4 * exact, 1e38 * exact[-1:], 1e-38 * exact[-1:], 0 * exact[-1:]])


@pytest.mark.parametrize("name", ORTHOGONAL)
@pytest.mark.parametrize("shape", [(256, 768), (768, 768), (768, 2816)])
def test_no_orthogonalisation_explodes_in_16_bits(name, shape):
    """As the first gradients of a run nearly are: all tokens agree on one direction."""
    iterate = jax.jit(partial(ORTHOGONAL[name], dtype="bfloat16"))
    g_Kmn = jnp.asarray(hard_matrices(*(side if ON_GPU else side // 16 for side in shape)), jnp.float32)
    found = np.asarray(iterate(g_Kmn), np.float32)
    assert np.isfinite(found).all()
    assert np.linalg.norm(found, 2, axis=(1, 2)).max() < 1.25
    assert not found[-1].any()
