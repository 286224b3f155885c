"""Islands without an engine's processes: rounds, leases, refusals, the outer step, records, snapshots and replays."""

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from small_run import SMALL, events, log_of, rewrite, runs_of

from speedrun.base import faults, runlog
from speedrun.base.errors import CheckpointError, DataError, SpeedrunError, UsageError
from speedrun.base.recipe_files import resolve
from speedrun.base.rounds import Work
from speedrun.data.stream import START, Shape
from speedrun.islands import snapshot
from speedrun.islands.driver import Driver
from speedrun.islands.fleet import Fleet
from speedrun.islands.island import ROOTS, Island, config_sha256, weights_of
from speedrun.islands.replay import in_turns, repeated
from speedrun.islands.rounds import Answer, Lease, Leases, Lost, Order, digest, stepped
from speedrun.record.checks.v6_examination import REPLAY_CHECKS
from speedrun.record.examination import Examination
from speedrun.record.examine.examiner import _Examiner
from speedrun.record.examine.training import Trainer
from speedrun.record.logged_run import rounds_of
from speedrun.record.summary import assemble
from speedrun.record.validate import find_check, validate
from speedrun.train.preflight import prepare, shapes_of
from speedrun.train.recorded import train
from speedrun.train.resume_settings import asked
from speedrun.train.run_config import RunConfig

RNG = np.random.default_rng(0)
FLEET = runlog.Islands(islands=2, every=2, quorum=1, deadline_s=600.0)


def equal(*_: Any) -> float:
    """The score of all weights, where no test is of scores."""
    return 0.0


class Here:
    """An engine whose islands take turns in this process; they share one program, and each has a state of its own."""

    def __init__(self, config: RunConfig, *names: str, island: Island | None = None) -> None:
        self.names, self.orders = list(names), list[tuple[str, Order]]()
        self.island = island or Island("", replace(config, out=Path(f"{config.out}.island"), resume=False))
        self.states: dict[str, Any] = {}

    def islands(self) -> list[str]:
        return self.names

    def send(self, island: str, order: Order) -> None:
        self.orders.append((island, order))

    def receive(self, timeout_s: float, /) -> Answer | Lost | None:
        if not self.orders:
            return None
        name, order = self.orders.pop(0)
        with jax.transfer_guard("allow"):  # this process is the driver's, too
            self.island.state = self.states.pop(name) if name in self.states else self.island.fresh()
            answer = self.island.work(order)
        self.states[name] = self.island.state
        return answer._replace(work=replace(answer.work, island=name))


SMALLER = {**SMALL, "stages.0.num_steps": "25", "stages.0.num_sequences": "8"}
ISLANDS = RunConfig("islands-cpu", Path("unset"), overrides=SMALLER, meshes=2)


def test_one_island_whose_mean_is_taken_ends_with_the_state_of_a_plain_run(trained, smoke_data, tmp_path):
    config = RunConfig(
        "islands-cpu", tmp_path / "out", overrides=SMALL, data=smoke_data, num_devices=8, meshes=1
    )
    engine = Here(config, "a")
    ready = engine.island.ready
    weights = weights_of(engine.island.fresh())
    given = replace(FLEET, every=4), config_sha256(ready), shapes_of(ready.recipe)
    fleet, losses, last = Fleet(*given, Leases(ready.stream(START)), weights, equal), [], None
    while fleet.step < len(fleet.shapes):
        (last,) = fleet.advance(engine).used
        losses += last.losses
    (end,) = events(trained.out, runlog.RunEnd)
    assert last is not None
    assert last.state_hash == end.final_hash
    assert losses == [step.loss for step in events(trained.out, runlog.Step)]
    assert last.digest == digest(fleet.weights)


SGD = """
from dataclasses import dataclass, replace

import optax

from speedrun.recipes.smoke import RECIPE as SMOKE
from speedrun.science.optim.muon_and_adam import by_group


@dataclass(frozen=True, slots=True)
class Sgd:
    lr: float

    def transform(self, layout):
        return by_group({name: optax.sgd(self.lr) for name in layout.groups.values()}, layout)


RECIPE = replace(SMOKE, name="sgd", parent="smoke", optimizer=Sgd(lr=2.0))
"""


