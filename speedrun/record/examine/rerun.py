"""Runs what a record carries in sandboxed processes: its source, to train or lower again, or our examiner.

Only `speedrun reproduce` and `validate --relower` run the source.
"""

import os
import stat
import sys
import tempfile
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TextIO

import msgspec
from msgspec.structs import replace

from speedrun.base import provenance, runlog
from speedrun.base import track as tracks
from speedrun.base.atomic_files import write_whole
from speedrun.base.clock import Clock
from speedrun.base.console import clean
from speedrun.base.errors import DataError, SpeedrunError, UsageError
from speedrun.base.exit_codes import EXIT_CODES, meaning
from speedrun.data import generated, shards, vocabulary
from speedrun.record import archive
from speedrun.record.examination import Examination, Findings
from speedrun.record.examine import sandbox
from speedrun.record.layout import Strict
from speedrun.record.logged_run import rounds_of
from speedrun.record.reader import load, read_files
from speedrun.train.resume_settings import asked
from speedrun.train.run_config import RunConfig

_PACKAGE = Path(__file__).parent.parent.parent

#: What any process needs. No compilation cache: untrusted code could leave programs there for us to run.
_ENVIRONMENT = ("PATH", "LANG", "LD_LIBRARY_PATH", provenance.IMAGE_VARIABLE)

_EXAMINER = ("-m", "speedrun.record.examine.examiner")

#: Bounds of the time limit of a run, and its factor on the run's own time.
_LEAST_S, _MOST_S, _SLOWER = 3600.0, 86400.0, 10.0
_MOST_FACTS_BYTES = 1 << 26
#: Between an event and the line that is heard, in all; a busy machine takes a tenth of a second.
_SLACK_S, _SLACK_SHARE = 0.5, 0.01

#: Names of modules in harnesses until 2026-11-29.
_OLD_NAMES = ("train.memory", "train.footprint"), ("train.run_config", "train.request")
#: Lowers the programs of a source with functions of its harness, which V503 knows.
_LOWER = """
import sys
from pathlib import Path
import msgspec
import numpy as np
from speedrun.record.archive import pack
from speedrun.train.export_programs import exported
from speedrun.train.memory import flops_per_token
from speedrun.train.preflight import prepare
from speedrun.train.run_config import RunConfig, decoded
request = Path(sys.argv[1])
ready = prepare(decoded(request.read_bytes(), RunConfig))
table = ready.program.layout.table
plan = {
    "shapes": {name: spec.shape for name, spec in table.items()},
    "flops_per_token": flops_per_token(table),
    "total_tokens": ready.recipe.total_tokens,
    "tokens_per_step": max(stage.batch_tokens for stage in ready.recipe.stages),
    "compiler_options": ready.program.compiler_options,
}
inputs = [
    {name: np.asarray(x).item() for name, x in row.items() if np.ndim(x) == 0 and not isinstance(x, str)}
    for row in ready.program.step.plan.rows
]
facts = {"config": ready.described, "plan": plan, "inputs": inputs}
request.with_name("facts.json").write_bytes(msgspec.json.encode(facts))
request.with_name("programs.xz").write_bytes(pack(exported(ready)))
"""


class RerunFacts(Strict, frozen=True):
    """What a source states about the run that it lowers, in the form of the log."""

    config: dict[str, Any]
    plan: dict[str, Any]  #: fields of `runlog.Plan`
    inputs: tuple[dict[str, Any], ...]  #: of each step


