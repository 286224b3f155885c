"""Choose the implementation of each operation while a program is traced, and record the choice with its reason.

Legend: B batch, T time, H heads, K head width.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from speedrun.base.errors import UsageError, unknown
from speedrun.science import nn
from speedrun.science.kernels import (
    attention_banded,
    attention_triton,
    cross_entropy,
    lookup_triton,
    mlp_gradients,
)
from speedrun.science.kernels import cross_entropy_gpu as gpu
from speedrun.science.kernels import mlp as mlps
from speedrun.science.kernels import qk_norm_triton as fused
from speedrun.science.kernels.attention import Window, attention
from speedrun.science.kernels.cross_entropy import Cap, Losses, Targets, as_cap, single_targets
from speedrun.science.kernels.cross_entropy_gpu import Fp8, Passes
from speedrun.science.kernels.qk_norm import Angles, qk_norm

#: Limit for the scores of the definition; its backward pass keeps about three such arrays.
MOST_SCORE_BYTES = 4 * 2**30
#: Tokens per chunk of logits on a GPU: 4.9 GB in 16 bits with the GPT-2 vocabulary.
HEAD_TOKENS = 49_152
#: GPUs by compute capability that Mosaic's kernels run on, and those that Triton's run on.
_HOPPER = MappingProxyType({"9.0": "H100 or H200"})
_TRITON = MappingProxyType({"8.0": "A100", "8.9": "L40S or 4090", **_HOPPER, "10.0": "B200"})


class Choice(NamedTuple):
    """An implementation that can run, with the signature of the definition, or of that in 8 bits."""

    name: str
    function: Callable[..., Any]
    reason: str


#: table [V, D] -> rows [B, T, D]
Lookup = Callable[[jax.Array], jax.Array]


class Implementation(NamedTuple):
    """A way to compute an operation. Implementations differ from the definition only by rounding."""

    unsupported_reasons: Callable[[Any], list[str]]  #: call -> all reasons why the implementation cannot run
    bind: Callable[[Any], Callable[..., Any]]  #: call -> function with the signature of the definition


class AttentionCall(NamedTuple):
    """Static facts of a call of attention."""

    shape_BTHK: tuple[int, ...]  #: of queries and keys, on one device
    value_dim: int  #: of a head
    dtype: jnp.dtype
    platform: str  #: as JAX names it: cpu, gpu
    compute_capability: str  #: of an NVIDIA GPU, such as 9.0; empty elsewhere
    window_tokens: int  #: upper bound of the keys that a query sees


class QkNormCall(NamedTuple):
    """Static facts of a call of QK-norm and rotary."""

    head_dim: int
    dtype: jnp.dtype
    platform: str
    compute_capability: str


class MlpCall(NamedTuple):
    """Static facts of a call of the MLP."""

    num_tokens: int  #: on one device
    model_dim: int
    mlp_dim: int
    dtype: jnp.dtype  #: of the states
    platform: str
    compute_capability: str
    rounds_gradients: bool = False  #: to 8 bits, as the factors


class LookupCall(NamedTuple):
    """Static facts of a lookup in a table, and of the sums of its gradient."""

    num_tokens: int  #: on one device
    model_dim: int
    dtype: jnp.dtype
    platform: str
    compute_capability: str


class HeadCall(NamedTuple):
    """Static facts of a call of the loss head."""

    num_tokens: int  #: on one device
    num_columns: int
    dtype: jnp.dtype
    platform: str
    compute_capability: str
    fp8: Fp8 | None
    cap: Cap
    chunk_tokens: int = HEAD_TOKENS  #: most tokens whose logits exist at a time


def _definition_reasons(call: AttentionCall) -> list[str]:
    rows, tokens, heads, _ = call.shape_BTHK
    need = 4 * rows * heads * tokens**2
    too_much = f"its scores take {need / 2**30:.0f} GiB; it needs {MOST_SCORE_BYTES / 2**30:.0f} GiB or less"
    return [too_much] if need > MOST_SCORE_BYTES else []


def _platform_reasons(call: Any, cards: Mapping[str, str] = _HOPPER) -> list[str]:
    if call.platform == "gpu" and call.compute_capability in cards:
        return []
    here = f"{call.platform} {call.compute_capability}".strip()
    need = ", ".join(f"{name} (gpu {capability})" for capability, name in cards.items())
    return [f"this is a {here}; the kernels need an {need}"]


def _triton_reasons(call: AttentionCall | QkNormCall | LookupCall) -> list[str]:
    other = [] if call.dtype == jnp.bfloat16 else [f"{call.dtype} inputs; the kernels need bfloat16"]
    return _platform_reasons(call, _TRITON) + other


def _size_reasons(call: AttentionCall) -> list[str]:
    _, num_tokens, _, head_dim = call.shape_BTHK
    return attention_triton.unsupported_reasons(num_tokens, head_dim, call.value_dim)


def _bind_triton(call: AttentionCall) -> Callable[..., jax.Array]:
    tiling = attention_triton.AMPERE if call.compute_capability[0] == "8" else attention_triton.HOPPER
    return partial(attention_triton.attention, tiling=tiling)


ATTENTION: Mapping[str, Implementation] = MappingProxyType(
    {
        "definition": Implementation(_definition_reasons, lambda _: attention),
        "banded": Implementation(
            lambda _: [], lambda call: partial(attention_banded.attention, window_tokens=call.window_tokens)
        ),
        "triton": Implementation(lambda call: _triton_reasons(call) + _size_reasons(call), _bind_triton),
    }
)


def qk_norm_impl(call: QkNormCall) -> Choice:
    """Return the implementation that reads and writes each number once where it can run, else the definition."""
    if reasons := _triton_reasons(call) + fused.unsupported_reasons(call.head_dim):
        return Choice("definition", qk_norm, f"not triton: {', '.join(reasons)}")
    return Choice("triton", fused.qk_norm, "one pass")


def lookup_impl(call: LookupCall) -> Choice:
    """Return the implementation that sums gradients in tiles where it can run, else the definition."""
    if reasons := _triton_reasons(call) + lookup_triton.unsupported_reasons(*call[:2]):
        return Choice("definition", lambda *args: nn.lookup(*args[:2]), f"not triton: {', '.join(reasons)}")
    return Choice("triton", lookup_triton.lookup, "gradients summed in tiles of equal ids")


def mlp_impl(call: MlpCall) -> Choice:
    """Return the implementation with activations inside products where it can run, else the definition."""
    if not (reasons := _platform_reasons(call)):
        # Importing Mosaic takes a third of a start.
        from speedrun.science.kernels import mlp_mosaic

        if not (reasons := mlp_mosaic.unsupported_reasons(*call[:4])):
            rounding = partial(mlp_gradients.mlp, fused=mlp_mosaic.FUSED)
            form = rounding if call.rounds_gradients else mlp_mosaic.mlp
            return Choice("mosaic", form, "activations inside products")
    form = mlp_gradients.mlp if call.rounds_gradients else mlps.mlp
    return Choice("definition", form, f"not mosaic: {', '.join(reasons)}")


def passes_of(call: HeadCall) -> tuple[Passes, str]:
    """Return the fastest passes over the logits that can run, and a description."""
    if not (reasons := _platform_reasons(call)):
        from speedrun.science.kernels import cross_entropy_mosaic as mosaic

        if not (reasons := mosaic.unsupported_reasons(call.num_tokens, call.num_columns, call.dtype)):
            return mosaic.PASSES, "mosaic's passes"
    return gpu.PASSES, f"XLA's passes: {', '.join(reasons)}"


def choose_attention(wanted: str, call: AttentionCall) -> Choice:
    """Return the wanted implementation, or for "auto" the first that can run; raise UsageError if there is none."""
    tokens = call.shape_BTHK[1]
    if call.platform != "cpu":
        order = ["triton", "banded", "definition"]
        why = f"first of {', '.join(order)} that can run here"
    elif call.window_tokens <= tokens // 2:
        order, why = ["banded"], f"{tokens:,} tokens, windows of at most {call.window_tokens:,}"
    else:
        order = ["definition", "banded"]
        why = f"{tokens:,} tokens, windows of up to {call.window_tokens:,}: too little to skip"
    if wanted != "auto":
        if wanted not in ATTENTION:
            raise unknown("implementation of attention", wanted, ["auto", *ATTENTION])
        if reasons := "; ".join(ATTENTION[wanted].unsupported_reasons(call)):
            hint = "or let 'auto' choose another"
            raise UsageError(f"attention implementation {wanted!r} cannot run: {reasons}; {hint}")
        return Choice(wanted, ATTENTION[wanted].bind(call), "asked for")
    reasons = {name: ATTENTION[name].unsupported_reasons(call) for name in order}
    name = next(name for name in order if not reasons[name])
    skipped = [f"not {other}: {', '.join(reasons[other])}" for other in order[: order.index(name)]]
    return Choice(name, ATTENTION[name].bind(call), "; ".join([why, *skipped]))


def choose_head(call: HeadCall) -> Choice:
    """Return how the loss head is computed: plain without a cap, the CPU's on a CPU without FP8, else the GPU's.

    Raise UsageError for FP8 without a cap. Devices without FP8 units emulate FP8.
    """
    num_tokens, fp8, is_cpu = call.num_tokens, call.fp8, call.platform == "cpu"
    if math.isinf(call.cap.height):
        if fp8 is not None:
            raise UsageError("the head has FP8 products only with a logit cap; set a cap or no FP8")
        most = cross_entropy.CHUNK_TOKENS if is_cpu else call.chunk_tokens // 4
        chunks = cross_entropy.min_chunks(num_tokens, most)
        plain = partial(cross_entropy.weighted_uncapped, num_chunks=chunks)
        return Choice("uncapped", plain, f"logits without a cap, {num_tokens:,} tokens in {chunks} chunks")
    if is_cpu and fp8 is None:
        return Choice("chunks", cross_entropy.weighted_on_cpu, "cpu: a chunk of logits stays in its cache")
    num_chunks = cross_entropy.min_chunks(num_tokens, call.chunk_tokens)
    passes, by = passes_of(call._replace(num_tokens=num_tokens // num_chunks))
    head = partial(gpu.weighted_cross_entropy, fp8=fp8, num_chunks=num_chunks, passes=passes)
    reason = f"{call.platform}, {num_tokens:,} tokens in {num_chunks} chunks; {by}"
    return Choice(str(call.dtype) if fp8 is None else "fp8", head, reason)


@dataclass(frozen=True, eq=False)  # no two are equal: `jit` would take the trace of another program's kernels
class Kernels:
    """The operations of one program. Tracing a call chooses an implementation, and adds it to `choices`."""

    platform: str  #: as JAX names it
    compute_capability: str  #: of an NVIDIA GPU; empty elsewhere
    wanted_attention: str = "auto"
    head_tokens: int = HEAD_TOKENS  #: most tokens whose logits exist at a time
    choices: dict[str, Choice] = field(default_factory=dict)  #: by operation and shape

    def attention(
        self,
        q_BTHK: jax.Array,
        k_BTHK: jax.Array,
        v_BTHK: jax.Array,
        first_BT: jax.Array,
        /,
        *,
        scale: float,
        window: Window,
        block_tokens: int,
        angles: Angles | None = None,
    ) -> jax.Array:
        """Compute `kernels.attention`, after `qk_norm` by the angles; `first_BT` is `first_key` of this window."""
        call = AttentionCall(q_BTHK.shape, v_BTHK.shape[-1], *self._on(q_BTHK), window.most * block_tokens)
        kind = "fixed" if isinstance(window.blocks, int) else "traced"
        what = f"attention {_spec(q_BTHK)}, {kind} window of {window.most} blocks"
        choice = self._chosen(what, choose_attention(self.wanted_attention, call))
        more: dict[str, Any] = {"scale": scale}
        if angles is not None and choice.name == "triton":
            more["normed"] = fused.normed(k_BTHK, angles)
        elif angles is not None:
            q_BTHK, k_BTHK = self.qk_norm(q_BTHK, k_BTHK, angles)
        with jax.named_scope("attention"):
            return choice.function(q_BTHK, k_BTHK, v_BTHK, first_BT, **more)

    def qk_norm(self, q_BTHK: jax.Array, k_BTHK: jax.Array, angles: Angles) -> tuple[jax.Array, jax.Array]:
        """Apply the RMS norm per head, then rotary, to queries and keys. See `kernels.qk_norm`."""
        call = QkNormCall(q_BTHK.shape[3], *self._on(q_BTHK))
        choice = self._chosen(f"qk_norm {_spec(q_BTHK)}", qk_norm_impl(call))
        return choice.function(q_BTHK, k_BTHK, angles)

    def lookup(self, ids_BT: jax.Array, by_id: lookup_triton.Order | None = None) -> Lookup:
        """Return a function that computes `nn.lookup` of a table, for ids that it has. Tables share a sort of ids."""
        sorted_ids = by_id or lookup_triton.order(ids_BT)

        def rows_of(table_VD: jax.Array) -> jax.Array:
            call = LookupCall(ids_BT.size, table_VD.shape[1], *self._on(table_VD))
            choice = self._chosen(f"lookup of {ids_BT.size} in {_spec(table_VD)}", lookup_impl(call))
            return choice.function(table_VD, ids_BT, sorted_ids)

        return rows_of

    def mlp(
        self,
        x_D: jax.Array,
        up_FD: jax.Array,
        down_DF: jax.Array,
        *,
        factors: mlps.Factors = "float32",
        gradient_scale: float = 0.0,
    ) -> jax.Array:
        """Apply the MLP with a squared ReLU to states [..., D]. See `kernels.mlp`.

        With a `gradient_scale` above 0 and factors of 8 bits, gradients have 8 bits. See `kernels.mlp_gradients`.
        """
        num_tokens, (mlp_dim, model_dim) = math.prod(x_D.shape[:-1]), up_FD.shape
        has_eight = jnp.finfo(factors).bits == 8
        rounds = has_eight and gradient_scale > 0
        call = MlpCall(num_tokens, model_dim, mlp_dim, *self._on(x_D), rounds)
        kind = f"{factors if has_eight else x_D.dtype}{', gradients float8_e5m2' * rounds}"
        choice = self._chosen(f"mlp {num_tokens}x{model_dim}x{mlp_dim} {kind}", mlp_impl(call))
        how = {"gradient_scale": gradient_scale} if rounds else {"factors": factors}
        with jax.named_scope("mlp"):
            return choice.function(x_D, up_FD, down_DF, **how)

    def summed_cross_entropy(
        self, x_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array, *, cap: float, fp8: Fp8 | None
    ) -> jax.Array:
        """Return the loss summed over all tokens: f32 [], nats."""
        targets = single_targets(targets_N)
        return self.weighted_cross_entropy(x_ND, head_VD, targets, cap=cap, fp8=fp8).weighted

    def weighted_cross_entropy(
        self, x_ND: jax.Array, head_VD: jax.Array, targets: Targets, *, cap: float | Cap, fp8: Fp8 | None
    ) -> Losses:
        """Return the losses of all tokens and targets. See `kernels.cross_entropy`."""
        num_columns, num_targets = len(head_VD), targets.ids_NM.shape[1]
        call = HeadCall(len(x_ND), num_columns, *self._on(x_ND), fp8, as_cap(cap), self.head_tokens)
        many = f", {num_targets} targets" if num_targets > 1 else ""
        what = f"head {_spec(x_ND, None if fp8 is None else 'fp8')}, {num_columns} columns{many}"
        choice = self._chosen(what, choose_head(call))
        with jax.named_scope("loss_head"):
            return choice.function(x_ND, head_VD, targets, cap=call.cap)

    def _on(self, x: jax.Array) -> tuple[jnp.dtype, str, str]:
        """Return the fields of any call that say where it runs, and on which dtype."""
        return x.dtype, self.platform, self.compute_capability

    def _chosen(self, what: str, choice: Choice) -> Choice:
        """Record and return the choice for a call."""
        self.choices[what] = choice
        return choice


def _spec(x: jax.Array, dtype: str | None = None) -> str:
    return f"{'x'.join(map(str, x.shape))} {dtype or x.dtype}"
