"""Runs of a batch or sweep on the nodes of a Ray. The real one is in tests/islands/test_islands_ray.py."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from small_run import runs_of

from speedrun.base import track
from speedrun.base.errors import SpeedrunError
from speedrun.islands import remote_runs
from speedrun.islands.remote_runs import Home, Nodes
from speedrun.record import layout
from speedrun.train.run_config import RunConfig

SMOKE = track.load("smoke-cpu")
FACTS = {"device": "cpu", "processors": "2", "jax": "1"}


class RayError(Exception):
    pass


@dataclass
class Ray:
    """As much of Ray as is used: jobs end in turns."""

    facts: dict[str, dict[str, str]]  #: of each node
    lost: set[str] = field(default_factory=set[str])  #: nodes that die with their first run
    codes: dict[int, int] = field(default_factory=dict[int, int])  #: exit codes of seeds that crash
    jobs: list[tuple[str, Any, tuple[Any, ...]]] = field(default_factory=list[Any])
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=RayError)
        strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda id, soft: id)
        self.util = SimpleNamespace(scheduling_strategies=strategies)

    def nodes(self) -> list[dict[str, Any]]:
        found = {"Alive": True, "Resources": {"CPU": 2.0}}
        return [{"NodeID": name, "NodeManagerAddress": name, **found} for name in self.facts]

    def remote(self, **options: Any) -> Callable[[Any], Any]:
        node = options["scheduling_strategy"]

        def send(function: Any, *words: Any) -> int:
            self.jobs.append((node, function, words))
            return len(self.jobs) - 1

        return lambda function: SimpleNamespace(remote=lambda *words: send(function, *words))

    def wait(self, jobs: list[int], *, num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        del num_returns, timeout
        running = [self.jobs[job][0] for job in jobs]
        assert len(running) == len(set(running)), "two jobs on a node"
        self.most_at_once = max(self.most_at_once, len(jobs))
        return jobs[:1], jobs[1:]

    def get(self, job: int) -> Any:
        node, function, words = self.jobs[job]
        if function is remote_runs._facts:
            return {"source": remote_runs._source(), **self.facts[node]}
        if node in self.lost:
            raise RayError("the node died")
        config, given = words
        assert set(given) == ({layout.BATCH, layout.SOURCE} if config.batch_sha256 else set())
        code = self.codes.get(config.seed, 0)
        return Home(
            code,
            "no space" * bool(code),
            {f"runs/{config.seed}/{layout.LOG}": b"log\n", "programs-a.xz": b"p", **given},
        )


def nodes(ray: Ray) -> tuple[Nodes, list[str]]:
    said: list[str] = []
    return Nodes(ray, "127.0.0.1:1", said.append), said


def requests(folder: Path, number: int) -> list[RunConfig]:
    return [RunConfig("smoke-cpu", folder / str(seed), seed=seed) for seed in range(number)]


@pytest.fixture(autouse=True)
def head(monkeypatch) -> None:
    monkeypatch.setattr(remote_runs.cluster, "require_head", lambda address: None)


def test_each_request_is_trained_once_and_each_node_trains_one_at_a_time(tmp_path):
    ray = Ray({"a": FACTS, "b": FACTS}, codes={3: 4})
    there, said = nodes(ray)
    found = list(there.trained(SMOKE, requests(tmp_path, 5), ()))
    assert sorted((config.seed, code) for config, code in found) == [(0, 0), (1, 0), (2, 0), (3, 4), (4, 0)]
    assert len([line for line in said if line.endswith(": error: no space; --resume with --on goes on")]) == 1
    assert ray.most_at_once == 2
    logs = [tmp_path / str(seed) / "runs" / str(seed) / layout.LOG for seed in range(5)]
    assert all(log.read_bytes() == b"log\n" for log in logs)


def test_the_run_of_a_lost_node_is_trained_by_another(tmp_path):
    there, said = nodes(Ray({"a": FACTS, "b": FACTS}, {"a"}))
    found = list(there.trained(SMOKE, requests(tmp_path, 3), ()))
    assert sorted(config.seed for config, _ in found) == [0, 1, 2]
    assert any("a is lost, or fails: the node died" in line for line in said)


def test_without_a_node_the_command_says_what_to_start(tmp_path):
    with pytest.raises(SpeedrunError, match=r"start one, and --resume"):
        list(nodes(Ray({"a": FACTS}, {"a"}))[0].trained(SMOKE, requests(tmp_path, 1), ()))


@pytest.mark.parametrize(
    ("other", "device"),
    [({"processors": "4"}, ""), ({"jax": "2"}, ""), ({"source": "0"}, ""), ({"device": "H100"}, "cpu")],
)
def test_a_node_of_another_kind_is_left_out(other, device, tmp_path):
    ray = Ray({"a": FACTS, "b": {**FACTS, **other}} if not device else {"b": FACTS | other, "a": FACTS})
    there, said = nodes(ray)
    earlier: Any = [SimpleNamespace(hardware=(8, name)) for name in (device, "")]
    assert len(list(there.trained(SMOKE, requests(tmp_path, 4), earlier))) == 4
    ((name, value),) = other.items()
    assert [line for line in said if f"b is left out: {name} {value}, need" in line]
    assert not [node for node, function, _ in ray.jobs if function is remote_runs._train and node == "b"]


def test_a_node_that_comes_later_trains_too(tmp_path):
    ray = Ray({"a": FACTS})
    under_way = nodes(ray)[0].trained(SMOKE, requests(tmp_path, 6), ())
    next(under_way)
    ray.facts["b"] = FACTS
    assert len(list(under_way)) == 5
    assert {node for node, function, _ in ray.jobs if function is remote_runs._train} == {"a", "b"}


def test_a_node_that_is_busy_with_something_else_does_not_hold_up_the_end(tmp_path, monkeypatch):
    ray = Ray({"a": FACTS, "busy": FACTS})
    wait = ray.wait

    def others(jobs: list[int]) -> list[int]:
        return [job for job in jobs if ray.jobs[job][0] != "busy"]

    monkeypatch.setattr(ray, "wait", lambda jobs, **how: wait(others(jobs), **how) if others(jobs) else 1 / 0)
    assert len(list(nodes(ray)[0].trained(SMOKE, requests(tmp_path, 2), ()))) == 2


def test_a_batch_sends_what_it_declared_and_keeps_its_own_files(tmp_path):
    for name in (layout.BATCH, layout.SOURCE):
        (tmp_path / name).write_bytes(b"declared")
    overrides = {"stages.0.num_steps": "9"}
    one = RunConfig(
        "smoke-cpu", tmp_path, seed=1, batch_sha256="b", data=Path("here"), overrides=overrides, num_devices=1
    )
    ray = Ray({"a": FACTS})
    asked = [one, msgspec.structs.replace(one, seed=2)]
    assert len(list(nodes(ray)[0].trained(SMOKE, asked, ()))) == 2
    assert (tmp_path / layout.BATCH).read_bytes() == b"declared"
    assert len([*tmp_path.glob(f"runs/*/{layout.LOG}")]) == 2
    sent = [words[0] for _, function, words in ray.jobs if function is remote_runs._train]
    assert sent == [msgspec.structs.replace(config, data=Path("here").absolute()) for config in asked]


@pytest.mark.compile
def test_what_comes_home_is_the_run(trained, tmp_path):
    given = {layout.BATCH: b"{}\n", layout.SOURCE: (trained.out / layout.SOURCE).read_bytes()}
    plain = msgspec.structs.replace(
        trained, checkpoint_every=0, keep_checkpoints=2, batch_sha256=layout.sha256(given[layout.BATCH])
    )
    home = remote_runs._train(plain, given)
    assert (home.code, home.error) == (0, "")
    assert home.files.items() >= given.items()
    remote_runs._bring_home(tmp_path / "out", home.files)
    (here,), (there,) = runs_of(tmp_path / "out"), runs_of(trained.out)
    assert here.final_hash == there.final_hash


def test_what_breaks_off_comes_home_with_its_error(trained):
    home = remote_runs._train(msgspec.structs.replace(trained, overrides={"stages.0.num_steps": "0"}), {})
    assert home.code == 2
    assert "num_steps" in home.error
