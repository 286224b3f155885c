"""The inputs of each step of record 89: windows, rates, momentum, weights of targets, rotary frequencies (K: width)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from speedrun.base.errors import UsageError
from speedrun.base.field_types import Count, Fraction, Momentum, Natural, Positive, Rate


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
            raise ValueError(f"slow_turns {self.slow_turns:g} must be below fast_turns {self.fast_turns:g}")
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

    def progress(self, step: int, num_steps: int) -> tuple[int, float]:
        """Return the index of the phase of a step, and how much of it is done."""
        starts = [*self.starts(num_steps), num_steps]
        index = max(i for i, start in enumerate(starts[:-1]) if start <= step)
        return index, (step - starts[index]) / (starts[index + 1] - starts[index])

    def at(self, step: int, num_steps: int) -> dict[str, Any]:
        """Return the inputs of a step; `num_steps` itself is the last validation."""
        index, done = self.progress(step, num_steps)
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
        index, done = self.progress(step, num_steps)
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
