"""Islands as actors of Ray, each a process of its own, on this machine or on several. Only this module imports ray.

Ray listens on all interfaces and obeys whoever has its token, so there always is one: docs/islands.md.
"""

import importlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from speedrun.base import track as tracks
from speedrun.base.clock import Stopwatch
from speedrun.base.errors import SpeedrunError, UsageError
from speedrun.islands.rounds import Answer, Lost, Order
from speedrun.train.request import RunConfig

TOKEN = "RAY_AUTH_TOKEN"
#: Read when ray is imported, and by the processes that it starts.
_SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
_ANSWER_S = 10.0  #: of the head
_MOST_FAILED = 8  #: islands in a row that did not start


class Actor:
    """An island in a process of its own. It leaves after the order in hand when it gets SIGTERM."""

    def __init__(self, name: str, config: RunConfig) -> None:
        # The driver imports this module before JAX: Ray forks, and JAX forbids it.
        from speedrun.islands.island import Island

        self._island, self._leaves = Island(name, config), False
        signal.signal(signal.SIGTERM, self._leave)

    def _leave(self, *_: object) -> None:
        self._leaves = True

    def work(self, order: Order) -> tuple[Answer, bool]:
        """Return the answer, and whether it was the last."""
        return self._island.work(order), self._leaves


class Actors:
    """`rounds.Engine` over actors. An island is ready once it has compiled and answered its last order."""

    def __init__(self, ray: Any, address: str | None, config: RunConfig) -> None:
        """Keep `config.islands` alive, each of which trains as the request says."""
        self._ray, self._address, self._config = ray, address, config
        rules = tracks.load(config.track).rules
        is_gpu = rules.platform == "gpu"
        share = {"num_gpus": config.num_devices or rules.num_devices or 1} if is_gpu else {"num_cpus": 1}
        self._make = ray.remote(**share, max_restarts=0, scheduling_strategy="SPREAD")(Actor)
        self.actors: dict[str, Any] = {}
        self._pending: dict[Any, str] = {}  #: results of starts and orders
        self._starting: set[str] = set()
        self._left: list[Lost] = []
        self._started = self._failed = 0

    def islands(self) -> list[str]:
        """Return those that are ready; start others in the place of lost ones."""
        while len(self.actors) < self._config.islands:
            name, self._started = str(self._started), self._started + 1
            # Its folder is never made; reports of a hang lie beside it.
            out = Path(f"{self._config.out.absolute()}.island-{name}")
            config = replace(self._config, out=out, resume=False)
            self.actors[name] = self._make.remote(name, config)
            self._pending[self.actors[name].__ray_ready__.remote()] = name
            self._starting.add(name)
        return [name for name in self.actors if name not in self._pending.values()]

    def send(self, island: str, order: Order) -> None:
        """Send an order."""
        self._pending[self.actors[island].work.remote(order)] = island

    def receive(self, timeout_s: float, /) -> Answer | Lost | None:
        """Return the next answer, or an island that left, died or did not start."""
        watch = Stopwatch()
        if self._left:
            return self._left.pop()
        if not self._pending:
            time.sleep(timeout_s)
        while self._pending:
            left_s = max(0.0, timeout_s - watch.seconds)
            done, _ = self._ray.wait([*self._pending], num_returns=1, timeout=left_s)
            if not done:
                break
            name = self._pending.pop(done[0])
            try:
                found = self._ray.get(done[0])
            except self._ray.exceptions.RayError as error:
                return self._lost(name, _reason(error))
            if name in self._starting:
                self._starting.remove(name)
                self._failed = 0
                continue
            answer, is_last = found
            if is_last:
                self._left.append(self._lost(name, "it received SIGTERM"))
            return answer
        return None

    def _lost(self, name: str, why: str) -> Lost:
        if self._address is not None and (gone := _unreachable(self._address)):
            # Ray would end this process in a minute.
            raise SpeedrunError(
                f"the head of Ray at {self._address} is gone ({gone}); start it again, and --resume"
            )
        self._ray.kill(self.actors.pop(name))
        if name in self._starting:
            self._starting.remove(name)
            self._failed += 1
        if self._failed == _MOST_FAILED:
            raise SpeedrunError(
                f"{self._failed} islands in a row did not start: {why}; fix that, and --resume"
            )
        return Lost(name, why)


def _reason(error: Exception) -> str:
    """Return the sentence of an error that has the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[-1].partition(". ")[0].partition(" Worker exit")[0]


@contextmanager
def connected(address: str | None, number: int) -> Iterator[Callable[[RunConfig], Actors]]:
    """Connect to the Ray at `address`, or start one of our own for a number of islands, which ends with the block.

    Yield what makes the islands of a request.
    """
    if address is not None:
        _require(address)
    os.environ.setdefault(TOKEN, secrets.token_hex(32))
    os.environ.update(_SETTINGS)
    try:
        ray: Any = importlib.import_module("ray")  # pyright cannot find it in most environments
    except ImportError:
        raise UsageError("islands need Ray, which is missing; type: scripts/install.sh islands") from None
    given: dict[str, Any] = {"log_to_driver": False, "logging_level": "critical"}
    if address is None:
        given |= {"num_cpus": number, "include_dashboard": False}
    ours = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address or "local", **given)
    except (ray.exceptions.RayError, RuntimeError, ConnectionError, ValueError) as error:
        hint = (
            f"${TOKEN} or the version may differ from the head's" if address else "free ports, and try again"
        )
        raise UsageError(f"Ray at {address or 'this machine'}: {_reason(error)}; {hint}") from None
    signal.signal(signal.SIGTERM, ours)  # Ray's would end us with another code
    ray._private.worker.print_to_stdstream = lambda *_, **__: None  # it would colour our standard output
    try:
        yield partial(Actors, ray, address)
    finally:
        ray.shutdown()


def _require(address: str) -> None:
    """Raise UsageError unless there is a token, and something listens: Ray would try for minutes."""
    if not os.environ.get(TOKEN):
        raise UsageError(f"--address {address}: ${TOKEN} is not set; set it to the token of that Ray")
    if why := _unreachable(address):
        hint = "start it there with 'ray start --head --port=PORT', and the same token"
        raise UsageError(f"--address {address}: no Ray answers ({why}); {hint}")


def _unreachable(address: str) -> str:
    """Return why nothing listens there, or nothing."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _ANSWER_S).close()
    except (OSError, ValueError, OverflowError) as error:
        return str(error)
    return ""
