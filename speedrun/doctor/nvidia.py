"""Query NVIDIA's driver with `nvidia-smi`, and parse its answers."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ANSWER_S = 20.0  #: an nvidia-smi that hangs is a broken driver

#: An unset or unknown field.
_NOTHING = re.compile(r"\[?(N/A|Not Supported|Not Active|Unknown Error|Requested functionality.*)\]?")
#: Newer versions underline the head of the matrix.
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")

#: Bits of `clocks_event_reasons.active` that slow a run down. Large products always run at the power cap (4). Idle (1)
#: and the display's clock (256) are harmless.
REASONS = {
    0x02: "clocks set by hand",
    0x08: "hardware slowdown",
    0x10: "bound to another GPU's clocks",
    0x20: "heat, by software",
    0x40: "heat, by hardware",
    0x80: "power brake",
}


class NoAnswerError(Exception):
    """Why `nvidia-smi` gave no answer."""


class Gpu(NamedTuple):
    """One GPU."""

    name: str
    driver: str
    memory_bytes: int
    pcie_width: int | None  #: lanes in use
    most_pcie_width: int | None  #: lanes there are
    mig: bool  #: divided into instances


class Load(NamedTuple):
    """State of one GPU under load."""

    clock_mhz: int | None
    most_clock_mhz: int | None
    temperature_c: int | None
    reasons: tuple[str, ...]  #: the active ones of REASONS


def ask(*args: str) -> str:
    """Run `nvidia-smi` and return its output; raise NoAnswerError if it is not installed, fails or hangs."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *args], capture_output=True, encoding="utf-8", errors="replace", timeout=_ANSWER_S
        )
    except OSError:
        raise NoAnswerError("there is no nvidia-smi") from None
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"nvidia-smi gave no answer in {_ANSWER_S:.0f} s") from None
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())
        raise NoAnswerError(f"nvidia-smi fails: {said[:160]}")
    return done.stdout


def present() -> int:
    """Count the GPUs that the kernel knows, working or not."""
    return sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))


def is_installed() -> bool:
    """Whether `nvidia-smi` is installed."""
    return shutil.which("nvidia-smi") is not None


def gpus() -> list[Gpu]:
    """Return all GPUs; raise NoAnswerError as `ask` does."""
    fields = ("name", "driver_version", "memory.total", "pcie.link.width.current", "pcie.link.width.max")
    return [
        Gpu(name or "", driver or "", (_int(mib) or 0) * 2**20, _int(width), _int(most), mig == "Enabled")
        for name, driver, mib, width, most, mig in _query(*fields, "mig.mode.current")
    ]


def loads() -> list[Load]:
    """Return the current state of all GPUs; raise NoAnswerError as `ask`, or for a driver without one of the fields."""
    fields = ("clocks.sm", "clocks.max.sm", "temperature.gpu", "clocks_event_reasons.active")
    return [
        Load(_int(clock), _int(most), _int(heat), _reasons(bits))
        for clock, most, heat, bits in _query(*fields)
    ]


def links() -> dict[tuple[int, int], str]:
    """Return the connection of every pair: `NV18` is 18 NVLinks; PIX, PXB, PHB, NODE, SYS are ever longer PCIe paths.

    Raises:
        NoAnswerError: see `ask`.
    """
    return read_links(ask("topo", "-m"))


def read_links(matrix: str) -> dict[tuple[int, int], str]:
    """Parse the pairs (i < j) of the matrix of `nvidia-smi topo -m`, without network cards.

    The head is `GPU0  GPU1 ... NIC0 ... CPU Affinity`; a row is `GPU0  X  NV18 ...`.
    """
    rows = [_ESCAPES.sub("", line).split() for line in matrix.splitlines()]
    head = next((row for row in rows if row[:1] == ["GPU0"] and row[1:2] != ["X"]), [])
    columns = [_index(word) for word in head]
    found = {}
    for row in rows:
        if row and row is not head and (i := _index(row[0])) is not None:
            for j, kind in zip(columns, row[1:], strict=False):  # affinities stand behind the pairs
                if j is not None and i < j:
                    found[i, j] = kind
    return found


def _index(word: str) -> int | None:
    match = re.fullmatch(r"GPU(\d+)", word)
    return int(match[1]) if match else None


def _query(*fields: str) -> Iterator[list[str | None]]:
    """Yield one row per GPU, with None for unknown fields."""
    answer = ask(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    for line in filter(None, answer.splitlines()):
        words = [word.strip() for word in line.split(",")]
        if len(words) != len(fields):
            raise NoAnswerError(f"nvidia-smi answers {line[:80]!r}")
        yield [None if _NOTHING.fullmatch(word) else word for word in words]


def _int(word: str | None) -> int | None:
    if word is None:
        return None
    try:
        return int(float(word))
    except ValueError:
        raise NoAnswerError(f"nvidia-smi answers {word[:80]!r} for a number") from None


def _reasons(bits: str | None) -> tuple[str, ...]:
    if bits is None:
        return ()
    try:
        active = int(bits, 16)
    except ValueError:
        raise NoAnswerError(f"nvidia-smi answers {bits[:80]!r} for reasons") from None
    return tuple(said for bit, said in REASONS.items() if active & bit)
