"""Which form of an operation runs where, and the reason that is logged."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from speedrun.base.errors import UsageError
from speedrun.science.kernels import attention_triton, mlp_mosaic
from speedrun.science.kernels.cross_entropy import as_cap
from speedrun.science.kernels.dispatch import (
    AttentionCall,
    Choice,
    HeadCall,
    Kernels,
    LookupCall,
    MlpCall,
    QkNormCall,
    choose_attention,
    choose_head,
    lookup_impl,
    mlp_impl,
    qk_norm_impl,
)

F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
CPU: dict[str, Any] = {"platform": "cpu", "compute_capability": "", "dtype": F32}
SHORT = {**CPU, "shape_BTHK": (2, 256, 2, 16)}
#: Of each operation on an H100: its call, and calls that differ, with the form that runs and a part of its reason.
ATTENTION = AttentionCall((1, 49_152, 6, 128), 128, BF16, "gpu", "9.0", window_tokens=14 * 128)
QK_NORM, MLP = QkNormCall(128, BF16, "gpu", "9.0"), MlpCall(49_152, 768, 3072, BF16, "gpu", "9.0")
HEAD = HeadCall(49_152, 50_304, BF16, "gpu", "9.0", None, as_cap(15.0))
CASES: list[tuple[Callable[[Any], Any], Any, list[tuple[dict[str, Any], str, str]]]] = [
    (partial(choose_attention, "auto"), ATTENTION, [
        ({}, "triton", "first of triton, banded, definition that can run here"),
        ({"shape_BTHK": (1, 49_153, 6, 128)}, "banded", "not triton: sequences of 49,153 tokens"),
        ({"compute_capability": "7.5"}, "banded", "7.5; the kernels need an A100 (gpu 8.0), L40S"),
        ({"platform": "rocm"}, "banded", "not triton: this is a rocm 9.0; the"),
        (CPU, "banded", "49,152 tokens, windows of at most 1,792"),
        (SHORT, "definition", "256 tokens"),
        ({**CPU, "shape_BTHK": (2, 1792, 2, 16)}, "definition", "too little to skip"),
        ({**SHORT, "window_tokens": 128}, "banded", "windows of at most 128"),
        ({**CPU, "window_tokens": 999 * 128}, "banded", "not definition: its scores take 54 GiB"),
    ]),
    (qk_norm_impl, QK_NORM, [
        ({}, "triton", "one pass"),
        ({"compute_capability": "7.5"}, "definition", "not triton: this is a gpu 7.5"),
        ({"dtype": F32}, "definition", "float32 inputs"),
        ({"head_dim": 96}, "definition", "heads of 96 dimensions"),
        (CPU, "definition", "this is a cpu"),
    ]),
    (lookup_impl, LookupCall(49_152, 768, BF16, "gpu", "9.0"), [
        ({}, "triton", "tiles of equal ids"),
        ({"num_tokens": 100}, "definition", "not triton: 100 tokens; the kernel needs a multiple of 64"),
        ({"model_dim": 192}, "definition", "192 dimensions; the kernel needs a multiple of 128"),
        ({"dtype": F32}, "definition", "float32 inputs"),
        (CPU, "definition", "this is a cpu"),
    ]),
    (mlp_impl, MLP, [
        ({}, "mosaic", ""),
        ({"platform": "cpu"}, "definition", "this is a cpu 9.0"),
        ({"compute_capability": "8.0"}, "definition", "this is a gpu 8.0"),
        ({"num_tokens": 100}, "definition", "100 tokens; the kernels need a multiple of 128"),
        ({"model_dim": 192}, "definition", "192 dimensions; the kernels need a multiple of 128"),
        ({"mlp_dim": 640}, "definition", "an MLP of 640; the kernels need a multiple of 256"),
        ({"dtype": F32}, "definition", "float32 inputs; the kernels need bfloat16"),
    ]),
    (choose_head, HEAD, [
        ({"num_tokens": 98_304}, "bfloat16", "98,304 tokens in 2 chunks; mosaic's passes"),
        ({"num_tokens": 98_307}, "bfloat16", "in 3 chunks; XLA's passes: "),
        ({"chunk_tokens": 12_288}, "bfloat16", "in 4 chunks"),
        ({"chunk_tokens": 12_288, "cap": as_cap(math.inf)}, "uncapped", "in 16 chunks"),
        ({"compute_capability": "8.0"}, "bfloat16", "XLA's passes: this is a gpu 8.0"),
        # A chunk of so few tokens fits no tile, whatever their number in all.
        ({"chunk_tokens": 96}, "bfloat16", "XLA's passes: 96 tokens in a chunk; the kernels need a multiple of 64"),
        ({"num_tokens": 49_153}, "bfloat16", "XLA's passes: 3781 tokens in a chunk"),
        ({"num_columns": 50_257}, "bfloat16", "XLA's passes: 50257 columns"),
        ({"dtype": F32}, "float32", "XLA's passes: float32 logits; the kernels need bfloat16"),
        (CPU, "chunks", "cpu"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("choose", "call", "name", "reason"),
    [(one, call._replace(**changes), *want) for one, call, cases in CASES for changes, *want in cases],
)
def test_the_first_form_that_can_run_is_chosen_and_says_why(choose, call, name, reason):
    choice = choose(call)
    assert choice.name == name
    assert reason in choice.reason


def bound(choice: Choice) -> dict[str, Any]:
    assert isinstance(choice.function, partial)
    return choice.function.keywords


def test_a_form_is_bound_to_what_its_reason_says():
    ampere = {"compute_capability": "8.0"}
    assert bound(choose_attention("banded", ATTENTION)) == {"window_tokens": 14 * 128}
    found = bound(choose_attention("auto", ATTENTION._replace(**ampere)))
    assert found == {"tiling": attention_triton.AMPERE}
    two, one = (bound(choose_head(HEAD._replace(**own))) for own in ({"num_tokens": 98_304}, ampere))
    assert (two["num_chunks"], one["num_chunks"], two["passes"] is one["passes"]) == (2, 1, False)
    assert bound(mlp_impl(MLP._replace(rounds_gradients=True))) == {"fused": mlp_mosaic.FUSED}


def test_scores_of_attention_have_a_limit_and_a_form_that_cannot_run_is_refused():
    most = ATTENTION._replace(**CPU, shape_BTHK=(1, 2**15, 1, 16))  # scores of exactly 4 GiB
    assert choose_attention("definition", most).name == "definition"
    with pytest.raises(UsageError, match="its scores take 4 GiB"):
        choose_attention("definition", most._replace(shape_BTHK=(1, 2**15 + 1, 1, 16)))
    for name, said in (("triton", "a cpu.*float32"), ("band", "did you mean 'banded'")):
        with pytest.raises(UsageError, match=said):
            choose_attention(name, most)


def test_the_choices_of_a_program_are_kept_where_another_ones_trace_could_be_taken():

    @partial(jax.jit, static_argnums=0)
    def head(kernels: Kernels, *args: jax.Array) -> jax.Array:
        return kernels.summed_cross_entropy(*args, cap=15.0, fp8=None)

    x_ND, head_VD, targets_N = jnp.ones((8, 4)), jnp.ones((16, 4)), jnp.zeros(8, jnp.int32)
    for kernels in (Kernels("cpu", ""), Kernels("cpu", "")):
        head(kernels, x_ND, head_VD, targets_N)
        assert [one.name for one in kernels.choices.values()] == ["chunks"]
