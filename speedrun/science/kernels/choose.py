"""Choose the form of each operation while a program is traced, and record the choice with its reason.

Legend: B batch, T time, H heads, K head width.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from speedrun.ground.errors import UsageError, unknown
from speedrun.science.kernels import cross_entropy, cross_entropy_gpu, forms
from speedrun.science.kernels.attention import Sight, Window
from speedrun.science.kernels.cross_entropy import Cap, Losses, Targets, as_cap, single_targets
from speedrun.science.kernels.cross_entropy_gpu import Fp8
from speedrun.science.kernels.forms import Choice, Form
from speedrun.science.kernels.mlp import Factors
from speedrun.science.kernels.qk_norm import Angles

FIXED_WINDOW_FORMS = frozenset({"flash3"})  #: of attention: they need one program per window
#: On a CPU the definition is as fast up to this length: 3.3 ms against 3.8 at 256 tokens, 28.5 against 11.3 at 512.
SHORT_TOKENS = 256
#: Room for documents assumes this mean length. With more documents the output is NaN, never silently wrong.
TOKENS_PER_DOCUMENT = 32


def choose_attention(wanted: str, call: forms.AttentionCall) -> Choice:
    """Return the wanted form, or for "auto" the first form in order of preference that can run.

    "auto" never chooses `flash3`, which needs one program per window.

    Raises:
        UsageError: if the name is unknown or the form cannot run; the message lists all reasons.
    """
    tokens = call.shape_BTHK[1]
    if call.platform != "cpu":
        order = ["triton", "banded", "definition"]
        why = f"first of {', '.join(order)} that can run here"
    elif tokens > SHORT_TOKENS and call.window_tokens < tokens:
        order, why = ["banded"], f"{tokens:,} tokens, windows of at most {call.window_tokens:,}"
    else:
        order = ["definition", "banded"]
        why = f"{tokens:,} tokens, windows of up to {call.window_tokens:,}: nothing to skip"
    return _choose("attention", forms.ATTENTION, wanted, order, why, call)


def choose_qk_norm(wanted: str, call: forms.QkNormCall) -> Choice:
    """Return a form from `QK_NORM`, as `choose_attention` does."""
    order, why = ["triton", "definition"], "one pass where it can run"
    return _choose("qk_norm", forms.QK_NORM, wanted, order, why, call)


def _choose(
    operation: str, of: Mapping[str, Form], wanted: str, order: list[str], why: str, call: Any
) -> Choice:
    """Do what `choose_attention` says."""
    if wanted != "auto":
        if wanted not in of:
            raise unknown(f"form of {operation}", wanted, ["auto", *of])
        if reasons := "; ".join(of[wanted].refusals(call)):
            raise UsageError(
                f"{operation} form {wanted!r} cannot run: {reasons}; or let 'auto' choose another"
            )
        return Choice(wanted, of[wanted].bind(call), "asked for")
    refusals = {name: of[name].refusals(call) for name in order}
    name = next(name for name in order if not refusals[name])
    skipped = [f"not {other}: {', '.join(refusals[other])}" for other in order[: order.index(name)]]
    return Choice(name, of[name].bind(call), "; ".join([why, *skipped]))


def choose_head(call: forms.HeadCall) -> Choice:
    """Return the form of the loss head: the plain one without a cap, the CPU's on a CPU without FP8, else the GPU's.

    Devices without FP8 units emulate it.

    Raises:
        UsageError: for FP8 without a cap.
    """
    num_tokens, fp8, is_cpu = call.num_tokens, call.fp8, call.platform == "cpu"
    if math.isinf(call.cap.height):
        if fp8 is not None:
            raise UsageError("the head has FP8 products only with a logit cap; set a cap or no FP8")
        most = cross_entropy.CHUNK_TOKENS if is_cpu else call.chunk_tokens // 4
        chunks = cross_entropy.fewest_chunks(num_tokens, most)
        plain = partial(cross_entropy.weighted_uncapped, num_chunks=chunks)
        return Choice("uncapped", plain, f"logits without a cap, {num_tokens:,} tokens in {chunks} chunks")
    if is_cpu and fp8 is None:
        return Choice("chunks", cross_entropy.weighted_on_cpu, "cpu: a chunk of logits stays in its cache")
    num_chunks = cross_entropy.fewest_chunks(num_tokens, call.chunk_tokens)
    passes, by = forms.passes(call._replace(num_tokens=num_tokens // num_chunks))
    head = partial(cross_entropy_gpu.weighted_cross_entropy, fp8=fp8, num_chunks=num_chunks, passes=passes)
    reason = f"{call.platform}, {num_tokens:,} tokens in {num_chunks} chunks; {by}"
    return Choice(str(call.dtype) if fp8 is None else "fp8", head, reason)


@dataclass(frozen=True, eq=False)  # as an argument of `jit`, no other program's kernels stand for these
class Kernels:
    """The operations of one program. Tracing a call chooses its form and adds the choice to `choices`.

    Only the traced model knows the shapes and dtypes of calls. The choice is a pure function of the call.
    """

    platform: str  #: as JAX names it
    compute_capability: str  #: of an NVIDIA GPU; empty elsewhere
    wanted_attention: str = "auto"
    head_tokens: int = forms.HEAD_TOKENS  #: of which logits exist at one time
    choices: dict[str, Choice] = field(default_factory=dict)  #: by operation and shape

    def attention(
        self,
        q_BTHK: jax.Array,
        k_BTHK: jax.Array,
        v_BTHK: jax.Array,
        sight: Sight,
        /,
        *,
        scale: float,
        window: Window,
        block_tokens: int,
    ) -> jax.Array:
        """Compute `kernels.attention`; `sight` must be made from this `window` and `block_tokens`."""
        rows, tokens, heads, width = q_BTHK.shape
        if isinstance(window.blocks, int) and window.blocks < 1:  # forms disagree about what sees nothing
            raise UsageError(f"attention has a window of {window.blocks} blocks; need at least 1")
        static = window.blocks if isinstance(window.blocks, int) else None
        max_documents = rows * max(64, tokens // TOKENS_PER_DOCUMENT)
        here = (rows, tokens, heads, width), q_BTHK.dtype, self.platform, self.compute_capability
        call = forms.AttentionCall(*here, block_tokens, window.most, static, max_documents)
        choice = choose_attention(self.wanted_attention, call)
        shape, kind = f"{rows}x{tokens}x{heads}x{width}", "traced" if static is None else "fixed"
        self.choices[f"attention {shape} {q_BTHK.dtype}, {kind} window of {window.most} blocks"] = choice
        with jax.named_scope("attention"):
            return choice.function(q_BTHK, k_BTHK, v_BTHK, sight, scale=scale)

    def qk_norm(self, q_BTHK: jax.Array, k_BTHK: jax.Array, angles: Angles) -> tuple[jax.Array, jax.Array]:
        """Apply the RMS norm per head, then rotary, to queries and keys. See `kernels.qk_norm`."""
        call = forms.QkNormCall(q_BTHK.shape[3], q_BTHK.dtype, self.platform, self.compute_capability)
        choice = choose_qk_norm("auto", call)
        self.choices[f"qk_norm {'x'.join(map(str, q_BTHK.shape))} {q_BTHK.dtype}"] = choice
        return choice.function(q_BTHK, k_BTHK, angles)

    def mlp(
        self, x_D: jax.Array, up_FD: jax.Array, down_DF: jax.Array, *, factors: Factors = "float32"
    ) -> jax.Array:
        """Apply the MLP with a squared ReLU to states [..., D]. See `kernels.mlp`."""
        num_tokens, (mlp_dim, model_dim) = math.prod(x_D.shape[:-1]), up_FD.shape
        here = x_D.dtype, self.platform, self.compute_capability
        choice = forms.mlp_form(forms.MlpCall(num_tokens, model_dim, mlp_dim, *here))
        kind = factors if jnp.finfo(factors).bits == 8 else x_D.dtype
        self.choices[f"mlp {num_tokens}x{model_dim}x{mlp_dim} {kind}"] = choice
        with jax.named_scope("mlp"):
            return choice.function(x_D, up_FD, down_DF, factors=factors)

    def summed_cross_entropy(
        self, x_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array, *, cap: float, fp8: Fp8 | None
    ) -> jax.Array:
        """Return the summed loss of all tokens: f32 [], nats."""
        targets = single_targets(targets_N)
        return self.weighted_cross_entropy(x_ND, head_VD, targets, cap=cap, fp8=fp8).weighted

    def weighted_cross_entropy(
        self, x_ND: jax.Array, head_VD: jax.Array, targets: Targets, *, cap: float | Cap, fp8: Fp8 | None
    ) -> Losses:
        """Return the losses of all tokens and targets. See `kernels.cross_entropy`."""
        sizes, capped = (len(x_ND), len(head_VD)), as_cap(cap)
        here = x_ND.dtype, self.platform, self.compute_capability
        choice = choose_head(forms.HeadCall(*sizes, *here, fp8, capped, self.head_tokens))
        factors = x_ND.dtype if fp8 is None else "fp8"
        call = f"head {'x'.join(map(str, x_ND.shape))} {factors}, {len(head_VD)} columns"
        num_targets = targets.ids_NM.shape[1]
        self.choices[call if num_targets == 1 else f"{call}, {num_targets} targets"] = choice
        with jax.named_scope("loss_head"):
            return choice.function(x_ND, head_VD, targets, cap=capped)
