"""The log of a run: typed events, one JSON line each, hash-chained and flushed per line.

Each line has `i` (index), `t_mono_ns` (monotonic clock), `t_utc`, `prev` (first 16 hex digits of the sha256 of the
line before; zeros for the first) and one event. A killed run leaves a readable log, and an edited line breaks the
chain. Losses are nats per token, and times are seconds unless a name has another unit.

The text log and the console are made from this log (`console.py`).
"""

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Annotated, Literal, Self

import msgspec

from speedrun.base.clock import now
from speedrun.base.errors import translate_os_errors
from speedrun.base.limits import Count, Natural, Seconds, Sha256, Size, StateHash

GENESIS = "0" * 16

Outcome = Literal["finished", "non-finite", "aborted"]
Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=8)]


class Event(msgspec.Struct, frozen=True, tag_field="ev", forbid_unknown_fields=True):
    """Base of all events."""


class ShardRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One contiguous range of positions read as inputs; the target after the last is not counted."""

    name: str
    sha256: Sha256  #: of the whole file
    tokens: Size  #: in the whole file
    start: Size  #: inclusive
    stop: Size  #: exclusive
    skipped: Size = 0  #: of these, not input: cut off from documents


class DataRead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The data that a run read."""

    shards: tuple[ShardRange, ...]  #: in reading order
    val_shard: ShardRange
    val_sha256: Sha256  #: of the scored ids


class RunStart(Event, tag="run_start", frozen=True, omit_defaults=True):
    """First line: the run. `config` is the resolved recipe with the split over devices."""

    format: Literal[2]  #: of the log, raised when an older one can no longer be read
    run_id: str  #: also the name of its folder
    track: str  #: name and version, as `smoke-cpu@1`
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


class Preflight(Event, tag="preflight", frozen=True, omit_defaults=True):
    """Hardware, software and measured rates; only listed packages and variables are captured."""

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
    val_sha256: Sha256  #: of the val_tokens + 1 ids that will be scored, as little-endian uint16


class Exported(Event, tag="exported", frozen=True):
    """The programs of the run, exported for its record before any was compiled: `record.archive`."""

    sha256: Sha256  #: of the archive
    num_bytes: Size
    seconds: Seconds


class Plan(Event, tag="plan", frozen=True, omit_defaults=True):
    """Sizes of the run, and the memory that the compiler needs."""

    num_params: Size
    tokens_per_step: Size
    total_tokens: Size
    flops_per_token: float
    state_bytes_per_device: Size
    temp_bytes_per_device: Size
    kernels: dict[str, str] = {}  #: operation and shape -> the chosen form, and why
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
    """State hash after the state was built again; must equal the one before."""

    state_hash: StateHash
    num_steps: Natural
    seconds: Seconds


class Resume(Event, tag="resume", frozen=True):
    """The state of an earlier run after `step` steps replaces the fresh one."""

    run_id: str  #: of the run that saved it
    step: Natural
    state_hash: StateHash
    train_time_s: Seconds
    tokens_seen: Size
    cursor: tuple[Size, Size]


class ClockStart(Event, tag="clock_start", frozen=True):
    """All devices are synchronised; the first batch is read after this."""


class Step(Event, tag="step", frozen=True, omit_defaults=True):
    """Training step `step` (from 0) is known to be finished at `train_time_s` on the ranked clock."""

    step: Natural
    train_time_s: Seconds
    loss: float
    batch_tokens: Count
    tokens_seen: Size
    cursor: tuple[Size, Size]  #: shard index and offset after this step's batch was taken
    inputs: dict[str, float | int | bool] = {}  #: scheduled inputs that are numbers


class StageChange(Event, tag="stage_change", frozen=True, omit_defaults=True):
    """From `step` on, another stage begins, or inputs that are integers have other values."""

    step: Natural
    stage: Natural
    inputs: dict[str, int] = {}


