"""gpt2: record 1 of 2024-05-28, GPT-2 trained by llm.c with AdamW. The bottom of the ladder.

Claim: none yet; not run at full size. Published: 45 minutes on 8xH100, and 3.2722 in 19,560 steps, in a log of
2024-10-13.
Differs: tokens in their order (llm.c shuffles them); gains and biases are float32 in the forward pass, too.
Run: speedrun run --track main-8xh100 --recipe gpt2
Credits: A. Karpathy and the contributors of llm.c.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from speedrun.base.limits import Momentum, Positive, Rate
from speedrun.base.mesh import DATA
from speedrun.science.models.gpt2 import Config, forward, logits, loss, table
from speedrun.science.optim.groups import by_group, in_float32, scale_by_input
from speedrun.science.optim.schedules import Schedule
from speedrun.science.params import Layout
from speedrun.science.recipe import Recipe, Stage


def clip_by_global_norm(most: float, layout: Layout) -> optax.GradientTransformation:
    """Scale all gradients together so that the norm over all parameters and devices is at most `most`.

    Call `update` inside `shard_map`: a device has the gradients of its own shard.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        sharded = {name: grad for name, grad in updates.items() if DATA in layout.specs[name]}
        repeated = {name: grad for name, grad in updates.items() if name not in sharded}
        own, rest = (optax.tree.norm(grads, squared=True) for grads in (sharded, repeated))
        scale = jnp.minimum(1, most * jax.lax.rsqrt(jax.lax.psum(own, DATA) + rest))
        return jax.tree.map(lambda grad: scale * grad, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


@dataclass(frozen=True, slots=True)
class AdamW:
    """Adam with decoupled decay of matrices and tables, and with clipped gradients. Learning rates are peak values."""

    matrix_lr: Rate
    other_lr: Rate
    beta1: Momentum
    beta2: Momentum
    eps: Positive
    weight_decay: Rate  #: a step shrinks weights by the factor 1 - lr * lr_scale * weight_decay
    clip_norm: Positive

    def transform(self, layout: Layout) -> optax.GradientTransformationExtraArgs:
        """Return the transformation of packed parameters."""
        adam = in_float32(optax.scale_by_adam(self.beta1, self.beta2, self.eps))
        decayed = optax.chain(adam, optax.add_decayed_weights(self.weight_decay))
        matrix, other = optax.scale(-self.matrix_lr), optax.scale(-self.other_lr)
        groups = {
            "matrix": optax.chain(decayed, matrix),
            "head": optax.chain(decayed, other),
            "embed": optax.chain(decayed, other),
            "vector": optax.chain(adam, other),
        }
        clip = clip_by_global_norm(self.clip_norm, layout)
        return optax.chain(clip, by_group(groups, layout), scale_by_input("lr_scale"))


RECIPE = Recipe(
    name="gpt2",
    summary="12 layers, 124M parameters, 10.3B tokens: llm.c's GPT-2, record 1",
    parent=None,
    revision=1,
    config=Config(
        vocab_size=50257,
        max_positions=1024,
        num_layers=12,
        model_dim=768,
        num_heads=12,
        head_dim=64,
        mlp_dim=3072,
    ),
    table=table,
    forward=forward,
    logits=logits,
    loss=loss,
    optimizer=AdamW(
        matrix_lr=0.0006,
        other_lr=0.0006,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        clip_norm=1.0,
    ),
    schedule=Schedule(cooldown_fraction=1.0, cooldown="cosine", warmup_steps=700),
    stages=(Stage(num_steps=19_560, num_sequences=512, seq_len=1024),),
    eval_sequences=512,
    eval_seq_len=1024,
    compute_dtype="bfloat16",
)
