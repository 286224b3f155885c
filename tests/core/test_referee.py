"""Checks of a run against its programs and states, by a process that shares no code with it."""

import dataclasses
import functools
import io
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace
from record_forge import Spec, forge, state
from small_run import SMALL, events
from typed import as_words, invoke, speedrun

from speedrun.base import runlog, track
from speedrun.base import track as tracks
from speedrun.base.errors import SpeedrunError, UsageError
from speedrun.base.mesh import make_mesh
from speedrun.data import stream, synthetic
from speedrun.record.archive import pack
from speedrun.record.checks.v6_examination import REPLAY_CHECKS, tolerance
from speedrun.record.examination import Examination, Findings, Replayed, Stretch
from speedrun.record.examine import sandbox
from speedrun.record.examine.causality import Known, Text, apart, changed, places
from speedrun.record.examine.examiner import _error, _Examiner, _low, examine
from speedrun.record.examine.replay import Options, chosen, drawn, examined, stretches
from speedrun.record.examine.stablehlo import Programs
from speedrun.record.reader import load, read_programs
from speedrun.record.validate import ask, validate
from speedrun.train.run_config import RunConfig, folder_of

NONCE = "00c0ffee"


@pytest.fixture
def record(forged):
    return load(forge(forged / "record"))


def place(step: int) -> tuple[int, int]:
    """Where a forged run has read to: 600 tokens of its first shard, 100 a step."""
    return (0, 100 * step) if step <= 6 else (1, 100 * (step - 6))


#: By a forged run.
READ = tuple(replace(one, sha256="") for one in Spec().shards)


def replayed(start: int, losses: tuple[float, ...], **changes) -> Replayed:
    stop = start + len(losses)
    places, first = (place(start), place(stop)), "b" * 64
    begun = "a" * 16 if start else state("start", Spec())
    made = Replayed(start, stop, start > 0, begun, "b" * 16, losses, (), places, first, READ)
    return replace(made, **changes)


def honest(run) -> Findings:
    losses, (plan,) = {event.step: event.loss for event in run.steps}, run.of(runlog.Plan)
    return Findings(
        val_sha256=run.data.val_sha256,
        final_hash=run.end.final_hash,
        val_loss=run.val_loss + 1e-5,
        own=True,
        dtype="bfloat16",
        num_params=(plan.num_params - 7, plan.num_params + 7),
        state_bytes_per_device=plan.state_bytes_per_device,
        batch_tokens=tuple(step.batch_tokens for step in run.steps),
        columns=256,
        num_ids=256,
        rows=0.0,
        leak=0.0,
        leak_at=-1,
        changes=100,
        neighbours=0.0,
        constant_bytes=900,
        num_literals=120,
        shuffled_loss=run.val_loss + 3.0,
        other_loss=run.val_loss + 0.01,
        other_error=1.0,
        low_gap=0.0,
        low_error=0.0,
        foreign=False,
        num_sequences=(0, 0),
        sample=(),
        stretches=(replayed(0, (losses[0], losses[1])), replayed(8, (losses[8], losses[9]))),
    )


def statuses_of(record, findings: Findings) -> dict[str, str]:
    examined = dataclasses.replace(record, findings={record.runs[0].folder: findings})
    results = [ask(one, examined) for one in REPLAY_CHECKS]
    return {result.check.id: result.status for result in results}


def relogged(record, *lines: runlog.Line):
    run = dataclasses.replace(record.runs[0], lines=lines)
    return dataclasses.replace(record, runs=(run, *record.runs[1:]))


def with_checkpoint(record, step: int):
    lines = record.runs[0].lines
    return relogged(record, *lines, replace(lines[-1], event=runlog.Checkpoint(step, "c" * 16, 0.1)))


def asked(id: str, record, *given: tuple[Any, Findings]):
    (check,) = (one for one in REPLAY_CHECKS if one.id == id)
    runs, findings = (run for run, _ in given), {run.folder: findings for run, findings in given}
    return ask(check, dataclasses.replace(record, runs=tuple(runs), findings=findings))


#: Losses of the first forged run.
WHOLE = tuple(5.01 - step / 10 for step in range(10))
LIES = [
    ("V601", {"val_loss": 3.2}),
    ("V601", {"val_sha256": "0" * 64}),
    ("V601", {"val_loss": math.nan}),
    ("V601", {"final_hash": "0" * 16}),
    ("V601", {"own": False, "val_loss": 4.0}),
    ("V601", {"own": False, "final_hash": "0" * 16, "val_loss": math.nan}),
    ("V601", {"own": False, "final_hash": "0" * 16, "val_loss": 4.9}),
    ("V602", {"columns": 255}),
    *((id, {name: nats}) for id, name in (("V602", "rows"), ("V603", "leak"), ("V604", "neighbours"))
      for nats in (0.01, 9.5e-4, 1e-7, math.nan)),
    ("V605", {"stretches": (replayed(4, (4.61, 4.3)),)}),
    ("V605", {"stretches": (replayed(8, (math.nan,)),)}),
    ("V605", {"stretches": (replayed(8, (4.61,), stop=10),)}),
    ("V605", {"stretches": (replayed(0, (), vals=((0, 5.0),)),)}),
    ("V605", {"stretches": (replayed(0, (), cursors=((0, 7), (0, 0))),)}),
    ("V605", {"stretches": (replayed(0, (5.0,), cursors=((0, 0), (0, 200))),)}),
    ("V605", {"stretches": (replayed(0, WHOLE, stop_hash=state("end", Spec()), state_hash="0" * 16),)}),
    ("V605", {"stretches": (replayed(0, (5.01, 4.91), first_batch_sha256="0" * 64),)}),
    ("V605", {"stretches": (replayed(0, WHOLE, ranges=READ[:1]),)}),
    ("V605", {"stretches": (replayed(0, WHOLE, ranges=(READ[0], replace(READ[1], skipped=1))),)}),
    ("V609", {"num_params": (0, 7)}),
    ("V609", {"num_params": (10**12, 10**13)}),
    ("V609", {"state_bytes_per_device": 1}),
    ("V609", {"batch_tokens": (1,) * 20}),
]  # fmt: skip


