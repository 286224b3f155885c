"""Islands in turns: rounds, leases, refusals and the outer step, against a plain run and against NumPy."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from small_run import SMALL, events

from speedrun.base import runlog
from speedrun.base.errors import DataError, SpeedrunError
from speedrun.data.stream import START, Shape
from speedrun.islands import outer
from speedrun.islands.fleet import Fleet
from speedrun.islands.in_turns import InTurns
from speedrun.islands.island import Answer, Island, Order, digest
from speedrun.islands.leases import Leases
from speedrun.islands.outer import Outer
from speedrun.islands.rounds import Lost, Rules
from speedrun.train.request import RunConfig

RNG = np.random.default_rng(0)
PATIENT = Rules(deadline_s=600)


def settings(**changed: Any) -> dict[str, Any]:
    start = {"outer": Outer(), "rules": PATIENT, "every": 2, "quorum": 1, "config_sha256": "c" * 64}
    return {**start, **changed}


def test_one_island_whose_mean_is_taken_ends_with_the_state_of_a_plain_run(trained, smoke_data, tmp_path):
    member = Island("a", RunConfig("smoke-cpu", tmp_path / "out", overrides=SMALL, data=smoke_data))
    (stage,) = member.ready.recipe.stages
    shapes = [Shape(stage.num_sequences, stage.seq_len)] * stage.num_steps
    given = settings(every=4, config_sha256=member.config_sha256)
    fleet = Fleet(**given, shapes=shapes, leases=Leases(member.ready.stream(START)), weights=member.weights())
    losses, answer = [], None
    while not fleet.is_done:
        (answer,) = fleet.advance(InTurns({"a": member})).answers
        losses += answer.losses
    (end,) = events(trained.out, runlog.RunEnd)
    assert answer is not None
    assert answer.state_hash == end.final_hash
    assert losses == [step.loss for step in events(trained.out, runlog.Step)]
    assert all(np.array_equal(x, answer.weights[name]) for name, x in fleet.weights.items())


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


def scripted(*names: str, most: int = 10_000, **changed: Any) -> tuple[Fleet, Scripted]:
    tokens: Any = Tokens(most)
    fleet = Fleet(**settings(**changed), shapes=[Shape(2, 8)] * 6, leases=Leases(tokens), weights=WEIGHTS)
    return fleet, Scripted(*names)


def answer_to(order: Order, island: str, **changed: Any) -> Answer:
    weights = {name: x + np.float32(1) for name, x in order.weights.items()}
    given = order.version, order.lease.number, "c" * 64, order.lease.num_tokens, weights, digest(weights)
    return Answer(island, *given, losses=(1.0, 1.0), state_hash="")._replace(**changed)


def played(fleet: Fleet, engine: Scripted, *answers: Callable[[], Any]) -> Any:
    """A round in which these arrive, made after the orders are known."""
    engine.arriving = list(answers)
    return fleet.advance(engine)


NAN = {name: np.full_like(x, np.nan) for name, x in WEIGHTS.items()}
FAR = {name: 100 * x for name, x in WEIGHTS.items()}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another lease": ({"lease": 7}, "of lease 7 with 32 tokens, need lease 0"),
    "other tokens": ({"num_tokens": 31}, "of lease 0 with 31 tokens, need lease 0"),
    "another config": ({"config_sha256": "d" * 64}, "of config dddddddddddd, need cccccccccccc"),
    "damaged": ({"weights": WEIGHTS}, "damaged: its weights do not have its digest"),
    "not finite": ({"weights": NAN, "digest": digest(NAN)}, "not finite"),
    "a loss of NaN": ({"losses": (1.0, float("nan"))}, "not finite"),
    "far away": (
        {"weights": FAR, "digest": digest(FAR)},
        "its weights moved by 99 of their norm, more than 10",
    ),
    "other arrays": ({"weights": {}, "digest": digest({})}, "its weights have other names, shapes or dtypes"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_answer_is_refused_and_its_tokens_are_given_again(kind):
    changed, why = WRONG[kind]
    fleet, engine = scripted("a", "b", rules=Rules(600, most_change=10.0))
    wrong = lambda: answer_to(engine.orders["a"], "a", **changed)  # noqa: E731
    found = played(fleet, engine, wrong, lambda: answer_to(engine.orders["b"], "b"))
    assert found.refused == (Lost("a", why),)
    assert [one.island for one in found.answers] == ["b"]
    assert [lease.number for lease in fleet.leases.returned] == [0]
    played(fleet, engine)
    assert {order.lease.number for order in engine.orders.values()} == {0, 2}


def test_a_stale_answer_is_refused_and_its_island_may_still_answer():
    fleet, engine = scripted("a")
    late = lambda: answer_to(engine.orders["a"], "a", version=4)  # noqa: E731
    found = played(fleet, engine, late, lambda: answer_to(engine.orders["a"], "a"))
    assert found.refused == (Lost("a", "stale: of version 4, need 0"),)
    assert [one.island for one in found.answers] == ["a"]
    assert fleet.leases.returned == []


def test_an_island_that_is_late_gives_its_tokens_back():
    fleet, engine = scripted("a", "b")
    found = played(fleet, engine, lambda: answer_to(engine.orders["b"], "b"))
    assert found.lost == (Lost("a", "late: no answer in 600 s"),)
    assert [lease.number for lease in fleet.leases.returned] == [0]


def test_a_second_answer_is_refused():
    fleet, engine = scripted("a", "b")
    twice = [lambda: answer_to(engine.orders["a"], "a")] * 2
    found = played(fleet, engine, *twice)
    assert [one.why for one in found.refused] == ["it has answered already, or was not asked"]
    assert len(found.answers) == 1


def test_a_round_without_a_quorum_changes_nothing_and_gives_its_tokens_again():
    fleet, engine = scripted("a", "b", quorum=2)
    found = played(fleet, engine, lambda: answer_to(engine.orders["a"], "a"), lambda: Lost("b", "killed"))
    assert found.lost == (Lost("b", "killed"),)
    assert fleet.version == 0
    assert fleet.weights is WEIGHTS
    first = {order.lease for order in engine.orders.values()}
    both = [lambda: answer_to(engine.orders["a"], "a"), lambda: answer_to(engine.orders["b"], "b")]
    found = played(fleet, engine, *both)
    assert {order.lease for order in engine.orders.values()} == first
    assert fleet.version == 1


def test_leases_are_disjoint_and_cover_the_stream_in_order():
    fleet, engine = scripted("a", "b", "c")
    seen = []
    while not fleet.is_done:
        round_ = played(fleet, engine, *[lambda n=n: answer_to(engine.orders[n], n) for n in "abc"])
        seen += [round_.leases[answer.island] for answer in round_.answers]
    assert [lease.number for lease in seen] == list(range(9))
    assert [(lease.start.offset, lease.stop.offset) for lease in seen] == [
        (32 * i, 32 * i + 32) for i in range(9)
    ]
    assert (fleet.version, fleet.step) == (3, 6)


def test_too_few_tokens_are_an_error():
    fleet, engine = scripted("a", "b", most=40)
    with pytest.raises(DataError, match="no tokens left"):
        fleet.advance(engine)


def test_an_island_that_fails_is_lost_and_the_others_go_on():
    class Failing:
        def work(self, order: Order) -> Answer:
            raise SpeedrunError("its disk is full")

    class Fine:
        def work(self, order: Order) -> Answer:
            return answer_to(order, "b")

    members: Any = {"a": Failing(), "b": Fine()}
    fleet, engine = scripted()[0], InTurns(members)
    assert fleet.advance(engine).lost == (Lost("a", "its disk is full"),)
    assert engine.islands() == ["b"]
    assert fleet.advance(engine).lost == ()


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.5), (1.0, 0.9)])
def test_the_outer_step_is_nesterov_on_the_mean_by_tokens(lr, momentum):
    """Against long doubles, for 20 rounds of four islands."""
    weights, velocity = WEIGHTS, {name: np.zeros_like(x) for name, x in WEIGHTS.items()}
    exact = {name: x.astype(np.longdouble) for name, x in WEIGHTS.items()}
    moving = {name: np.zeros_like(x) for name, x in exact.items()}
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
        weights, velocity = outer.stepped(Outer(lr, momentum), weights, velocity, parts)
    for name, x in exact.items():
        np.testing.assert_allclose(weights[name], x.astype(np.float64), rtol=0, atol=3e-6)
        assert weights[name].dtype == np.float32


def test_the_mean_of_one_island_is_its_weights_to_the_last_bit():
    parts = [(7, WEIGHTS)]
    new, _ = outer.stepped(Outer(), {name: x + 1 for name, x in WEIGHTS.items()}, {}, parts)
    assert all(np.array_equal(x, WEIGHTS[name]) for name, x in new.items())


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"momentum": 1.0}])
def test_settings_of_the_outer_step_have_limits(wrong):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"lr": 1.0, "momentum": 0.0} | wrong, Outer)
