"""The log of a run: typed events, one JSON line each, hash-chained and flushed.

Each line has `i` (index), `t_mono_ns` (monotonic clock), `t_utc`, `prev` (first 16 hex digits of the sha256 of the
previous line; zeros in the first) and one event. Losses are nats per token.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Annotated, Literal, Self

import msgspec

from speedrun.base.clock import Stamp, now
from speedrun.base.errors import translate_os_errors
from speedrun.base.field_types import Count, Natural, Seconds, Sha256, Size, StateHash
from speedrun.base.rounds import Budget, Island, Islands, Round

GENESIS = "0" * 16

Outcome = Literal["finished", "non-finite", "aborted"]
#: Why a run cannot count for a rank, as it was started; "": it may.
Purpose = Literal["", "unranked", "sweep"]
Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=8)]


class Event(msgspec.Struct, frozen=True, tag_field="ev", forbid_unknown_fields=True):
    """Base of all events but those of `base.rounds`."""


class ShardRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A contiguous range of positions read as inputs."""

    name: str
    sha256: Sha256  #: of the whole file
    tokens: Size  #: in the whole file
    start: Size  #: inclusive
    stop: Size  #: exclusive
    skipped: Size = 0  #: of these, cut off from documents


class DataRead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The data that a run read."""

    shards: tuple[ShardRange, ...]  #: in reading order
    val_shard: ShardRange
    val_sha256: Sha256  #: of the scored ids


class RunStart(Event, tag="run_start", frozen=True, omit_defaults=True):
    """First line. `config` is the resolved recipe with its split over devices."""

    format: Literal[2]  #: incremented when older logs can no longer be read
    run_id: str  #: also the name of its folder
    track: str  #: name and version, as `smoke-cpu@2`
    track_sha256: Sha256
    recipe: str
    recipe_revision: Natural
    overrides: dict[str, str]  #: settings of `--set`
    seed: Natural
    num_steps: Natural
    source_sha256: Sha256
    config: dict
    config_sha256: Sha256
    batch_sha256: Sha256 = ""  #: of the `batch.json` that declared this run; empty for a single run
    purpose: Purpose = ""


class Preflight(Event, tag="preflight", frozen=True, omit_defaults=True):
    """Hardware, software and measured rates. Only listed packages and variables are recorded."""

    platform: str
    device_kind: str
    num_devices: Count
    software: dict[str, str]
    environment: dict[str, str]
    matmul_gflops: float  #: measured before the clock, sum over all devices
    commit: str = ""  #: of the checkout; empty if unknown, as without git
    dirty: bool | None = None  #: whether the code differed from that commit; None if unknown
    lock: str = ""  #: the lock file whose pins are installed; empty if there is none
    lock_sha256: Sha256 = ""
    num_processes: Count = 1  #: that shared the devices
    num_replicas: Count = 1  #: of the state, one on each node


class DataReady(Event, tag="data", frozen=True):
    """Shards found, headers checked."""

    folder: str
    train_shards: list[str]
    val_shard: str
    val_tokens: Size
    val_sha256: Sha256  #: of the val_tokens + 1 scored ids, as little-endian uint16


class Exported(Event, tag="exported", frozen=True, omit_defaults=True):
    """The programs of the run were exported for its record: `record.archive`."""

    sha256: Sha256  #: of the archive
    num_bytes: Size
    seconds: Seconds
    settings: dict[str, str] = {}  #: of JAX, that a recipe changed before they were lowered


class Plan(Event, tag="plan", frozen=True, omit_defaults=True):
    """Sizes of the run, and memory by the compiler's count."""

    num_params: Size
    tokens_per_step: Size
    total_tokens: Size
    flops_per_token: float
    state_bytes_per_device: Size
    temp_bytes_per_device: Size
    kernels: dict[str, str] = {}  #: operation and shape -> the chosen implementation, and why
    compiler_options: dict[str, bool | int | str] = {}
    shapes: dict[str, Shape] = {}  #: of each parameter


class Compile(Event, tag="compile", frozen=True, omit_defaults=True):
    """One executable, compiled ahead of time."""

    name: str
    seconds: Seconds
    cache: Literal["off", "hit", "miss"] = "off"  #: JAX's persistent cache


class WarmupStart(Event, tag="warmup_start", frozen=True):
    """State hash before the warm-up steps on synthetic ids."""

    state_hash: StateHash


class WarmupEnd(Event, tag="warmup_end", frozen=True):
    """State hash after the state was built again; must equal that of `WarmupStart`."""

    state_hash: StateHash
    num_steps: Natural
    seconds: Seconds


class Resume(Event, tag="resume", frozen=True):
    """The state of an earlier run after `step` steps replaces the new one."""

    run_id: str  #: of the run that saved it
    step: Natural
    state_hash: StateHash
    train_time_s: Seconds
    tokens_seen: Size
    cursor: tuple[Size, Size]


class ClockStart(Event, tag="clock_start", frozen=True):
    """All devices are synchronised. The first batch is read after this."""


class Step(Event, tag="step", frozen=True, omit_defaults=True):
    """Training step `step` (from 0) finished before `train_time_s` on the ranked clock."""

    step: Natural
    train_time_s: Seconds
    loss: float
    batch_tokens: Count
    tokens_seen: Size
    cursor: tuple[Size, Size]  #: shard index and offset after this step's batch was taken
    inputs: dict[str, float | int | bool] = {}  #: scheduled inputs that are numbers


class StageChange(Event, tag="stage_change", frozen=True, omit_defaults=True):
    """At `step`, another stage begins, or integer inputs change."""

    step: Natural
    stage: Natural
    inputs: dict[str, int] = {}


