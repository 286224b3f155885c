"""`speedrun attempt`: all that lies between a machine and a record that can be sent, stage by stage.

Each stage is a command that can be typed as well, in a process of its own. What is done is marked in
`runs/<track>.attempt/state.json`, with a digest of all that it depends on: started again, an attempt goes on with the
first stage whose digest has become another one.
"""

import hashlib
import platform
import shlex
import sys
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from subprocess import Popen
from typing import Any, NoReturn

import click
import msgspec

from speedrun.cli.child import as_shell
from speedrun.cli.options import (
    Integer,
    data_option,
    example,
    json_option,
    parse_settings,
    price_option,
    recipe_option,
    settings_option,
    track_option,
)
from speedrun.cli.run import new_folder
from speedrun.data import inventory
from speedrun.doctor import nvidia
from speedrun.ground import children, clock, devices, provenance, signals
from speedrun.ground import track as tracks
from speedrun.ground.errors import SpeedrunError, UsageError, meaning
from speedrun.ground.lock import alone_in
from speedrun.ground.wholefile import write_whole
from speedrun.ledger import runfile
from speedrun.ledger.batch import Standing, standing
from speedrun.ledger.record import load

STAGES = ("doctor", "data", "batch", "stats", "validate", "submit")


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the batch is: with other arguments it is another batch."""

    runs: int
    recipe: str | None
    settings: tuple[str, ...]
    data: str | None
    title: str | None

    @property
    def science(self) -> list[str]:
        """What is trained, as options."""
        recipe = [] if self.recipe is None else ["--recipe", self.recipe]
        return [*recipe, *(word for setting in self.settings for word in ("--set", setting))]

    @property
    def surroundings(self) -> list[str]:
        """Options that a batch takes also when it goes on."""
        data = [] if self.data is None else ["--data", self.data]
        return [*data, *([] if self.title is None else ["--title", self.title])]

    @property
    def words(self) -> str:
        """All of it, as it was typed."""
        return shlex.join(["--runs", str(self.runs), *self.science, *self.surroundings])


class State(msgspec.Struct, forbid_unknown_fields=True):
    """`state.json`."""

    asked: Asked
    record: str = ""  #: the folder of the batch; empty before it is begun
    done: dict[str, str] = {}  #: a stage that is done, and the digest of what it depends on


@click.command(
    epilog=example(
        "speedrun attempt --track main-8xh100 --dry-run",
        "speedrun attempt --track main-8xh100 --runs 4 --dollars 2.50",
        "speedrun attempt --track smoke-cpu --runs 6 --again batch",
    )
)
@track_option()
@click.option("--runs", type=Integer(2), metavar="N", help="Of the batch. Default: as many as a rank takes.")
@recipe_option
@settings_option
@data_option
@click.option("--title", help="What the record is, in a few words.")
@price_option
@click.option(
    "--again", type=click.Choice(STAGES), help="Do this stage anew; a batch goes into a new record."
)
@click.option("--dry-run", is_flag=True, help="Say what it takes and what is left to do, and stop.")
@json_option
def command(
    *,
    track: str,
    runs: int | None,
    recipe: str | None,
    settings: tuple[str, ...],
    data: Path | None,
    title: str | None,
    dollars: float,
    again: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Go all the way from this machine to a record ready to be sent: doctor, data, batch, stats, validate, submit.

    Stopped at any point, the same command goes on there. Exits with 0 if the batch proves its target and the record
    is packed, with 1 if it proves nothing, else as the stage that failed.
    """
    rules = tracks.load(track)
    parse_settings(settings)
    if data is None and not rules.data.is_ours_to_get:
        raise UsageError(f"track {track} takes anybody's shards; {rules.data.get}")
    asked = Asked(
        runs=runs or max(2, rules.rules.min_runs),
        recipe=recipe,
        settings=settings,
        data=None if data is None else str(data),
        title=title,
    )
    folder = Path("runs") / f"{track}.attempt"
    turn = nullcontext() if dry_run else alone_in(folder, refuse=UsageError)  # a dry run writes nothing
    with turn, signals.handled_by(signals.stop):
        attempt = Attempt(rules, asked, folder / "state.json", dollars, again, as_json=as_json)
        attempt.tell()
        attempt.end(0 if dry_run else attempt.run())


