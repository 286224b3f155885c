"""record89: the PyTorch speedrun's record of 2026-07-17, on the tokens of FineWeb.

Claim: none yet; not run at full size. The PyTorch runs reach 3.28 in 1,285 steps and 73.8 s on 8 H100. The step
agrees with runs of the authors' classes in float32 (tests/core/test_golden89.py).
Differs: README.md, beside this file, lists the differences.
Run: speedrun run --track main-8xh100 --recipe record89
Credits: modded-nanogpt, records 22 to 89; functions name their authors.
"""

from collections.abc import Mapping

from speedrun.recipes.record89.model import forward, logits, loss
from speedrun.recipes.record89.normuon_and_adam import AdamGroup, NorMuonAndAdam
from speedrun.recipes.record89.parameters import Config, Layer, constants, rate_of, table
from speedrun.recipes.record89.schedule import PrefixPhase, Schedule
from speedrun.science import variants
from speedrun.science.kernels.cross_entropy_gpu import RECORD89
from speedrun.science.recipe import Expected, Recipe, Stage, settings
from speedrun.science.variants import Rules, at_smoke, scaled

SCALES = "schedule.attention_scale", "schedule.short_scale", "schedule.long_scale"  #: of attention
SIZED: Rules = {
    **variants.SIZED,
    "config.bigram_rows": at_smoke(1920),
    "schedule.*prefix_weight": at_smoke(0.0),
    **dict.fromkeys(("config.compose_keys", "schedule.block_tokens", "schedule.*_turns"), scaled(window=1)),
    "schedule.rotary_pairs": scaled(head=1),
    **dict.fromkeys(SCALES, scaled(head=-0.5)),
}


def less(extra: str, layers: str = "*") -> Rules:
    """Take an extra from layers."""
    return {f"config.layers.{layers}.extras": lambda old, *_: tuple(one for one in old if one != extra)}


def frozen(*groups: str) -> Rules:
    """Set the rates of some groups of Adam to zero. What stays is a table of zeros, or constant gates and weights."""
    return {"optimizer.adam.*.lr": lambda lr, one, key: lr * (settings(one)[f"{key[:-2]}name"] not in groups)}


def last(_: float, recipe: Recipe, key: str) -> float:
    """Return an input of the last validation, where windows have grown."""
    return float(recipe.inputs_at(recipe.num_steps)[key.removeprefix("schedule.")])


FEATURES: Mapping[str, Rules] = {
    **variants.FEATURES,
    "other-values": less("value", "[0-9]"),  # the last layer's is also mixed in at the end, so it stays
    # Two heads share a softmax. Without it, their windows are the short ones, and so is record 92's width of values.
    "paired-heads": {"config.layers.*.attention": lambda old, *_: "short" if old == "paired" else old},
    "exclusive-heads": less("exclusive"),
    "key-offset": less("offset"),
    "head-gates": less("gate"),  # a factor for each head and token, initially 1/4; without it, 1
    "composed-heads": less("compose"),
    "bigrams": frozen("bigram"),
    "token-gates": frozen("mudd_gate", "mudd_gate_bias", "mudd_gate_scale"),
    "token-mixing": frozen("mudd", "mudd_bias"),
    "future-tokens": {"schedule.phases.*.target_weights": (1.0,), "schedule.phases.*.end_weights": (1.0,)},
    # Wavelengths and scale grow with windows. Without this, windows and scale are the last, wavelengths the first ones.
    "growing-windows": {
        "schedule.phases.*.long_blocks": lambda _, recipe, __: recipe.schedule.final_long_blocks,
        "schedule.phases.*.short_blocks": lambda _, recipe, __: recipe.schedule.phases[-1].short_blocks,
        **dict.fromkeys(SCALES, last),
    },
}

