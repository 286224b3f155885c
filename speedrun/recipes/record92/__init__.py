"""record92: the PyTorch speedrun's record of 2026-08-30, on the tokens of FineWeb.

Claim: none yet; not run at full size. The PyTorch runs reach 3.28 in 1,194 steps and 39.9 s on 8 H100. The step agrees
with runs of the authors' functions in float32 (tests/core/test_golden92.py).
Differs: README.md, beside this file, lists the differences.
Run: speedrun run --track main-8xh100 --recipe record92
Credits: modded-nanogpt, records 22 to 92.
"""

import math
from collections.abc import Mapping

from speedrun.recipes import record89
from speedrun.recipes.record89.model import logits
from speedrun.recipes.record89.normuon_and_adam import AdamGroup
from speedrun.recipes.record89.parameters import Layer, constants
from speedrun.recipes.record92.anvil import AnvilAndAdam
from speedrun.recipes.record92.averages import Average
from speedrun.recipes.record92.model import carry, forward, loss
from speedrun.recipes.record92.parameters import Config, rate_of, table
from speedrun.recipes.record92.row_adam import RowPeriod
from speedrun.recipes.record92.schedule import Phase, Schedule, Tail
from speedrun.science.kernels.cross_entropy_gpu import RECORD92
from speedrun.science.recipe import Expected, Recipe, Stage
from speedrun.science.variants import Rules, at_smoke, scaled

SIZED: Rules = {
    **record89.SIZED,
    "config.ngram_rows": lambda rows, _, size: round(rows * min(1.0, size.batch) ** 4) or 15_360,
    "config.segment_tokens": scaled(window=1),
    "schedule.phases.*.prefix_weights": at_smoke(()),
    "schedule.phases.*.columns": at_smoke((192,)),
}

FEATURES: Mapping[str, Rules] = {
    **record89.FEATURES,
    # Without these: a table of zeros, one mean in the direction, every second step, all columns.
    "n-grams": {"optimizer.rows.*.lr": 0.0},
    "slow-mean": {"schedule.one_mean_steps": lambda _, recipe, __: recipe.num_steps},
    "rare-updates": {
        "schedule.frequent_steps": lambda _, recipe, __: recipe.num_steps,
    },
    "sampled-softmax": {"schedule.phases.*.columns": ()},
    "averages": {"optimizer.averages.*.share": 0.0},
}

#: Groups with the settings of record 89.
SAME = tuple(group for group in record89.RECIPE.optimizer.adam if group.name not in ("value", "bigram"))

RECIPE = Recipe(
    name="record92",
    summary="11 layers, 300M parameters and 65B of n-grams, 0.33B tokens: modded-nanogpt's record 92",
    parent="record89",
    revision=3,
    config=Config(
        vocab_size=50304,
        model_dim=768,
        num_heads=6,
        mlp_dim=2816,
        layers=(
            Layer("paired", ("x0", "ngram")),
            Layer("short", ("value", "exclusive", "x0", "ngram")),
            Layer("paired", ("value", "x0")),
            Layer("long", ("offset", "exclusive", "gate")),
            Layer("none", ("x0", "ngram")),
            Layer("paired", ("x0", "ngram")),
            Layer("none"),
            Layer("none", ("x0",)),
            Layer("short", ("value",)),
            Layer("none", ("ngram",)),
            Layer("long", ("offset", "value", "gate")),
        ),
        gate_dim=64,
        ngram_rows=84_602_880,
        sign_rows=8192,
        mix_dim=64,
        segment_tokens=2560,
        sweep_starts=8,
        document_token=50256,
        table_dtype="bfloat16",
        head_fp8=RECORD92,
        mlp_dtype="float8_e4m3fn",
        mlp_gradient_scale=2**-6,
        qkv_dtype="float8_e4m3fn",
    ),
    table=table,
    forward=forward,
    logits=logits,
    loss=loss,
    carry=carry,
    optimizer=AnvilAndAdam(
        anvil_lr=0.023,
        anvil_decay=2.25,
        anvil_betas=(0.98, 0.9),
        polar_dtype="bfloat16",
        rate_of=rate_of,
        adam_lr=0.008,
        adam_eps=1e-10,
        adam_decay=0.005,
        adam=SAME,
        tables=(AdamGroup("value", 70.0, 0.75, 0.95, 5.0),),
        later_tables=(AdamGroup("value", 70.0, 0.75**2, 0.95**2, 10.0),),
        rows=(RowPeriod(70.0, 0.95, 5.0), RowPeriod(70.0, 0.95**2, 10.0)),
        averages=(
            Average(("head", "embed"), "ema", 0.65),
            Average(("vo", "mlp"), "average", 1.0),
            Average(("value",), "value_average", 1.0),
            Average(("qk",), "blend", 0.55),
            Average(("vo", "mlp"), "blend", 0.3493),
        ),
        rescaled=("head", "embed", "qk", "vo", "mlp"),
    ),
    schedule=Schedule(
        phases=(
            Phase(320, 1.0, 1, 3, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0), (0.25,), (10_240,), room=2),
            Phase(361, 1.52, 3, 7, (1.0, 0.5), (1.0, 0.0), (0.2, 0.15, 0.1, 0.05), (10_240,)),
            Phase(426, 1.73, 5, 11, (1.0,), (1.0,), (), (14_336, 14_336, 24_576)),
            # Batches become shorter here. At step 1,175, rows of two such batches wait, and of two 2.5 times as long.
            Phase(67, 1.73 * math.sqrt(40 / 48), 5, 11, (1.0,), (1.0,), room=5),
            Phase(20, 1.0, 6, 13, (1.0,), (1.0,), room=7),
        ),
        cooldown_fraction=0.8,
        final_lr_scale=0.3,
        momentum_start=0.85,
        momentum_end=0.93,
        momentum_warmup_steps=240,
        momentum_cooldown_steps=50,
        block_tokens=128,
        final_long_blocks=20,
        rotary_pairs=32,
        slow_turns=1.0,
        fast_turns=32.0,
        short_scale=0.13,
        long_scale=0.085,
        one_mean_steps=514,
        fast_beta=0.85,
        fast_weight=0.4385,
        frequent_steps=336,
        tails=(
            Tail("ema", 298, 2 / 299),
            Tail("average", 249, 4 / 53),
            Tail("value_average", 247, 4 / 53),
            Tail("blend", 297, 2 / 75),
        ),
    ),
    stages=(
        Stage(num_steps=320, num_sequences=8, seq_len=16_384, document_tokens=896),
        Stage(num_steps=361, num_sequences=8, seq_len=32_768, document_tokens=2_048),
        Stage(num_steps=426, num_sequences=8, seq_len=49_152, document_tokens=3_072),
        Stage(num_steps=67, num_sequences=8, seq_len=40_960, document_tokens=3_072),
        Stage(num_steps=20, num_sequences=8, seq_len=16_384, document_tokens=3_072),
    ),
    eval_sequences=8,
    eval_seq_len=262_144,
    compute_dtype="bfloat16",
    constants=constants,
    if_nan="give each sequence as many columns as it has distinct targets (schedule.phases.N.columns)",
    sizes=SIZED,
    features=FEATURES,
    expected=Expected(
        "record92", "main-8xh100", 3.2793, 0.0037, 9, "modded-nanogpt, runs of record 92 for #367"
    ),
)
