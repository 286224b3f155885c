"""Generation with cached rows of the past, beside the whole forward pass for each token."""

import jax
import jax.numpy as jnp
import numpy as np

from speedrun.bench.timing import Timing, compare
from speedrun.science.params import Params
from speedrun.trained import weights
from speedrun.trained.decode import Decoder, Draw, Texts
from speedrun.training.program import Program


def decoding(program: Program, *, num_tokens: int, num_new: int) -> list[Timing]:
    """Time the last `num_new` tokens of a text of `num_tokens`, with initial weights and greedy draws."""
    recipe, vocab_size = program.recipe, program.recipe.config.vocab_size
    inputs = weights.inputs_at(program, recipe.num_steps)
    params = weights.named(program, program.layout.init(jax.random.key(0)))
    decoder = Decoder(recipe, inputs, params, vocab_size=vocab_size, num_positions=num_tokens)
    prompt = np.arange(num_tokens - num_new, dtype=np.int32) % vocab_size

    def cached(params: Params, texts: Texts, how: Draw) -> jax.Array:
        return decoder.write(params, decoder.model.fixed(params), texts, how, num_new)[1]

    def whole(params: Params, texts: Texts, _: Draw) -> jax.Array:
        def write(texts: Texts, _: None) -> tuple[Texts, None]:
            x_BTD = recipe.forward(params, texts.tokens_PT, inputs, recipe.config, program.kernels)
            z_PV = recipe.logits(params, x_BTD[0][texts.length_P - 1], recipe.config)[:, :vocab_size]
            tokens_PT = texts.tokens_PT.at[0, texts.length_P].set(jnp.argmax(z_PV, axis=1).astype(jnp.int32))
            return texts._replace(tokens_PT=tokens_PT, length_P=texts.length_P + 1), None

        return jax.lax.scan(write, texts, length=num_new)[0].tokens_PT

    return compare({"cached": cached, "whole": whole}, params, decoder.start([prompt]), Draw(temperature=0))