def test_sgd_averaged_after_each_step_is_sgd_on_all_their_tokens(smoke_data, tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDRUN_RECIPES", "")  # `resolve` puts a folder first
    (tmp_path / "sgd.py").write_text(SGD)
    recipe = resolve(str(tmp_path / "sgd.py"))

    def after(steps: int, *names: str, num_sequences: int) -> dict[str, np.ndarray]:
        overrides = {**SMALL, "stages.0.num_sequences": str(num_sequences)}
        out, same = tmp_path / str(len(names)), {"data": smoke_data, "overrides": overrides}
        engine = Here(RunConfig("islands-cpu", out, recipe, meshes=len(names), **same), *names)
        ready = engine.island.ready
        given = replace(FLEET, every=1, quorum=len(names)), config_sha256(ready), shapes_of(ready.recipe)
        fleet = Fleet(*given, Leases(ready.stream(START)), weights_of(engine.island.fresh()), equal)
        for _ in range(steps):
            fleet.advance(engine)
        assert fleet.step == steps
        return fleet.weights

    first, apart, whole = (
        after(0, "a", num_sequences=8),
        after(5, "a", "b", num_sequences=8),
        after(5, "a", num_sequences=16),
    )
    for name, x in whole.items():
        moved = np.linalg.norm(x - first[name])
        assert np.linalg.norm(apart[name] - x) <= 1e-3 * moved + 1e-6 * np.linalg.norm(x), name
    assert any(np.linalg.norm(x - first[name]) > 0.01 for name, x in whole.items())


class SameTokens(Leases):
    """Leases of the same tokens to pairs of islands."""

    other: Lease | None = None

    def grant(self, shapes: Sequence[Shape]) -> Lease:
        lease, self.other = self.other, None
        if lease is None:
            lease = self.other = super().grant(shapes)
            return lease
        return replace(lease, number=lease.number + 1000)


def test_two_islands_on_the_same_tokens_are_one(island):
    ready = island.ready
    given = replace(FLEET, every=3, quorum=1), config_sha256(ready), shapes_of(ready.recipe)

    def after(leases: type[Leases], *names: str) -> str:
        fleet = Fleet(*given, leases(ready.stream(START)), weights_of(island.fresh()), equal)
        engine = Here(ready.config, *names, island=island)
        for _ in range(3):
            assert len(fleet.advance(engine).used) == len(names)
        return digest(fleet.weights)

    assert after(SameTokens, "a", "b") == after(Leases, "a") != after(Leases, "a", "b")


class Scripted:
    """An engine whose islands answer as the test says; time does not pass."""

    def __init__(self, *names: str) -> None:
        self.names, self.orders = list(names), dict[str, Order]()
        self.arriving: list[Callable[[], Answer | Lost]] = []

    def islands(self) -> list[str]:
        return self.names

    def send(self, island: str, order: Order) -> None:
        self.orders[island] = order

    def receive(self, _: float) -> Answer | Lost | None:
        return self.arriving.pop(0)() if self.arriving else None


WEIGHTS = {"bank": RNG.standard_normal((3, 4)).astype(np.float32), "scalars": np.ones(2, np.float32)}


class Tokens:
    """A stream that only moves."""

    def __init__(self, most: int) -> None:
        self.cursor, self.most = START, most

    def batch(self, num_sequences: int, seq_len: int, _: int = 0) -> None:
        if self.cursor.offset + num_sequences * seq_len > self.most:
            raise DataError("no tokens left")
        self.cursor = self.cursor._replace(offset=self.cursor.offset + num_sequences * seq_len)


def scripted(*names: str, most: int = 10_000, score: Any = equal, **changed: Any) -> tuple[Fleet, Scripted]:
    tokens: Any = Tokens(most)
    given = replace(FLEET, **changed), "c" * 64, [Shape(2, 8)] * 6, Leases(tokens)
    return Fleet(*given, WEIGHTS, score), Scripted(*names)


def answer_to(
    order: Order, island: str, weights: Any = None, config: str = "c" * 64, **changed: Any
) -> Answer:
    made = {name: x + np.float32(1) for name, x in order.weights.items()}
    lease = order.lease
    given = (
        order.version,
        lease.number,
        lease.start,
        lease.stop,
        lease.num_tokens,
        (1.0, 1.0),
        digest(made),
        "",
    )
    return Answer(replace(Work(island, *given), **changed), config, made if weights is None else weights)


def played(fleet: Fleet, engine: Scripted, *answers: Callable[[], Any]) -> Any:
    """A round in which these arrive, made after the orders are known."""
    engine.arriving = list(answers)
    return fleet.advance(engine)


def refused(found: Any) -> list[tuple[str, str]]:
    return [(one.island, one.refused) for one in found.round.works if one.refused]


def names(found: Any) -> list[str]:
    return [one.island for one in found.used]


NAN = {name: np.full_like(x, np.nan) for name, x in WEIGHTS.items()}
FAR = {name: 100 * x for name, x in WEIGHTS.items()}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another lease": ({"lease": 7}, "of lease 7, need lease 0"),
    "other tokens": ({"start": (0, 8)}, "of lease 0, need lease 0"),
    "fewer tokens": ({"num_tokens": 31}, "of 31 tokens in 2 steps, need 32 in 2"),
    "fewer steps": ({"losses": (1.0,)}, "of 32 tokens in 1 steps, need 32 in 2"),
    "another config": ({"config": "d" * 64}, "of config dddddddddddd, need cccccccccccc"),
    "damaged": ({"weights": WEIGHTS}, "damaged: its weights do not match its digest"),
    "not finite": ({"weights": NAN, "digest": digest(NAN)}, "not finite"),
    "a loss of NaN": ({"losses": (1.0, float("nan"))}, "not finite"),
    "worse": (
        {"weights": FAR, "digest": digest(FAR)},
        "its weights cost 100.000 nats, and may cost 12.000",
    ),
    "other arrays": ({"weights": {}, "digest": digest({})}, "its weights have other names, shapes or dtypes"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_answer_is_refused_and_its_tokens_are_given_again(kind):
    changed, why = WRONG[kind]
    fleet, engine = scripted("a", "b", score=lambda weights, *_: weights["scalars"][0], max_rise=10.0)
    wrong = lambda: answer_to(engine.orders["a"], "a", **changed)  # noqa: E731
    found = played(fleet, engine, wrong, lambda: answer_to(engine.orders["b"], "b"))
    assert refused(found) == [("a", why)]
    assert names(found) == ["b"]
    assert [lease.number for lease in fleet.leases.returned] == [0]
    assert runlog.decode(runlog.Line(0, 0, "", "", found.round).encode()).event == found.round, (
        "it can be logged"
    )
    played(fleet, engine)
    assert {order.lease.number for order in engine.orders.values()} == {0, 2}


def test_weights_that_have_no_mean_with_the_others_are_left_out():
    """They score as well as the others, since the sign of all is free."""
    score = lambda weights, *_: abs(abs(float(weights["scalars"][0])) - 2)  # noqa: E731
    fleet, engine = scripted("a", "b", "c", score=score, max_rise=0.1, quorum=2)
    flipped = {name: -(x + np.float32(1)) for name, x in WEIGHTS.items()}
    honest = [lambda one=one: answer_to(engine.orders[one], one) for one in "ac"]
    found = played(
        fleet, engine, lambda: answer_to(engine.orders["b"], "b", flipped, digest=digest(flipped)), *honest
    )
    assert refused(found) == [("b", "the mean costs 1.333 nats with its weights, 0.000 without")]
    assert score(fleet.weights) == 0
    assert [lease.number for lease in fleet.leases.returned] == [1]


def test_a_stale_answer_is_refused_and_its_island_may_still_answer():
    fleet, engine = scripted("a")
    late = lambda: answer_to(engine.orders["a"], "a", version=4)  # noqa: E731
    found = played(fleet, engine, late, lambda: answer_to(engine.orders["a"], "a"))
    assert refused(found) == [("a", "stale: of version 4, need 0")]
    assert names(found) == ["a"]
    assert fleet.leases.returned == []


def test_what_arrives_while_islands_are_awaited_is_kept_for_the_next_round():
    fleet, engine = scripted("a", "b")
    engine.arriving = [lambda: Lost("c", "killed")]
    fleet.poll(engine, 0.1)
    found = played(fleet, engine, lambda: answer_to(engine.orders["a"], "a"))
    assert found.lost[0] == Lost("c", "killed")
    assert fleet.late == []


def test_an_island_that_is_late_gives_its_tokens_back():
    fleet, engine = scripted("a", "b")
    found = played(fleet, engine, lambda: answer_to(engine.orders["b"], "b"))
    assert found.lost == (Lost("a", "late: no answer in 1 s"),)
    assert [lease.number for lease in fleet.leases.returned] == [0]


def test_a_second_answer_is_refused():
    fleet, engine = scripted("a", "b")
    twice = [lambda: answer_to(engine.orders["a"], "a")] * 2
    found = played(fleet, engine, *twice)
    assert refused(found) == [("a", "it has answered already, or was not asked")]
    assert names(found) == ["a"]


def test_a_late_answer_to_an_earlier_order_of_the_round_leaves_the_open_one_alone():
    fleet, engine = scripted("a", "b", "c", quorum=3)
    played(fleet, engine, lambda: answer_to(engine.orders["a"], "a"), lambda: Lost("b", "killed"))
    old, engine.names = engine.orders["c"], ["a", "d", "c"]
    late, others = lambda: answer_to(old, "c"), [lambda n=n: answer_to(engine.orders[n], n) for n in "adc"]
    engine.arriving = [late]
    fleet.poll(engine, 0.1)
    found = played(fleet, engine, *others)
    assert refused(found) == [("c", "of lease 2, need lease 3")] or len(found.used) == 3
    assert fleet.version == 1


def test_a_round_without_a_quorum_changes_nothing_and_gives_its_tokens_again():
    fleet, engine = scripted("a", "b", quorum=2)
    found = played(fleet, engine, lambda: answer_to(engine.orders["a"], "a"), lambda: Lost("b", "killed"))
    assert found.lost == (Lost("b", "killed"),)
    assert refused(found) == [("a", "only 1 of 2 answered")]
    assert (fleet.version, found.round.digest) == (0, "")
    assert fleet.weights is WEIGHTS
    first = {order.lease for order in engine.orders.values()}
    both = [lambda: answer_to(engine.orders["a"], "a"), lambda: answer_to(engine.orders["b"], "b")]
    found = played(fleet, engine, *both)
    assert {order.lease for order in engine.orders.values()} == first
    assert (fleet.version, found.round.digest) == (1, digest(fleet.weights))
    assert found.round.num_bytes == 4 * sum(x.nbytes for x in WEIGHTS.values())


def test_the_mean_does_not_depend_on_who_answers_first_and_bytes_are_those_of_orders_and_answers():
    """Of these three numbers, the sum depends on their order."""
    far = {"a": 1e17, "b": -1e17, "c": 1.0}

    def digest_of(*order: str) -> str:
        fleet, engine = scripted("a", "b", "c")
        made = {name: {key: np.full_like(x, far[name]) for key, x in WEIGHTS.items()} for name in order}
        given = [
            lambda one=one: answer_to(engine.orders[one], one, made[one], digest=digest(made[one]))
            for one in order
        ]
        return played(fleet, engine, *given).round.digest

    assert digest_of("a", "b", "c") == digest_of("c", "b", "a") == digest_of("a", "c", "b")
    fleet, engine = scripted("a", "b")
    found = played(fleet, engine, lambda: answer_to(engine.orders["a"], "a"))
    assert found.round.num_bytes == 3 * sum(x.nbytes for x in WEIGHTS.values())


def test_leases_are_disjoint_and_cover_the_stream_in_order():
    fleet, engine = scripted("a", "b", "c")
    seen = []
    while fleet.step < len(fleet.shapes):
        round_ = played(fleet, engine, *[lambda n=n: answer_to(engine.orders[n], n) for n in "abc"])
        seen += sorted(round_.used, key=lambda one: one.lease)
    assert [one.lease for one in seen] == list(range(9))
    assert [(one.start[1], one.stop[1]) for one in seen] == [(32 * i, 32 * i + 32) for i in range(9)]
    assert (fleet.version, fleet.step) == (3, 6)


def test_too_few_tokens_are_an_error():
    fleet, engine = scripted("a", "b", most=40)
    with pytest.raises(DataError, match="no tokens left"):
        fleet.advance(engine)


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.5), (1.0, 0.9)])
def test_the_outer_step_is_nesterov_on_the_mean_by_tokens(lr, momentum):
    """Against long doubles, for 20 rounds of four islands."""
    weights, velocity = WEIGHTS, {name: np.zeros_like(x) for name, x in WEIGHTS.items()}
    exact = {name: x.astype(np.longdouble) for name, x in WEIGHTS.items()}
    moving = {name: np.zeros_like(x) for name, x in exact.items()}
    settings = replace(FLEET, outer_lr=lr, outer_momentum=momentum)
    for _ in range(20):
        tokens = RNG.integers(1, 100, 4).tolist()
        moves = [{name: RNG.standard_normal(x.shape) / 50 for name, x in exact.items()} for _ in tokens]
        parts = [
            (n, {name: (x + move[name]).astype(np.float32) for name, x in weights.items()})
            for n, move in zip(tokens, moves, strict=True)
        ]
        for name, x in exact.items():
            mean = sum(np.longdouble(n) * w[name] for n, w in parts) / sum(tokens)
            change = weights[name] - mean
            moving[name] = momentum * moving[name] + change
            exact[name] = x - lr * (change + momentum * moving[name])
        weights, velocity = stepped(settings, weights, velocity, parts)
    for name, x in exact.items():
        np.testing.assert_allclose(weights[name], x.astype(np.float64), rtol=0, atol=3e-6)
        assert weights[name].dtype == np.float32


