"""One run of a record: its log, line by line, and what follows from it.

Logs are untrusted. A line is accepted only in the canonical form of a known event, which also refuses repeated keys,
NaN and stray spaces; and the events must come in an order that the checks can rely on.
"""

import itertools
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TypeVar

import msgspec

from speedrun.base import runlog
from speedrun.base.errors import NonFiniteError
from speedrun.record.layout import LOG

#: Events that a finished run has exactly once.
_ONCE = (runlog.Preflight, runlog.DataReady, runlog.Plan, runlog.ClockStart, runlog.ClockStop, runlog.RunEnd)
#: The order of what comes before its first step.
_ORDER = (runlog.RunStart, runlog.Preflight, runlog.DataReady, runlog.Exported, runlog.Plan)
_ORDER += (runlog.WarmupStart, runlog.WarmupEnd, runlog.Resume, runlog.ClockStart)
_CLOCK = (runlog.ClockStart, runlog.ClockPause, runlog.ClockResume, runlog.ClockStop)
#: Origin of a run that was not resumed.
_BEGINNING = runlog.Resume(run_id="", step=0, state_hash="", train_time_s=0.0, tokens_seen=0, cursor=(0, 0))

#: The end of float32: above every honest number of a record. Squares of it, and sums of those, are finite.
_LARGEST = 2.0**128
_LONGEST_LINE, _DEEPEST = 2**22, 64  #: in bytes, and in levels of its JSON
_Event = TypeVar("_Event", bound=runlog.Event)


class FormatError(ValueError):
    """A file of a record that does not have the declared form."""


@dataclass(frozen=True)
class Run:
    """One run, by its log."""

    raw_lines: tuple[bytes, ...]
    lines: tuple[runlog.Line, ...]
    folder: str

    @cached_property
    def outcome(self) -> runlog.Outcome:
        """How it ended. A run that was killed broke off where its log ends; an error that it logged counts always."""
        end = self.lines[-1].event
        if isinstance(end, runlog.RunEnd) and end.status != "aborted":
            return end.status
        errors = [error.kind for error in self.of(runlog.Error)]
        return "non-finite" if NonFiniteError.__name__ in errors else "aborted"

    @property
    def finished(self) -> bool:
        """Whether it claims to have finished."""
        return self.outcome == "finished"

    @property
    def created_utc(self) -> str:
        """Time of the first line, as the log has it."""
        return self.lines[0].t_utc

    @cached_property
    def preflight(self) -> runlog.Preflight:
        """Hardware and software; a finished run always has them."""
        return self.of(runlog.Preflight)[0]

    @property
    def hardware(self) -> tuple[int, str]:
        """The number of devices and their kind; none for a run that was killed before it knew."""
        return next(((hw.num_devices, hw.device_kind) for hw in self.of(runlog.Preflight)), (0, ""))

    @property
    def bench_gflops(self) -> tuple[float, float]:
        """The lowest and the highest of the measured rates: before the run, and after it if it was measured then."""
        rates = [hw.matmul_gflops for hw in self.of(runlog.Preflight)]
        rates += [end.matmul_gflops for end in self.of(runlog.RunEnd) if end.matmul_gflops]
        return min(rates), max(rates)

    @property
    def broke_off(self) -> str:
        """Where and why a run that did not finish broke off."""
        where = "before the clock"
        if self.of(runlog.ClockStart):
            where = f"after {self.origin.step + len(self.steps):,} of {self.start.num_steps:,} steps"
        errors = [f"{error.kind}: {error.message}" for error in self.of(runlog.Error)]
        return f"{self.folder} broke off {where}: {errors[-1] if errors else 'its log just ends'}"

    def of(self, kind: type[_Event]) -> list[_Event]:
        """Return all events of one kind, in order."""
        return [line.event for line in self.lines if isinstance(line.event, kind)]

    def line_of(self, kind: type[runlog.Event]) -> runlog.Line:
        """Return the line of the first event of a kind that the grammar demands."""
        return next(line for line in self.lines if isinstance(line.event, kind))

    @cached_property
    def start(self) -> runlog.RunStart:
        """The first event."""
        return self.of(runlog.RunStart)[0]

    @cached_property
    def begun(self) -> datetime:
        """Time of the first line, in UTC."""
        return datetime.fromisoformat(self.lines[0].t_utc)

    @cached_property
    def end(self) -> runlog.RunEnd:
        """The last event of a run that was not killed."""
        return self.of(runlog.RunEnd)[0]

    @property
    def final_hash(self) -> str:
        """Of its last state; empty if it broke off."""
        return next((end.final_hash for end in self.of(runlog.RunEnd)), "")

    @property
    def data(self) -> runlog.DataRead:
        """What it read; a run that was not killed has it."""
        return self.end.data

    @cached_property
    def steps(self) -> list[runlog.Step]:
        """All training steps."""
        return self.of(runlog.Step)

    @cached_property
    def vals(self) -> list[runlog.Val]:
        """All validations; the last one is the result."""
        return self.of(runlog.Val)

    @cached_property
    def origin(self) -> runlog.Resume:
        """Where it started: at step 0, or where the run that it resumes left off."""
        return next(iter(self.of(runlog.Resume)), _BEGINNING)

    @property
    def resumed(self) -> bool:
        """Whether it resumes an earlier run."""
        return self.origin is not _BEGINNING

    @cached_property
    def step_s(self) -> list[float]:
        """Seconds each step took on the ranked clock."""
        times = [self.origin.train_time_s, *(step.train_time_s for step in self.steps)]
        return [after - before for before, after in itertools.pairwise(times)]

    @property
    def train_time_s(self) -> float:
        """Train time when the clock stopped."""
        return self.of(runlog.ClockStop)[0].train_time_s

    @property
    def val_loss(self) -> float:
        """The result: loss of the last validation, from its exact sum."""
        return loss_of(self.vals[-1])


