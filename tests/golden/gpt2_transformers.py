"""Golden logits of GPT-2, computed by the library transformers on random weights: makes `gpt2_transformers.npz`.

    python tests/golden/gpt2_transformers.py      # needs torch and transformers; written with 2.13.0 and 5.23.0

Arrays in the file
    config       JSON: `config.json` of the model
    tokens       int32 [B, T]
    logits       float32 [B, T, V]; `GPT2LMHeadModel` in float32 on the CPU, without dropout
    NAME         float16; the parameter of that name in transformers, widened to float32 before use
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).with_suffix(".npz")
CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_positions": 24,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 80,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def drawn(config: dict, seed: int) -> dict[str, np.ndarray]:
    """Draw every parameter, also gains and biases, away from what it would be at the start: float16 values."""
    rng, width, mlp = np.random.default_rng(seed), config["n_embd"], config["n_inner"]
    shapes = {"wte.weight": (config["vocab_size"], width), "wpe.weight": (config["n_positions"], width)}
    for i in range(config["n_layer"]):
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{norm}.weight": (width,), f"h.{i}.{norm}.bias": (width,)}
        conv = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
        conv |= {"mlp.c_fc": (width, mlp), "mlp.c_proj": (mlp, width)}
        for name, shape in conv.items():
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[1:]}
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    return {
        name: (0.3 * rng.standard_normal(shape) + (len(shape) == 1 and name.endswith("weight"))).astype(
            np.float16
        )
        for name, shape in shapes.items()
    }


def logits(model: Any, tokens_BT: np.ndarray) -> np.ndarray:
    """Return what a model of transformers computes: float32 [B, T, V]."""
    torch = import_module("torch")
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens_BT.astype(np.int64))).logits.float().numpy()


def main() -> None:
    torch, transformers = import_module("torch"), import_module("transformers")
    weights = drawn(CONFIG, seed=0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG))
    state = {f"transformer.{name}": torch.from_numpy(x.astype(np.float32)) for name, x in weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)
    model.tie_weights()
    tokens_BT = np.random.default_rng(1).integers(0, CONFIG["vocab_size"], (2, 24), dtype=np.int32)
    arrays: dict[str, Any] = {"tokens": tokens_BT, "logits": logits(model, tokens_BT), **weights}
    np.savez_compressed(GOLDEN, config=np.array(json.dumps(CONFIG)), **arrays)


if __name__ == "__main__":
    main()
