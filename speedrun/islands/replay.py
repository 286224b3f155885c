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
from speedrun.islands.outer import Weights, digest, stepped
from speedrun.islands.rounds import Answer, Order
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


def repeated(
    settings: runlog.Islands,
    history: Sequence[tuple[str, runlog.Round]],
    weights: dict[str, np.ndarray],
    train: Train,
) -> Iterator[Repeated]:
    """Repeat all rounds that counted, from the first weights on; `history` is from `rounds_of`.

    An answer that was refused is repeated, too, as it moved the optimiser of its island.
    """
    due: dict[int, dict[tuple[str, int, str], Work]] = defaultdict(dict)
    for folder, one in history:
        for work in one.works:  # an island may answer twice
            due[work.version].setdefault((f"{folder}/{work.island}", work.lease, work.state_hash), work)
    velocity = {name: np.zeros(x.shape, np.float32) for name, x in weights.items()}
    for one in sorted((one for _, one in history if one.digest), key=lambda one: one.version):
        parts, works = {}, []
        for (name, *_), work in due[one.version].items():
            answer = train(name, work, weights)
            if not work.refused:
                works.append((work, replace(answer.work, island=work.island)))
                parts[work.lease] = work.num_tokens, answer.weights
        weights, velocity = stepped(settings, weights, velocity, [part for _, part in sorted(parts.items())])
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
