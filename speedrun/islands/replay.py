"""Repeats what the islands of a record did, in turns in one process, from the log of their leases."""

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

import jax
import numpy as np
from msgspec.structs import replace

from speedrun.base import runlog
from speedrun.base.errors import UsageError
from speedrun.base.rounds import Work
from speedrun.data.stream import START, Cursor
from speedrun.islands.island import Island
from speedrun.islands.rounds import Answer, Lease, Order, Weights, digest, stepped
from speedrun.record.examination import Replayed
from speedrun.record.examine.training import State, Trainer
from speedrun.science.step import TrainState
from speedrun.train.checkpoint import state_hash
from speedrun.train.preflight import shapes_of

#: Trains as a work says, on the island of that name, from these weights, and perhaps with a fresh optimiser.
Train = Callable[[str, Work, Weights, bool], Answer]


class Repeated(NamedTuple):
    """A round that counted, and what came of it now."""

    round: runlog.Round
    works: list[tuple[Work, Work]]  #: as logged, and as repeated; those that were used
    weights: Weights

    @property
    def differs(self) -> list[str]:
        """What is not equal to the last bit."""
        apart = [old.island for old, new in self.works if new != old]
        found = [f"island {name} ended in another state" for name in apart]
        return found + ["the outer step gave other weights"] * (digest(self.weights) != self.round.digest)


def repeated(
    settings: runlog.Islands,
    history: Sequence[tuple[str, runlog.Round]],
    weights: dict[str, np.ndarray],
    train: Train,
) -> Iterator[Repeated]:
    """Repeat all rounds that counted, from the first weights on; `history` is from `rounds_of`.

    An answer that was refused is not: the optimiser of its island begins anew, as one does that missed a round.
    """
    steady = set[str]()
    velocity = {name: np.zeros(x.shape, np.float32) for name, x in weights.items()}
    for folder, one in history:
        parts, works = {}, []
        used = {f"{folder}/{work.island}": work for work in one.works if not work.refused}
        for name, work in used.items():
            answer = train(name, work, weights, name not in steady)
            works.append((work, replace(answer.work, island=work.island)))
            parts[work.lease] = work.num_tokens, answer.weights
        steady = used.keys() - {f"{folder}/{work.island}" for work in one.works if work.refused}
        if not one.digest:
            continue
        weights, velocity = stepped(settings, weights, velocity, [part for _, part in sorted(parts.items())])
        yield Repeated(one, works, weights)


def in_turns(island: Island, every: int) -> Train:
    """Return what trains all islands with the program of one, each from a state of its own."""
    shapes, states = shapes_of(island.ready.recipe), dict[str, TrainState]()

    def train(name: str, work: Work, weights: Weights, is_fresh: bool) -> Answer:  # noqa: FBT001
        island.state = states.pop(name) if name in states else island.fresh()
        step = work.version * every
        lease = Lease(work.lease, Cursor(*work.start), Cursor(*work.stop), tuple(shapes[step:][:every]))
        answer = island.work(Order(work.version, step, lease, weights, is_fresh))
        states[name] = island.state
        return answer

    return train


def examined(trainer: Trainer) -> tuple[Replayed, State, Cursor]:
    """Train all rounds of a record again with its programs, each island from a state of its own.

    Return what was found, with the track's validations, the last state, and the position after it.
    """
    settings, end = trainer.request.islands, trainer.request.num_steps
    assert settings is not None
    fresh, states = trainer.initial()[0], dict[str, State]()
    names = trainer.archive.leaves[1:][: trainer.archive.num_params]
    weights = {name: np.asarray(x) for name, x in zip(names, fresh[1:], strict=False)}
    losses, vals, last = list[float](), list[tuple[int, float]](), START

    def adopted(leaves: State, weights: Weights, step: int) -> State:
        given = [np.asarray(step, leaves[0].dtype), *weights.values()]
        return [*map(jax.device_put, given, trainer.places), *leaves[len(given) :]]

    def train(island: str, work: Work, weights: Weights, is_fresh: bool) -> Answer:  # noqa: FBT001
        nonlocal last
        at, tokens, costs = work.version * settings.every, trainer.read_from(Cursor(*work.start)), []
        kept = None if is_fresh else states.pop(island)
        leaves = adopted(kept or trainer.initial()[0], weights, at)
        for step in range(at, min(at + settings.every, end)):
            leaves, loss, _ = trainer.stepped(leaves, step, tokens)
            costs.append(loss)
        if tokens.cursor != work.stop:
            raise UsageError(
                f"lease {work.lease} ends at {work.stop} by the log, at {tokens.cursor} when read"
            )
        states[island], last = leaves, max(last, tokens.cursor)
        moved = dict(zip(weights, map(np.asarray, leaves[1:]), strict=False))
        return Answer(replace(work, losses=tuple(costs)), "", moved)

    for one in repeated(settings, trainer.request.rounds, weights, train):
        at = one.round.version * settings.every
        if trainer.track.validates_at(at):
            vals.append((at, trainer.loss(adopted(fresh, weights, at), at)))
        losses += [fmean(step) for step in zip(*(new.losses for _, new in one.works), strict=True)]
        weights = one.weights
    stopped = adopted(fresh, weights, end)
    found = Replayed(
        start=0,
        stop=end,
        from_checkpoint=False,
        state_hash=state_hash(fresh),
        stop_hash=state_hash(stopped),
        losses=tuple(losses),
        vals=tuple(vals),
        cursors=(START, last),
        first_batch_sha256="",
        ranges=(),
    )
    return found, stopped, last
