"""`speedrun replay`: runs the source that a record carries, and compares every loss.

This executes code from the record, in a process of its own. No other command does.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TextIO

import click
import msgspec

from speedrun import provenance, runlog
from speedrun import track as tracks
from speedrun.cli.options import data_option, example, json_option
from speedrun.console import clean
from speedrun.data import inventory
from speedrun.errors import SpeedrunError, UsageError
from speedrun.ledger import format
from speedrun.ledger.record import Record, load
from speedrun.ledger.run import Run
from speedrun.sourcefile import split_source

#: What a process needs to run at all.
_ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH")


@click.command(epilog=example("speedrun replay records/smoke-cpu/2026-11-21-first"))
@click.argument("record", type=click.Path(path_type=Path))
@click.option("--run", "run_id", metavar="ID", help="Which run of the record. Default: the first.")
@data_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Keep the new run here. Default: thrown away.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    record: Path,
    run_id: str | None,
    data: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Unpack the source of RECORD, run it again, compare all losses. EXECUTES CODE FROM THE RECORD.

    Exits with 0 if every loss is equal to the last bit, else with 1. Equality is promised only for the same
    software on the same kind of machine.
    """
    loaded = load(record)
    old = _find(loaded, record, run_id)
    source = _checked_source(loaded, record, old)
    environment = _checked_environment(record, old)
    echo = sys.stderr if as_json else sys.stdout
    with tempfile.TemporaryDirectory() as scratch:
        target = (out or Path(scratch) / "record").absolute()
        losses = _replay(old, source, environment, data, target, Path(scratch) / "source", echo)
    pairs = list(zip([step.loss for step in old.steps], losses, strict=False))
    num_equal = sum(a == b for a, b in pairs)
    largest = max((abs(a - b) for a, b in pairs), default=0.0)
    equal = num_equal == len(old.steps) == len(losses)
    if as_json:
        facts = {
            "run": old.file.run_id,
            "losses": len(old.steps),
            "equal": num_equal,
            "largest_difference": largest,
        }
        click.echo(msgspec.json.encode(facts))
    else:
        click.echo(f"replay  {num_equal} of {len(old.steps)} losses equal, largest difference {largest:.3g}")
    ctx.exit(0 if equal else 1)


def _find(record: Record, folder: Path, run_id: str | None) -> Run:
    if not record.whole or not record.runs:
        raise UsageError(f"{folder}: no readable run; 'speedrun validate {folder}' says what is wrong")
    runs = {run.file.run_id: run for run in record.runs}
    if run_id is not None and run_id not in runs:
        raise UsageError(f"{folder} has no run {run_id!r}; choose one of: {', '.join(runs)}")
    return runs[run_id] if run_id is not None else record.runs[0]


def _checked_source(record: Record, folder: Path, run: Run) -> dict[str, str]:
    """The files of `source.txt`, if they are what the run says it ran."""
    raw = record.raw.get("source.txt", b"")
    if format.sha256(raw) != run.file.source_sha256:
        raise UsageError(
            f"{folder}/source.txt is not the source of {run.file.run_id} (its sha256 differs); nothing was executed; "
            f"'speedrun validate {folder}' says what is wrong"
        )
    try:
        return split_source(raw.decode())
    except ValueError as error:
        raise UsageError(f"{folder}/source.txt: {error}; nothing was executed") from None


def _checked_environment(folder: Path, run: Run) -> dict[str, str]:
    """The variables that the run had, if they are ones that a run records: others could load foreign code."""
    if foreign := sorted(run.file.environment.keys() - set(provenance.VARIABLES)):
        raise UsageError(
            f"{folder}: the environment of {run.file.run_id} holds {clean(', '.join(foreign))}; "
            f"only {', '.join(provenance.VARIABLES)} may stand there; nothing was executed"
        )
    return run.file.environment


def _replay(
    old: Run,
    source: dict[str, str],
    environment: dict[str, str],
    data: Path | None,
    out: Path,
    scratch: Path,
    echo: TextIO,
) -> list[float]:
    """Runs the unpacked source; the losses of its steps."""
    for path, text in source.items():
        (scratch / path).parent.mkdir(parents=True, exist_ok=True)
        (scratch / path).write_text(text, encoding="utf-8")
    rules = tracks.load(old.file.track.rpartition("@")[0])
    config = {
        "track": rules.name,
        "out": str(out),
        "recipe": old.file.recipe,
        "seed": old.file.seed,
        "overrides": old.file.overrides,
        "data": str(inventory.data_folder(rules, data).absolute())
        if data or rules.synthetic is None
        else None,
        "num_devices": old.file.num_devices,
        "microbatches": old.start.config.get("microbatches"),
    }
    if "attention" in old.start.config:  # older sources do not know the setting
        config["attention"] = old.start.config["attention"]
    (scratch / "run.json").write_bytes(msgspec.json.encode(config))
    # Foreign code gets no secrets of this machine, and the variables that the run had.
    keep = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-m", "speedrun.train", "run.json"],
        cwd=scratch,
        env={**keep, **environment, "PYTHONPATH": str(scratch)},
        stdout=echo,
        check=False,
    )
    if done.returncode:
        raise SpeedrunError(
            f"the source of {old.file.run_id} ended with exit code {done.returncode}; see its output above"
        )
    log = next((out / "runs").glob("*/metrics.jsonl"))
    return [line.event.loss for line in runlog.read(log) if isinstance(line.event, runlog.Step)]