def test_the_mean_of_one_island_is_its_weights_to_the_last_bit():
    parts = [(7, WEIGHTS)]
    new, _ = stepped(FLEET, {name: x + 1 for name, x in WEIGHTS.items()}, {}, parts)
    assert all(np.array_equal(x, WEIGHTS[name]) for name, x in new.items())


@pytest.mark.parametrize("wrong", [{"outer_lr": 0.0}, {"outer_momentum": 1.0}, {"islands": 0}, {"every": 0}])
def test_settings_have_limits(wrong):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(msgspec.to_builtins(FLEET) | wrong, runlog.Islands)


# --- with the driver, its record and its snapshot -----------------------------------------------------------


@pytest.fixture(scope="module")
def island(smoke_data, tmp_path_factory) -> Island:
    """A program for all islands of this file."""
    return Island("", replace(ISLANDS, out=tmp_path_factory.mktemp("island") / "out", data=smoke_data))


def run(island: Island, out: Path, engine: Any = None, resume: bool = False, **changed: Any) -> runlog.RunEnd:
    settings = replace(FLEET, every=10, quorum=2, outer_lr=0.7, outer_momentum=0.5, **changed)
    config = replace(island.ready.config, out=out, resume=resume)
    here = lambda config: engine or Here(config, "0", "1", island=island)  # noqa: E731
    end = train(config, steps=partial(Driver, settings=settings, engine_of=here, meet_s=0.5), roots=ROOTS)
    assemble(out)
    return end


