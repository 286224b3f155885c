"""An engine without processes: the islands take turns. It repeats what islands of another engine did, bit by bit."""

from collections.abc import Mapping

from speedrun.base.errors import SpeedrunError
from speedrun.islands.island import Answer, Island, Order
from speedrun.islands.rounds import Lost


class InTurns:
    """Islands in this process."""

    def __init__(self, islands: Mapping[str, Island]) -> None:
        self._islands = dict(islands)
        self._orders: list[tuple[str, Order]] = []

    def islands(self) -> list[str]:
        """Return all that were not lost."""
        return [*self._islands]

    def send(self, island: str, order: Order) -> None:
        """Put an order into the queue."""
        self._orders.append((island, order))

    def receive(self, _: float) -> Answer | Lost | None:
        """Carry out the next order, however long it takes."""
        if not self._orders:
            return None
        name, order = self._orders.pop(0)
        try:
            return self._islands[name].work(order)
        except SpeedrunError as error:
            del self._islands[name]
            return Lost(name, str(error))