class ClockPause(Event, tag="clock_pause", frozen=True):
    """The clock paused, after a synchronisation."""

    reason: str
    train_time_s: Seconds


class Val(Event, tag="val", frozen=True, omit_defaults=True):
    """A declared validation before step `step`. `nll_sum` is a float64 as C hex: the loss is nll_sum / tokens."""

    step: Natural
    loss: float
    tokens: Count
    nll_sum: str
    seconds: Seconds
    sequences: tuple[float, ...] = ()  #: nats per token of each, in nine digits; only in the last validation


class HeldOut(Event, tag="held_out", frozen=True):
    """After the result, its state is scored on other text of the validation shard: `track.Data.held_start`."""

    nonce: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]  #: drawn when there was a result
    val: Val


class ClockResume(Event, tag="clock_resume", frozen=True):
    """The clock continued."""

    train_time_s: Seconds


class ClockStop(Event, tag="clock_stop", frozen=True):
    """The clock stopped, after the last update and a synchronisation."""

    train_time_s: Seconds


class Checkpoint(Event, tag="checkpoint", frozen=True):
    """The state before `step` was copied to the host. It is written in the background."""

    step: Natural
    state_hash: StateHash
    seconds: Seconds  #: for which the run waited


class Warning(Event, tag="warning", frozen=True):
    """A caution for readers of the record."""

    message: str


class Error(Event, tag="error", frozen=True):
    """Why the run ended early."""

    kind: str
    message: str


class RunEnd(Event, tag="run_end", frozen=True, omit_defaults=True):
    """Last line, unless the process was killed."""

    status: Outcome
    val_loss: float | None
    train_time_s: Seconds
    cold_wall_s: Seconds
    compile_s: Seconds
    warmup_s: Seconds
    val_s: Seconds
    data_wait_s: Seconds
    peak_bytes: Size
    final_hash: StateHash  #: of the state; empty if the run crashed
    data: DataRead
    first_batch_sha256: Sha256 = ""  #: empty if the run ended before its first step
    throttled_s: Seconds | None = None  #: by heat or power supply; None if not counted
    phases: dict[str, Seconds] = {}  #: of `clock.Phases`; add up to the wall time so far
    lost_s: Seconds = 0.0  #: of earlier processes, after the checkpoint that was restored
    matmul_gflops: float = 0.0  #: as in `Preflight`, but after the last validation; 0: not measured


AnyEvent = (
    RunStart | Preflight | DataReady | Exported | Plan | Compile | WarmupStart | WarmupEnd | Resume | ClockStart | Step
    | StageChange | Islands | Island | Round | ClockPause | Val | HeldOut | ClockResume | ClockStop | Checkpoint
    | Budget | Warning | Error | RunEnd
)  # fmt: skip


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of metrics.jsonl."""

    i: int
    t_mono_ns: int
    t_utc: str
    prev: str
    event: AnyEvent

    def encode(self) -> bytes:
        """Return the line without its newline, as the chain hashes it."""
        return msgspec.json.encode(self)


#: Return a line from its bytes; raise msgspec.DecodeError unless it has exactly the declared form.
decode = msgspec.json.Decoder(Line).decode
Reader = Callable[[Line], None]


def digest(line: bytes) -> str:
    """Return `prev` of the line that follows."""
    return hashlib.sha256(line).hexdigest()[:16]


class RunLog:
    """Appends events to `metrics.jsonl`; then passes each line to a reader."""

    def __init__(self, path: Path | None, reader: Reader | None = None) -> None:
        """Create `path`; None writes nothing, in all processes of a run but the first."""
        self._path, self._reader = path, reader or (lambda _: None)
        with translate_os_errors(self._path):
            self._file: IO[bytes] | None = None if path is None else path.open("xb")
        self._index, self._prev = 0, GENESIS
        self._held: list[tuple[Line, bytes]] = []
        self._turn = threading.Lock()

    def emit(self, event: AnyEvent, *, hold: bool = False, stamp: Stamp | None = None) -> None:
        """Write an event, or hold it for one write with the next; `stamp` is when it came. Drop a reader that fails.

        After a StorageError, the next call writes the event first.
        """
        if self._file is None:
            return
        with self._turn:
            stamp = stamp or now()
            line = Line(self._index, stamp.mono_ns, stamp.utc, self._prev, event)
            raw = line.encode()
            self._index, self._prev = self._index + 1, digest(raw)
            self._held.append((line, raw + b"\n"))
            if hold:
                return
            held, self._held = self._held, []
            with translate_os_errors(self._path):
                self._file.writelines(raw for _, raw in held)
                self._file.flush()
                if isinstance(event, Checkpoint):  # which may outlive this machine
                    os.fsync(self._file.fileno())
            try:
                for line, _ in held:
                    self._reader(line)
            except OSError:
                self._reader = lambda _: None

    def nonce(self) -> str:
        """Return a nonce for the held-out text; the result must have been emitted."""
        return os.urandom(8).hex()

    def is_as_written(self) -> bool:
        """Return whether the last line of the file is the last that was written, and so all lines are."""
        assert self._path is not None
        with translate_os_errors(self._path):
            lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        return not self._index or (lines != [] and digest(lines[-1]) == self._prev)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            with translate_os_errors(self._path):
                self._file.close()


def read(path: Path) -> Iterator[Line]:
    """Yield the lines of a log. Leave out a torn last line, which a killed writer leaves."""
    for raw in path.read_bytes().split(b"\n")[:-1]:
        yield decode(raw)
