"""The results of a session: a summary in Markdown, and an archive small enough to send."""

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from speedrun.bench.parts import Part
from speedrun.bench.session import results
from speedrun.ground.wholefile import write_whole

MOST_ARCHIVE_BYTES = 16 * 2**20


def write(head: Sequence[str], parts: Sequence[Part], out: Path) -> None:
    """Write `summary.md`."""
    write_whole(out / "summary.md", text(head, parts, out).encode())


def text(head: Sequence[str], parts: Sequence[Part], out: Path) -> str:
    """Return all results as Markdown: a table of parts, then the figures of each."""
    found = results(out)
    names = [part.name for part in parts if part.name in found]
    names += [name for name in found if name not in names]
    missing = [part.name for part in parts if part.name not in found]
    rows = [
        {
            "part": name,
            "status": one.status,
            "seconds": f"{one.seconds:.0f}",
            "figures, or the reason": one.reason if one.status != "ok" else _gist(_output(out, name)),
        }
        for name, one in ((name, found[name]) for name in names)
    ]
    lines = ["# What this machine measured", "", *(f"- {line}" for line in head), "", *_table(rows), ""]
    if missing:
        lines += [f"Not run: {', '.join(missing)}.", ""]
    for name in names:
        lines += [f"## {name}", "", f"`speedrun {' '.join(found[name].argv)}`", "", *_figures(out, name), ""]
    return "\n".join(lines)


_SHOWN_LINES, _SHOWN_CHARS = 14, 120
_FEW = 8  #: of a list of numbers
#: Figures for the first table, if a part has them.
_GIST = (
    "mean_ms",
    "step_ms",
    "tokens_per_s",
    "mfu",
    "peak_bytes",
    "ratio",
    "matmul_gflops",
    "memory_gb_per_s",
    "ready",
)


def _output(out: Path, name: str) -> Any:
    """Return the standard output of a part: decoded, if it is JSON."""
    path = out / "parts" / f"{name}.out"
    text = path.read_text(errors="replace").strip() if path.is_file() else ""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _gist(output: Any) -> str:
    """Return the few figures that matter most."""
    if isinstance(output, str):
        results = [line for line in output.splitlines() if line.startswith("result")]
        return " ".join(results[-1].split()) if results else ""
    facts: dict[str, Any] = output if isinstance(output, dict) else {}
    rows: list[dict[str, Any]] = output if isinstance(output, list) else facts.get("timings", [])
    if rows and "verdict" in rows[0]:
        return f"{sum(row['verdict'] == 'right' for row in rows)} of {len(rows)} cases right"
    if rows:
        return ", ".join(f"{row['name']} {_shown(row['median_ms'])} ms" for row in rows)
    return ", ".join(f"{key} {_shown(facts[key])}" for key in _GIST if facts.get(key) is not None)


def _figures(out: Path, name: str) -> list[str]:
    """Return the output of a part: JSON as tables, text as its last lines."""
    output = _output(out, name)
    if isinstance(output, str):
        return ["```", *output.splitlines()[-_SHOWN_LINES:], "```"] if output else []
    if isinstance(output, list):
        return _table(output)
    lines = [f"- {key}: {_shown(value)}" for key, value in output.items() if not _is_rows(value)]
    for key, rows in output.items():
        if _is_rows(rows):
            lines += ["", f"{key}:", "", *_table(rows)]
    return lines


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    heads = [key for key in rows[0] if not isinstance(rows[0][key], dict | list)] if rows else []
    lines = [heads, ["---"] * len(heads), *([_shown(row.get(key)) for key in heads] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines] if heads else []


def _shown(value: Any) -> str:
    """Format a value for a cell or a line."""
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list):
        some = value[:: max(1, len(value) // _FEW)]
        return ", ".join(map(_shown, some)) + (
            f" ({len(some)} of {len(value)})" if len(some) < len(value) else ""
        )
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_shown(one)}" for key, one in value.items())
    text = " ".join(str(value).replace("|", "/").split())
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}~"


def archive(out: Path, most_bytes: int = MOST_ARCHIVE_BYTES) -> list[str]:
    """Pack the folder into `outputs.tar.gz`, and return the files that it leaves out for their size, largest first."""
    target = out / "outputs.tar.gz"
    target.unlink(missing_ok=True)
    files = sorted((path for path in out.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    left_out: list[str] = []
    while True:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for path in files:
                tar.add(path, path.relative_to(out))
        if packed.tell() <= most_bytes or not files:
            break
        left_out.append(str(files.pop().relative_to(out)))
    write_whole(target, packed.getvalue())
    return left_out
