"""muon: gpt2 with Muon for the matrices, rotary, a constant learning rate with a linear end, and no biases.

Claim: none yet; not run at full size. Published: 22.3 minutes on 8xH100 and 3.2785 in 6,200 steps, as record 4 of
2024-10-11; record 3, with the first Muon, 24.9 minutes.
Differs: the residual stream is bfloat16 (upstream from record 10 on); the RMS norm has an epsilon of 1e-7, not 1e-6.
Run: speedrun run --track main-8xh100 --recipe muon
Credits: K. Jordan, J. Bernstein (@jxbz), @bozavlado.
"""

import math
from dataclasses import replace

from speedrun.recipes import gpt2
from speedrun.science.models import muon
from speedrun.science.optim.groups import Adam, MuonAndAdam
from speedrun.science.optim.schedules import Schedule
from speedrun.science.params import Member
from speedrun.science.recipe import Stage


def longer_side_root(matrix: Member) -> float:
    """Return the scale that gives the entries of an orthogonal matrix a mean square of one; `muon_lr` is their size."""
    return math.sqrt(max(matrix.rows, matrix.cols))


RECIPE = replace(
    gpt2.RECIPE,
    name="muon",
    summary="12 layers, 124M parameters, 3.3B tokens: Muon and rotary, record 4",
    parent="gpt2",
    config=muon.Config(
        vocab_size=50257,
        num_layers=12,
        model_dim=768,
        num_heads=12,
        head_dim=64,
        mlp_dim=3072,
    ),
    table=muon.table,
    forward=muon.forward,
    optimizer=MuonAndAdam(
        muon_lr=0.00036,
        muon_steps=5,
        muon_dtype="bfloat16",
        head_lr=0.0036,
        adam=Adam(beta1=0.9, beta2=0.95, eps=1e-8),
        factor_of=longer_side_root,
    ),
    schedule=Schedule(cooldown_fraction=1800 / 6200, momentum_start=0.95, momentum_end=0.95),
    stages=(Stage(num_steps=6200, num_sequences=512, seq_len=1024),),
)