class Attempt:
    """One attempt on its way."""

    def __init__(
        self,
        rules: tracks.Track,
        asked: Asked,
        path: Path,
        dollars: float,
        again: str | None,
        *,
        as_json: bool,
    ) -> None:
        self._rules, self._path, self._dollars, self._as_json = rules, path, dollars, as_json
        self._state = _read(path, asked)
        if again == "batch":
            self._state = State(asked, done=self._state.done)
        elif asked != self._state.asked:
            raise UsageError(
                f"{self._state.record or path} was begun with {self._state.asked.words}; give the same to go on, or "
                "--again batch to begin anew"
            )
        if again:
            self._state.done.pop(again, None)
        self._how = f"the same command without --again {again}" if again else "the same command"

    def tell(self) -> None:
        """What is left to do, and what it takes."""
        self._say(f"attempt {self._rules.id}: {', '.join(self._left()) or 'all is done'}")
        if missing := self._missing():
            argv = ["speedrun", "plan", "--track", self._rules.name, "--runs", str(missing)]
            argv += ["--dollars", str(self._dollars), *self._state.asked.science, *_kind(self._gpus)]
            if code := self._end_of(argv):
                self.end(code)

    def run(self) -> int:
        """All stages that are not done; ends the process with the first one that fails.

        Returns:
            0 if the batch proves its target, else 1: it is kept, and packed where the track does not rank.
        """
        self._write()  # what is to come again comes again, also if an earlier stage fails
        for stage in filter(lambda stage: not self._is_done(stage), STAGES):
            argv = self._command(stage)
            self._say(f"== {clock.now().utc[:19]}Z {stage}: {shlex.join(argv)}")
            code = self._end_of(argv)
            # A batch that proves nothing is complete all the same; `stats` says why, `submit` knows whether it matters.
            unproven = stage in ("batch", "stats") and code == SpeedrunError.exit_code and not self._missing()
            if code and not unproven:
                told = f"attempt: {stage} ended with {meaning(code)}; {self._how} goes on there"
                click.echo(told, err=True)
                self.end(code)
            self._state.done[stage] = self._digest(stage)
            self._write()
        far = self._far()
        proven = far is not None and far.passed
        verdict = "which proves its target" if proven else "which does not prove its target"
        self._say(f"attempt {self._rules.id}: all is done; the record is {self._state.record}, {verdict}")
        return 0 if proven else SpeedrunError.exit_code

    def end(self, code: int) -> NoReturn:
        """Ends the process; as JSON, with what is left."""
        if self._as_json:
            facts = {"track": self._rules.id, "record": self._state.record or None, "exit_code": code}
            click.echo(msgspec.json.encode({**facts, "left": self._left()}))
        sys.exit(code)

    def _say(self, line: str) -> None:
        click.echo(line, err=self._as_json)

    def _left(self) -> list[str]:
        return [stage for stage in STAGES if not self._is_done(stage)]

    def _end_of(self, argv: list[str]) -> int:
        """The exit code of one of our commands; signals go on to it."""
        stdout = sys.stderr if self._as_json else None
        child = Popen([sys.executable, "-m", *argv], stdout=stdout, process_group=0)
        code = children.wait_for(child)
        return as_shell(code) if code else 0

    def _command(self, stage: str) -> list[str]:
        """What to type for it."""
        on_track = ["--track", self._rules.name]
        match stage:
            case "doctor":
                return ["speedrun", "doctor", *on_track, "--dollars", str(self._dollars)]
            case "data":
                return self._data_command(on_track)
            case "batch":
                return self._batch_command(on_track)
        return ["speedrun", stage, self._state.record]

    def _data_command(self, on_track: list[str]) -> list[str]:
        if self._state.asked.data is not None:
            return ["speedrun", "data", "verify", *on_track, "--data", self._state.asked.data]
        return shlex.split(self._rules.data.get)

    def _batch_command(self, on_track: list[str]) -> list[str]:
        """Begins the batch, or goes on with it."""
        asked, state = self._state.asked, self._state
        if state.record and (Path(state.record) / runfile.BATCH).exists():
            return ["speedrun", "batch", "--resume", state.record, *asked.surroundings]
        state.record = str(new_folder(self._rules.name))
        self._write()  # before the batch is there, so that whoever comes next goes on with it
        chosen = ["--runs", str(asked.runs), *asked.science, *asked.surroundings, "--out", state.record]
        return ["speedrun", "batch", *on_track, *chosen]

    def _missing(self) -> int:
        """Runs that the batch still lacks."""
        far = self._far()
        return self._state.asked.runs if far is None else len(far.missing)

    def _far(self) -> Standing | None:
        """How far the batch has come; None before it is declared."""
        folder, target = Path(self._state.record), self._rules.target
        if not self._state.record or not (folder / runfile.BATCH).exists():
            return None
        found = load(folder)
        if found.declaration is None:
            raise UsageError(
                f"{folder / runfile.BATCH} cannot be read; restore it, or begin anew with --again batch"
            )
        return standing(found.declaration, found.runs, target.loss, target.sigma)

    def _is_done(self, stage: str) -> bool:
        return self._state.done.get(stage) == self._digest(stage)

    def _digest(self, stage: str) -> str:
        """Of all that a stage depends on or has made."""
        state = self._state
        match stage:
            case "doctor":
                facts: Any = (self._track_sha256, provenance.installed(), platform.node(), self._gpus)
            case "data":
                explicit = None if state.asked.data is None else Path(state.asked.data)
                facts = (self._track_sha256, _listing(inventory.data_folder(self._rules, explicit)))
            case "batch":  # not of the manifest, which holds what people say of the record, too
                record = Path(state.record)
                facts = (state.record, _content(record / runfile.BATCH), _content(record / "summary.json"))
            case _:
                facts = (stage, state.record, _content(Path(state.record) / "manifest.json"))
        return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()

    @cached_property  # a driver that hangs is waited for once
    def _gpus(self) -> list[str]:
        """Their names."""
        try:
            return [gpu.name for gpu in nvidia.gpus()]
        except nvidia.NoAnswerError:
            return []  # the doctor tells of it

    @property
    def _track_sha256(self) -> str:
        return tracks.sha256(self._rules.name)

    def _write(self) -> None:
        write_whole(self._path, msgspec.json.format(msgspec.json.encode(self._state), indent=2), b"\n")


def _read(path: Path, asked: Asked) -> State:
    try:
        return msgspec.json.decode(path.read_bytes(), type=State)
    except FileNotFoundError:
        return State(asked)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path}: {error}; delete it to begin anew, in a new record; the one that is there stays"
        ) from None


def _kind(gpus: list[str]) -> list[str]:
    """Return the option for the first known GPU; without one, `plan` names its default."""
    return next((["--device-kind", kind] for kind in map(devices.kind_of, gpus) if kind), [])


def _listing(folder: Path) -> list[tuple[str, str, int, int]]:
    paths = sorted(folder.glob("*.bin"))
    return [(str(folder.absolute()), path.name, (s := path.stat()).st_size, s.st_mtime_ns) for path in paths]


def _content(path: Path) -> str:
    try:
        return runfile.sha256(path.read_bytes())
    except OSError:
        return ""