@pytest.fixture(scope="module")
def done(island, tmp_path_factory) -> Path:
    """A record of islands; its snapshot of round 1 is kept as `old`."""
    out = tmp_path_factory.mktemp("islands") / "record"

    def keeps(name: str) -> None:
        if name == "snapshot" and not out.with_name("old").exists():
            shutil.copy(f"{out}.islands/snapshot", out.with_name("old"))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(faults, "point", keeps)
        run(island, out)
    return out


def failed(record: Path) -> dict[str, tuple[str, ...]]:
    """Checks that failed, but for what the test's islands compile in the driver's process."""
    return {
        one.check.id: one.messages
        for one in validate(record).having("failed")
        if one.check.id not in SIMULATED
    }


SIMULATED = {"V206"}


def differences(island: Island, record: Path) -> list[str]:
    (settings, *_) = runs_of(record)[0].of(runlog.Islands)
    given = settings, rounds_of(runs_of(record)), weights_of(island.fresh()), in_turns(island, 10)
    return [said for one in repeated(*given) for said in one.differs]


def test_a_record_of_islands_validates_and_can_be_repeated(island, done):
    assert failed(done) == {}
    assert {one.check.id for one in validate(done).having("ok")} >= {"V108", "V109"}
    assert differences(island, done) == []
    assert [step.step for step in events(done, runlog.Step)] == list(range(25))
    assert events(done, runlog.Step)[-1].tokens_seen == 2 * 25 * 8 * 64
    assert [one.step for one in events(done, runlog.Val)] == [0, 25]


