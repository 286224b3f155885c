"""The doctor: the driver's answers, verdicts, and the command on machines that are not here."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from typed import invoke, program, speedrun

from speedrun.base import accelerators, track
from speedrun.base.errors import UsageError
from speedrun.base.mesh import accelerator
from speedrun.machine import bench_kernels as bench
from speedrun.machine import check_devices as seen_devices
from speedrun.machine import checkup as examine
from speedrun.machine.check_devices import Check, Machine
from speedrun.machine.commands import _print

ROOT = Path(__file__).parents[2]
H100 = "NVIDIA H100 80GB HBM3"
CPUS = Machine("cpu", "cpu", 8)
NODE, HALF = (Machine("gpu", H100, number) for number in (8, 4))
GPU = seen_devices.Gpu(H100, "580.95.05")


REFUSALS = examine.refusals


@pytest.fixture(autouse=True)
def committed(monkeypatch) -> None:
    """A checkout whose code may be edited."""
    monkeypatch.setattr(examine, "refusals", lambda *_: [])


@pytest.fixture
def driver(tmp_path, monkeypatch) -> Path:
    """A folder of answers that a `nvidia-smi` on the PATH gives: those of a sound node of eight H100."""
    answers = tmp_path / "answers"
    answers.mkdir()
    (answers / "name").write_text(8 * f"{H100}, 580.95.05, 4\n")
    (answers / "counters").write_text(8 * "0, 0, 0\n")
    tool = program(
        tmp_path / "bin" / "nvidia-smi",
        f"""#!/bin/sh
cd {answers} || exit 1
case "$*" in
  --query-gpu=name,*) cat name ;;
  --query-gpu=*counters*) cat counters ;;
  *) echo "Field is not a valid field to query." && exit 2 ;;
