"""A run that is small enough for a test, and what runs leave on disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from speedrun.base import runlog
from speedrun.record.logged_run import Run
from speedrun.record.reader import load

#: The smoke recipe, small enough for a test; 12 steps. Most of its time would be attention in validations.
SMALL = {
    "stages.0.num_steps": "12",
    "stages.0.seq_len": "64",
    "eval_sequences": "128",
    "eval_seq_len": "64",
    "config.attention_kinds": "('long', 'none', 'none', 'short')",
    "config.model_dim": "16",
    "config.num_heads": "2",
    "config.head_dim": "8",
    "config.mlp_dim": "32",
}


#: A committed record of one run.
FIRST = Path(__file__).parent.parent / "records" / "smoke-cpu" / "2026-11-29-first"


def files(folder: Path) -> dict[str, bytes]:
    """The bytes of all files below a folder, by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def children_of(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def log_of(out: Path) -> Path:
    (path,) = out.glob("runs/*/metrics.jsonl")
    return path


def events(out: Path, kind: type = object) -> list[Any]:
    return [line.event for line in runlog.read(log_of(out)) if isinstance(line.event, kind)]


def rewrite(out: Path, change: Callable[[Any], Any]) -> None:
    """Change events of a log, with the hashes that follow from them."""
    prev, lines = runlog.GENESIS, []
    for line in list(runlog.read(log_of(out))):
        raw = replace(line, prev=prev, event=change(line.event)).encode()
        prev = runlog.digest(raw)
        lines.append(raw + b"\n")
    log_of(out).write_bytes(b"".join(lines))


def runs_of(out: Path) -> list[Run]:
    """The runs of a record, the oldest first."""
    return sorted(load(out).runs, key=lambda run: run.begun)
