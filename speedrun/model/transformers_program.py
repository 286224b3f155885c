"""A folder for transformers of any architecture: weights, programs of JAX, and the module that runs them."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speedrun.model.decode import lengths
from speedrun.model.exported import named_arrays
from speedrun.model.incremental import DecodingKernels
from speedrun.model.weights import Trained

_MODULE = Path(__file__).parent / "transformers_module" / "modeling_speedrun.py"


def parts(trained: Trained) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, bytes]]:
    """Return the weights, `config.json` and the other files. Programs compute in float32, on CPUs or GPUs of NVIDIA."""
    recipe, inputs = trained.program.recipe.override({"compute_dtype": "float32"}), trained.inputs
    config, vocab_size, kernels = recipe.config, trained.track.data.vocab_size, DecodingKernels()
    named, document_token = named_arrays(trained), trained.track.data.document_token

    def logits(weights: list[jax.Array], tokens_T: jax.Array) -> jax.Array:
        params = dict(zip(named, weights, strict=True))
        read = recipe.read(params, tokens_T[None])
        x_TD = recipe.forward(read, tokens_T[None], inputs, config, kernels)[0]
        return recipe.logits(params, x_TD, inputs, config)[:, :vocab_size]

    forms = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in named.values()]
    export = jax.export.export(jax.jit(logits), platforms=("cpu", "cuda"))
    files = {_MODULE.name: _MODULE.read_bytes()}
    for length in lengths(recipe.eval_seq_len):
        program = export(forms, jax.ShapeDtypeStruct((length,), jnp.int32))
        files[f"logits-{length}.jax"] = bytes(program.serialize())
    # PyTorch has no dots in the names of parameters.
    there = {name.replace(".", "-"): x for name, x in named.items()}
    about = {
        "model_type": "speedrun",
        "architectures": ["SpeedrunForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{_MODULE.stem}.SpeedrunConfig",
            "AutoModelForCausalLM": f"{_MODULE.stem}.SpeedrunForCausalLM",
        },
        "vocab_size": vocab_size,
        "shapes": {name: x.shape for name, x in there.items()},
        "lengths": lengths(recipe.eval_seq_len),
        "use_cache": False,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), document_token),
    }
    return there, about, files
