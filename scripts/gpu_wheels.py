#!/usr/bin/env python3
"""Wheels for a GPU machine without a network; called by measure_gpu.sh, needs only the standard library and pip.

    gpu_wheels.py pack DIR             downloads what that machine's Python lacks, by the digests in requirements/
    gpu_wheels.py install DIR TARGET   installs it there, into a folder of its own

That Python is 3.12 on Linux x86-64 with JAX for CUDA 13. Of FlashAttention only the library of version 3 is kept: the
whole wheel has 74 MiB, nearly all of it FlashAttention-2.
"""

import base64
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = Path(__file__).parent.parent / "requirements"
PYTHON, PLATFORMS = "3.12", ("manylinux_2_28_x86_64", "manylinux2014_x86_64")
#: Of run.lock; that machine has the rest.
PACKAGES = ("msgspec",)
MOST_BYTES = 60 * 2**20
_LIBRARY = "dew_flash_attn/libdew_flash_attn3.so"


class Refused(Exception):
    """One line: what we got, what is needed, what to do."""


def pack(folder: Path) -> list[Path]:
    """Downloads and repacks; gives the wheels.

    Raises:
        Refused: if pip fails, or they do not fit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch, "wanted.txt")
        pins = "".join(pinned((REQUIREMENTS / "run.lock").read_text(), name) for name in PACKAGES)
        wanted.write_text(pins + (REQUIREMENTS / "attention-cuda13.lock").read_text())
        platforms = [f"--platform={name}" for name in PLATFORMS]
        pip("download", "--no-deps", "--require-hashes", "--only-binary=:all:", f"--python-version={PYTHON}",
            "--implementation=cp", *platforms, "--dest", scratch, "--requirement", str(wanted))  # fmt: skip
        kept = [keep(wheel, folder) for wheel in sorted(Path(scratch).glob("*.whl"))]
    if (size := sum(wheel.stat().st_size for wheel in kept)) > MOST_BYTES:
        raise Refused(
            f"the wheels take {size:,} bytes, need at most {MOST_BYTES:,}; take some out of PACKAGES"
        )
    return kept


def pinned(lock: str, name: str) -> str:
    """The lines of a lock file that pin a package, digests included."""
    found = re.search(rf"^{name}==(?:.*\\\n)*.*\n", lock, re.MULTILINE)
    if found is None:
        raise Refused(f"run.lock pins no {name}; need its digest; run scripts/lock.sh")
    return found[0]


def keep(wheel: Path, folder: Path) -> Path:
    """Copies a wheel to a folder; one of FlashAttention without its second version and under a version of its own."""
    with zipfile.ZipFile(wheel) as source:
        if _LIBRARY not in source.namelist():
            kept = folder / wheel.name
            kept.write_bytes(wheel.read_bytes())
            return kept
        name, version, tag = wheel.stem.split("-", 2)
        old, new = f"{name}-{version}", f"{name}-{version}+fa3"
        files = {
            path: source.read(path) for path in source.namelist() if path.startswith(f"{old}.dist-info/")
        }
        files[_LIBRARY] = source.read(_LIBRARY)
    del files[f"{old}.dist-info/RECORD"]
    about = f"{old}.dist-info/METADATA"
    files[about] = files[about].replace(
        f"\nVersion: {version}\n".encode(), f"\nVersion: {version}+fa3\n".encode()
    )
    kept, record = folder / f"{new}-{tag}.whl", []
    with zipfile.ZipFile(kept, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
        for name, raw in files.items():
            name = name.replace(f"{old}.dist-info/", f"{new}.dist-info/")
            target.writestr(zipfile.ZipInfo(name), raw, zipfile.ZIP_DEFLATED, 9)
            digest = base64.urlsafe_b64encode(hashlib.sha256(raw).digest()).decode().rstrip("=")
            record.append(f"{name},sha256={digest},{len(raw)}\n")
        target.writestr(f"{new}.dist-info/RECORD", "".join([*record, f"{new}.dist-info/RECORD,,\n"]))
    return kept


def install(folder: Path, target: Path) -> None:
    """Installs all wheels of a folder into `target`, without a network and without touching this Python.

    Raises:
        Refused: if there are none, or they are for another Python or platform.
    """
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        raise Refused(f"{folder} holds no wheels; need those of: scripts/measure_gpu.sh --wheels DIR")
    pip("install", "--no-index", "--no-deps", "--upgrade", "--target", str(target), *wheels)


def pip(*words: str) -> None:
    """Runs pip.

    Raises:
        Refused: with what it said last, if it fails.
    """
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or [
            done.stderr.strip()
        ]
        here = f"Python {sys.version_info.major}.{sys.version_info.minor} on {sys.platform}"
        raise Refused(
            f"pip {words[0]} with {here}: {lines[0].removeprefix('ERROR: ')}; need wheels for this Python"
        )


def main() -> None:
    """Packs or installs, and says so in a line."""
    match sys.argv[1:]:
        case ["-h" | "--help"]:
            print(__doc__.strip())
        case ["pack", folder]:
            wheels = pack(Path(folder))
            size = sum(wheel.stat().st_size for wheel in wheels) / 2**20
            print(f"wheels: {', '.join(wheel.name for wheel in wheels)} in {folder}, {size:.1f} MiB")
        case ["install", folder, target]:
            install(Path(folder), Path(target))
        case _:
            raise Refused("need: pack DIR, or install DIR TARGET")


if __name__ == "__main__":
    try:
        main()
    except (Refused, OSError) as error:
        sys.exit(f"measure_gpu: {error}")
