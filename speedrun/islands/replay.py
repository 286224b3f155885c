"""Repeats what the islands of a record did, in turns in one process, from the log of their leases."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from speedrun.base import runlog
from speedrun.base.rounds import Work
from speedrun.data.stream import Cursor
from speedrun.islands.island import Island
from speedrun.islands.leases import Lease
from speedrun.islands.outer import Outer, Weights, digest, stepped
from speedrun.islands.rounds import Answer, Order
from speedrun.record.logged_run import Run
from speedrun.science.step import TrainState
from speedrun.train.preflight import shapes_of

#: Trains as a work says, on the island of that name, from these weights.
Train = Callable[[str, Work, Weights], Answer]


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


def repeated(runs: Sequence[Run], weights: Weights, train: Train) -> Iterator[Repeated]:
    """Repeat all rounds that counted, from the first weights on; `runs` go on from each other.

    An answer that was refused is repeated, too, as it moved the optimiser of its island.
    """
    (settings, *_) = runs[0].of(runlog.Islands)
    outer = Outer(settings.outer_lr, settings.outer_momentum)
    due: dict[int, dict[tuple[object, ...], tuple[str, Work]]] = defaultdict(dict)
    rounds = sorted(
        (one for run in runs for one in run.of(runlog.Round) if one.digest), key=lambda one: one.version
    )
    for run in runs:
        for one in run.of(runlog.Round):
            # A run that goes on from another first logs the last round of that one, if it was killed before it could.
            folder = run.folder if one.version * settings.every >= run.origin.step else run.origin.run_id
            for work in one.works:
                name = f"{folder}/{work.island}"
                due[work.version].setdefault(
                    (name, work.lease, work.state_hash), (name, work)
                )  # it may come twice
    velocity: Weights = {name: np.zeros(x.shape, np.float32) for name, x in weights.items()}
    for one in rounds:
        parts, works = {}, []
        for name, work in due[one.version].values():
            answer = train(name, work, weights)
            if not work.refused:
                works.append((work, replace(answer.work, island=work.island)))
                parts[work.lease] = work.num_tokens, answer.weights
        in_order = [part for _, part in sorted(parts.items())]
        weights, velocity = stepped(outer, weights, velocity, in_order)
        yield Repeated(one, works, weights)


def in_turns(island: Island, every: int) -> Train:
    """Return what trains all islands with the program of one, each from a state of its own."""
    shapes, states = shapes_of(island.ready.recipe), dict[str, TrainState]()

    def train(name: str, work: Work, weights: Weights) -> Answer:
        island.state = states.pop(name) if name in states else island.fresh()
        step = work.version * every
        lease = Lease(work.lease, Cursor(*work.start), Cursor(*work.stop), tuple(shapes[step:][:every]))
        answer = island.work(Order(work.version, step, lease, weights))
        states[name] = island.state
        return answer

    return train
