"""One run of a record: the lines of its log, and facts that follow from them.

Logs are untrusted. A line must be the canonical form of a known event, which excludes repeated keys, NaN and stray
spaces, and the events must come in an order on which the checks can rely.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from statistics import stdev
from typing import TypeVar

import msgspec

from speedrun.base import runlog
from speedrun.base.errors import NonFiniteError
from speedrun.record.layout import LOG

#: Events that a finished run has exactly once.
_ONCE = (runlog.Preflight, runlog.DataReady, runlog.Plan, runlog.ClockStart, runlog.ClockStop, runlog.RunEnd)
#: Their order before its first step.
_ORDER = (runlog.RunStart, runlog.Preflight, runlog.DataReady, runlog.Exported, runlog.Plan)
_ORDER += (runlog.WarmupStart, runlog.WarmupEnd, runlog.Resume, runlog.ClockStart)
_CLOCK = (runlog.ClockStart, runlog.ClockPause, runlog.ClockResume, runlog.ClockStop)
#: Origin of a run that was not resumed.
_BEGINNING = runlog.Resume(run_id="", step=0, state_hash="", train_time_s=0.0, tokens_seen=0, cursor=(0, 0))

_LARGEST = 2.0**128  #: the end of float32, so sums of squares are finite
_LONGEST_LINE, _DEEPEST = 2**22, 64  #: bytes of a line, and levels of its JSON
_Event = TypeVar("_Event", bound=msgspec.Struct)


class FormatError(ValueError):
    """A file of a record does not have the declared form."""


@dataclass(frozen=True)
class Run:
    """One run, by its log."""

    raw_lines: tuple[bytes, ...]
    lines: tuple[runlog.Line, ...]
    folder: str

    @cached_property
    def outcome(self) -> runlog.Outcome:
        """How the run ended; a logged non-finite loss counts even if the run was killed afterwards."""
        end = self.lines[-1].event
        if isinstance(end, runlog.RunEnd) and end.status != "aborted":
            return end.status
        errors = [error.kind for error in self.of(runlog.Error)]
        return "non-finite" if NonFiniteError.__name__ in errors else "aborted"

    @property
    def finished(self) -> bool:
        """Whether the run claims to have finished."""
        return self.outcome == "finished"

    @cached_property
    def chain_break(self) -> int | None:
        """Index of the first line that does not follow the line before it, as after an edit."""
        links = zip([runlog.GENESIS, *map(runlog.digest, self.raw_lines)], self.lines, strict=False)
        found = (at for at, (prev, line) in enumerate(links) if (line.i, line.prev) != (at, prev))
        return next(found, None)

    @cached_property
    def preflight(self) -> runlog.Preflight:
        """Hardware and software; a finished run always has them."""
        return self.of(runlog.Preflight)[0]

    @property
    def hardware(self) -> tuple[int, str]:
        """Number and kind of the devices; zero and "" for a run that was killed before its preflight."""
        return next(((hw.num_devices, hw.device_kind) for hw in self.of(runlog.Preflight)), (0, ""))

    @property
    def bench_gflops(self) -> tuple[float, float]:
        """The lower and the higher of the rates measured before and after the run."""
        rates = [hw.matmul_gflops for hw in self.of(runlog.Preflight)]
        rates += [end.matmul_gflops for end in self.of(runlog.RunEnd) if end.matmul_gflops]
        return min(rates), max(rates)

    @property
    def crashed(self) -> str:
        """Where and why a run that did not finish crashed."""
        where = "before the clock"
        if self.of(runlog.ClockStart):
            where = f"after {self.origin.step + len(self.steps):,} of {self.start.num_steps:,} steps"
        errors = [f"{error.kind}: {error.message}" for error in self.of(runlog.Error)]
        by = "was ended by its budget" if errors and errors[-1].startswith("Budget: ") else "crashed"
        return f"{self.folder} {by} {where}: {errors[-1] if errors else 'its log just ends'}"

    def of(self, kind: type[_Event]) -> list[_Event]:
        """Return all events of a kind, in order."""
        return [line.event for line in self.lines if isinstance(line.event, kind)]

    def line_of(self, kind: type[runlog.Event]) -> runlog.Line:
        """Return the line of the first event of a kind; there must be one."""
        return next(line for line in self.lines if isinstance(line.event, kind))

    @cached_property
    def start(self) -> runlog.RunStart:
        """The first event."""
        return self.of(runlog.RunStart)[0]

    @cached_property
    def begun(self) -> datetime:
        """Time of the first line."""
        return datetime.fromisoformat(self.lines[0].t_utc)

    def began_after(self, other: "Run") -> bool:
        """Whether it began later by the wall clock or, in case somebody set that back, by the clock since boot."""
        return self.begun > other.begun or self.lines[0].t_mono_ns > other.lines[0].t_mono_ns

    @cached_property
    def end(self) -> runlog.RunEnd:
        """The last event of a run that was not killed."""
        return self.of(runlog.RunEnd)[0]

    @property
    def final_hash(self) -> str:
        """Hash of the last state; empty if the run crashed."""
        return next((end.final_hash for end in self.of(runlog.RunEnd)), "")

    @property
    def data(self) -> runlog.DataRead:
        """The data that a run read, if it was not killed."""
        return self.end.data

    @cached_property
    def steps(self) -> list[runlog.Step]:
        """All training steps."""
        return self.of(runlog.Step)

    @property
    def held_out(self) -> runlog.Val | None:
        """Scores of the held-out text; None if its track has none."""
        return next((one.val for one in self.of(runlog.HeldOut)), None)

    @property
    def held_gap(self) -> tuple[float, float] | None:
        """By how much the loss of held-out text is above the result, and its standard error over sequences."""
        if self.held_out is None:
            return None
        parts = [val.sequences for val in (self.held_out, self.vals[-1])]
        if min(map(len, parts)) < 2:
            return None
        # The smaller sd of both: a few wild losses would hide a gap.
        error = min(map(stdev, parts)) * sum(1 / len(each) for each in parts) ** 0.5
        return loss_of(self.held_out) - self.val_loss, error

    @cached_property
    def vals(self) -> list[runlog.Val]:
        """All validations; the last one is the result."""
        return self.of(runlog.Val)

    @cached_property
    def origin(self) -> runlog.Resume:
        """Where the run started: step 0, or the last checkpoint of the run that it resumes."""
        return next(iter(self.of(runlog.Resume)), _BEGINNING)

    @property
    def resumed(self) -> bool:
        """Whether the run resumes an earlier one."""
        return self.origin is not _BEGINNING

    @cached_property
    def step_s(self) -> list[float]:
        """Seconds of each step on the ranked clock."""
        times = [self.origin.train_time_s, *(step.train_time_s for step in self.steps)]
        return [after - before for before, after in itertools.pairwise(times)]

    @property
    def train_time_s(self) -> float:
        """Train time when the clock stopped."""
        return self.of(runlog.ClockStop)[0].train_time_s

    @property
    def val_loss(self) -> float:
        """The result: exact loss of the last validation."""
        return loss_of(self.vals[-1])


def rounds_of(runs: Iterable[Run]) -> list[tuple[str, runlog.Round]]:
    """Return all rounds of runs that go on from each other, each with the folder of the run whose islands played it."""
    found = []
    for run in sorted(runs, key=lambda run: (run.origin.step, run.begun)):
        for one in run.of(runlog.Round):
            # A run that goes on first logs the last round of the one before, if that was killed too early.
            is_old = any(one.version * each.every < run.origin.step for each in run.of(runlog.Islands))
            found.append((run.origin.run_id if is_old else run.folder, one))
    return found


def loss_of(val: runlog.Val) -> float:
    """Return the loss of a validation from its exact sum."""
    return float.fromhex(val.nll_sum) / val.tokens


def check_moment(utc: str) -> None:
    """Raise FormatError for a text that is not a time stamp with a time zone."""
    try:
        zone = datetime.fromisoformat(utc).tzinfo
    except ValueError as error:
        raise FormatError(str(error)) from None
    if zone is None:
        raise FormatError(f"{utc!r} has no time zone")


def check_range(holder: object) -> None:
    """Raise FormatError for a file or event with a NaN or a number beyond 2^128, or with too deep nesting."""
    level, depth = [msgspec.to_builtins(holder)], 0
    while level:
        if (depth := depth + 1) > _DEEPEST:
            raise FormatError(f"nested in more than {_DEEPEST} levels")
        if any(not -_LARGEST <= one <= _LARGEST for one in level if isinstance(one, int | float)):
            raise FormatError("a number is out of range; at most 2^128 is permitted")
        inside = (one.values() if isinstance(one, dict) else one for one in level)
        level = [part for one in inside if not isinstance(one, str | int | float | None) for part in one]


def read_run(raw: dict[str, bytes], folder: str) -> Run:
    """Read the log of a run; raise FormatError unless it is complete, canonical and in order."""
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
    if problem := _grammar_problem(run):
        raise FormatError(problem)
    return run


def _read_line(raw_line: bytes) -> runlog.Line:
    if len(raw_line) > _LONGEST_LINE:
        raise FormatError(f"{len(raw_line):,} bytes; at most {_LONGEST_LINE:,} are read")
    try:
        line = runlog.decode(raw_line)
        check_moment(line.t_utc)
        check_range(line)
        val = line.event.val if isinstance(line.event, runlog.HeldOut) else line.event
        if isinstance(val, runlog.Val):
            check_range(nll := float.fromhex(val.nll_sum))
            if nll.hex() != val.nll_sum:
                raise FormatError(f"{val.nll_sum!r} is another form of {nll.hex()}")
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise FormatError(str(error)) from None
    if line.encode() != raw_line:
        raise FormatError("not in canonical form (a key twice, or other spacing)")
    return line


def _grammar_problem(run: Run) -> str | None:
    """Return what is wrong with the order of events; runs that crashed need only a correct beginning."""
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
        need = f"{run.start.num_steps - first} steps and a validation"
        return f"got {len(run.steps)} steps and {len(run.vals)} validations, need {need}"
    return None
