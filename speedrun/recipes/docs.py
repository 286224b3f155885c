"""docs: smoke with a BPE vocabulary of 4,096 and a longer window, for the documentation of this machine's Python.

Claim: 4.4585 nats per token, 2.09 bits per byte (sd 0.005, 10 seeds, 2026-11-29, Python 3.11 with jax 0.10.2), in 50 s
of CPU time on one device. Baselines: unigram 6.52, smoothed bigram 4.46, the same program without attention 5.01, with
targets shifted by two positions 6.37.
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
    expected=Expected("docs", "docs-cpu", 4.4585, 0.005, 10, "one device, docs/LOG.md"),
)
