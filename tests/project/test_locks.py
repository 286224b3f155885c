"""The lock files: whole, agreed, and tied to no host."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCKS = {path.stem: path.read_text() for path in sorted((ROOT / "requirements").glob("*.lock"))}

PIN = re.compile(r"([a-z0-9-]+)==([0-9][0-9a-z.]*)(?: ; ([^\\]+))? \\")


def pins(lock: str) -> set[tuple[str, str, str]]:
    return {(m[1], m[2], m[3] or "") for line in LOCKS[lock].splitlines() if (m := PIN.fullmatch(line))}


def versions(lock: str) -> set[tuple[str, str]]:
    return {(name, version) for name, version, _ in pins(lock)}


def test_locks_agree():
    everything = pins("cuda12") | pins("cuda13") | pins("dev")
    # What more packages ask for may need a package in more places: markers may differ.
    assert versions("run") <= versions("prep") <= versions("dev")
    of_tests = {pin for pin in versions("aot") if pin[0] == "nvidia-cuda-nvdisasm"}
    assert versions("aot") - of_tests <= versions("cuda12"), "the compiler must be the one that GPUs get"
    places = [(name, marker) for name, _, marker in everything]
    assert len(places) == len(set(places)), "one package, two versions; run scripts/lock.sh"