def loss_of(val: runlog.Val) -> float:
    """Return the loss of a validation from its exact sum."""
    return float.fromhex(val.nll_sum) / val.tokens


def check_moment(utc: str) -> None:
    """Raise FormatError unless a text is a time stamp with a time zone."""
    try:
        zone = datetime.fromisoformat(utc).tzinfo
    except ValueError as error:
        raise FormatError(str(error)) from None
    if zone is None:
        raise FormatError(f"{utc!r} has no time zone")


def check_range(holder: object) -> None:
    """Check every number in a file or event, at any depth.

    Raises:
        FormatError: if one is not finite, or its magnitude is above 2^128; or if it is nested too deep.
    """
    level, depth = [msgspec.to_builtins(holder)], 0
    while level:
        if (depth := depth + 1) > _DEEPEST:
            raise FormatError(f"nested in more than {_DEEPEST} levels")
        if any(not -_LARGEST <= one <= _LARGEST for one in level if isinstance(one, int | float)):
            raise FormatError("a number is out of range; at most 2^128 is permitted")
        inside = (one.values() if isinstance(one, dict) else one for one in level)
        level = [part for one in inside if not isinstance(one, str | int | float | None) for part in one]


def read_run(raw: dict[str, bytes], folder: str) -> Run:
    """Read one run, line by line.

    Raises:
        FormatError: if its log is missing or of another format, or a line is not a canonical event.
    """
    path = f"runs/{folder}/{LOG}"
    if path not in raw:
        raise FormatError("missing")
    log = raw[path].split(b"\n")
    if log.pop():
        raise FormatError("the last line is torn")
    lines = []
    for number, raw_line in enumerate(log, 1):
        try:
            lines.append(_read_line(raw_line))
        except FormatError as error:
            raise FormatError(f"line {number}: {error}") from None
    run = Run(tuple(log), tuple(lines), folder)
    if problem := grammar_problem(run):
        raise FormatError(problem)
    return run


def _read_line(raw_line: bytes) -> runlog.Line:
    """Decode one line; raise FormatError unless it is canonical, with valid hex floats and stamps."""
    if len(raw_line) > _LONGEST_LINE:
        raise FormatError(f"{len(raw_line):,} bytes; at most {_LONGEST_LINE:,} are read")
    try:
        line = runlog.decode(raw_line)
        check_moment(line.t_utc)
        check_range(line)
        if isinstance(line.event, runlog.Val):
            check_range(nll := float.fromhex(line.event.nll_sum))
            if nll.hex() != line.event.nll_sum:
                raise FormatError(f"{line.event.nll_sum!r} is another form of {nll.hex()}")
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise FormatError(str(error)) from None
    if line.encode() != raw_line:
        raise FormatError("not in canonical form (a key twice, or other spacing)")
    return line


def grammar_problem(run: Run) -> str | None:
    """Return what is wrong with the order of events, or None. Runs that broke off need only a correct beginning."""
    kinds = [type(line.event) for line in run.lines]
    if not kinds or kinds[0] is not runlog.RunStart or kinds.count(runlog.RunStart) != 1:
        return "the log must begin with its only run_start"
    if run.start.run_id != run.folder:
        return f"it is the log of {run.start.run_id!r}"
    first = run.origin.step
    if [step.step for step in run.steps] != list(range(first, first + len(run.steps))):
        return f"steps must be numbered {first}, {first + 1}, {first + 2}, ... without a gap"
    resumed_late = run.resumed and runlog.ClockStart in kinds[: kinds.index(runlog.Resume)]
    if kinds.count(runlog.Resume) > 1 or resumed_late:
        return "a run resumes at most one other, before its clock starts"
    if not run.finished:
        return None
    for kind in _ONCE:
        if (count := kinds.count(kind)) != 1:
            return f"a finished run has one {kind.__struct_config__.tag} event, this log has {count}"
    clock = [kind for kind in kinds if kind in _CLOCK]
    num_pauses = kinds.count(runlog.ClockPause)
    if clock != [runlog.ClockStart, *(runlog.ClockPause, runlog.ClockResume) * num_pauses, runlog.ClockStop]:
        return "the clock must start, pause and resume in turn, and stop"
    if kinds[-1] is not runlog.RunEnd:
        return "the log of a finished run must end with run_end"
    ordered = [kind for kind in kinds if kind in _ORDER]
    for before, after in itertools.pairwise(ordered):
        if _ORDER.index(before) > _ORDER.index(after):
            return f"{after.__struct_config__.tag} must come before {before.__struct_config__.tag}"
    if not run.vals or run.start.num_steps != first + len(run.steps) or not (run.steps or run.resumed):
        want = f"{run.start.num_steps - first} steps and a validation"
        return f"want {want}, got {len(run.steps)} and {len(run.vals)}"
    return None
