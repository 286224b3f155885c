"""Runs the source that a record carries, in a process of its own. The only module that executes anything of a record.

`speedrun replay`, `compare`, `reproduce` and `validate --replay` call it, and say so.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import msgspec

from speedrun import provenance, signals
from speedrun import track as tracks
from speedrun.console import clean
from speedrun.data import inventory
from speedrun.errors import EXIT_CODES, SpeedrunError, UsageError, meaning
from speedrun.ledger import format
from speedrun.ledger.findings import Examination, Findings
from speedrun.ledger.record import Record, load
from speedrun.ledger.run import Run
from speedrun.sourcefile import split_source

#: What a process needs to run at all. No cache of programs: foreign code could leave some there for us to run.
_ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH", provenance.IMAGE_VARIABLE)

#: Laid over the record's source to look at what it made.
_EXAMINER = ("examine.py", "output.py", "ledger/findings.py")


class Rerun:
    """A run of a record, checked, ready to be run again."""

    def __init__(self, folder: Path, run_id: str | None = None) -> None:
        """Reads the record; executes nothing yet.

        Raises:
            UsageError: no such run; a source or an environment that is not what the run says.
        """
        record = load(folder)
        self.old = _find(record, folder, run_id)
        self._source = _checked_source(record, folder, self.old)
        self._environment = _checked_environment(folder, self.old)

    def run(self, out: Path, *, seed: int, data: Path | None, echo: TextIO, checkpoint_every: int = 0) -> Run:
        """Unpacks the source into a scratch folder and runs it.

        Args:
            out: the new record's folder.
            seed: of the new run.
            data: folder of shards; None: the track's own.
            echo: where the new run's output goes.
            checkpoint_every: steps; all checkpoints are kept. 0: none.

        Raises:
            SpeedrunError: if it ends badly.
        """
        config = self._config(out, seed, data)
        if checkpoint_every:
            config |= {"checkpoint_every": checkpoint_every, "keep_checkpoints": 0}
        self._execute("speedrun.train", config, echo, {})
        new = [run for run in load(out).runs if run.finished] if out.is_dir() else []
        if len(new) != 1:
            raise SpeedrunError(
                f"the source of {self.old.file.run_id} ended well, but left {len(new)} finished runs that can be read; "
                f"need one; 'speedrun validate {out}' says what is wrong"
            )
        return new[0]

    @property
    def knows_checkpoints(self) -> bool:
        """Whether its source is new enough to write some."""
        return "speedrun/checkpoint.py" in self._source

    def examine(
        self,
        checkpoints: Path,
        restarts: tuple[int, ...],
        num_replayed: int,
        *,
        data: Path | None,
        echo: TextIO,
    ) -> Findings:
        """Runs our examiner on the record's source.

        Args:
            checkpoints: of a run of that source.
            restarts: steps to go on from.
            num_replayed: steps, from each of them.
            data: folder of shards; None: the track's own.
            echo: where its output goes.

        Raises:
            SpeedrunError: if it ends badly.
        """
        with tempfile.TemporaryDirectory() as scratch:
            found = Path(scratch, "findings.json")
            config = self._config(Path(scratch, "out"), self.old.file.seed, data)
            asked = Examination(config, checkpoints.absolute(), restarts, num_replayed, found)
            ours = {
                f"speedrun/{name}": (Path(__file__).parent / name).read_text("utf-8") for name in _EXAMINER
            }
            self._execute("speedrun.examine", asked, echo, ours)
            return msgspec.json.decode(found.read_bytes(), type=Findings)

    def _execute(self, module: str, request: object, echo: TextIO, ours: Mapping[str, str]) -> None:
        """Runs a module of the record's source, with files of ours laid over it, in a scratch folder."""
        with tempfile.TemporaryDirectory() as scratch:
            for path, text in {**self._source, **ours}.items():
                file = Path(scratch, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            Path(scratch, "request.json").write_bytes(msgspec.json.encode(request, enc_hook=str))
            # Foreign code gets no variable of ours that may hold a secret, and those that the run had.
            keep = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            child = subprocess.Popen(
                [sys.executable, "-m", module, "request.json"],
                cwd=scratch,
                env={**keep, **self._environment, "PYTHONPATH": scratch},
                stdout=echo,
                process_group=0,
            )
            code = signals.wait_for(child)
        if code:
            error = SpeedrunError(
                f"the source of {self.old.file.run_id} ended with {meaning(code)}; see its output above"
            )
            error.exit_code = code if code in EXIT_CODES else SpeedrunError.exit_code
            raise error

    def _config(self, out: Path, seed: int, data: Path | None) -> dict[str, object]:
        """What `prepare.RunConfig` of the record's own source wants; older sources know fewer settings."""
        file, config = self.old.file, self.old.start.config
        rules = tracks.load(file.track.rpartition("@")[0])
        own_data = data is None and rules.synthetic is not None  # its own source makes it
        wanted: dict[str, object] = {
            "track": rules.name,
            "out": str(out.absolute()),
            "recipe": file.recipe,
            "seed": seed,
            "overrides": file.overrides,
            "data": None if own_data else str(inventory.data_folder(rules, data).absolute()),
            "num_devices": file.num_devices,
            "microbatches": config.get("microbatches"),
        }
        return wanted | {name: config[name] for name in ("attention", "replicas") if name in config}


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