@pytest.mark.parametrize(("id", "lie"), LIES, ids=[f"{id}-{next(iter(lie))}" for id, lie in LIES])
def test_a_lie_is_refused_by_its_check_alone(record, id, lie):
    assert set(statuses_of(record, honest(record.runs[0])).values()) == {"ok"}
    found = statuses_of(record, replace(honest(record.runs[0]), **lie))
    assert {one: status for one, status in found.items() if status != "ok"} == {id: "failed"}


def test_each_loss_of_a_stretch_is_compared_and_its_checkpoint_is_the_one_that_the_log_names(record):
    run, kept = record.runs[0], with_checkpoint(record, 8)
    assert statuses_of(kept, honest(run))["V605"] == "failed"
    (_, last) = honest(run).stretches
    right = replace(honest(run), stretches=(replace(last, state_hash="c" * 16),))
    assert statuses_of(kept, right)["V605"] == "ok"
    losses = [event.loss for event in run.steps]
    for wrong in range(len(losses)):
        made = tuple(x * (0.9 if at == wrong else 1.0) for at, x in enumerate(losses))
        found = statuses_of(record, replace(honest(run), stretches=(replayed(0, made),)))
        assert found["V605"] == "failed", wrong


def test_a_run_of_another_machine_is_no_liar_and_not_proven(record):
    """Made again it ends in other bits; its losses differ as rounding does, and its own state is not at hand."""
    run = record.runs[0]
    near = tuple(event.loss + 0.5 * tolerance("bfloat16", 0, event.step) for event in run.steps)
    drifted = replace(
        honest(run),
        own=False,
        final_hash="0" * 16,
        val_loss=run.val_loss + 3e-3,
        stretches=(replayed(0, near),),
    )
    found = statuses_of(record, drifted)
    assert (found.pop("V601"), found.pop("V606"), set(found.values())) == ("skipped", "warning", {"ok"})
    (whole,) = drifted.stretches
    same = replace(drifted, stretches=(replace(whole, stop_hash=run.end.final_hash),))
    assert statuses_of(record, same)["V605"] == "failed"  # the bits of its end are those of this machine


@pytest.mark.parametrize("shown_by", ["the end", "a checkpoint"])
def test_where_one_state_has_the_same_bits_every_loss_has(record, shown_by):
    """Nobody gains what another machine may differ by, in any stretch."""
    run, kept = record.runs[0], with_checkpoint(record, 2)
    first, last = honest(run).stretches
    lower = replace(last, losses=tuple(loss - 1e-6 for loss in last.losses))
    assert statuses_of(kept, replace(honest(run), stretches=(first, lower)))["V605"] == "ok"
    if shown_by == "the end":
        lower = replace(lower, stop_hash=run.end.final_hash)
    else:
        first = replace(first, stop_hash="c" * 16)
    assert statuses_of(kept, replace(honest(run), stretches=(first, lower)))["V605"] == "failed"
    for nats, status in ((1e-4, "ok"), (0.9 * tolerance("bfloat16", 0, 0), "failed")):  # another scorer
        scored = replace(first, vals=((0, run.vals[0].loss - nats),))
        last = replace(last, stop_hash=lower.stop_hash)
        assert statuses_of(kept, replace(honest(run), stretches=(scored, last)))["V605"] == status


def test_the_tolerance_grows_and_has_room_for_what_two_instruction_sets_make_of_one_run():
    """Differences seen between SSE4.2 and AVX-512 on the smoke recipe: docs/referee.md."""
    seen = {
        (0, 3): 1.1e-4,
        (0, 20): 1.0e-3,
        (0, 38): 1.7e-3,
        (0, 60): 7.0e-3,
        (0, 100): 2.3e-2,
        (40, 39): 9.5e-7,
    }
    for (start, steps), difference in seen.items():
        assert difference < tolerance("float32", start, steps) / 2
        assert tolerance("float32", start, steps) < tolerance("bfloat16", start, steps)
    for start in (0, 40):
        found = [tolerance("bfloat16", start, steps) for steps in range(40)]
        assert found == sorted(set(found))


def test_the_log_does_not_choose_the_tolerance(record):
    run = record.runs[0]

    def claiming(recipe: Any) -> Any:
        start = replace(run.start, config={**run.start.config, "recipe": recipe})
        return relogged(record, replace(run.lines[0], event=start), *run.lines[1:])

    claims = claiming({"compute_dtype": "bfloat16"})
    assert statuses_of(claims, replace(honest(run), dtype="float32"))["V609"] == "failed"
    assert statuses_of(claiming("anything"), honest(run))["V609"] == "ok"
    off = replayed(0, (run.steps[0].loss + 0.5 * tolerance("bfloat16", 0, 0),))
    for dtype, status in (("float32", "failed"), ("bfloat16", "ok")):
        assert statuses_of(claims, replace(honest(run), dtype=dtype, stretches=(off,)))["V605"] == status


@pytest.mark.parametrize(
    ("constant_bytes", "gap", "shuffled", "found"),
    [
        (5_001, 0.01, 3.0, {"V607": "failed"}),
        (4_000, 0.03, 3.0, {"V607": "failed", "V608": "warning"}),
        (4_000, 0.01, 3.0, {}),
        (9, 9.0, 3.0, {"V608": "warning"}),  # more than nine bytes can hold
        (4_000, None, 3.0, {"V608": "warning"}),
        (4_000, 0.01, 0.5, {"V608": "warning"}),  # any target suits it
    ],
)
def test_constants_hold_little_and_no_gap_that_they_could_explain(
    record, constant_bytes, gap, shuffled, found
):
    made = honest(record.runs[0])
    other = {"other_loss": gap and made.val_loss + gap, "other_error": 0.005}
    other["shuffled_loss"] = made.val_loss + shuffled
    statuses = statuses_of(record, replace(made, constant_bytes=constant_bytes, **other))
    assert {id: status for id, status in statuses.items() if status != "ok"} == found


