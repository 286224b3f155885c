"""record21: the PyTorch speedrun's record of 2025-01-26, variant A, on the tokens of FineWeb.

Claim: none yet; not run at full size. The PyTorch runs reach 3.2787 (sd 0.0019, 81 runs) in 1,770 steps. The step
agrees with an independent implementation in float32 (tests/core/test_golden.py).
Differs: on 8 devices gradients of matrices and head are summed in bfloat16, not float32 (docs/LOG.md).
Run: speedrun run --track main-8xh100
Credits: modded-nanogpt (K. Jordan, @Grad62304977, @YouJiacheng, @brendanh0gan, @KoszarskyB, @leloykun and others).
"""

from speedrun.science import variants
from speedrun.science.kernels.cross_entropy_gpu import RECORD21
from speedrun.science.models.record21_model import NO_TABLE, Config, forward, logits, loss, table
from speedrun.science.optim.muon_and_adam import Adam, MuonAndAdam
from speedrun.science.optim.schedules import Schedule
from speedrun.science.recipe import Expected, Recipe, Stage

RECIPE = Recipe(
    name="record21",
    summary="12 layers, 276M parameters, 0.7B tokens: modded-nanogpt's record 21",
    parent="values",
    revision=1,
    config=Config(
        vocab_size=50257,
        padded_vocab_size=50304,
        model_dim=768,
        num_heads=6,
        head_dim=128,
        mlp_dim=3072,
        attention_kinds=(
            *("long", "short", "short", "short", "long", "short"),
            *("short", "none", "short", "short", "short", "long"),
        ),
        value_tables=(0, 1, 2, *(NO_TABLE,) * 6, 0, 1, 2),
        block_tokens=128,
        attention_scale=0.12,
        logit_cap=15.0,
        document_token=50256,
        table_dtype="bfloat16",
        head_fp8=RECORD21,
    ),
    table=table,
    forward=forward,
    logits=logits,
    loss=loss,
    optimizer=MuonAndAdam(
        muon_lr=0.05,
        muon_steps=5,
        muon_dtype="bfloat16",
        embed_lr=0.6,
        head_lr=0.008,
        scalar_lr=0.04,
        adam=Adam(beta1=0.8, beta2=0.95, eps=1e-10),
    ),
    schedule=Schedule(
        cooldown_fraction=0.4,
        final_lr_scale=0.1,
        momentum_start=0.85,
        momentum_end=0.95,
        momentum_steps=300,
        final_window=13.5,
    ),
    stages=(Stage(num_steps=1770, num_sequences=8, seq_len=49152),),
    eval_sequences=8,
    eval_seq_len=262144,
    compute_dtype="bfloat16",
    sizes=variants.SIZED,
    features=variants.FEATURES,
    expected=Expected("record21", "main-8xh100", 3.2787, 0.0019, 81, "modded-nanogpt, record 21"),
)
