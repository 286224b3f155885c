"""record89: the PyTorch speedrun's record of 2026-07-17, on the tokens of FineWeb.

Claim: none yet; not run at full size. The PyTorch runs reach 3.28 in 1,285 steps and 73.8 s on 8 H100. The step
agrees with runs of the authors' classes in float32 (tests/core/test_golden89.py).
Differs: docs/record89.md lists the differences.
Run: speedrun run --track main-8xh100 --recipe record89
Credits: modded-nanogpt, records 22 to 89; functions name their authors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from speedrun.base.errors import UsageError
from speedrun.base.limits import Count, Fraction, Momentum, Natural, Positive, Rate
from speedrun.science import variants
from speedrun.science.kernels.cross_entropy_gpu import RECORD89
from speedrun.science.models.record89_model import forward, logits, loss
from speedrun.science.models.record89_table import Config, Layer, constants, rate_of, table
from speedrun.science.optim.normuon_and_adam import AdamGroup, NorMuonAndAdam
from speedrun.science.recipe import Expected, Recipe, Stage, settings
from speedrun.science.variants import Rules, at_smoke, scaled


@dataclass(frozen=True, slots=True)
class Phase:
    """Settings of a stage. Weights of targets change linearly to their end values."""

    num_steps: Count  #: as in the recipe's stage
    lr_scale: Rate
    short_blocks: Natural
    long_blocks: Count
    target_weights: tuple[Rate, ...]  #: of the next token, the second next, ...
    end_weights: tuple[Rate, ...]

    def __post_init__(self) -> None:
        if len(self.target_weights) != len(self.end_weights):
            raise ValueError("target_weights and end_weights need equal lengths")
        if not any(self.target_weights) or not any(self.end_weights):
            raise ValueError("target_weights and end_weights need a weight above 0")


@dataclass(frozen=True, slots=True)
class PrefixPhase(Phase):
    """The weight of prefixes changes linearly, too."""

    prefix_weight: Rate = 0.0
    end_prefix_weight: Rate = 0.0


@dataclass(frozen=True, slots=True)
class Phases:
    """The inputs that records 89 and 92 share. The last phase, the extension, does not count as scheduled steps."""

    phases: tuple[Phase, ...]
    cooldown_fraction: Fraction  #: part of the scheduled steps in which the learning rate falls
    final_lr_scale: Rate
    momentum_start: Momentum
    momentum_end: Momentum
    momentum_warmup_steps: Count
    momentum_cooldown_steps: Count
    block_tokens: Count
    final_long_blocks: Count  #: in the last validation
    rotary_pairs: Count  #: a quarter of the width of a head
    slow_turns: Rate  #: frequencies with fewer turns in the old window stretch with it
    fast_turns: Rate  #: frequencies with more turns do not stretch

    def __post_init__(self) -> None:
        if self.slow_turns >= self.fast_turns:
            raise ValueError("slow_turns must be below fast_turns")
        most = max(self.final_long_blocks, *(phase.long_blocks for phase in self.phases)) * self.block_tokens
        if most >= 2**31:
            raise ValueError(f"a window of {most:,} tokens; need fewer than 2^31")
        if self.phases[-1].lr_scale != 1:
            raise ValueError("the last phase has the rate final_lr_scale; its lr_scale must be 1")

    def starts(self, num_steps: int) -> list[int]:
        """Return the first step of each phase; raise UsageError if the recipe has more or fewer steps."""
        lengths = [phase.num_steps for phase in self.phases]
        if sum(lengths) != num_steps:
            hint = "--set stages.0.num_steps=N --set schedule.phases.0.num_steps=N"
            found = f"schedule.phases have {lengths} steps, and the stages {num_steps} in all"
            raise UsageError(f"{found}; give each phase the steps of its stage: {hint}")
        return [sum(lengths[:i]) for i in range(len(lengths))]

    def place(self, step: int, num_steps: int) -> tuple[int, float]:
        """Return the index of the phase of a step, and how much of it is done."""
        starts = [*self.starts(num_steps), num_steps]
        index = max(i for i, start in enumerate(starts[:-1]) if start <= step)
        return index, (step - starts[index]) / (starts[index + 1] - starts[index])

    def at(self, step: int, num_steps: int) -> dict[str, Any]:
        """Return the inputs of a step; `num_steps` itself is the last validation."""
        index, done = self.place(step, num_steps)
        phase, most = self.phases[index], max(len(one.target_weights) for one in self.phases)
        both = phase.target_weights, phase.end_weights
        start, end = (np.array(w + (0.0,) * (most - len(w))) for w in both)
        long = phase.long_blocks if step < num_steps else self.final_long_blocks
        return {
            "lr_scale": np.float32(self.lr_scale(step, self.starts(num_steps)[-1], phase)),
            "momentum": np.float32(self.momentum(step, num_steps)),
            "adam": step % 2 == 1 and step < num_steps,
            "short_keys": phase.short_blocks * self.block_tokens + 1,
            "long_keys": long * self.block_tokens + 1,
            "target_weights": (start + done * (end - start)).astype(np.float32),
            "targets": len(phase.target_weights),
        }

    def lr_scale(self, step: int, scheduled: int, phase: Phase) -> float:
        """Return the factor of all learning rates: that of the phase, then linearly down to the last one."""
        start = int(scheduled * (1 - self.cooldown_fraction))
        done = min(1.0, max(0.0, (step - start) / max(1, scheduled - start)))
        return phase.lr_scale * (1 - done) + self.final_lr_scale * done

    def momentum(self, step: int, num_steps: int) -> float:
        """Return Muon's momentum, which rises at the start and falls at the end (record 46)."""
        low, high = self.momentum_start, self.momentum_end
        warm = min(1.0, step / self.momentum_warmup_steps)
        cool = max(0.0, 1 - (num_steps - step) / self.momentum_cooldown_steps)
        return low + (high - low) * (warm - cool)

    def stretched(self, blocks: Sequence[int], scale: float) -> tuple[np.ndarray, float]:
        """Return frequencies [K/4] and attention's scale, which change as a window grows, `scale` for the first one.

        f becomes f (old/new + w (1 - old/new)), where w = clip((r - slow) / (fast - slow), 0, 1) and r = old f / 2 pi
        is the number of turns in the old window. Record 31, after YaRN (Peng et al. 2023).
        """
        f_K = (1 / 1024) ** np.linspace(0, 1, self.rotary_pairs)
        for old, new in pairwise(number * self.block_tokens for number in blocks):
            turns_K = old * f_K / (2 * math.pi)
            keep_K = np.clip((turns_K - self.slow_turns) / (self.fast_turns - self.slow_turns), 0, 1)
            f_K = f_K * (old / new + keep_K * (1 - old / new))
            scale *= 1 + 0.2 * math.log(new / old)
        return f_K, scale