def test_an_examiner_repeats_the_islands_with_the_programs_of_the_record(done, smoke_data, tmp_path):
    (run_,) = runs_of(done)
    (settings,), (programs,) = run_.of(runlog.Islands), done.glob("programs-*.xz")
    request = Examination(
        programs=programs,
        track="islands-cpu@2",
        data=smoke_data,
        run_seed=0,
        platform="cpu",
        num_steps=25,
        held_nonce=run_.of(runlog.HeldOut)[0].nonce,
        num_devices=1,
        replicas=1,
        checkpoints=None,
        stretches=(),
        draws=7,
        findings=tmp_path / "findings.json",
        islands=settings,
        rounds=tuple(rounds_of([run_])),
    )
    examiner = _Examiner(request)
    found = examiner.findings()
    assert found.final_hash == run_.final_hash
    assert found.stretches[0].losses == tuple(step.loss for step in run_.steps)

    def said(check: Any, run: Any, found: Any = found) -> list[str]:
        one: Any = SimpleNamespace(runs=[run], findings={run.folder: found})
        return [problem.removeprefix(f"{run.folder}: ") for problem in check.find(one)]

    sizes = REPLAY_CHECKS[-1]
    assert [problem for one in (*REPLAY_CHECKS[:5], sizes) for problem in said(one, run_)] == []

    def problems(kind: type, version: int | None = None, **changed: Any) -> list[str]:
        lines = [
            replace(line, event=replace(line.event, **changed))
            if isinstance(line.event, kind) and getattr(line.event, "version", None) == version
            else line
            for line in run_.lines
        ]
        return said(sizes, dataclasses.replace(run_, lines=tuple(lines)))

    wrong = "the log says {} tokens, its program takes 512, on {} islands"
    assert problems(runlog.Step, batch_tokens=512) == ["step 0: " + wrong.format("512", 2)]
    works = with_works(request.rounds[1][1], refused="late").works
    assert problems(runlog.Round, 1, works=works) == ["step 10: " + wrong.format("1,024", 1)]
    assert problems(runlog.Round, 2, digest="") == ["step 20: " + wrong.format("1,024", 0)]
    resume = runlog.Resume("a", 10, "", 0.0, 0, START)
    rest = [line for line in run_.lines if getattr(line.event, "step", 10) >= 10]
    went_on = dataclasses.replace(run_, lines=(*rest, replace(rest[-1], event=resume)))
    grown = replace(found, batch_tokens=(1,) * 10 + found.batch_tokens[10:])
    assert said(sizes, went_on, grown) == []
    parts = examiner.track, examiner.archive, examiner.programs, examiner.shards, lambda *_: 0.0
    other = replace(settings, outer_lr=0.8)
    ((again,), _, _) = Trainer(replace(request, islands=other), *parts).all()
    assert again.stop_hash != run_.final_hash
    first, *rest = request.rounds
    moved = with_works(first[1], stop=(0, 5))
    with pytest.raises(UsageError, match=r"lease 1 ends at \(0, 5\) by the log"):
        Trainer(replace(request, rounds=((first[0], moved), *rest)), *parts).all()


class Killed(BaseException):
    """As a process dies: nothing runs after it that would not run in another process."""


@pytest.mark.parametrize(
    ("point", "nth"),
    [
        pytest.param("snapshot", 2, id="before its log"),
        pytest.param("round", 3, id="after it", marks=pytest.mark.compile),
    ],
)
def test_a_driver_that_dies_after_a_snapshot_logs_each_round_once(island, tmp_path, monkeypatch, point, nth):
    out, reached = tmp_path / "out", list[str]()

    def dies(name: str) -> None:
        reached.append(name)
        if reached.count(point) == nth:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(faults, "point", dies)
        with pytest.raises(Killed):
            run(island, out)
    assert snapshot.load(out).version == 2
    run(island, out, resume=True)
    rounds = [one.version for each in runs_of(out) for one in each.of(runlog.Round)]
    assert rounds == [0, 1, 2], "each once"
    assert failed(out) == {}
    assert differences(island, out) == []