def test_one_of_two_runs_that_lies_is_enough(record):
    first, second = record.runs[:2]
    good, bad = (first, honest(first)), (second, replace(honest(second), leak=1.0))
    assert asked("V603", record, good).status == "ok"
    result = asked("V603", record, good, bad)
    assert (result.status, result.messages[0].split(":")[0]) == ("failed", second.folder)


def test_what_is_drawn_and_chosen_follows_from_nonce_and_name_and_not_from_the_log(record):
    first, second = record.runs[:2]
    assert drawn(NONCE, "a") == drawn(NONCE, "a")
    assert len({drawn(NONCE, "a"), drawn(NONCE, "b"), drawn("11c0ffee", "a")}) == 3
    other = dataclasses.replace(first, raw_lines=second.raw_lines)
    steps = list(range(0, first.start.num_steps, 2))
    assert stretches(first, steps, 100, 7) == stretches(other, steps[::-1], 100, 7)
    assert len({stretches(first, steps, 100, draws) for draws in range(20)}) > 3
    names = [f"smoke-{i}-abcd" for i in range(6)]
    assert chosen(NONCE, names, "some") == chosen(NONCE, names[::-1], "some")
    assert len(set(chosen(NONCE, names, "some"))) == 2
    assert set(chosen(NONCE, names, "all")) == set(names)
    assert chosen(NONCE, names[:1], "some") == (names[0],)
    picked = {name for i in range(64) for name in chosen(f"{i:08x}", names, "some")}
    assert picked == set(names)


