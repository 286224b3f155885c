"""What a round of islands is made of, and which answers it takes.

The engine is an argument: it starts islands, carries orders to them and answers back, and says which were lost. Rounds
do not know whether islands are processes, or take turns in one.
"""

from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from speedrun.base.limits import Positive, Seconds
from speedrun.islands.island import Answer, Order, digest
from speedrun.islands.leases import Lease
from speedrun.islands.outer import Weights


class Lost(NamedTuple):
    """An island that will not answer."""

    island: str
    why: str


class Engine(Protocol):
    """Islands by name."""

    def islands(self) -> list[str]:
        """Return those that are ready for an order."""
        ...

    def send(self, island: str, order: Order) -> None:
        """Send an order."""
        ...

    def receive(self, timeout_s: float, /) -> Answer | Lost | None:
        """Return the next answer or loss; None if there is none in time."""
        ...


class Rules(msgspec.Struct, frozen=True):
    """What a round waits for and takes."""

    deadline_s: Seconds
    most_change: Positive = 1e30  #: of the norm of all weights, relative


class Round(NamedTuple):
    """What came of a round."""

    version: int  #: before it
    leases: dict[str, Lease]  #: by island
    answers: tuple[Answer, ...]  #: taken, in the order of their leases
    refused: tuple[Lost, ...]
    lost: tuple[Lost, ...]


def refusal(answer: Answer, order: Order | None, config_sha256: str, rules: Rules) -> str | None:
    """Return why an answer of this version is not taken, or None. `order` is the open one of its island."""
    if order is None:
        return "it has answered already, or was not asked"
    if answer.lease != order.lease.number or answer.num_tokens != order.lease.num_tokens:
        return f"of lease {answer.lease} with {answer.num_tokens:,} tokens, need lease {order.lease.number}"
    if answer.config_sha256 != config_sha256:
        return f"of config {answer.config_sha256[:12]}, need {config_sha256[:12]}"
    if answer.digest != digest(answer.weights):
        return "damaged: its weights do not have its digest"
    forms = [{name: (x.dtype, x.shape) for name, x in w.items()} for w in (answer.weights, order.weights)]
    if forms[0] != forms[1]:
        return "its weights have other names, shapes or dtypes"
    change, size = _norm(answer.weights, order.weights), _norm(order.weights)
    if not np.isfinite(change) or not np.isfinite(answer.losses).all():
        return "not finite"
    if change > rules.most_change * size:
        return f"its weights moved by {change / size:.3g} of their norm, more than {rules.most_change:g}"
    return None


def _norm(weights: Weights, origin: Weights | None = None) -> float:
    """Return the norm of all weights, from an origin."""
    wide = {name: x.astype(np.float64) for name, x in weights.items()}
    parts = (x - origin[name].astype(np.float64) if origin else x for name, x in wide.items())
    return float(np.sqrt(sum(np.sum(x * x) for x in parts)))
