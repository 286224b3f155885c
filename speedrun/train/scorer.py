"""The scorer: negative log likelihood of targets under a model's logits.

An instrument. A recipe computes hidden states and logits, and never gets a target of a validation.

Legend: N tokens of a chunk, T time, C chunks of a sequence, D model, V vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from speedrun.base.errors import UsageError

#: Limit for the float32 logits of one chunk, by platform. On a CPU they stay in its caches.
CHUNK_BYTES = {"cpu": 64 * 2**20, "gpu": 2 * 2**30}


def nll_sums(
    logits: Callable[[jax.Array], jax.Array],
    x_TD: jax.Array,
    targets_T: jax.Array,
    *,
    vocab_size: int,
    platform: str,
) -> jax.Array:
    """Return the negative log likelihood of a sequence's targets, -log softmax(logits(x))[target], summed in chunks.

    `logits` maps hidden states [N, D] to logits [N, V] of any float dtype, row by row; V is at least `vocab_size`, the
    track's. Targets are i32, each below V. The platform determines the size of a chunk.

    Returns:
        f32 [C], nats; to be summed in float64.

    Raises:
        UsageError: for logits of another shape.
    """
    num_tokens = len(x_TD)
    shape = jax.eval_shape(logits, x_TD).shape
    if len(shape) != 2 or shape[0] != num_tokens or shape[1] < vocab_size:
        need = f"config.vocab_size asks for {vocab_size:,} columns or more"
        raise UsageError(f"its logits are {[*shape]} for {num_tokens:,} hidden states; {need}")
    most = max(1, CHUNK_BYTES[platform] // (4 * shape[1]))
    chunk = next(n for n in range(min(most, num_tokens), 0, -1) if num_tokens % n == 0)

    def nll_sum(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        x_ND, targets_N = part
        z_NV = logits(x_ND).astype(jnp.float32)
        target_N = jnp.take_along_axis(z_NV, targets_N[:, None], axis=1)[:, 0]
        return jnp.sum(jax.nn.logsumexp(z_NV, axis=1) - target_N)

    return jax.lax.map(nll_sum, (x_TD.reshape(-1, chunk, x_TD.shape[1]), targets_T.reshape(-1, chunk)))
