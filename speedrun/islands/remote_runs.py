"""Runs on the nodes of a Ray, one at a time on each. A node that differs from the first one is left out."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from speedrun.base import provenance
from speedrun.base.atomic_files import lock_record, make_folder, write_whole
from speedrun.base.console import Printer
from speedrun.base.errors import SpeedrunError
from speedrun.base.track import Track
from speedrun.islands import cluster
from speedrun.record import layout
from speedrun.record.logged_run import Run
from speedrun.train import keeper
from speedrun.train.batch import Say, Trainer
from speedrun.train.run_config import RunConfig

_LOOK_S = 2.0  #: between looks for new nodes


class Home(NamedTuple):
    """What a node sends when a run has ended."""

    code: int  #: exit code
    error: str
    files: dict[str, bytes]  #: of its record, by relative path


def _facts(platform: str) -> dict[str, str]:
    """Return what must be equal on all nodes."""
    from speedrun.base import mesh as meshes

    meshes.prepare(platform)
    import jax

    devices = jax.devices()
    numbers = {"devices": str(len(devices)), "processors": str(os.cpu_count()), "source": _source()}
    return {"device": devices[0].device_kind, **numbers, **provenance.software()}


def _source() -> str:
    return layout.sha256(provenance.closure(["speedrun.train.recorded"], []).encode())[:12]


def _train(config: RunConfig, given: dict[str, bytes]) -> Home:
    """Train in a scratch folder with the files that a batch declared, if any."""
    with tempfile.TemporaryDirectory(prefix="speedrun-") as scratch:
        out = Path(scratch, "record")
        if given:
            make_folder(out, given)
        try:
            code, error = keeper.trained(keeper.Job(replace(config, out=out)), Printer(sys.stdout))
        except SpeedrunError as caught:
            code, error = caught.exit_code, str(caught)
        paths = [path for path in out.rglob("*") if path.is_file()]
        return Home(code, error, {path.relative_to(out).as_posix(): path.read_bytes() for path in paths})


def _bring_home(out: Path, files: dict[str, bytes]) -> None:
    """Write the files of a run that are not there, its log last: without it, the others are none of a record's."""
    with lock_record(out):
        for name in sorted(files, key=lambda name: name.endswith(layout.LOG)):
            if not (out / name).exists():
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                write_whole(out / name, files[name])


_Node = dict[str, Any]  #: as Ray describes it


class Nodes:
    """The nodes of a Ray."""

    def __init__(self, ray: Any, address: str, say: Say) -> None:
        """Take the package, connected to `address`."""
        self._ray, self._address, self._say = ray, address, say
        self._same = {"source": _source()}  #: facts of all nodes
        self._seen, self._idle = set[str](), list[_Node]()
        self._jobs: dict[Any, tuple[_Node, RunConfig | None]] = {}  #: a run, or a look at a new node

    def trained(
        self, rules: Track, configs: Iterable[RunConfig], earlier: Iterable[Run]
    ) -> Iterator[tuple[RunConfig, int]]:
        """Train each on a node; yield it with its exit code when its files are here. A lost run starts again."""
        for run in earlier:
            if run.hardware[1]:  # empty if it was killed early
                self._same["device"] = run.hardware[1]
        waiting, again = iter(configs), list[RunConfig]()
        while True:
            self._look(rules.rules.platform)
            while self._idle and (config := again.pop() if again else next(waiting, None)):
                self._send(config)
            if self._idle and not any(config for _, config in self._jobs.values()):
                return  # other nodes may still be busy with something else
            if not self._jobs:
                raise SpeedrunError("no node of Ray is left that can train; start one, and --resume")
            for job in self._ray.wait([*self._jobs], num_returns=1, timeout=_LOOK_S)[0]:
                node, config = self._jobs.pop(job)
                place = node["NodeManagerAddress"]
                try:
                    found = self._ray.get(job)
                except self._ray.exceptions.RayError as error:
                    cluster.require_head(self._address)
                    self._say(f"node    {place} is lost, or fails: {cluster.reason(error)}")
                    again += [config] if config else []
                    continue
                if config is None:
                    self._admit(node, found)
                    continue
                self._idle.append(node)
                _bring_home(config.out, found.files)
                if found.error:
                    self._say(f"node    {place}: error: {found.error}; --resume with --on goes on")
                yield config, found.code

    def _look(self, platform: str) -> None:
        """Ask new nodes what they are."""
        for node in self._ray.nodes():
            if node["Alive"] and node["NodeID"] not in self._seen and node["Resources"].get("CPU"):
                self._seen.add(node["NodeID"])
                self._jobs[self._task(_facts, node).remote(platform)] = node, None

    def _admit(self, node: _Node, facts: dict[str, str]) -> None:
        """Use a node if it equals the first one."""
        pairs = [(name, facts.get(name), need) for name, need in self._same.items()]
        if differ := [f"{name} {got}, need {need}" for name, got, need in pairs if got != need]:
            self._say(f"node    {node['NodeManagerAddress']} is left out: {'; '.join(differ)}")
        else:
            self._same |= facts
            self._idle.append(node)

    def _send(self, config: RunConfig) -> None:
        node, data = self._idle.pop(0), config.data and config.data.absolute()
        self._say(f"node    {node['NodeManagerAddress']} trains seed {config.seed}")
        declared = (layout.BATCH, layout.SOURCE) if config.batch_sha256 else ()
        given = {name: (config.out / name).read_bytes() for name in declared}
        job = self._task(_train, node).remote(replace(config, data=data), given)
        self._jobs[job] = node, config

    def _task(self, function: Callable[..., object], node: _Node) -> Any:
        """Return a task in a process of its own that takes a whole node, so that its run is timed alone."""
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        return self._ray.remote(
            num_cpus=node["Resources"]["CPU"],
            num_gpus=node["Resources"].get("GPU", 0),
            scheduling_strategy=affinity(node["NodeID"], soft=False),
            max_calls=1,
            max_retries=0,
        )(function)


@contextmanager
def trainer(address: str, say: Say) -> Iterator[Trainer]:
    """Connect to the Ray at an address, and yield what trains on its nodes. Do so before JAX is imported."""
    with cluster.connected(address) as ray:
        yield Nodes(ray, address, say).trained