def test_a_snapshot_that_is_damaged_or_missing_is_named(island, done, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="is missing; start a new one"):
        snapshot.load(out)
    shutil.copytree(f"{done}.islands", f"{out}.islands")
    path = Path(f"{out}.islands/snapshot")
    raw = bytearray(path.read_bytes())
    raw[-9] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="its digest does not match"):
        snapshot.load(out)


def test_a_snapshot_that_is_older_than_the_log_is_refused(done, tmp_path):
    out = tmp_path / "out"
    for end in ("", ".islands"):
        shutil.copytree(f"{done}{end}", f"{out}{end}")
    lines = log_of(out).read_bytes().splitlines(keepends=True)
    rounds = [i for i, line in enumerate(runlog.read(log_of(out))) if isinstance(line.event, runlog.Round)]
    shutil.copy(done.with_name("old"), f"{out}.islands/snapshot")
    same = replace(snapshot.load(out).config, out=out, resume=True)
    log_of(out).write_bytes(b"".join(lines[: rounds[0] + 1]))
    assert snapshot.resumed(out) == same, "it is as old as the log"
    log_of(out).write_bytes(b"".join(lines[: rounds[1] + 1]))
    rewrite(out, lambda event: replace(event, digest="") if is_round(event, 1) else event)
    assert snapshot.resumed(out) == same, "the next round did not count"
    log_of(out).write_bytes(b"".join(lines[: rounds[1] + 1]))
    with pytest.raises(CheckpointError, match="of round 1, but the log has round 2; restore it"):
        snapshot.resumed(out)


def test_a_snapshot_of_another_run_in_that_place_is_refused(done, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(f"{done}.islands", f"{out}.islands")
    run_id = snapshot.load(out).run_id
    for log in done.glob("runs/*/metrics.jsonl"):
        lines = log.read_bytes().splitlines(keepends=True)[:6]
        path = out / "runs" / "stranger" / log.name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"".join(lines).replace(run_id.encode(), b"stranger"))
    with pytest.raises(CheckpointError, match=f"is of another run, {run_id}"):
        snapshot.resumed(out)
    its_own = out / "runs" / run_id / log_of(done).name
    its_own.parent.mkdir()
    its_own.write_bytes(b"".join(log_of(done).read_bytes().splitlines(keepends=True)[:6]))
    assert snapshot.resumed(out).resume, "its run may be any of the record's"


class Unreliable(Here):
    """An island's first answer arrives after five others, and another island lies once, with a right digest."""

    held: Answer | None = None
    count, lied = 0, False

    def islands(self) -> list[str]:
        return [name for name in self.names if not (name == "1" and self.held)]

    def receive(self, timeout_s: float, /) -> Answer | Lost | None:
        if self.held and self.count >= 5:
            late, self.held = self.held, None
            return late
        answer: Any = super().receive(timeout_s)
        if answer and self.count == 1 and answer.work.island == "1":
            self.held, answer = answer, super().receive(timeout_s)
        self.count += answer is not None
        if answer and answer.work.island == "2" and not self.lied:
            self.lied, lie = True, {name: 30 * x for name, x in answer.weights.items()}
            answer = answer._replace(work=replace(answer.work, digest=digest(lie)), weights=lie)
        return answer


def test_late_and_harmful_answers_are_refused_and_their_islands_begin_anew_also_when_repeated(
    island, tmp_path
):
    out = tmp_path / "out"
    engine = Unreliable(island.ready.config, "0", "1", "2", island=island)
    run(island, out, engine)
    refusals = {one.island: one for each in events(out, runlog.Round) for one in each.works if one.refused}
    late, lie = refusals["1"], refusals["2"]
    assert late.version == 0
    assert late.refused.startswith("stale")
    assert lie.refused.startswith("its weights cost ")
    assert failed(out) == {}
    assert differences(island, out) == []


class Mute(Here):
    """Islands that are ready, and never answer."""

    def send(self, island: str, order: Order) -> None:
        pass


def test_a_fleet_that_never_answers_ends_with_the_reason(island, tmp_path):
    with pytest.raises(SpeedrunError, match=r"10 rounds in a row had fewer than 2 answers"):
        run(island, tmp_path / "out", Mute(island.ready.config, "0", "1", island=island))
    assert len(events(tmp_path / "out", runlog.Val)) == 1, "not before each attempt"


def test_weights_of_16_bits_are_kept_as_they_are(tmp_path):
    halves = {"table": np.arange(3, dtype=np.float32).astype(jax.numpy.bfloat16)}
    last = runlog.Round(0, (), 0)
    given: Any = {
        "config": replace(ISLANDS, out=tmp_path / "a"),
        "settings": FLEET,
        "run_id": "a",
        "version": 1,
    }
    given |= {
        "cursor": START,
        "num_granted": 0,
        "returned": [],
        "tokens_seen": 0,
        "train_time_s": 0.0,
        "last": last,
    }
    snapshot.save(snapshot.Snapshot(**given, weights=halves, velocity={}))
    found = snapshot.load(tmp_path / "a").weights["table"]
    assert found.dtype == halves["table"].dtype
    assert found.tolist() == [0.0, 1.0, 2.0]