class ClockPause(Event, tag="clock_pause", frozen=True):
    """The clock pauses, after a synchronisation."""

    reason: str
    train_time_s: Seconds


class Val(Event, tag="val", frozen=True, omit_defaults=True):
    """A declared validation before step `step`. `nll_sum` is a float64 as C hex: the loss is nll_sum / tokens."""

    step: Natural
    loss: float
    tokens: Count
    nll_sum: str
    seconds: Seconds
    sequences: tuple[float, ...] = ()  #: nats per token of each, in nine digits; of the last validation alone


class ClockResume(Event, tag="clock_resume", frozen=True):
    """The clock continues."""

    train_time_s: Seconds


class ClockStop(Event, tag="clock_stop", frozen=True):
    """The clock stopped, after a synchronisation following the last update."""

    train_time_s: Seconds


class Checkpoint(Event, tag="checkpoint", frozen=True):
    """The state before step `step` was copied to the host and is being written."""

    step: Natural
    state_hash: StateHash
    seconds: Seconds  #: that the run was held up


class Warning(Event, tag="warning", frozen=True):
    """Something a reader of the record should know."""

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
    final_hash: StateHash  #: of the state; empty if the run broke off
    data: DataRead
    first_batch_sha256: Sha256 = ""  #: empty if the run ended before its first step
    throttled_s: Seconds | None = None  #: by heat or power supply; None if not counted
    phases: dict[str, Seconds] = {}  #: of `clock.Phases`; their sum is the wall time up to here
    lost_s: Seconds = 0.0  #: of earlier processes, after the checkpoint from which this run was resumed
    matmul_gflops: float = 0.0  #: as in `Preflight`, but after the last validation; 0: not measured


AnyEvent = (
    RunStart | Preflight | DataReady | Exported | Plan | Compile | WarmupStart | WarmupEnd | Resume | ClockStart | Step
    | StageChange | ClockPause | Val | ClockResume | ClockStop | Checkpoint | Warning | Error | RunEnd
)  # fmt: skip


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of metrics.jsonl."""

    i: int
    t_mono_ns: int
    t_utc: str
    prev: str
    event: AnyEvent

    def encode(self) -> bytes:
        """Return the canonical bytes of this line, without the newline. The chain hashes these."""
        return msgspec.json.encode(self)


Reader = Callable[[Line], None]


def digest(line: bytes) -> str:
    """Return `prev` of the next line."""
    return hashlib.sha256(line).hexdigest()[:16]


class RunLog:
    """Appends events to `metrics.jsonl`, and passes each line to a reader after it is on disk."""

    def __init__(self, path: Path | None, reader: Reader | None = None) -> None:
        """Create the file `path`; None: write nothing, in all processes of a run but the first."""
        self._path, self._reader = path, reader
        with translate_os_errors(self._path):
            self._file: IO[bytes] | None = None if path is None else path.open("xb")
        self._index = 0
        self._prev = GENESIS
        self._held: list[tuple[Line, bytes]] = []
        self._turn = threading.Lock()

    def emit(self, event: AnyEvent, *, hold: bool = False) -> None:
        """Write an event, or hold it back for one write together with the next. Drop a reader that fails.

        Raises:
            StorageError: if it cannot be written. The next call tries again.
        """
        if self._file is None:
            return
        with self._turn:
            stamp = now()
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
            try:
                for line, _ in held:
                    if self._reader is not None:
                        self._reader(line)
            except OSError:
                self._reader = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            with translate_os_errors(self._path):
                self._file.close()


#: Returns a line from its bytes; raises msgspec.DecodeError unless it is JSON of exactly the declared form.
decode = msgspec.json.Decoder(Line).decode


def read(path: Path) -> Iterator[Line]:
    """Yield all whole lines of a log. A torn last line, of a killed writer, is left out."""
    for raw in path.read_bytes().split(b"\n")[:-1]:
        yield decode(raw)
