"""Islands as actors of Ray, each a process of its own, on this machine or on several."""

import signal
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from speedrun.base import track as tracks
from speedrun.base.clock import Stopwatch
from speedrun.base.errors import SpeedrunError
from speedrun.islands import cluster
from speedrun.islands.rounds import Answer, Lost, Order
from speedrun.train.run_config import RunConfig

_MOST_FAILED = 8  #: islands in a row that did not start


class Actor:
    """An island in a process of its own. It leaves after the order in hand when it gets SIGTERM."""

    def __init__(self, name: str, config: RunConfig) -> None:
        # The driver imports this module before JAX.
        from speedrun.islands.island import Island

        self._island, self._leaves = Island(name, config), False
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_leaves", True))

    def work(self, order: Order) -> tuple[Answer, bool]:
        """Return the answer, and whether it was the last."""
        return self._island.work(order), self._leaves


class Actors:
    """`rounds.Engine` over actors. An island is ready once it has compiled and answered its last order."""

    def __init__(self, ray: Any, address: str | None, config: RunConfig) -> None:
        """Keep `config.meshes` alive, each of which trains as the request says."""
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
        while len(self.actors) < self._config.meshes:
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
                return self._lost(name, cluster.reason(error))
            if name in self._starting:
                self._starting.remove(name)
                self._failed = 0
                continue
            answer, is_last = found
            answer = answer._replace(work=replace(answer.work, island=name))  # whatever it says
            if is_last:
                self._left.append(self._lost(name, "it received SIGTERM"))
            return answer
        return None

    def _lost(self, name: str, why: str) -> Lost:
        if self._address is not None:
            cluster.require_head(self._address)
        self._ray.kill(self.actors.pop(name))
        if name in self._starting:
            self._starting.remove(name)
            self._failed += 1
        if self._failed == _MOST_FAILED:
            found = f"{self._failed} islands in a row did not start: {why}"
            raise SpeedrunError(f"{found}; fix that, and --resume")
        return Lost(name, why)