def test_a_fleet_without_a_quorum_ends_with_the_reason(island, tmp_path):
    with pytest.raises(SpeedrunError, match=r"1 islands were ready within 0.5 s, need 2"):
        run(island, tmp_path / "out", Here(island.ready.config, "0", island=island))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"track": "smoke-cpu"}, "smoke-cpu@2 is for one mesh"),
        ({"meshes": 0}, "islands-cpu@2 is for several meshes that train together"),
        ({"meshes": 8, "overrides": {"stages.0.num_steps": "60"}}, "shards last for"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_a_folder_is_made(changed, why, smoke_data, tmp_path):
    config = replace(ISLANDS, out=tmp_path / "out", data=smoke_data, **changed)
    with pytest.raises(SpeedrunError, match=why):
        prepare(config)
    assert not config.out.exists()


#: One of each check in a whole record; the rules of both are below.
FORGED: dict[str, Callable[[runlog.Round], runlog.Round]] = {
    "V108": lambda one: with_works(one, num_tokens=10**6),
    "V109": lambda one: with_works(one, losses=(3.0,) * 10),
}


def is_round(event: Any, version: int) -> bool:
    return isinstance(event, runlog.Round) and event.version == version


def with_works(one: runlog.Round, **changed: Any) -> runlog.Round:
    return replace(one, works=(*one.works[:1], replace(one.works[1], **changed)))


@pytest.mark.parametrize("id", FORGED)
def test_a_forged_round_is_found(id, done, tmp_path):
    out = tmp_path / "record"
    shutil.copytree(done, out)
    rewrite(out, lambda event: FORGED[id](event) if is_round(event, 1) else event)
    assert id in {one.check.id for one in validate(out).results if one.status in ("failed", "warning")}


def work(lease: int, start: int, stop: int, island: str = "0", version: int = 0, **changed: Any) -> Work:
    """Work on what is between two places, in shards of 100 tokens."""
    places = divmod(start, 100), divmod(stop, 100)
    return replace(Work(island, version, lease, *places, stop - start, (), "", ""), **changed)


def told(id: str, *rounds: runlog.Round, **changed: Any) -> list[str]:
    """What a check says of a record of one run with these rounds."""
    used = [one for each in rounds if each.digest for one in each.works if not one.refused]
    tokens = sum(one.num_tokens for one in used)
    given: Any = {"fleets": [replace(FLEET, quorum=2)], "rules": (2, 2, 2), "joined": "01", "lost": 0}
    given |= {"losses": (3.0, 4.0) * 2, "tokens": tokens, "seen": 0, "cursor": (9, 0)} | changed
    there = [runlog.Island(name, 0) for name in given["joined"]]
    there += [runlog.Island("9", 0, "killed")] * given["lost"]
    logged: Any = {runlog.Round: rounds, runlog.Islands: given["fleets"], runlog.Island: there}
    of_all = {"tokens_seen": given["seen"] or given["tokens"], "cursor": given["cursor"]}
    steps = [
        SimpleNamespace(step=at, loss=loss, batch_tokens=0 if at else given["tokens"], **of_all)
        for at, loss in enumerate(given["losses"])
    ]
    origin = SimpleNamespace(run_id="", step=0, tokens_seen=0)
    start = SimpleNamespace(num_steps=4, config=changed.get("config", {}))
    run_ = SimpleNamespace(begun=0, folder="a", origin=origin, start=start, steps=steps)
    run_.of = lambda kind: logged.get(kind, [])
    numbers = dict(zip(("most", "every", "quorum"), given["rules"], strict=False))
    rules = SimpleNamespace(id="forged@1", meshes=numbers)
    record: Any = SimpleNamespace(runs=[run_], finished=[run_], reference_run=run_, rules=rules)
    return [*find_check(id).find(record)]


FIRST, THIRD = work(0, 0, 10), work(2, 20, 30)
CUT = {"config": {"recipe": {"stages": [{"document_tokens": 8}]}}}
LEASES: dict[str, tuple[tuple[Work, ...], dict[str, Any], str]] = {
    "in order": ((FIRST, work(1, 10, 20), THIRD), {}, ""),
    "one came back": ((FIRST, THIRD), {"lost": 1}, ""),
    "one came back at the end of a shard": ((FIRST, work(2, 110, 120)), {"lost": 1}, ""),
    "one was refused": ((FIRST, work(1, 10, 20, refused="damaged"), THIRD), {}, ""),
    "none came back": ((FIRST, THIRD), {}, "1 leases were not trained on, but only 0 answers were lost"),
    "first tokens left out": ((work(0, 1, 11),), {}, "lease 0 starts at (0, 1)"),
    "a lease twice": ((work(0, 0, 12, num_tokens=10), work(0, 13, 23)), CUT, "lease 0 starts at (0, 13)"),
    "fewer than it holds": ((work(0, 0, 11, num_tokens=10),), {}, "lease 0 is of 10 tokens, but holds 11"),
    "documents are cut": ((work(0, 0, 11, num_tokens=10),), CUT, ""),
    "tokens left out": ((FIRST, work(1, 11, 21)), {}, "lease 1 starts at (0, 11); lease 0 ends at (0, 10)"),
    "tokens twice": ((FIRST, work(2, 9, 19)), {"lost": 1}, "lease 2 starts at (0, 9)"),
    "more left out than came back": ((FIRST, work(2, 21, 31)), {"lost": 1}, "lease 2 starts at (0, 21)"),
    "more left out of the next shard": ((FIRST, work(2, 111, 121)), {"lost": 1}, "lease 2 starts at (1, 11)"),
    "a shard left out": ((FIRST, work(2, 200, 210)), {"lost": 1}, "lease 2 starts at (2, 0)"),
    "more than it holds": ((work(0, 0, 10, num_tokens=11),), {}, "lease 0 is of 11 tokens, but holds 10"),
    "fewer than a step says": ((FIRST,), {"tokens": 11}, "a: 11 tokens seen, its islands trained on 10"),
    "more than the steps add": ((FIRST,), {"seen": 11}, "a: step 0: 11 tokens seen, the batches sum to 10"),
    "beyond the data": ((FIRST,), {"cursor": (0, 9)}, "a: lease 0 ends at (0, 10), the data at (0, 9)"),
}


@pytest.mark.parametrize("kind", LEASES)
def test_each_rule_of_leases_refuses_what_no_other_does(kind):
    """In a round that counted; a second one did not."""
    works, changed, said = LEASES[kind]
    found = told("V108", runlog.Round(0, works, 0, "d"), runlog.Round(0, works, 0), **changed)
    assert len(found) == bool(said), found
    assert all(problem.startswith(said) for problem in found), found


def both(version: int = 0, /, *others: Work, **changed: Any) -> runlog.Round:
    """A round of two islands with different numbers of tokens; the second may differ, and there may be others."""
    one = work(0, 0, 10, version=version, losses=(1.0, 2.0))
    two = work(1, 10, 30, "1", version, losses=(4.0, 5.0))
    return runlog.Round(version, (one, replace(two, **changed), *others), 0, "d")


PAIR, MORE = (both(), both(1)), (both(), both(1, work(2, 30, 40, "2", 1)))
ROUNDS: dict[str, tuple[tuple[runlog.Round, ...], dict[str, Any], str]] = {
    "as they are": (PAIR, {}, ""),
    "one did not count": ((both(), replace(both(1), digest=""), both(1)), {}, ""),
    "no settings": ((), {"fleets": []}, "forged@1 is only for islands"),
    "no track of islands": (PAIR, {"rules": ()}, "forged@1 is not for islands"),
    "other settings": (
        PAIR,
        {"fleets": [replace(FLEET, quorum=2), FLEET]},
        "runs that go on from each other",
    ),
    "too many islands": (PAIR, {"rules": (1, 2, 2)}, "2 islands, 2 steps, quorum 2; the track has"),
    "another interval": (PAIR, {"rules": (2, 3, 2)}, "2 islands, 2 steps, quorum 2; the track has"),
    "another quorum": (PAIR, {"rules": (2, 2, 1)}, "2 islands, 2 steps, quorum 2; the track has"),
    "one twice": ((*PAIR, both(1)), {}, "rounds [0, 1, 1] counted; need 0 to 1, once each"),
    "one left out": (PAIR[:1], {}, "rounds [0] counted; need 0 to 1, once each"),
    "no quorum": (
        (both(), both(1, refused="late")),
        {"losses": (3.0, 4.0, 1.0, 2.0)},
        "round 1: islands ['0'] with 1",
    ),
    "an island twice": (
        (both(), both(1, work(2, 30, 40, "0", 1))),
        {},
        "round 1: islands ['0', '1'] with 3 answers",
    ),
    "an island more": (MORE, {"joined": "012"}, "round 1: islands ['0', '1', '2'] with 3 answers"),
    "a stranger": ((both(), both(1, island="9")), {}, "round 1: islands ['0', '9'] with 2 answers"),
    "a stale answer": ((both(), both(1, version=0)), {}, "round 1: islands ['0', '1'] with 2 answers"),
    "no losses": ((both(), both(1, losses=())), {}, "round 1: islands ['0', '1'] with 2 answers"),
    "another loss": (
        PAIR,
        {"losses": (3.0, 4.0, 3.0, 3.9)},
        "step 3 has loss 3.9, its islands a mean of 4.0",
    ),
}


@pytest.mark.parametrize("kind", ROUNDS)
def test_each_rule_of_rounds_refuses_what_no_other_does(kind):
    rounds, changed, said = ROUNDS[kind]
    found = told("V109", *rounds, **changed)
    assert len(found) == bool(said) + (kind == "no track of islands"), found
    assert not said or found[0].startswith(said), found


def test_the_request_of_a_logged_run_is_the_one_that_made_it(island, done):
    (run_,) = runs_of(done)
    found, config = asked(run_, done), island.ready.config
    same = ("track", "seed", "overrides")
    assert [getattr(found, name) for name in same] == [getattr(config, name) for name in same]
