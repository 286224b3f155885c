"""What tests of the ladder's rungs share: a rung at laptop size, its first losses, and pieces of models in NumPy.

The pieces are in float64 and follow the papers; each test puts the model of its rung together from them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speedrun.science import recipes
from speedrun.science.inputs import Inputs
from speedrun.science.kernels.choose import Kernels
from speedrun.science.params import Params
from speedrun.science.recipe import IDENTITY, Recipe, Stage

#: Sizes of the configs; a config has only some of them.
SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "head_size": 256,
    "max_positions": 64,
    "num_layers": 2,
    "model_dim": 64,
    "num_heads": 2,
    "head_dim": 32,
    "mlp_dim": 128,
    "table_dtype": "float32",
    "document_token": 0,
    "block_tokens": 16,
}


def small(name: str, *, schedule: Any = None, **config: Any) -> Recipe:
    """Return a rung at laptop size, in float32; with another schedule if one is given."""
    recipe = recipes.load(name)
    fields = {field.name for field in dataclasses.fields(recipe.config)}
    sizes = {key: value for key, value in SMALL.items() if key in fields} | config
    return dataclasses.replace(
        recipe,
        config=dataclasses.replace(recipe.config, **sizes),
        schedule=schedule or recipe.schedule,
        stages=(Stage(4, 8, 64),),
        eval_sequences=8,
        eval_seq_len=64,
        compute_dtype="float32",
    )


def numbers(recipe: Recipe) -> dict[str, Any]:
    """Return everything of a recipe but its names and functions."""
    given = dataclasses.asdict(recipe).items()
    return {key: value for key, value in given if key not in IDENTITY and not callable(value)}


def start(recipe: Recipe, ending: str) -> set[tuple[float, ...]]:
    """Return the initial values of the parameters whose names end so."""
    table = recipe.table(recipe.config)
    specs = [spec for name, spec in table.items() if name.endswith(ending)]
    return {tuple(spec.init(jax.random.key(0), spec.shape).tolist()) for spec in specs}


def random_params(recipe: Recipe) -> dict[str, np.ndarray]:
    """Draw every parameter from a normal, so that none is zero and every path through the model matters."""
    rng = np.random.default_rng(0)
    table = recipe.table(recipe.config)
    return {name: (0.2 * rng.standard_normal(spec.shape)).astype(np.float32) for name, spec in table.items()}


def hidden(recipe: Recipe, params: dict[str, np.ndarray], ids_BT: np.ndarray, **inputs: int) -> np.ndarray:
    """Return the recipe's final hidden states for given scheduled inputs."""

    @jax.jit
    def forward(params: Params, ids_BT: jax.Array) -> jax.Array:
        return recipe.forward(params, ids_BT, Inputs(inputs, {}), recipe.config, Kernels("cpu", ""))

    return np.asarray(forward({name: jnp.asarray(x) for name, x in params.items()}, jnp.asarray(ids_BT)))


def rms(x: np.ndarray) -> np.ndarray:
    """Divide by the root mean square of the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.finfo(np.float32).eps)


def split(x_TD: np.ndarray, num_heads: int) -> np.ndarray:
    """Split into heads: [H, T, K]."""
    return np.moveaxis(x_TD.reshape(len(x_TD), num_heads, -1), 1, 0)


def turn(x_HTK: np.ndarray, f: np.ndarray) -> np.ndarray:
    """Rotate pair i by position times f_i, as a product of complex numbers."""
    u, w = np.split(x_HTK, 2, axis=-1)
    z = (u + 1j * w) * np.exp(-1j * np.arange(x_HTK.shape[1])[:, None] * f)
    return np.concatenate([z.real, z.imag], axis=-1)


def attend(q_HTK: np.ndarray, k_HTK: np.ndarray, v_HTK: np.ndarray, seen_TT: np.ndarray) -> np.ndarray:
    """Return softmax(q k^T / sqrt(K)) v over what is seen, heads side by side: [T, H K]."""
    scores = np.where(seen_TT, q_HTK @ np.swapaxes(k_HTK, 1, 2) / np.sqrt(q_HTK.shape[-1]), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    o_HTK = weights / weights.sum(-1, keepdims=True) @ v_HTK
    return np.moveaxis(o_HTK, 0, 1).reshape(q_HTK.shape[1], -1)


def earlier(num_tokens: int) -> np.ndarray:
    """Return the causal mask."""
    return np.tri(num_tokens, dtype=bool)