esac
""",
    )
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    return answers


@pytest.fixture
def offline(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(examine.hub, "reach", Mock(side_effect=examine.hub.HubError("no connection")))
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path / "data"))


@pytest.fixture
def node(driver: Path, offline: None, monkeypatch) -> None:

    def seen(found: list[seen_devices.Gpu], *, usable: bool, timed: bool) -> Iterator[Check]:
        shown = NODE if usable else CPUS
        yield Check("devices", f"8 x {shown.kind}", ok=True, facts=shown._asdict())

    monkeypatch.setattr(examine.check_devices, "checks", seen)
    monkeypatch.setattr(examine.provenance, "installed", lambda: {"jax-cuda13-plugin": "0.10.2"})


@pytest.mark.parametrize(
    "does",
    [
        "echo 'NVIDIA-SMI has failed because it could not\ncommunicate'; exit 9",
        "echo 'NVIDIA H100, 580.95.05, 4'; echo 'GPU 0000:1B:00.0: nvidia-smi: GPU is lost'",
        "exec sleep 60",
        "",
    ],
)
def test_a_driver_that_gives_no_answer_says_so(does, driver, monkeypatch, tmp_path):
    monkeypatch.setattr(seen_devices, "_ANSWER_S", 0.2)
    (tmp_path / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\n{does}\n")
    if not does:
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(seen_devices.NoAnswerError, match="nvidia-smi"):
        seen_devices.found()


def test_what_slows_or_breaks_gpus_is_named(tmp_path, monkeypatch):
    (tmp_path / "libnccl.so.2").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    monkeypatch.setattr(seen_devices.shutil, "disk_usage", lambda _: SimpleNamespace(total=2**26))
    found = {check.name: check.found for check in seen_devices.quiet([GPU, GPU._replace(used_mib=40_000)])}
    assert "GPU 1 has 40,000 MiB in use; stop" in found["busy"]
    assert f"names {tmp_path}" in found["libraries"]
    assert "/dev/shm has 67.1 MB; NCCL needs 1.00 GB" in found["shared memory"]


def test_devices_of_two_kinds_train_nothing():
    devices = [SimpleNamespace(platform="gpu", device_kind=kind) for kind in ("NVIDIA A", "NVIDIA B")]
    mixed: Any = SimpleNamespace(devices=np.array(devices))
    with pytest.raises(
        UsageError, match="found NVIDIA A and NVIDIA B, need one kind; name its GPUs in CUDA_VIS"
    ):
        accelerator(mixed)


def test_gpus_that_jax_does_not_use_are_not_measured_as_cpus(monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda _: pytest.fail("simulated devices were measured"))
    found = {check.name: check.mark for check in seen_devices.checks([GPU], usable=True)}
    assert found == {"devices": "ok", "visible": "note"}


@pytest.mark.parametrize(
    ("check", "names"),
    [
        (examine.driver("580.65.06", 13, needed=True), ""),
        (examine.driver("575.57.08", 13, needed=True), "SPEEDRUN_ACCELERATOR=cuda12 scripts/install.sh"),
        (examine.driver("525.60.12", 12, needed=True), "install driver 525.60.13 or newer"),
        (examine.driver("470.82.01", 13, needed=True), "install driver 580 or newer"),
        (seen_devices.identity([GPU, GPU]), ""),
        (seen_devices.identity([GPU, GPU._replace(name="NVIDIA A100-SXM4-80GB")]), "needs one kind"),
    ],
)
def test_gpus_and_driver_are_sound_or_it_is_said_what_is_not(check, names):
    assert (check.ok, names in check.found) == (not names, True)


def of_vendor(share: float) -> dict[str, float]:
    h100 = accelerators.load("h100")
    links = dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce"), h100.link_rate)
    rates = {"matmul": h100.bf16_flops, "memory": h100.memory_rate, **links, "host to device": 60e9}
    return {name: 8 * share * rate for name, rate in rates.items()}


@pytest.mark.parametrize(("share", "ok"), [(0.75, True), (0.45, False)])
def test_rates_are_held_against_the_vendors(share, ok):
    found = {
        check.name: check for check in seen_devices.rates(of_vendor(share), NODE, accelerators.load("h100"))
    }
    assert list(found) == ["matmul", "memory", "all-gather", "reduce-scatter", "all-reduce", "host to device"]
    assert [check.ok for check in found.values()] == [*5 * [ok], True]
    assert found["all-reduce"].facts["share_of_vendor"] == pytest.approx(share)
    assert found["matmul"].facts["matmul_per_s"] == pytest.approx(share * 8 * 989.4e12)
    alone = [*seen_devices.rates(of_vendor(share), Machine("gpu", "something new", 1), None)]
    assert [check.name for check in alone] == list(found)
    assert all(check.ok and len(check.facts) == 1 for check in alone)


@pytest.mark.parametrize(("free", "writable"), [(10**9, True), (10**12, False)])
def test_a_full_or_forbidden_disk_is_in_the_way(free, writable, tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path / "not" / "yet"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(examine.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(examine.os, "access", lambda *_: writable)  # root may write anywhere
    found = examine.disk(track.load("main-8xh100"))
    assert found.mark == "bad"
    assert f"GB free in {tmp_path}; main-8xh100 needs 4.0 GB" in found.found


def advised(machine: Machine, *, with_data: bool, asked: str | None = None) -> str:
    rules = [track.load(name) for name in track.files()]
    fits = [examine.fitting(one, machine, needed=False) for one in rules]
    data = [Check(f"data {one.name}", "", ok=with_data, needed=False) for one in rules]
    return examine.advice([*fits, *data], asked=asked)


@pytest.mark.parametrize(
    ("machine", "without", "with_data"),
    [
        (CPUS, "speedrun data synth --track smoke-cpu", "speedrun run --track smoke-cpu"),
        (NODE, "speedrun data get --track main-8xh100", "speedrun batch --track main-8xh100"),
        (HALF, "speedrun data get --track single-gpu", "speedrun batch --track single-gpu"),
    ],
)
def test_the_hardest_track_that_fits_is_next(machine, without, with_data):
    assert advised(machine, with_data=False) == without
    assert advised(machine, with_data=True) == with_data
    assert advised(machine, with_data=True, asked="smoke-cpu") == "speedrun run --track smoke-cpu"
    fits = examine.fitting(track.load("main-8xh100"), machine, needed=True)
    assert fits.mark == ("ok" if machine == NODE else "bad")


def test_a_machine_fits_only_if_a_record_of_it_could_be_accepted(monkeypatch):
    monkeypatch.setattr(examine, "refusals", REFUSALS)
    monkeypatch.setattr(examine.provenance, "checkout", lambda: ("", None))  # git gives no answer
    for kind, refused in ((H100, ("V406",)), ("NVIDIA H100 PCIe", ("V404", "V406"))):
        fits = examine.fitting(track.load("main-8xh100"), Machine("gpu", kind, 8), needed=True)
        assert (fits.mark, *(id in fits.found for id in refused)) == ("bad", *(True for _ in refused))


@pytest.mark.compile
def test_this_machine_is_fit(tmp_path):
    # A process of its own: it wants eight devices, and JAX may have started here with another number.
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "SPEEDRUN_DATA": str(tmp_path)}
    done = speedrun("doctor", "--json", env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    found = {check["name"]: check for check in report["checks"]}
    assert report.keys() == {"ready", "track", "qualifies", "checks", "next"}
    assert report["next"].startswith("speedrun ")
    basis = {"python", "packages", "lock", "devices", "collective", "matmul", "memory", "host to device"}
    basis |= {"all-gather", "reduce-scatter", "all-reduce"}
    assert basis | {"disk", "hub", "track smoke-cpu", "data smoke-cpu"} <= found.keys()
    keys = {"name", "found", "ok", "needed", "facts", "mark"}
    assert all(check.keys() == keys for check in report["checks"])
    assert "smoke-cpu" in report["qualifies"]
    assert (report["ready"], report["track"], found["hub"]["mark"]) == (True, "smoke-cpu", "note")


def test_of_one_track_only_what_it_needs_is_checked(tmp_path, monkeypatch):
    """The smoke track, as for the quickstart, needs neither rates nor a network."""
    monkeypatch.setattr(bench, "measure", lambda _: pytest.fail("rates were measured"))
    monkeypatch.setattr(examine, "reachable", lambda: pytest.fail("the network was asked"))
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path))
    found = [check.name for check in examine.checks(track.load("smoke-cpu"), alone=True)]
    assert [name for name in found if name not in ("driver", "lock")] == [
        *("python", "packages", "devices", "disk", "track smoke-cpu", "data smoke-cpu")
    ]


@pytest.mark.parametrize(("asked", "code", "mark"), [((), 0, "note"), (("--track", "main-8xh100"), 1, "bad")])
def test_an_old_driver_is_in_the_way_of_gpus_only(node, driver, asked, code, mark):
    assert invoke("doctor").stdout.splitlines()[-1] == "next: speedrun data get --track main-8xh100"
    (driver / "name").write_text(8 * f"{H100}, 470.82.01, 4\n")
    result = invoke("doctor", *asked)
    assert result.exit_code == code
    assert f"\n{mark:<4}  driver: 470.82.01 is too old" in result.stdout
    assert "ok    cuda: wheels of CUDA 13\n" in result.stdout
    installer = (ROOT / "scripts" / "install.sh").read_text()
    assert f"driver%%.*}} >= {examine.DRIVERS[13]})); then echo cuda13; else echo cuda12" in installer
    again = " ".join(["speedrun doctor", *asked])
    assert result.stdout.endswith(f", then: {again}\n") == bool(asked)


def test_versions_are_numbers_and_foreign_packages_a_note(monkeypatch):
    for version in ("0.10.2", "0.10.10", "0.11.0.dev1"):
        assert examine.floor("jax", version, "jax>=0.10.2").ok
    for version in ("0.10.1", "0.9.9"):
        assert not examine.floor("jax", version, "jax>=0.10.2").ok
    # Not what is installed here: that may be another JAX, laid over the lock.
    pins = examine.provenance.pinned((ROOT / "requirements" / "run.lock").read_text())
    here = {name: max(filter(None, versions)) for name, versions in pins.items()}
    monkeypatch.setattr(examine.provenance, "installed", lambda: here)
    assert examine.lock().ok, "this environment is a lock's"
    here["optax"] = "0.0.1"
    assert examine.lock().mark == "note"


def test_a_machine_that_is_not_fit(offline, monkeypatch):
    def broken(*_: object, **__: object):
        raise RuntimeError("no CUDA: NCCL says so\nand a long tale")

    monkeypatch.setattr(examine.check_devices, "checks", broken)
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "bad   devices: no CUDA: NCCL says so; try again with NCCL_NVLS_ENABLE=0" in result.stdout
    monkeypatch.setattr(examine, "software", lambda: [Check("python", "2.7; need python>=3.11", ok=False)])
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "bad   python: 2.7; need python>=3.11\n" in result.stdout
    assert "note  data smoke-cpu: " in result.stdout
    assert "devices" not in result.stdout, "JAX is not asked"
    assert result.stdout.endswith(", then: speedrun doctor\n")


def test_what_a_machine_says_cannot_paint_the_terminal(driver, capsys):
    (driver / "name").write_text("\x1b[31mevil\x1b[0m, 580.95.05, 4\n")
    _print(seen_devices.identity(seen_devices.found()))
    assert capsys.readouterr().out == "ok    gpus: 1 x \\x1b[31mevil\\x1b[0m\n"
