"""docs: smoke with a BPE vocabulary of 4,096 and a longer window, for the documentation of this machine's Python.

Claim: 4.47 nats per token, 2.10 bits per byte (2 seeds, 2026-11-21, Python 3.11 with jax 0.10.2), in 115 s of
CPU time; 138 and 270 s of training on 2 busy CPU cores. Baselines: unigram 6.52, smoothed bigram 4.46, the same
program without attention 5.01, with targets shifted by two positions 6.37.
Run: speedrun run --track docs-cpu
"""

from dataclasses import replace

from speedrun.recipes import smoke
from speedrun.science.recipe import Expected, Stage

RECIPE = replace(
    smoke.RECIPE,
    name="docs",
    summary="record 21 at laptop size on Python's documentation",
    parent="smoke",
    config=replace(smoke.RECIPE.config, vocab_size=4096, padded_vocab_size=4096, block_tokens=32),
    schedule=replace(smoke.RECIPE.schedule, final_window=8.0),
    stages=(Stage(num_steps=160, num_sequences=8, seq_len=512),),
    eval_seq_len=512,
    expected=Expected("docs", "docs-cpu", 4.47, None, 2, "two seeds on 2026-11-21"),
)