@dataclass(frozen=True, slots=True)
class Schedule(Phases):
    """The inputs of each step."""

    phases: tuple[PrefixPhase, ...]
    attention_scale: Positive  #: of the first phase

    def untie_step(self, num_steps: int) -> int:
        """Return the step of the last update that ties head and embedding: an odd one, as Adam's steps are."""
        return self.starts(num_steps)[-2] | 1

    def at(self, step: int, num_steps: int) -> dict[str, Any]:
        """Return the inputs of a step; `num_steps` itself is the last validation."""
        index, done = self.place(step, num_steps)
        (rotary, scale), phase = self.rotary(index), self.phases[index]
        prefix = phase.prefix_weight + done * (phase.end_prefix_weight - phase.prefix_weight)
        return Phases.at(self, step, num_steps) | {
            "tied": np.bool_(step <= self.untie_step(num_steps)),
            "rotary": rotary.astype(np.float32),
            "attention_scale": np.float32(scale),
            "prefix_weight": np.float32(prefix),
            "has_prefix": max(phase.prefix_weight, phase.end_prefix_weight) > 0,
        }

    def rotary(self, index: int) -> tuple[np.ndarray, float]:
        """Return the frequencies and attention's scale of a phase."""
        return self.stretched([phase.long_blocks for phase in self.phases[: index + 1]], self.attention_scale)


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
    # The last layer's value embedding is also mixed in at the end, so it stays.
    "other-values": less("value", "[0-9]"),
    # Two heads share a softmax. Without it, their windows are the short ones, and so is record 92's width of values.
    "paired-heads": {"config.layers.*.attention": lambda old, *_: "short" if old == "paired" else old},
    "exclusive-heads": less("exclusive"),
    "key-offset": less("offset"),
    # A factor for each head and token, initially 1/4. Without it, 1.
    "head-gates": less("gate"),
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
    revision=1,
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
    expected=Expected(
        "record89", "main-8xh100", 3.2783, 0.0021, 9, "modded-nanogpt, runs of record 89 for #360"
    ),
)
