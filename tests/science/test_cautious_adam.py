"""Adam of record 89 against its formulas in float64; test_golden89.py has an independent implementation."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from driven import OPTIMIZER, TABLE, Driven, draw, spec
from golden_files import OPTIMISED

from speedrun.base.errors import UsageError
from speedrun.recipes.record89.normuon_and_adam import AdamGroup, AdamState
from speedrun.science.params import Layout, Params, Table

GROUPS = {group.name: group for group in OPTIMIZER.adam}
NAMES = [name for name, one in TABLE.items() if one.group != "matrix"]
NUM_STEPS, UNTIE = 10, 5  #: the last update of head and embedding as one is in step 5


def lr_scale(step: int) -> float:
    return 1 - 0.07 * step


class PlainAdam:
    def __init__(self, w: np.ndarray, group: AdamGroup) -> None:
        self.w, self.group, self.m, self.v, self.t = np.float64(w), group, np.zeros(()), np.zeros(()), 0

    def move(self, g: np.ndarray, scale: float) -> None:
        beta1, beta2, self.t = self.group.beta1, self.group.beta2, self.t + 1
        self.m, self.v = beta1 * self.m + (1 - beta1) * g, beta2 * self.v + (1 - beta2) * g**2
        a = OPTIMIZER.adam_lr * self.group.lr * scale
        u = a * (1 - beta2**self.t) ** 0.5 / (1 - beta1**self.t) * self.m / (self.v**0.5 + OPTIMIZER.adam_eps)
        u = u + a**2 * OPTIMIZER.adam_decay * self.group.decay * self.w * (u * self.w > 0)
        self.w = self.w - u


def train(table: Table, **settings: Any) -> Iterator[tuple[int, dict[str, np.ndarray], Params, AdamState]]:
    """Yield step, parameters by name, packed ones and state; every second step of ten updates, from equal tables."""
    start = draw(0, table)
    driven = Driven(start | {"embed": start["head"]}, table=table, **settings)
    for step in range(NUM_STEPS):
        inputs = {"lr_scale": lr_scale(step), "tied": step <= UNTIE, "adam": step % 2 == 1}
        named = driven.go(draw(1 + step, table), **inputs)
        yield step, named, driven.held[0], driven.held[1][1]


@pytest.mark.parametrize("num_devices", [1, 8])
def test_ten_steps_follow_the_rules_of_the_record(num_devices):
    """As its program does it: while tied, only the head is updated and copied; then moments and count are."""
    start = draw(0)
    start["embed"] = start["head"]
    plain = {name: PlainAdam(start[name], GROUPS[TABLE[name].group]) for name in NAMES}
    head, embed = plain["head"], plain["embed"]
    waiting: dict[str, Any] = dict.fromkeys(NAMES, 0.0)
    history = [*train(TABLE, num_devices=num_devices)]
    for step, got, _, _ in history:
        waiting = {name: waiting[name] + np.float64(draw(1 + step)[name]) for name in NAMES}
        if step % 2:
            is_tied = step <= UNTIE
            waiting["head"] = waiting["head"] + waiting["embed"] * is_tied
            for name in NAMES:
                if name != "embed" or not is_tied:
                    plain[name].move(waiting[name], lr_scale(step))
            if is_tied:
                embed.w = head.w
            if step == UNTIE:
                embed.m, embed.v, embed.t = head.m, head.v, head.t
            waiting = dict.fromkeys(NAMES, 0.0)
        for name in NAMES:
            at = f"{name} after step {step}"
            np.testing.assert_allclose(got[name], plain[name].w, atol=2e-6, err_msg=at)
    state = history[-1][3]
    for name in ("head", "embed"):
        np.testing.assert_allclose(state.mean[name][:10], plain[name].m, atol=1e-5)
        np.testing.assert_allclose(state.square[name][:10], plain[name].v, rtol=1e-5)
        assert not state.waiting[name].any()
    assert state.num_updates == head.t == embed.t == NUM_STEPS // 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tied_tables_stay_equal_to_the_last_bit_and_then_part(dtype):
    table = TABLE | {name: spec((1000, 3), name, dtype) for name in ("head", "embed")}
    # What is optimised contracts products and sums, which could part what is tied.
    for step, _, params, state in train(table, options=OPTIMISED):
        for held in (params, state.mean, state.square):
            head, embed = (np.asarray(held[name], np.float32)[:1000] for name in ("head", "embed"))
            share = (head != embed).mean()
            assert (share == 0) if step <= UNTIE + 1 else (share > 0.5)


def test_without_gradients_nothing_moves():
    """A zero update agrees with no weight: u W > 0."""
    start, none = draw(0), {name: 0 * x for name, x in draw(0).items()}
    got = Driven(start).go(none)
    for name in NAMES:
        np.testing.assert_array_equal(got[name], start[name])


def test_a_group_without_settings_is_refused():
    rule = dataclasses.replace(OPTIMIZER, adam=OPTIMIZER.adam[:2])
    with pytest.raises(UsageError, match="no AdamGroup for group 'scalar'"):
        rule.transform(Layout(TABLE))
