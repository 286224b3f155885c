"""webmini: a wider smoke with the GPT-2 vocabulary, for any folder of real text.

Claim: on web text (1 run each, 2026-11-21) 6.74 after its 100 steps, in 6 minutes of training on 2 CPU cores;
6.26 after 400 steps, 3.3 million tokens. Baselines: unigram 7.63, smoothed bigram 6.42.
Run: speedrun run --track webmini --data DIR
"""

from dataclasses import replace

from speedrun.recipes import smoke
from speedrun.science.recipe import Stage

RECIPE = replace(
    smoke.RECIPE,
    name="webmini",
    summary="record 21 at laptop size on real text, full vocabulary",
    parent="smoke",
    config=replace(
        smoke.RECIPE.config,
        vocab_size=50257,
        padded_vocab_size=50304,
        mlp_dim=512,
        block_tokens=32,
        document_token=50256,
    ),
    schedule=replace(smoke.RECIPE.schedule, final_window=8.0),
    stages=(Stage(num_steps=100, num_sequences=16, seq_len=512),),
    eval_seq_len=512,
)
