"""A round: every island trains on a lease of its own; those that answer in time move the weights together.

The engine is an argument: it starts islands, carries orders to them and answers back, and says which were lost. Rounds
do not know whether islands are processes, or take turns in one.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from speedrun.base.clock import Stopwatch
from speedrun.base.limits import Positive, Seconds
from speedrun.data.stream import Shape
from speedrun.islands.island import Answer, Order, digest
from speedrun.islands.leases import Lease, Leases
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


def play(
    engine: Engine,
    version: int,
    step: int,
    weights: Weights,
    leases: Leases,
    shapes: Sequence[Shape],
    config_sha256: str,
    rules: Rules,
) -> Round:
    """Give every island that is ready an order with a lease of its own; return what came back by the deadline.

    Leases of refused, lost and late islands go back. A late answer is refused in a later round, as it is stale.
    """
    open_orders: dict[str, Order] = {}
    for name in engine.islands():
        open_orders[name] = Order(version, step, leases.grant(shapes), weights)
        engine.send(name, open_orders[name])
    granted = {name: order.lease for name, order in open_orders.items()}
    watch, taken, refused, lost = Stopwatch(), list[Answer](), list[Lost](), list[Lost]()
    while open_orders and (left_s := rules.deadline_s - watch.seconds) > 0:
        if (found := engine.receive(left_s)) is None:
            break
        if (
            isinstance(found, Answer) and found.version != version
        ):  # its island may still answer this round's order
            refused.append(Lost(found.island, f"stale: of version {found.version}, need {version}"))
            continue
        order = open_orders.pop(found.island, None)
        if isinstance(found, Lost):
            lost.append(found)
        elif why := refusal(found, order, config_sha256, rules):
            refused.append(Lost(found.island, why))
        else:
            taken.append(found)
            continue
        if order is not None:
            leases.give_back(order.lease)
    for name, order in open_orders.items():
        lost.append(Lost(name, f"late: no answer in {rules.deadline_s:g} s"))
        leases.give_back(order.lease)
    answers = tuple(sorted(taken, key=lambda one: one.lease))
    return Round(version, granted, answers, tuple(refused), tuple(lost))


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
