"""What a round of islands is made of, and which answers it takes. Leases are disjoint parts of one stream.

The engine is an argument: it starts islands, carries orders to them and answers back, and says which were lost. Rounds
do not know whether islands are processes, or take turns in one.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from speedrun.base.rounds import Islands, Work
from speedrun.data.stream import Cursor, Shape, TokenStream

Weights = Mapping[str, np.ndarray]  #: packed parameters by name


class Lease(msgspec.Struct, frozen=True):
    """The tokens of some steps."""

    number: int  #: from 0, in the order of the stream
    start: Cursor
    stop: Cursor
    shapes: tuple[Shape, ...]  #: of the batch of each step

    @property
    def num_tokens(self) -> int:
        """Tokens that are trained on."""
        return sum(shape.num_sequences * shape.seq_len for shape in self.shapes)


class Leases:
    """Grants tokens, and grants again what comes back untrained."""

    def __init__(self, stream: TokenStream, num_granted: int = 0, returned: Sequence[Lease] = ()) -> None:
        self.stream, self.num_granted = stream, num_granted
        self.returned = list(returned)  #: whose tokens were not trained on

    def grant(self, shapes: Sequence[Shape]) -> Lease:
        """Lease tokens for batches of these shapes; raise DataError if the stream has too few."""
        wanted = tuple(shapes)
        if again := next((lease for lease in self.returned if lease.shapes == wanted), None):
            self.returned.remove(again)
            return again
        start = self.stream.cursor
        for shape in wanted:
            self.stream.batch(*shape)
        self.num_granted += 1
        return Lease(self.num_granted - 1, start, self.stream.cursor, wanted)


class Order(NamedTuple):
    """What an island is asked to do."""

    version: int  #: of the weights: the number of rounds that counted before
    step: int  #: of the schedule, at which it begins
    lease: Lease
    weights: Weights
    is_fresh: bool  #: the inner optimiser begins anew


class Answer(NamedTuple):
    """What it did."""

    work: Work
    config_sha256: str
    weights: Weights


class Lost(NamedTuple):
    """An island that left, or will not answer."""

    island: str
    why: str


class Engine(Protocol):
    """Islands by name."""

    def islands(self) -> list[str]:
        """Return those that are ready for an order; start others in the place of lost ones."""
        ...

    def send(self, island: str, order: Order) -> None:
        """Send an order."""

    def receive(self, timeout_s: float, /) -> Answer | Lost | None:
        """Return the next answer or loss; None if there is none in time."""
        ...


def refusal(answer: Answer, order: Order | None, config_sha256: str) -> str:
    """Return why an answer of this version is not taken, or nothing. `order` is the open one of its island."""
    work = answer.work
    if order is None:
        return "it has answered already, or was not asked"
    lease = order.lease
    if (work.lease, work.start, work.stop) != (lease.number, lease.start, lease.stop):
        return f"of lease {work.lease}, need lease {lease.number}"
    if work.num_tokens != lease.num_tokens or len(work.losses) != len(lease.shapes):
        got = f"of {work.num_tokens:,} tokens in {len(work.losses)} steps"
        return f"{got}, need {lease.num_tokens:,} in {len(lease.shapes)}"
    if answer.config_sha256 != config_sha256:
        return f"of config {answer.config_sha256[:12]}, need {config_sha256[:12]}"
    if work.digest != digest(answer.weights):
        return "damaged: its weights do not match its digest"
    forms = [{name: (x.dtype, x.shape) for name, x in w.items()} for w in (answer.weights, order.weights)]
    if forms[0] != forms[1]:
        return "its weights have other names, shapes or dtypes"
    if not np.isfinite([*map(np.sum, answer.weights.values()), *work.losses]).all():
        return "not finite"
    return ""


def mean(parts: Sequence[tuple[int, Weights]]) -> dict[str, np.ndarray]:
    """Return the mean of weights in float64, given (tokens, weights) of each island; that of one island is exact."""
    if len(parts) == 1:
        return {name: x.astype(np.float64) for name, x in parts[0][1].items()}
    total, found = sum(tokens for tokens, _ in parts), dict[str, np.ndarray]()
    for tokens, weights in parts:
        for name, x in weights.items():
            found[name] = found.get(name, 0.0) + tokens / total * x.astype(np.float64)
    return found


def stepped(
    settings: Islands, weights: Weights, velocity: Weights, parts: Sequence[tuple[int, Weights]]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return new weights, in their dtypes, and the new velocity, in float32, after an outer step.

        d = weights - mean;  velocity <- momentum velocity + d;  weights <- weights - lr (d + momentum velocity)

    Source: Douillard et al. 2023, DiLoCo.
    """
    new, moving, lr, momentum = mean(parts), dict(velocity), settings.outer_lr, settings.outer_momentum
    if (lr, momentum) != (1, 0):  # the mean needs a case of its own: `a - (a - x)` is not always x
        for name, x in new.items():
            old = weights[name].astype(np.float64)
            change = old - x
            moving[name] = (momentum * moving[name].astype(np.float64) + change).astype(np.float32)
            new[name] = old - lr * (change + momentum * moving[name].astype(np.float64))
    return {name: x.astype(weights[name].dtype) for name, x in new.items()}, moving


def digest(weights: Weights) -> str:
    """Return the sha256 of weights by name."""
    found = hashlib.sha256()
    for name, x in sorted(weights.items()):
        found.update(f"{name} {x.dtype} {x.shape} ".encode())
        found.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return found.hexdigest()