class Rerun:
    """A run of a record that can be run again."""

    def __init__(
        self,
        folder: Path,
        data: Path | None,
        echo: TextIO,
        *,
        run_id: str | None = None,
        unsafe: bool = False,
    ) -> None:
        """Read and check the record, without executing anything.

        Args:
            folder: the record.
            data: folder of shards; None: the track's own.
            echo: gets the progress and the output of the processes.
            run_id: the run; None: the first finished one.
            unsafe: run without a sandbox if there is none.
        """
        record = load(folder)
        self.old = next((run for run in record.runs if run.folder == run_id), record.reference_run)
        self.rounds = tuple(rounds_of(record.runs))
        self._echo, self._given, self._unsafe = echo, data, unsafe
        self._source = record.source_files
        if not self._source or record.source_sha256 != self.old.start.source_sha256:
            raise UsageError(
                f"{folder}/source.txt is not the source of {self.old.folder}; nothing was executed; "
                f"'speedrun validate {folder}' says what is wrong"
            )
        self._environment = dict(self.old.preflight.environment)
        if self._on_gpu:
            for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):  # they name GPUs of another machine
                self._environment.pop(name, None)
        # Other variables could load code.
        if foreign := sorted(self._environment.keys() - set(provenance.VARIABLES)):
            raise UsageError(
                f"{folder}: the environment of {self.old.folder} holds {clean(', '.join(foreign))}; "
                f"only {', '.join(provenance.VARIABLES)} are permitted; nothing was executed"
            )

    @property
    def _on_gpu(self) -> bool:
        return self.old.preflight.platform == "gpu"

    @property
    def rules(self) -> tracks.Track:
        """The track of the run."""
        return tracks.version(self.old.start.track)

    @property
    def data(self) -> Path:
        """The folder of shards."""
        return shards.data_folder(self.rules, self._given).absolute()

    @property
    def _limit_s(self) -> float:
        first, *_, last = self.old.lines
        return min(_MOST_S, max(_LEAST_S, _SLOWER * (last.t_mono_ns - first.t_mono_ns) / 1e9))

    def check_data(self) -> None:
        """Generate missing shards if possible, and check the digests of all that the run read.

        Otherwise, a referee's damaged shard would be held against the record.
        """
        generated.ensure(self.rules, self._given, lambda text: print(text, file=self._echo))
        folder, read = self.data, self.old.data
        for name, wanted in {shard.name: shard.sha256 for shard in (*read.shards, read.val_shard)}.items():
            path = folder / Path(name).name
            try:
                found = shards.sha256(path)
            except OSError as error:
                found = str(error.strerror)
            if found != wanted:
                raise DataError(
                    f"{path}: {found[:40]}; the run read one with sha256 {wanted[:16]}; nothing was executed; "
                    f"{self.rules.data.get}"
                )

    def run(self, out: Path, *, seed: int) -> None:
        """Train with the source, and copy its record into a new folder; raise SpeedrunError if it fails."""
        if self.old.of(runlog.Islands):
            got = f"{self.old.folder} is of several meshes, which cannot run again here"
            raise UsageError(f"{got}; to repeat what each did, type: speedrun validate --replay RECORD")
        with tempfile.TemporaryDirectory(prefix="speedrun-run-") as scratch:
            made, code = Path(scratch, "record"), self._unpacked(Path(scratch))
            config = self._config(made, seed, self.data)
            heard = HeardClock()
            try:
                is_old = "speedrun/train/recorded.py" not in self._source
                module = f"speedrun.train.{'run' if is_old else 'recorded'}"
                self._start(("-m", module), config, Path(scratch), code, [self.data], self._limit_s, heard)
            finally:
                heard.require(made)  # before anything is left that a next call would take for a result
                _bring(made, out)

    def lowered(self) -> tuple[bytes, RerunFacts]:
        """Lower the programs of the source; return their archive, and what the source states.

        It sees only headers and sizes of validation shards.
        """
        with tempfile.TemporaryDirectory(prefix="speedrun-source-") as name:
            scratch = Path(name)
            code, seen = self._unpacked(scratch), scratch / "data"
            readable = _without_text(self.data, seen, self.rules.data)
            config = self._config(scratch / "record", self.old.start.seed, seen)
            self._start(("-c", lowering(self._source)), config, scratch, code, readable, _LEAST_S)
            try:
                facts = msgspec.json.decode(plain(scratch / "facts.json", _MOST_FACTS_BYTES), type=RerunFacts)
                return plain(scratch / "programs.xz", archive.MOST_BYTES), facts
            except (OSError, ValueError, RecursionError) as error:
                raise SpeedrunError(f"the source of {self.old.folder} left no programs: {error}") from None

    def _unpacked(self, scratch: Path) -> Path:
        code = scratch / "source"
        for path, text in self._source.items():
            file = code / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return code

    def examine(self, request: Examination) -> Findings:
        """Run our examiner on the programs of the record, without any of its source."""
        readable = [_PACKAGE, request.data, *([request.checkpoints] if request.checkpoints else [])]
        self._start(_EXAMINER, request, request.findings.parent, _PACKAGE.parent, readable, self._limit_s)
        return msgspec.json.decode(request.findings.read_bytes(), type=Findings)

    def _start(
        self,
        words: tuple[str, str],
        request: object,
        scratch: Path,
        code: Path,
        readable: Iterable[Path],
        limit_s: float,
        hear: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """Run Python in the sandbox; its only argument is the path of a file with the request."""
        path = scratch / "request.json"
        path.write_bytes(msgspec.json.encode(request, enc_hook=str))
        # Untrusted code gets the variables of its run, and none of ours, which may hold a secret.
        keep = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        found = sandbox.run(
            [sys.executable, *words, str(path)],
            scratch,
            readable=readable,
            environment={**keep, **self._environment, "PYTHONPATH": str(code)},
            stdout=self._echo,
            hear=hear,
            wall_s=limit_s,
            gpu=self._on_gpu,
            unsafe=self._unsafe,
        )
        if found:
            what = "the examiner" if words == _EXAMINER else "the source"
            ended = f"{what} of {self.old.folder} ended with {meaning(found)}"
            raise SpeedrunError(f"{ended}; see its output above", found if found in EXIT_CODES else 0)

    def _config(self, out: Path, seed: int, data: Path) -> RunConfig:
        return replace(asked(self.old, out.absolute(), data.absolute()), seed=seed)


class HeardClock:
    """The train time of a run in the sandbox by a clock outside: it hears the lines that the run prints of its log."""

    def __init__(self) -> None:
        self._clock = Clock()

    def __call__(self, line: bytes) -> None:
        """Start, pause or stop at an event of the clock. A clock that is told to do what it does already goes on."""
        with suppress(msgspec.DecodeError, RuntimeError):
            match runlog.decode(line).event:
                case runlog.ClockStart() | runlog.ClockResume():
                    self._clock.start(lambda: None)
                case runlog.ClockPause() | runlog.ClockStop():
                    self._clock.stop(lambda: None)
                case _:
                    pass

    def require(self, record: Path) -> None:
        """Raise SpeedrunError if a finished run of a record states another train time."""
        heard_s = self._clock.seconds
        for run in load(record).finished if record.is_dir() else ():
            if abs(run.train_time_s - heard_s) > _SLACK_S + _SLACK_SHARE * heard_s:
                told = f"the run states {run.train_time_s:.3f} s of training, the clock outside of it {heard_s:.3f} s"
                raise SpeedrunError(f"{told}; nothing was judged; look in its source for what reads time")


def _without_text(data: Path, seen: Path, rules: tracks.Data) -> list[Path]:
    """Make a folder with links to the files that lowering needs, and validation shards of zeros; return these files.

    Other files are left out, because they may hold the text.
    """
    seen.mkdir()
    files = [path for path in data.iterdir() if path.is_file()]
    blank = [path for path in files if fnmatch(path.name, rules.val)]
    needed = (rules.train, shards.MANIFEST, vocabulary.RANKS, vocabulary.TOKENIZER)
    others = [path for path in files if path not in blank and any(fnmatch(path.name, one) for one in needed)]
    for path in blank:
        with path.open("rb") as shard, (seen / path.name).open("wb") as made:
            made.write(shard.read(shards.HEADER_BYTES))
            made.truncate(path.stat().st_size)
    for path in others:
        (seen / path.name).symlink_to(path.resolve())
    return [path.resolve() for path in others]


def plain(path: Path, max_bytes: int) -> bytes:
    """Read a small file that untrusted code left, but no link or pipe; raise OSError or ValueError."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > max_bytes:
        raise ValueError(f"{path.name} is no plain file of at most {max_bytes:,} bytes")
    return path.read_bytes()


def lowering(source: Container[str]) -> str:
    """Return what lowers the programs of a source, which has these files."""
    text = _LOWER
    for new, old in _OLD_NAMES if "speedrun/train/request.py" in source else ():
        text = text.replace(new, old)
    return text


def _bring(made: Path, out: Path) -> None:
    """Copy the files that a record may hold."""
    if made.is_dir() and not made.is_symlink():
        for path, content in read_files(made)[0].items():
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            write_whole(out / path, content)
