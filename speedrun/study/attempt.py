"""All stages from a machine to a record that can be submitted.

Each stage is a command of its own, run as a child process. `state.json` marks the stages that are done, each with a
digest of all that it depends on. An attempt that is started again continues with the first stage whose digest changed.
"""

import hashlib
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from speedrun.data import inventory
from speedrun.ground import children, clock, devices, provenance
from speedrun.ground import track as tracks
from speedrun.ground.errors import SpeedrunError, UsageError
from speedrun.ground.exit_codes import meaning
from speedrun.ground.wholefile import read_regular, write_whole
from speedrun.ledger import runfile
from speedrun.ledger.batch import Standing, standing
from speedrun.ledger.record import load

STAGES = ("doctor", "data", "batch", "stats", "validate", "submit")
_KILL_AFTER_S = 3 * children.KILL_AFTER_S  #: a stage may have to kill a child of its own first


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of the batch; with others it is another batch."""

    runs: int
    recipe: str | None
    settings: tuple[str, ...]
    data: str | None
    title: str | None

    @property
    def science(self) -> list[str]:
        """Options that say what is trained."""
        recipe = [] if self.recipe is None else ["--recipe", self.recipe]
        return [*recipe, *(word for setting in self.settings for word in ("--set", setting))]

    @property
    def surroundings(self) -> list[str]:
        """Options that `batch --resume` takes, too."""
        data = [] if self.data is None else ["--data", self.data]
        return [*data, *([] if self.title is None else ["--title", self.title])]

    @property
    def words(self) -> str:
        """All options, as they were typed."""
        return shlex.join(["--runs", str(self.runs), *self.science, *self.surroundings])


class State(msgspec.Struct, forbid_unknown_fields=True):
    """`state.json`."""

    asked: Settings
    record: str = ""  #: folder of the batch; empty before it is declared
    done: dict[str, str] = {}  #: digests by stage


@dataclass
class Attempt:
    """An attempt on a track.

    Raises:
        UsageError: if the state cannot be read, or is of a batch with other settings.
    """

    rules: tracks.Track
    settings: Settings
    path: Path  #: of the state
    new_record: Path  #: folder for the batch, if none is declared
    gpus: Sequence[str]  #: names of the GPUs here
    dollars: float  #: price of a GPU and hour
    again: str | None  #: a stage to repeat
    say: Callable[[str], None]  #: called with lines of progress
    to_stderr: bool  #: where the stages print

    def __post_init__(self) -> None:
        self._state = _read(self.path, self.settings)
        if self.again == "batch":
            self._state = State(self.settings, done=self._state.done)
        elif self.settings != self._state.asked:
            raise UsageError(
                f"{self.record or self.path} was started with {self._state.asked.words}; pass the same to continue, or "
                "--again batch to start a new one"
            )
        if self.again:
            self._state.done.pop(self.again, None)

    @property
    def record(self) -> str:
        """Folder of the batch; empty before it is declared."""
        return self._state.record

    @property
    def left(self) -> list[str]:
        """The stages to run."""
        return [stage for stage in STAGES if not self._is_done(stage)]

    def _is_done(self, stage: str) -> bool:
        return self._state.done.get(stage) == self._digest(stage)

    def plan(self) -> int:
        """Report what is left and what it costs; return the exit code of `speedrun plan`."""
        self.say(f"attempt {self.rules.id}: {', '.join(self.left) or 'all is done'}")
        if not (missing := self._missing_runs()):
            return 0
        argv = ["speedrun", "plan", "--track", self.rules.name, "--runs", str(missing)]
        return self._run(
            [*argv, "--dollars", str(self.dollars), *self.settings.science, *self._device_kind()]
        )

    def run(self) -> int:
        """Run the stages that are left, up to the first that fails.

        Returns:
            The exit code of the stage that failed; else 0 if the batch proves its target, and 1 if not.
        """
        self._write()  # a stage that is to be repeated is repeated, even if an earlier one fails now
        for stage in STAGES:
            if self._is_done(stage):
                continue
            argv = self._command(stage)
            self.say(f"== {clock.now().utc[:19]}Z {stage}: {shlex.join(argv)}")
            code = self._run(argv)
            # A batch that proves nothing is still complete. `stats` reports it, `submit` knows whether it matters.
            may_be_unproven = stage in ("batch", "stats") and code == SpeedrunError.exit_code
            is_incomplete = stage == "batch" and self._missing_runs() > 0
            if is_incomplete or (code and not may_be_unproven):
                code = code or SpeedrunError.exit_code
                without = f" without --again {self.again}" if self.again else ""
                sys.stderr.write(
                    f"attempt: {stage} ended with {meaning(code)}; to continue, run the same command{without}\n"
                )
                return code
            self._state.done[stage] = self._digest(stage)
            self._write()
        now = self._standing()
        proven = now is not None and now.passed
        verdict = "which proves its target" if proven else "which does not prove its target"
        self.say(f"attempt {self.rules.id}: all is done; the record is {self.record}, {verdict}")
        return 0 if proven else SpeedrunError.exit_code

    def _run(self, argv: list[str]) -> int:
        """Run one of our commands; return its exit code."""
        argv = [sys.executable, "-m", *argv]
        return children.shell_code(children.run(argv, to_stderr=self.to_stderr, kill_after_s=_KILL_AFTER_S))

    def _command(self, stage: str) -> list[str]:
        """Return the command of a stage."""
        asked, on_track = self.settings, ["--track", self.rules.name]
        match stage:
            case "doctor":
                return ["speedrun", "doctor", *on_track, "--dollars", str(self.dollars)]
            case "data" if asked.data is not None:
                return ["speedrun", "data", "verify", *on_track, "--data", asked.data]
            case "data":
                return shlex.split(self.rules.data.get)
            case "batch" if self.record and (Path(self.record) / runfile.BATCH).exists():
                return ["speedrun", "batch", "--resume", self.record, *asked.surroundings]
            case "batch":
                self._state.record = str(self.new_record)
                self._write()  # before the batch is declared, so that the next attempt finds it
                chosen = [
                    "--runs",
                    str(asked.runs),
                    "--out",
                    self.record,
                    *asked.science,
                    *asked.surroundings,
                ]
                return ["speedrun", "batch", *on_track, *chosen]
        return ["speedrun", stage, self.record]

    def _missing_runs(self) -> int:
        """Return how many runs the batch lacks."""
        now = self._standing()
        return self.settings.runs if now is None else len(now.missing)

    def _standing(self) -> Standing | None:
        """Return the standing of the batch; None before it is declared."""
        folder, target = Path(self.record), self.rules.target
        if not self.record or not (folder / runfile.BATCH).exists():
            return None
        found = load(folder)
        if found.declaration is None:
            raise UsageError(
                f"{folder / runfile.BATCH} cannot be read; restore it, or pass --again batch to start a new one"
            )
        return standing(found.declaration, found.runs, target.loss, target.sigma)

    def _digest(self, stage: str) -> str:
        """Return a digest of all that a stage depends on or has made."""
        record, rules_sha256 = Path(self.record), tracks.sha256(self.rules.name)
        match stage:
            case "doctor":
                facts: Any = (rules_sha256, provenance.installed(), platform.node(), self.gpus)
            case "data":
                data = self.settings.data
                facts = (
                    rules_sha256,
                    _files(inventory.data_folder(self.rules, Path(data) if data else None)),
                )
            case "batch":  # not of the manifest, which `describe` edits
                facts = (self.record, _sha256(record / runfile.BATCH), _sha256(record / "summary.json"))
            case _:
                facts = (stage, self.record, _sha256(record / "manifest.json"))
        return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()

    def _device_kind(self) -> list[str]:
        """Return the option that names the GPUs here to `plan`; none if the table of devices lacks them."""
        return next((["--device-kind", kind] for kind in map(devices.kind_of, self.gpus) if kind), [])

    def _write(self) -> None:
        write_whole(self.path, msgspec.json.format(msgspec.json.encode(self._state), indent=2), b"\n")


def _read(path: Path, settings: Settings) -> State:
    try:
        return msgspec.json.decode(read_regular(path), type=State)
    except FileNotFoundError:
        return State(settings)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: {error}; delete it to start a new record; the old one is kept") from None


def _files(folder: Path) -> list[tuple[str, str, int, int]]:
    paths = sorted(folder.glob("*.bin"))
    return [(str(folder.absolute()), path.name, (s := path.stat()).st_size, s.st_mtime_ns) for path in paths]


def _sha256(path: Path) -> str:
    try:
        return runfile.sha256(path.read_bytes())
    except OSError:
        return ""
