"""Runs the source that a record carries, in its own process and sandbox. Nothing else executes code of a record.

`speedrun replay`, `compare`, `reproduce` and `validate --replay` call it, and say so.
"""

import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TextIO

import msgspec

from speedrun.data import inventory
from speedrun.ground import provenance
from speedrun.ground import track as tracks
from speedrun.ground.console import clean
from speedrun.ground.errors import EXIT_CODES, SpeedrunError, UsageError, meaning
from speedrun.ground.sourcefile import split_source
from speedrun.ground.wholefile import write_whole
from speedrun.ledger import runfile
from speedrun.ledger.findings import Examination, Findings, HandedOver, Wanted
from speedrun.ledger.record import Record, load, read_files
from speedrun.ledger.run import Run
from speedrun.referee import sandbox

_PACKAGE = Path(__file__).parent.parent

#: What a process needs to run at all. No cache of programs: foreign code could leave some there for us to run.
_ENVIRONMENT = ("PATH", "LANG", "LD_LIBRARY_PATH", provenance.IMAGE_VARIABLE)

#: Laid over the record's source to lower its programs; and a file of a source new enough for it.
_OURS = ("referee/__init__.py", "referee/handover.py", "ground/output.py", "ledger/findings.py")
_NEEDED = "speedrun/training/program.py"

_LEAST_S, _MOST_S, _SLOWER = 3600.0, 7 * 86400.0, 10.0  #: of a run: seconds, and times what it took
_HANDOVER_S = 1800.0
_MOST_BYTES = 1 << 30  #: of all programs together
_MOST_TABLE_BYTES = 1 << 24  #: of what lists them
_MOST_STACKS_BYTES = 1 << 22


class Replay(NamedTuple):
    """How the losses of a run compare with those of the same run made again."""

    num_losses: int  #: of the recorded run
    num_equal: int  #: to the last bit
    largest_difference: float  #: nats
    equal: bool  #: whether both have the same losses, and as many


