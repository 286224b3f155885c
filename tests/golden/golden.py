"""Golden values for the record-21 recipe: what an independent implementation of the same algorithm computed.

Each `record21_*.npz` beside this file holds the outcome of a short run in float32 on one CPU device: a tiny
model of the record-21 architecture (12 layers, so that every wiring rule occurs), trained for a few steps on a
synthetic token stream. The numbers were produced by an independent implementation in another framework.

Arrays in a file
    config            JSON: model_dim, num_heads, head_dim, vocab_size (= rows of every table and of the head),
                      num_layers, seq_len (tokens of one step, one sequence), steps, seed, document_token
    tokens            uint16 [steps * seq_len + 1]; step s reads tokens[s*seq_len : (s+1)*seq_len + 1]
    windows_tokens    int [steps]; the long window of each step, in tokens (a multiple of 128)
    losses            float64 [steps]; mean nats per token of each step, BEFORE its update
    grad0_norm/NAME   Frobenius norm of the first step's gradient of parameter NAME
    grad0_probe/NAME  16 entries of it: flat[:: max(1, size // 16)][:16]
    final_norm/NAME, final_probe/NAME   the same of the parameter after the last update

RMS norms use epsilon 1.19e-7 (float32), Newton-Schulz 1e-7. How the run differs from the full recipe: everything is
float32 (no bfloat16, no FP8 head; Newton-Schulz in float32 as well), weights start from `initial_parameters` below
instead of the recipe's own initialiser (so that no path is hidden behind a zero), the schedules use steps as the
total number of steps, and the token that opens a document is 0. Learning rates, betas, momentum warm-up over 300
steps, cooldown and window growth are the recipe's.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

ATTENTION_FREE_LAYER = 7


def parameter_shapes(
    model_dim: int, num_heads: int, head_dim: int, vocab_size: int, num_layers: int
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters, in the order in which `initial_parameters` draws them.

    Matrices are stored [out, in]; `qkv` is [3, heads*head_dim, model_dim] in the order query, key, value.
    `lambdas` of a block are (residual, embedding shortcut); `value_lambdas` are (own value, value embedding).
    """
    inner = num_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in sorted(range(num_layers), key=str):  # "0", "1", "10", "11", "2", ... : drawing order only
        block = f"block.{layer}"
        if layer != ATTENTION_FREE_LAYER:
            shapes[f"{block}.attn_out"] = (model_dim, inner)
            shapes[f"{block}.value_lambdas"] = (2,)
            shapes[f"{block}.qkv"] = (3, inner, model_dim)
        shapes[f"{block}.lambdas"] = (2,)
        shapes[f"{block}.mlp_up"] = (4 * model_dim, model_dim)
        shapes[f"{block}.mlp_down"] = (model_dim, 4 * model_dim)
    shapes["embed"] = (vocab_size, model_dim)
    shapes["head"] = (vocab_size, model_dim)
    shapes["skips"] = (num_layers // 2,)  # entry i: what layer num_layers//2 + i takes from the stack
    for table in range(3):
        shapes[f"value_embed.{table}"] = (vocab_size, model_dim)
    return shapes


def initial_parameters(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Float32 starting values of the golden runs: normal draws, scaled; scalars near the recipe's own start."""
    sizes = {k: config[k] for k in ("model_dim", "num_heads", "head_dim", "vocab_size", "num_layers")}
    start = {"lambdas": (1.0, 0.0), "value_lambdas": (0.5, 0.5)}
    rng = np.random.default_rng(config["seed"])
    params = {}
    for name, shape in parameter_shapes(**sizes).items():
        z = rng.standard_normal(shape).astype(np.float32)
        if len(shape) >= 2:
            scale = 1.0 if "embed" in name else 0.5 / np.sqrt(shape[-1])
            params[name] = (z * np.float32(scale)).astype(np.float32)
        else:
            base = np.ones(shape) if name == "skips" else np.array(start[name.rsplit(".", 1)[1]])
            params[name] = (base + 0.1 * z).astype(np.float32)
    return params
