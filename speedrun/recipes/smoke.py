"""smoke: record 21's architecture at laptop size, for the synthetic stream of the smoke-cpu track.

Claim: 3.0908 nats per token (sd 0.011, 60 seeds, 2026-11-29), all between 3.070 and 3.117. The optimum is 3.00.
Run: speedrun run --track smoke-cpu
Credits: the architecture is modded-nanogpt's record 21; the numbers were tuned here (docs/LOG.md).
"""

from speedrun.science import variants
from speedrun.science.models import record21_model as record21
from speedrun.science.optim.muon_and_adam import Adam, MuonAndAdam
from speedrun.science.optim.schedules import Schedule
from speedrun.science.recipe import Expected, Recipe, Stage

RECIPE = Recipe(
    name="smoke",
    summary="record 21 at laptop size on the synthetic stream",
    parent=None,
    revision=2,
    config=record21.Config(
        vocab_size=256,
        padded_vocab_size=256,
        model_dim=128,
        num_heads=4,
        head_dim=32,
        mlp_dim=256,
        attention_kinds=("long", "short", "none", "long"),
        value_tables=(0, record21.NO_TABLE, record21.NO_TABLE, 0),
        block_tokens=16,
        attention_scale=0.25,
        logit_cap=15.0,
        document_token=0,
        table_dtype="float32",
        head_fp8=None,
    ),
    table=record21.table,
    forward=record21.forward,
    logits=record21.logits,
    loss=record21.loss,
    optimizer=MuonAndAdam(
        muon_lr=0.05,
        muon_steps=5,
        muon_dtype="float32",
        embed_lr=0.3,
        head_lr=0.008,
        scalar_lr=0.04,
        adam=Adam(beta1=0.8, beta2=0.95, eps=1e-10),
    ),
    schedule=Schedule(
        cooldown_fraction=0.4,
        final_lr_scale=0.1,
        momentum_start=0.85,
        momentum_end=0.95,
        momentum_steps=100,
        final_window=3.0,
    ),
    stages=(Stage(num_steps=280, num_sequences=8, seq_len=256),),
    eval_sequences=16,
    eval_seq_len=1024,
    compute_dtype="float32",
    features=variants.FEATURES,
    expected=Expected("smoke", "smoke-cpu", 3.0908, 0.011, 60, "one device, docs/LOG.md"),
)
