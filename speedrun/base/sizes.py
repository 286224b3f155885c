"""Smaller and larger siblings of a full-size recipe, by the names of its settings (docs/recipes.md)."""

from collections.abc import Mapping
from typing import Any

from speedrun.base.errors import UsageError

#: `--set size=nano`: layers for its 12, width for its 768, and the factor of its tokens per step.
SIZES = {
    "smoke": (4, 128, 0.0),  # SMOKE has its tokens
    "nano": (4, 256, 0.25),
    "micro": (8, 512, 0.5),
    "small": (12, 768, 1.0),
    "medium": (16, 1024, 2.0),
}
#: The ids of the smoke-cpu track, which are no bytes, so they have no prefixes; and the batches of its recipe.
SMOKE = {"vocab_size": 256, "head_size": 256, "document_token": 0, "bigram_rows": 1920, "ngram_rows": 15_360}
SMOKE |= {"prefix_weight": 0.0, "end_prefix_weight": 0.0, "prefix_weights": (), "columns": (192,)}
SMOKE |= {"num_sequences": 8, "eval_sequences": 64, "seq_len": 256, "eval_seq_len": 256, "max_positions": 256}


def settings_at(name: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a full-size recipe at another size.

    Raises:
        UsageError: for other recipes, and for a multiple of the width that has no rule and is not `given`.
    """
    if name not in SIZES:
        raise UsageError(f"unknown size {name!r}; choose one of: {', '.join(SIZES)}")
    if known.get("config.model_dim") != 768 or "config.num_heads" not in known:
        raise UsageError(f"size={name} needs config.model_dim=768 and config.num_heads; choose another")
    num_layers, model_dim, batch = SIZES[name]
    width, head_dim = model_dim / 768, known.get("config.head_dim", 768 // known["config.num_heads"])
    narrow = min(1.0, model_dim / 4 / head_dim)
    tuples = {k: v for k, v in known.items() if isinstance(v, tuple) and k.rpartition(".")[0] == "config"}
    layers = known.get("config.num_layers", max(map(len, tuples.values()), default=1))
    depth = max(2, round(layers * num_layers / 12))
    places = [round(i * (layers - 1) / (depth - 1)) for i in range(depth)]  # keeps ends and mirror layers
    new: dict[str, Any] = {k: tuple(v[i] for i in places) for k, v in tuples.items() if len(v) == layers}
    factors = {"model_dim": width, "mlp_dim": width, "num_heads": width / narrow, "matrix_lr": 1 / width}
    factors |= dict.fromkeys(("head_dim", "rotary_pairs"), narrow) | {"num_layers": depth / layers}
    factors |= dict.fromkeys(("attention_scale", "short_scale", "long_scale"), narrow**-0.5)
    factors["ngram_rows"] = min(1.0, batch) ** 4
    windows = ("block_tokens", "compose_keys", "document_tokens", "segment_tokens", "slow_turns")
    factors |= dict.fromkeys((*windows, "fast_turns"), 1 / 8 if name == "smoke" else 1)
    for key, old in known.items():
        above, _, field = key.rpartition(".")
        if field in factors:
            new[key] = round(old * factors[field]) if isinstance(old, int) else old * factors[field]
        elif field == "num_sequences":  # at least one for each of eight devices; then shorter ones
            new[key] = max(min(old, 8), round(old * batch))
            new[f"{above}.seq_len"] = round(old * known[f"{above}.seq_len"] * batch) // new[key]
    new |= _smoke(known) if name == "smoke" else {}
    for key, old in known.items():
        is_unset = key.startswith("config.") and key not in {**new, **given}
        if is_unset and isinstance(old, int) and old % 768 == 0 < old:
            hint = f"--set {key}=..., too"
            raise UsageError(f"size={name} has no rule for {key}, a multiple of the width; {hint}")
    return new


def _smoke(known: Mapping[str, Any]) -> dict[str, Any]:
    new: dict[str, Any] = {"config.head_fp8": None}
    packs = any(value for key, value in known.items() if key.endswith(".document_tokens"))
    lengths = (v for k, v in known.items() if k.startswith("stages.") and k.endswith(".num_steps"))
    shrink = (120 if packs else 280) / sum(lengths)
    for key, old in known.items():
        field = key.rpartition(".")[2]
        if field in SMOKE and old != ():  # none stay none
            new[key] = SMOKE[field]
        elif field.endswith("dtype"):
            new[key] = "float32"
        elif key.startswith(("schedule.", "stages.")) and field.endswith("_steps"):
            new[key] = max(min(old, 1), round(old * shrink))  # none stays none
    return new