class Rerun:
    """A run of a record, checked, ready to be run again."""

    def __init__(self, folder: Path, run_id: str | None = None, *, unsafe: bool = False) -> None:
        """Reads the record, and what of ours is needed; executes nothing yet.

        Args:
            folder: the record.
            run_id: of the run; None: the first.
            unsafe: run it without a world of its own where that cannot be had.

        Raises:
            UsageError: no such run; a source or an environment that is not what the run says.
        """
        record = load(folder)
        self.old = _find(record, folder, run_id)
        self._unsafe = unsafe
        self._source = _checked_source(record, folder, self.old)
        self._environment = _checked_environment(folder, self.old)
        self._ours = {f"speedrun/{name}": (_PACKAGE / name).read_text("utf-8") for name in _OURS}

    def run(self, out: Path, *, seed: int, data: Path | None, echo: TextIO) -> Run:
        """Unpacks the source into a scratch folder and runs it.

        Args:
            out: the new record's folder.
            seed: of the new run.
            data: folder of shards; None: the track's own.
            echo: where the new run's output goes.

        Raises:
            SpeedrunError: if it ends badly.
        """
        if out.exists():
            raise UsageError(f"{out} exists already; need a new folder; remove it or pass another --out")
        took_s = self.old.end.cold_wall_s if self.old.finished else 0.0
        limit_s = min(_MOST_S, max(_LEAST_S, _SLOWER * took_s))
        with tempfile.TemporaryDirectory(prefix="speedrun-run-") as scratch:
            made = Path(scratch, "record")
            config = self._config(made, seed, data)
            try:
                self._execute(self._entry, config, Path(scratch), echo, {}, limit_s)
            finally:
                _bring(made, out)
        new = [run for run in load(out).runs if run.finished] if out.is_dir() else []
        if len(new) != 1:
            raise SpeedrunError(
                f"the source of {self.old.file.run_id} ended well, but left {len(new)} finished runs that can be read; "
                f"need one; 'speedrun validate {out}' says what is wrong"
            )
        return new[0]

    def replay(self, out: Path, *, data: Path | None, echo: TextIO) -> Replay:
        """Run it with its own seed, and compare every loss. Arguments and errors as those of `run`."""
        new = self.run(out, seed=self.old.file.seed, data=data, echo=echo)
        old_losses, losses = ([step.loss for step in run.steps] for run in (self.old, new))
        pairs = list(zip(old_losses, losses, strict=False))
        return Replay(
            num_losses=len(old_losses),
            num_equal=sum(old == again for old, again in pairs),
            largest_difference=max((abs(old - again) for old, again in pairs), default=0.0),
            equal=old_losses == losses,
        )

    @property
    def _entry(self) -> str:
        """The module that trains: the layout before 2026-11-22 had it elsewhere."""
        new, old = "speedrun/training/train.py", "speedrun/train.py"
        return (new if new in self._source else old).removesuffix(".py").replace("/", ".")

    @property
    def can_be_examined(self) -> bool:
        """Whether the instruments in its source are new enough to lower its programs for the examiner."""
        return _NEEDED in self._source

    def hand_over(self, folder: Path, *, data: Path, echo: TextIO) -> None:
        """Has the source lower its programs, and puts them into a new folder: plain files, as many as it names.

        Args:
            folder: where they go.
            data: folder of shards, of which the source looks at the headers.
            echo: where its output goes.

        Raises:
            SpeedrunError: if it ends badly, or hands over something else.
        """
        with tempfile.TemporaryDirectory(prefix="speedrun-programs-") as scratch:
            given = Path(scratch, "programs")
            wanted = Wanted(self._config(Path(scratch, "record"), self.old.file.seed, data), given)
            self._execute("speedrun.referee.handover", wanted, Path(scratch), echo, self._ours, _HANDOVER_S)
            try:
                raw = plain(given / "programs.json", _MOST_TABLE_BYTES)
                names = msgspec.json.decode(raw, type=HandedOver).programs
                if not all(name.replace("-", "").isalnum() for name in names):
                    raise ValueError("a name that is none")
                programs, left_bytes = {}, _MOST_BYTES
                for name in names:
                    programs[f"{name}.mlir"] = found = plain(given / f"{name}.mlir", left_bytes)
                    left_bytes -= len(found)
            except (OSError, ValueError) as error:
                raise SpeedrunError(
                    f"the source of {self.old.file.run_id} handed over no programs that can be read "
                    f"({clean(str(error))}); it cannot be examined; look at its output above"
                ) from None
        folder.mkdir()
        for name, content in {"programs.json": raw, **programs}.items():
            (folder / name).write_bytes(content)

    def examine(self, asked: Examination, scratch: Path, echo: TextIO) -> Findings:
        """Runs our examiner on programs that were handed over; nothing of the source is there.

        Args:
            asked: what to look at; its paths to programs and findings lie in `scratch`.
            scratch: the only folder that it can write.
            echo: where its output goes.

        Raises:
            SpeedrunError: if it ends badly.
        """
        readable = [_PACKAGE, asked.data, *([asked.checkpoints] if asked.checkpoints else [])]
        self._start("speedrun.referee.examiner", asked, scratch, echo, _PACKAGE.parent, readable, _MOST_S)
        return msgspec.json.decode(asked.findings.read_bytes(), type=Findings)

    def _execute(
        self,
        module: str,
        request: object,
        scratch: Path,
        echo: TextIO,
        ours: Mapping[str, str],
        limit_s: float,
    ) -> None:
        """Runs a module of the record's source, with files of ours laid over it, in a scratch folder."""
        for path, text in {**self._source, **ours}.items():
            file = scratch / "source" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        config = msgspec.to_builtins(request, enc_hook=str)
        data = config.get("config", config)["data"]
        readable = [Path(data)] if data else []
        self._start(module, request, scratch, echo, scratch / "source", readable, limit_s)

    def _start(
        self,
        module: str,
        request: object,
        scratch: Path,
        echo: TextIO,
        code: Path,
        readable: Iterable[Path],
        limit_s: float,
    ) -> None:
        """Runs a module apart, with one argument: a file that holds the request."""
        asked = scratch / "request.json"
        asked.write_bytes(msgspec.json.encode(request, enc_hook=str))
        # Foreign code gets no variable of ours that may hold a secret, and those that the run had.
        keep = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        found = sandbox.run(
            [sys.executable, "-m", module, str(asked)],
            scratch,
            readable=readable,
            environment={**keep, **self._environment, "PYTHONPATH": str(code)},
            stdout=echo,
            limits=sandbox.Limits(limit_s, gpu=self.old.file.platform == "gpu"),
            unsafe=self._unsafe,
        )
        if found:
            what = "the examiner" if module == "speedrun.referee.examiner" else "the source"
            error = SpeedrunError(
                f"{what} of {self.old.file.run_id} ended with {meaning(found)}; see its output above"
            )
            error.exit_code = found if found in EXIT_CODES else SpeedrunError.exit_code
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


def plain(path: Path, most_bytes: int) -> bytes:
    """The content of a small file that a stranger left: no link, no pipe.

    Raises:
        OSError: it is not there.
        ValueError: it is something else.
    """
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > most_bytes:
        raise ValueError(f"{path.name} is no plain file of at most {most_bytes:,} bytes")
    return path.read_bytes()


def _bring(made: Path, out: Path) -> None:
    """Copies what a stranger's process made: the files that a record may hold, and the stacks of one that hung."""
    if made.is_dir() and not made.is_symlink():
        for path, content in read_files(made)[0].items():
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            write_whole(out / path, content)
    with suppress(OSError, ValueError):
        stacks = plain(made.with_name("record.stacks.txt"), _MOST_STACKS_BYTES)
        write_whole(out.with_name(f"{out.name}.stacks.txt"), stacks)


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
    if runfile.sha256(raw) != run.file.source_sha256:
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