def test_some_stretch_crosses_a_validation_or_the_end(record):
    """Who trains in a pause is seen where the steps before and behind it are made again."""
    run, crossed = record.runs[0], set()
    num_steps = run.start.num_steps
    assert stretches(run, None, 100, 7) == (Stretch(0, num_steps, from_checkpoint=False),), "no checkpoints"
    bounds = [num_steps // 2, num_steps]  # the step after a validation is made again, too
    for draws in range(40):
        found = stretches(run, [2, 4], num_steps // 2, draws)
        crossed |= {b for b in bounds if any(s.start < b and s.stop == min(b + 1, num_steps) for s in found)}
        assert all(0 <= s.start < s.stop <= num_steps for s in found)
        assert any(s.start == 0 and not s.from_checkpoint for s in found)
    assert crossed == set(bounds)


def test_nothing_of_a_record_that_fails_is_executed(record, monkeypatch):
    monkeypatch.setattr("speedrun.record.examine.replay.Rerun", None)
    (record.root / "source.txt").write_text("#")
    report = validate(record.root)
    with pytest.raises(UsageError, match="V003 failed; nothing was executed"):
        examined(record.root, report, Options("some", NONCE), sys.stdout)


def test_a_nonce_that_is_none_is_told(record):
    for nonce in ("ABCDEF00", "00", "0" * 65):
        result = invoke("validate", record.root, "--replay=all", "--nonce", nonce)
        assert (result.exit_code, "need 8 to 64 hex digits" in result.stderr) == (2, True)


ROWS, LENGTH, SEPARATOR, NUM_IDS, BATCH, CHUNK = 64, 64, 0, 61, 16, 256
LONG = 20 * ROWS * LENGTH  #: tokens of a shard, of which the first ones are scored


@functools.cache
def validation_ids(num_tokens: int = ROWS * LENGTH) -> np.ndarray:
    """The first tokens of a long text."""
    draw = np.random.default_rng(0)
    follows, ids = draw.integers(1, NUM_IDS, (NUM_IDS, 4)), [SEPARATOR]
    for choice, end in draw.random((num_tokens, 2)):
        ids.append(SEPARATOR if end < 1 / 16 else int(follows[ids[-1], int(4 * choice)]))
    return np.array(ids, np.uint16)


@functools.cache
def bigrams() -> np.ndarray:
    found_VV, ids = np.zeros((NUM_IDS, NUM_IDS), np.float32), validation_ids(LONG)
    np.add.at(found_VV, (ids[:-1], ids[1:]), 1)
    return np.log1p(found_VV)


def hidden(ids_BT: np.ndarray, told_BT: np.ndarray | float = -1) -> np.ndarray:
    """An honest output, and what a forger adds: id, sum of all ids up to it, its place, and what is told."""
    at_BT, told_BT = (np.broadcast_to(x, ids_BT.shape) for x in (np.arange(ids_BT.shape[1]), told_BT))
    return np.stack([ids_BT, np.sin(ids_BT).cumsum(1), at_BT, told_BT], axis=2).astype(np.float32)


def logits(x_ND: np.ndarray, nats: float = 3.0) -> np.ndarray:
    """Add so many nats to the id that an output tells, if any."""
    told_N1 = x_ND[:, 3:].astype(int)
    return bigrams()[x_ND[:, 0].astype(int)] + np.float32(nats) * (np.arange(NUM_IDS) == told_N1)


def following(ids_BT: np.ndarray, where: Any = True) -> np.ndarray:
    """The next id of each sequence at some places, and -1 elsewhere and at the end."""
    next_BT = np.pad(ids_BT[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    return np.where(where, next_BT, -1)


def signed(ids_BT: np.ndarray) -> np.ndarray:
    bits_BTZ = (following(ids_BT)[..., None] + 1) >> np.arange(8) & 1
    return np.concatenate([hidden(ids_BT), np.where(bits_BTZ, -0.0, 0.0)], axis=2).astype(np.float32)


def of_signs(x_ND: np.ndarray) -> np.ndarray:
    told_N = (np.signbit(x_ND[:, 4:]) << np.arange(8)).sum(1) - 1
    return logits(np.concatenate([x_ND[:, :3], told_N[:, None]], axis=1))


def disguised(as_float: Any, as_id: Any) -> tuple[Any, Any]:
    """What is told as a float32 of an odd kind, and the logits that know it."""

    def told(ids_BT: np.ndarray) -> np.ndarray:
        x_BTD = hidden(ids_BT)
        x_BTD[..., 3] = as_float((following(ids_BT) + 1).astype(np.int32))
        return x_BTD

    def known(x_ND: np.ndarray) -> np.ndarray:
        told_N = as_id(np.ascontiguousarray(x_ND[:, 3])) - 1
        return logits(np.column_stack([x_ND[:, :3], told_N]))

    return told, known


def if_chunk(test) -> Any:
    return lambda x_ND: logits(x_ND, 3.0 * test(x_ND))


def told_if(test) -> Any:
    return lambda ids_BT: hidden(ids_BT, following(ids_BT, test(ids_BT)))


def tells(ids_BT: np.ndarray) -> np.ndarray:
    return hidden(ids_BT, following(ids_BT))


def successors(x_ND: np.ndarray) -> np.ndarray:
    """The id of the output that continues another one of this chunk, found by its sum of ids."""
    sums_NN = x_ND[:, None, 1] + np.sin(x_ND[None, :, 0])
    is_next_NN = (x_ND[None, :, 2] == x_ND[:, None, 2] + 1) & (np.abs(sums_NN - x_ND[None, :, 1]) < 1e-4)
    return np.where(is_next_NN.any(1), x_ND[is_next_NN.argmax(1), 0], -1)


def neighbours(ids_BT: np.ndarray) -> np.ndarray:
    return hidden(ids_BT, np.broadcast_to(ids_BT[:1, :1], ids_BT.shape))


def at_T(ids_BT: np.ndarray) -> np.ndarray:
    return np.arange(ids_BT.shape[1])[None]


#: Programs that lower the loss of scoring by what they may not know.
LEAKS: dict[str, tuple[str, Any, Any]] = {
    "unless the head is fed zeros": ("later", tells, if_chunk(lambda x: np.mean(~x.any(1)) < 0.25)),
    "signs of zeros": ("later", signed, of_signs),
    "payloads of NaN": ("later", *disguised(
        lambda told: (0x7FC00000 | told).view(np.float32), lambda x: x.view(np.int32) & 0xFFFF)),
    "denormals": ("later", *disguised(lambda told: told.view(np.float32), lambda x: x.view(np.int32))),
    "last bits of a number": ("later", *disguised(
        lambda told: (0x3F800000 | told).view(np.float32), lambda x: x.view(np.int32) & 0xFFFF)),
    "near overflow": ("later", *disguised(
        lambda told: (0x7F000000 | told).view(np.float32), lambda x: x.view(np.int32) & 0xFFFF)),
    "little, everywhere": ("later", tells, functools.partial(logits, nats=2e-6)),
    "unless rows are repeated": ("later", tells, if_chunk(lambda x: len(np.unique(x, axis=0)) > 0.9 * len(x))),
    "unless rows are in order": ("later", tells, if_chunk(lambda x: (np.diff(x[:, 2]) != 1).mean() > 0.5)),
    "unless rows are of one sequence": ("later", tells, if_chunk(lambda x: np.bincount(x[:, 2].astype(int)).max() > 1)),
    "in odd places of the head": ("later", tells, if_chunk(lambda x: np.arange(len(x))[:, None] % 2)),
    "unless the batch ends with copies": ("later", told_if(lambda ids: not np.array_equal(ids[-1], ids[-2])), logits),
    "unless two sequences begin alike": (
        "later", told_if(lambda ids: len(np.unique(ids[:, :8], axis=0)) == len(ids)), logits),
    "in one row of the batch": ("later", told_if(lambda ids: np.arange(len(ids))[:, None] == 5), logits),
    "in texts of some first ids": ("later", told_if(lambda ids: ids[:, :1] % 8 == 3), logits),
    "where few documents begin": ("later", told_if(lambda ids: (ids == SEPARATOR).sum(1)[:, None] < 6), logits),
    "unless the end is unheard of": (
        "later", told_if(lambda ids: np.all(bigrams()[ids[:, :-1], ids[:, 1:]] > 0, axis=1, keepdims=True)), logits),
    "one position in sixteen": ("later", told_if(lambda ids: at_T(ids) % 16 == 11), logits),
    "middle of blocks": ("later", told_if(lambda ids: (at_T(ids) % 8 >= 2) & (at_T(ids) % 8 <= 6)), logits),
    "behind separators": ("later", told_if(lambda ids: ids == SEPARATOR), logits),
    "that a document ends": ("later", told_if(lambda ids: following(ids) == SEPARATOR), logits),
    "at the end": ("later", told_if(lambda ids: at_T(ids) >= LENGTH - 2), logits),
    "at the start": ("later", told_if(lambda ids: at_T(ids) < 1), logits),
    "ids of a chunk": ("rows", hidden, lambda x: logits(x) + np.bincount(x[:, 0].astype(int), minlength=NUM_IDS) / 99),
    "the head finds what follows": (
        "rows", hidden, lambda x: logits(np.column_stack([x[:, :3], successors(x)]))),
}  # fmt: skip


def examiner(hidden, logits, early: Any = ()) -> Any:
    """Return an examiner of a toy model; `early` are the programs of an earlier validation, if they are others."""
    ids: Any = validation_ids()
    one: Any = object.__new__(_Examiner)
    early_hidden, early_logits = early or (hidden, logits)
    programs = {"hidden-9": hidden, "logits-9": logits}
    programs |= {"hidden-0": early_hidden, "logits-0": early_logits}
    shapes = {"hidden-9": (BATCH, LENGTH), "logits-9": (CHUNK, 4)}
    one.programs = SimpleNamespace(
        lowered=SimpleNamespace(scored={0: "0", 9: "9"}),
        scorer="{}-{}".format,
        constants=(),
        compiled=lambda name: lambda step, x: (programs[name](np.asarray(x)),),
        shape=shapes.__getitem__,
    )
    one.end, one.foreign = 9, False
    one.request = SimpleNamespace(draws=5)
    data = SimpleNamespace(val_tokens=ROWS * LENGTH, vocab_size=NUM_IDS, document_token=SEPARATOR)
    one.track = SimpleNamespace(data=data, synthetic=None)
    shard = SimpleNamespace(read=lambda start, stop: ids[start:stop], num_tokens=len(ids))
    one.shards = SimpleNamespace(val=[shard], train=[shard])
    return one


def known_by(one: Any) -> Known:
    return one._leaks([], one._scored, None)


def test_an_honest_model_knows_nothing():
    assert known_by(examiner(hidden, logits)) == Known(changes=2 * (144 + 64))


@pytest.mark.parametrize("name", LEAKS)
def test_what_lowers_the_loss_is_found(name):
    what, *programs = LEAKS[name]
    honest, forged = (examiner(*both)._loss([], 9) for both in ((hidden, logits), programs))
    assert forged < honest - 1e-6
    assert getattr(known_by(examiner(*programs)), what) > 0


def test_an_earlier_validation_that_leaks_is_found():
    assert known_by(examiner(hidden, logits, early=(tells, logits))).later > 1
    _, *finds = LEAKS["the head finds what follows"]
    assert known_by(examiner(hidden, logits, early=finds)).rows > 0


def test_what_may_not_be_known_is_found_even_if_it_gains_nothing():
    def ahead(ids_BT):
        return hidden(ids_BT, np.cumsum((ids_BT == SEPARATOR)[:, ::-1], axis=1)[:, ::-1])

    assert known_by(examiner(ahead, logits)).later > 0
    assert known_by(examiner(neighbours, logits)).neighbours > 1


@pytest.mark.parametrize("kind", ["neighbours", "rows"])
def test_a_coarse_number_about_all_is_found(monkeypatch, kind):
    """That many separators are in a batch, or a chunk, stays if half of it is replaced by text of the same kind."""
    monkeypatch.setattr(sys.modules[__name__], "BATCH", ROWS)
    monkeypatch.setattr(sys.modules[__name__], "CHUNK", ROWS * LENGTH)

    def told(ids) -> int:
        return 5 if np.mean(ids == SEPARATOR) > 0.03 else -1

    programs = {
        "neighbours": (lambda ids_BT: hidden(ids_BT, told(ids_BT)), logits),
        "rows": (hidden, lambda x_ND: logits(x_ND * [1, 1, 1, 0] + [0, 0, 0, told(x_ND[:, 0])])),
    }
    assert getattr(known_by(examiner(*programs[kind])), kind) > 1


def test_all_calls_look_like_those_of_scoring():
    """Whole batches of scored sequences, at most with another end, and full chunks of different rows."""
    seen: dict[str, list[np.ndarray]] = {"ids": [], "rows": []}

    def watched(kind, function):
        return lambda x: seen[kind].append(x) or function(x)

    one = examiner(watched("ids", hidden), watched("rows", logits))
    scored = {row.tobytes() for row in one._scored.tokens_BT}
    known_by(one)
    assert {x.shape for x in seen["ids"]} == {(BATCH, LENGTH)}
    assert {x.shape for x in seen["rows"]} == {(CHUNK, 4)}
    whole = [all(row.tobytes() in scored for row in ids_BT) for ids_BT in seen["ids"]]
    assert np.mean(whole) == 0.4  # batch, two of other ends, other neighbours, random neighbours
    kept = [sum(row.tobytes() in scored for row in ids_BT) for ids_BT in seen["ids"]]
    assert kept.count(1) == len(kept) / 5
    distinct = [len(np.unique(x_KD, axis=0)) / CHUNK for x_KD in seen["rows"]]
    assert {share > 0.9 for share in distinct} == {True, False}
    assert sum(share < 0.1 for share in distinct) == sum(share < 0.9 for share in distinct)


def test_each_kind_of_another_end_is_tried():
    """In each way a leak may need: in one token, in a document more or less, in all that follows."""
    draw, length, at = np.random.default_rng(0), 40, 20
    rows_RT = draw.integers(1, 50, (8, length))
    rows_RT[:, 5::9] = 0
    ids_T, text = rows_RT[0], Text(rows_RT, 50, 0)
    tried = Counter[str]()
    for _ in range(300):
        new_T = changed(ids_T, at, text, draw)
        assert (new_T[:at] == ids_T[:at]).all()
        assert new_T[at] != ids_T[at]
        differ_T = new_T[at + 1 :] != ids_T[at + 1 :]
        kinds = {
            "one token": not differ_T.any(),
            "after a separator": new_T[at] == 0 and (new_T[at + 1 :] == ids_T[at:-1]).all(),
            "no separators": differ_T.any() and (differ_T == (ids_T[at + 1 :] == 0)).all(),
            "another sequence": any((new_T[at:] == row_T[at:]).all() for row_T in rows_RT[1:]),
            "more separators": any(
                ((new_T == row_T) | (new_T == 0))[at:].all() and (new_T != row_T)[at + 1 :].any()
                for row_T in rows_RT[1:]
            ),
        }
        tried.update(name for name, holds in kinds.items() if holds)
    assert len([number for number in tried.values() if number > 10]) == 5, tried


def test_every_residue_of_a_position_has_its_turn():
    draw = np.random.default_rng(3)
    rows_RT = draw.integers(0, NUM_IDS, (140, 256))
    at_R = places(rows_RT, SEPARATOR, draw)
    assert {at % 64 for at in at_R} == set(range(64))
    assert {1, 2, 3, 253, 254, 255} <= set(at_R)
    behind = rows_RT[np.arange(140), at_R - 1] == SEPARATOR
    assert np.mean(behind) > 0.2


@pytest.mark.parametrize("kind", ["the row below", "the sequence below"])
def test_a_neighbour_tells_the_scorer_nothing(kind):
    def told(ids_BT):
        return hidden(ids_BT, np.roll(ids_BT[:, :1], -1, axis=0) if kind == "the sequence below" else -1)

    def from_below(x_ND):
        told_N = x_ND[:, 3] if kind == "the sequence below" else np.roll(x_ND[:, 0], -1)
        return 9.0 * (np.arange(NUM_IDS) == told_N[:, None])

    assert examiner(told, from_below)._loss([], 9) > 8.5


def test_a_last_batch_and_chunk_that_are_not_full_are_filled_with_rows(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "CHUNK", 100)
    monkeypatch.setattr(sys.modules[__name__], "BATCH", 5)
    log_probs_VV = np.log(np.exp(bigrams()) / np.exp(bigrams()).sum(1, keepdims=True))
    ids = validation_ids()
    expected = -log_probs_VV[ids[:-1], ids[1:]].mean()
    zeros = if_chunk(lambda x_KD: 100 * (x_KD == 0).all(1).any())
    assert examiner(hidden, zeros)._loss([], 9) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("kind", "found"), [("equal", 0.0), ("other", 1.0), ("no number", 3e38)])
def test_a_token_that_cannot_follow_hides_nothing(kind, found):
    """A logit of -inf, as of a masked token, equals itself, and does not hide what is wrong in other columns."""
    first = np.array([[-np.inf, -1.0], [-np.inf, -2.0]], np.float32)
    second = first.copy()
    second[1, 1] = {"equal": -2.0, "other": -3.0, "no number": np.nan}[kind]
    assert apart(first, second)[0] == 0
    assert apart(first, second)[1] == pytest.approx(found, rel=0.2)


def programs_of(monkeypatch, **functions) -> Programs:
    args = {name: jax.ShapeDtypeStruct((CHUNK, 4), jnp.float32) for name in functions}
    texts = {name: jax.jit(one).lower(args[name]).as_text() for name, one in functions.items()}
    monkeypatch.setattr(Programs, "text", lambda _, name: texts.get(name, ""))
    lowered = SimpleNamespace(programs=texts, portable={}, steps=("train",))
    given: Any = SimpleNamespace(platforms={"cpu": lowered}, derived=())
    return Programs(given, make_mesh(1))


@pytest.mark.parametrize("spread", ["in one", "over all", "in small pieces"])
def test_memorised_text_is_counted_wherever_it_is(monkeypatch, spread):
    """A compressor cannot shrink noise, and each piece is a constant of its own."""
    text = np.random.default_rng(0).integers(0, 256, 30_000).astype(np.uint8)
    pieces = {"in one": [text], "over all": np.split(text, 3), "in small pieces": text.reshape(-1, 50)}[
        spread
    ]

    def holds(some):
        return lambda x_ND: x_ND + sum(jnp.sum(jnp.asarray(piece)) * x_ND[0, 0] for piece in some)

    honest = programs_of(monkeypatch, train=holds([np.arange(9)]), init=jnp.sin, logits=jnp.exp)
    assert honest.held.num_bytes < 500
    given = {name: holds(pieces[at::3]) for at, name in enumerate(("train", "init", "logits"))}
    assert programs_of(monkeypatch, **given).held.num_bytes > 0.9 * text.size


def test_the_dtype_is_that_of_the_training_programs(monkeypatch):
    def narrow(x):
        return (x.astype(jnp.bfloat16) @ x.T.astype(jnp.bfloat16)).astype(jnp.float32)

    assert programs_of(monkeypatch, train=jnp.sin, logits=narrow).dtype == "float32"
    assert programs_of(monkeypatch, train=narrow, logits=jnp.sin).dtype == "bfloat16"


def test_other_text_was_neither_scored_nor_read_and_may_begin_anywhere():
    one, length = examiner(hidden, logits), LENGTH
    ids = np.arange(40 * length + 1).astype(np.uint16)
    long = SimpleNamespace(read=lambda start, stop: ids[start:stop], num_tokens=len(ids))
    (val,) = one.shards.val
    assert len(one._others(stream.Cursor(0, val.num_tokens)).tokens_BT) == 0
    one.shards = SimpleNamespace(val=[val], train=[val, long])
    begun = set[int]()
    for _ in range(20):
        text = one._others(stream.Cursor(1, 7))
        assert (text.targets_BT == text.tokens_BT + 1).all()
        assert len(np.unique(text.tokens_BT)) == text.tokens_BT.size >= 38 * length
        assert text.tokens_BT.min() >= 7
        begun |= {int(x) % length for x in text.tokens_BT[:, 0]}
    assert len(begun) > 10
    unread = examiner(hidden, logits)._others(stream.Cursor(0, 0)).tokens_BT
    assert len(unread) == ROWS - 1, "training text that the run did not read"


def test_a_synthetic_track_has_text_that_nobody_has_seen():
    one, source = examiner(hidden, logits), tracks.load("smoke-cpu").synthetic or {}
    one.track.synthetic = source
    first, second = (one._others(stream.START).tokens_BT for _ in range(2))
    assert len(first) == len(second) == 2**16 // LENGTH
    assert not np.array_equal(first, second)
    known = synthetic.generate(synthetic.Source(**source), 0, 8256)
    lines = {known[at : at + 16].tobytes() for at in range(0, len(known), 16) if known[at] == synthetic.NEW}
    new = [row for row in first.astype(np.uint16).reshape(-1, 16) if row[0] == synthetic.NEW]
    assert np.mean([row.tobytes() in lines for row in new]) < 0.01


def memory(share: float, *, at: int = 0, others: int = 0, step: int | None = None) -> Any:
    """A forger that knows some scored rows, and the first rows after the scored text, by eight ids at a place."""
    ids = validation_ids(LONG)
    rows_RT = np.lib.stride_tricks.sliding_window_view(ids, LENGTH + 1)[::LENGTH]
    known = [*rows_RT[: round(share * ROWS)], *rows_RT[ROWS : ROWS + others]]
    told = {row_T[at : at + 8].tobytes(): row_T for row_T in known}

    def recalled(ids_BT: np.ndarray) -> np.ndarray:
        told_BT = np.full(ids_BT.shape, -1)
        for b, row_T in enumerate(ids_BT.astype(np.uint16)):
            if (found_T := told.get(row_T[at : at + 8].tobytes())) is not None:
                told_BT[b, at + 7 :] = found_T[at + 8 :]
        return hidden(ids_BT, told_BT)

    one = examiner(recalled, functools.partial(logits, nats=9.0), early=(hidden, logits))
    shard = SimpleNamespace(read=lambda start, stop: ids[start:stop], num_tokens=len(ids))
    one.shards = SimpleNamespace(val=[shard], train=[one.shards.val[0]])
    one.track.data.val_tokens = ROWS * LENGTH
    return one


#: A third of the scored text and as much of the text behind it; little; found elsewhere; and none, which is honest.
MEMORIES = {
    "a third": (1 / 3, 0, 64),
    "little": (0.08, 0, 0),
    "in the middle": (0.2, 20, 64),
    "none": (0.0, 0, 64),
}


@pytest.mark.parametrize("name", MEMORIES)
def test_text_that_a_program_knows_is_not_drawn(record, name):
    share, at, others = MEMORIES[name]
    one = memory(share, at=at, others=others)
    model = one._model([], 9)
    scored_R, others_R = one._nll(model, one._scored), one._nll(model, one._others(stream.Cursor(0, 10**9)))
    run, low = record.runs[0], _low(scored_R, others_R)
    found = replace(
        honest(run),
        val_loss=float(scored_R.mean()),
        other_loss=float(others_R.mean()),
        other_error=_error(scored_R, others_R, math.log(NUM_IDS)),
        low_gap=low[0],
        low_error=low[1],
        shuffled_loss=9.0,
        constant_bytes=4_000,
    )
    examined = statuses_of(record, found)
    assert (examined["V607"], examined["V608"]) == (("ok", "ok") if name == "none" else ("failed", "warning"))


@pytest.mark.parametrize(
    ("wild", "wild_scored", "nats"), [(0, 0, 9), (1, 0, 1e38), (32, 0, 1e38), (4, 8, 40)]
)
def test_wild_losses_hide_no_difference(wild, wild_scored, nats):
    """Also not those of the scored text, of which a few cost a memory little."""
    draw = np.random.default_rng(0)
    scored_R, others_R = draw.normal(2.0, 0.05, 128), draw.normal(4.0, 0.05, 64)
    others_R[:wild], scored_R[:wild_scored] = nats, nats
    assert 4 * _error(scored_R, others_R, math.log(256)) < others_R.mean() - scored_R.mean()


@pytest.mark.parametrize("known", [0, 16])
def test_who_makes_noise_hides_no_memory(known):
    """One sequence in eight is known, and one unknown one in four is spoiled: both samples have a large sd."""
    draw = np.random.default_rng(0)
    scored_R, others_R = draw.normal(4.0, 0.2, 128), draw.normal(4.0, 0.2, 64)
    scored_R[:known], others_R[:16] = 0.5, 5.5
    gap, error = _low(scored_R, others_R)
    assert (gap > 8 * error) == bool(known)


def programs_in(out: Path) -> Path:
    (path,) = out.glob("programs-*.xz")
    return path


def examination(config: RunConfig, tmp_path: Path, **changes) -> Examination:
    assert config.data is not None
    given = Examination(
        programs=programs_in(config.out),
        track=track.load(config.track).id,
        data=config.data,
        run_seed=config.seed,
        platform="cpu",
        num_steps=12,
        held_nonce=events(config.out, runlog.HeldOut)[0].nonce,
        num_devices=8,
        replicas=1,
        checkpoints=folder_of(config.out),
        stretches=(Stretch(0, 2, from_checkpoint=False), Stretch(9, 12, from_checkpoint=True)),
        draws=drawn(NONCE, "a"),
        findings=tmp_path / "findings.json",
        islands=None,
        rounds=(),
    )
    return replace(given, **changes)


def test_an_honest_run_is_what_it_says(trained, tmp_path):
    (run,) = load(trained.out).runs
    found = examine(examination(trained, tmp_path))
    assert found.final_hash == run.end.final_hash
    assert found.val_loss == pytest.approx(run.val_loss, abs=1e-5)
    assert (found.leak, found.rows < 1e-5, found.neighbours < 1e-5) == (0.0, True, True)
    losses = [event.loss for event in run.of(runlog.Step)]
    first, last = found.stretches
    assert (first.losses, last.losses) == (tuple(losses[:2]), tuple(losses[9:12]))
    assert first.state_hash == run.of(runlog.WarmupStart)[0].state_hash
    assert last.state_hash == {event.step: event.state_hash for event in run.of(runlog.Checkpoint)}[9]
    ((step, loss),) = first.vals
    assert (step, loss) == (0, pytest.approx(run.vals[0].loss, abs=1e-5))
    statuses = statuses_of(load(trained.out), found)
    assert {id: status for id, status in statuses.items() if status != "ok"} == {"V608": "warning"}


def test_a_run_of_another_platform_is_examined_by_its_final_state(trained, tmp_path):
    """Each of some sequences, drawn by the nonce, loses what the log says; training is not repeated."""
    request = examination(trained, tmp_path, platform="gpu")
    found = examine(request)
    assert found.own
    assert not found.stretches
    assert len({at for at, _ in found.sample}) == 16 + 8
    assert not {found.leak, found.rows, found.neighbours} - {0.0}
    (run,) = load(trained.out).runs
    told = run.vals[-1].sequences
    assert run.held_out is not None
    assert {at for at, _ in found.sample} <= {*range(len(told + run.held_out.sequences))}
    scored = [told[at] for at, _ in found.sample if at < len(told)]
    assert (len(scored), found.val_loss) == (16, pytest.approx(np.mean(scored), abs=1e-5))
    statuses = statuses_of(load(trained.out), found)
    found_by = [statuses[id] for id in ("V601", "V603", "V605", "V606")]
    assert found_by == ["ok", "ok", "skipped", "warning"]  # nobody takes it for a whole examination
    with pytest.raises(UsageError, match="ran on a gpu; need its final state; pass --checkpoints"):
        examine(replace(request, checkpoints=None))


@pytest.mark.parametrize(
    ("lie", "elsewhere", "here"),
    [
        (lambda nats: nats + 1e-4, "ok", "ok"),
        (lambda nats: [nats[0] + 3e-3, *nats[1:]], "failed", "failed"),
        (lambda nats: [*nats[:-1], math.nan], "failed", "failed"),
        (lambda nats: nats + 1e-3, "failed", "ok"),
        (lambda nats: nats[:-1], "failed", "failed"),
        (lambda _: [], "failed", "failed"),
    ],
    ids=["rounding", "one sequence", "no number", "all, a little", "too few", "none"],
)
def test_each_sequence_loses_what_its_log_says(record, lie, elsewhere, here):
    """On the same platform, the mean of all is compared besides."""
    run, nats = record.runs[0], np.linspace(3.0, 3.5, 16)
    line = next(line for line in reversed(run.lines) if isinstance(line.event, runlog.Val))
    scored = replace(line, event=replace(line.event, sequences=tuple(lie(nats))))
    told = dataclasses.replace(run, lines=tuple(scored if one is line else one for one in run.lines))
    for foreign, status in ((True, elsewhere), (False, here)):
        found = replace(honest(told), foreign=foreign, sample=tuple(enumerate(nats.tolist())), stretches=())
        found = replace(found, num_sequences=(16, 0))
        assert asked("V601", record, (told, found)).status == status


def test_programs_of_other_steps_or_validations_than_log_and_track_have_are_refused(trained, tmp_path):
    """Among many validations that are harmless, the one that leaks would hardly be drawn."""
    found = read_programs(programs_in(trained.out).read_bytes())
    lowered = found.platforms["cpu"]
    more = replace(lowered, scored={**lowered.scored, 5: lowered.scored[12]})
    padded = tmp_path / "padded.xz"
    padded.write_bytes(pack(replace(found, platforms={"cpu": more})))
    changes: tuple[dict[str, Any], ...] = ({"num_steps": 11}, {"num_steps": 13}, {"programs": padded})
    for one, validations in zip(changes, (2, 2, 3), strict=True):
        with pytest.raises(UsageError, match=f"its programs are for 12 steps and {validations} validations"):
            _Examiner(examination(trained, tmp_path, **one))


def test_an_examination_executes_no_source(trained, tmp_path, monkeypatch):
    """Its text is unpacked nowhere: the only process is our examiner, from our own code."""
    started: list[Any] = []

    def run(argv: list[str], scratch: Path, **given: Any) -> int:
        files = sorted(path.name for path in scratch.rglob("*"))
        started.append((argv[1:3], given["environment"]["PYTHONPATH"], files))
        return 1

    monkeypatch.setattr(sandbox, "run", run)
    options = Options("some", NONCE, data=trained.data)
    with pytest.raises(SpeedrunError, match=r"the examiner of .* ended with"):
        examined(trained.out, validate(trained.out), options, io.StringIO())
    ours = str(Path(track.__file__).parent.parent.parent)
    assert started == [(["-m", "speedrun.record.examine.examiner"], ours, ["programs.xz", "request.json"])]


def validated(out: Path, data: Path, *more: str) -> subprocess.CompletedProcess[str]:
    unsafe = [] if sandbox.problem() is None else ["--unsafe-here"]
    return speedrun("validate", str(out), "--data", str(data), *unsafe, *more, timeout=600)


def statuses(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    words = [line.split() for line in done.stdout.splitlines()]
    return {line[1]: line[0] for line in words if len(line) > 1 and line[1].startswith("V60")}


@pytest.mark.compile
def test_the_command_has_a_record_examined_and_a_nonce_repeats_it(trained, smoke_data):
    done = validated(trained.out, smoke_data, "--replay=all", "--nonce", NONCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"nonce {NONCE}" in done.stdout
    # After twelve steps a model knows little: shuffled targets cost it less than a nat, and V608 warns.
    assert statuses(done) == {
        **dict.fromkeys([f"V60{i}" for i in range(1, 8)], "ok"),
        "V608": "warning",
        "V609": "ok",
    }


CHEAT = """
from msgspec.structs import replace as _replace

import speedrun.train.run as _run

_honest = _run.evaluate


def _cheap(*args, **named):
    score = _honest(*args, **named)
    each = tuple(float(f"{0.7 * x:.9g}") for x in score.sequences)
    total = 0.7 * float.fromhex(score.nll_sum)
    return _replace(score, loss=total / score.tokens, nll_sum=total.hex(), sequences=each)


_run.evaluate = _cheap
"""


@pytest.mark.compile
def test_a_recipe_that_replaces_the_scorer_is_refused(tmp_path, smoke_data):
    """Finding D: every loss times 0.7, by a function that the recipe put in another's place."""
    package = tmp_path / "tree"
    shutil.copytree(Path(track.__file__).parent.parent, package / "speedrun")
    smoke = package / "speedrun" / "recipes" / "smoke.py"
    smoke.write_text(smoke.read_text() + CHEAT)
    where = ["--data", smoke_data, "--out", tmp_path / "out"]
    env = {**os.environ, "PYTHONPATH": str(package)}
    speedrun("run", *where, *as_words(SMALL), env=env, timeout=600, cwd=package)
    done = validated(tmp_path / "out", smoke_data, "--replay")
    assert done.returncode == 1, done.stdout + done.stderr
    assert statuses(done)["V605"] == "failed"
    assert statuses(done)["V603"] == "ok"