RECIPE = Recipe(
    name="record89",
    summary="11 layers, 636M parameters, 0.34B tokens: modded-nanogpt's record 89",
    parent="record21",
    revision=2,
    config=Config(
        vocab_size=50304,
        model_dim=768,
        num_heads=6,
        mlp_dim=3072,
        layers=(
            Layer("paired"),
            Layer("short", ("value", "exclusive")),
            Layer("paired", ("value",)),
            Layer("long", ("offset", "exclusive", "gate")),
            Layer("short", ("exclusive",)),
            Layer("paired"),
            Layer("none"),
            Layer("short", ("exclusive",)),
            Layer("short", ("value",)),
            Layer("paired", ("value",)),
            Layer("long", ("offset", "value", "compose", "gate")),
        ),
        gate_dim=64,
        bigram_rows=377_280,
        sign_rows=8192,
        compose_keys=112,
        document_token=50256,
        table_dtype="bfloat16",
        head_fp8=RECORD89,
        mlp_dtype="float8_e4m3fn",
        mlp_gradient_scale=2**-6,
    ),
    table=table,
    forward=forward,
    logits=logits,
    loss=loss,
    optimizer=NorMuonAndAdam(
        muon_lr=0.023,
        muon_decay=1.2,
        muon_beta2=0.9,
        polar_dtype="bfloat16",
        rate_of=rate_of,
        adam_lr=0.008,
        adam_eps=1e-10,
        adam_decay=0.005,
        adam=(
            AdamGroup("head", 1.0, 0.5, 0.95, 150.0),
            AdamGroup("embed", 1.0, 0.5, 0.95, 150.0),
            AdamGroup("value", 75.0, 0.75, 0.95, 5.0),
            AdamGroup("bigram", 75.0, 0.75, 0.95, 5.0),
            AdamGroup("value_gate", 1.0, 0.9, 0.99, 1.0),
            AdamGroup("smear_gate", 0.01, 0.9, 0.99, 0.0),
            AdamGroup("scalar", 5.0, 0.9, 0.99, 0.0),
            AdamGroup("resid", 5.0, 0.9, 0.95, 0.0),
            AdamGroup("post", 1.0, 0.9, 0.95, 0.0),
            AdamGroup("mudd", 0.25, 0.9, 0.99, 1.0),
            AdamGroup("mudd_bias", 0.25, 0.9, 0.99, 0.0),
            AdamGroup("mudd_gate", 0.1, 0.9, 0.99, 1.0),
            AdamGroup("mudd_gate_bias", 0.1, 0.9, 0.99, 0.0),
            AdamGroup("mudd_gate_scale", 0.1, 0.9, 0.99, 0.0),
        ),
    ),
    schedule=Schedule(
        phases=(
            PrefixPhase(423, 1.0, 1, 3, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0), 0.25, 0.25),
            PrefixPhase(424, 1.52, 3, 7, (1.0, 0.5), (1.0, 0.0), 0.25, 0.0),
            PrefixPhase(423, 1.73, 5, 11, (1.0,), (1.0,)),
            PrefixPhase(15, 1.0, 6, 13, (1.0,), (1.0,)),
        ),
        cooldown_fraction=0.6,
        final_lr_scale=0.15,
        momentum_start=0.85,
        momentum_end=0.95,
        momentum_warmup_steps=300,
        momentum_cooldown_steps=50,
        block_tokens=128,
        final_long_blocks=20,
        rotary_pairs=32,
        slow_turns=1.0,
        fast_turns=32.0,
        attention_scale=0.1,
    ),
    stages=(
        Stage(num_steps=423, num_sequences=8, seq_len=16_384, document_tokens=896),
        Stage(num_steps=424, num_sequences=8, seq_len=32_768, document_tokens=2_048),
        Stage(num_steps=423, num_sequences=8, seq_len=49_152, document_tokens=2_048),
        Stage(num_steps=15, num_sequences=8, seq_len=49_152, document_tokens=2_048),
    ),
    eval_sequences=8,
    eval_seq_len=262_144,
    compute_dtype="bfloat16",
    constants=constants,
    sizes=SIZED,
    features=FEATURES,
    expected=Expected("record89", "main-8xh100", 3.2783, 0.0021, 9, "modded-nanogpt, its runs for #360"),
)
