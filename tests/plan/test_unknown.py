"""A plan of what nobody here wrote, against the program that eight H100 would run: recipe, optimiser, sampled loss."""

from dataclasses import dataclass
from typing import Any

import anatomy
import deviceless
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from speedrun.science.params import Params, ParamSpec, gaussian
from speedrun.science.recipe import Batch, Loss, Recipe, Stage
from speedrun.train.program import Program


@dataclass(frozen=True, slots=True)
class Sizes:
    vocab_size: int = 8192
    depth: int = 4
    width: int = 512
    inner: int = 2048


def table(sizes: Sizes) -> dict[str, ParamSpec]:
    def matrix(*shape: int) -> ParamSpec:
        return ParamSpec(shape, ("out", "in"), gaussian(0.02), "thing")

    layer = {"wqkv": (3 * sizes.width, sizes.width), "wo": (sizes.width, sizes.width)}
    layer |= {"gate": (sizes.inner, sizes.width), "value": (sizes.inner, sizes.width)}
    layer |= {"project": (sizes.width, sizes.inner)}
    specs = {f"{i}/{name}": matrix(*shape) for i in range(sizes.depth) for name, shape in layer.items()}
    return specs | {"words": matrix(sizes.vocab_size, sizes.width)}


def normal(x: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def forward(p: Params, tokens: jax.Array, inputs: Any, sizes: Sizes, kernels: Any) -> jax.Array:
    """Softmax attention of JAX and a GEGLU: no kernel of this package."""
    x = p["words"][tokens]
    for i in range(sizes.depth):
        qkv = (normal(x) @ p[f"{i}/wqkv"].T).reshape(*tokens.shape, 3, 4, -1)
        attended = jax.nn.dot_product_attention(*jnp.unstack(qkv, axis=2), is_causal=True)
        x += attended.reshape(x.shape) @ p[f"{i}/wo"].T
        h = normal(x)
        x += (jax.nn.gelu(h @ p[f"{i}/gate"].T) * (h @ p[f"{i}/value"].T)) @ p[f"{i}/project"].T
    return normal(x)


def logits(p: Params, x: jax.Array, inputs: Any, sizes: Sizes) -> jax.Array:
    return (x @ p["words"].T).astype(jnp.float32)


def loss(p: Params, batch: Batch, inputs: Any, sizes: Sizes, kernels: Any, forward: Any) -> Loss:
    """Cross entropy at a quarter of the positions, drawn anew in each step."""
    x = forward(p, batch.tokens_BT, inputs, sizes, kernels).reshape(-1, sizes.width)
    drawn = jax.random.randint(jax.random.key(inputs["draw"]), (len(x) // 4,), 0, len(x))
    z = logits(p, x[drawn], inputs, sizes)
    nll = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(z, batch.targets_BT.ravel()[drawn]))
    return Loss(nll, nll, batch.carry)


class Yogi:
    def transform(self, layout: Any) -> optax.GradientTransformationExtraArgs:
        parts = optax.clip(1.0), optax.scale_by_yogi(), optax.add_decayed_weights(0.1), optax.scale(-0.01)
        return optax.with_extra_args_support(optax.chain(*parts))


class Draws:
    def at(self, step: int, num_steps: int) -> dict[str, Any]:
        return {"draw": np.int32(step)}


STRANGER = Recipe(
    name="stranger",
    summary="of nobody here",
    parent=None,
    revision=1,
    config=Sizes(),
    table=table,
    forward=forward,
    logits=logits,
    loss=loss,
    optimizer=Yogi(),
    schedule=Draws(),
    stages=(Stage(num_steps=4, num_sequences=64, seq_len=1024),),
    eval_sequences=64,
    eval_seq_len=1024,
    compute_dtype="bfloat16",
)


@pytest.mark.compile
def test_a_plan_counts_what_nobody_here_wrote(h100):
    program = Program(STRANGER, h100(8))
    _, time, memory = anatomy.prices(deviceless.compiled_step(program, 0), program, 0)
    assert time == pytest.approx(1, abs=0.06)
    assert memory == pytest.approx(1, abs=0.1)
