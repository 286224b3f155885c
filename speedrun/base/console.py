"""The text log of a run: `render` makes it from `metrics.jsonl`, and `Printer` prints it during the run."""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, Self, TextIO

from msgspec import DecodeError

from speedrun.base import runlog
from speedrun.base.clock import Stopwatch
from speedrun.base.runlog import Line

_RULE_WIDTH = 82
_LINE_LIMIT = 400  #: characters
_CLEAR = "\r\x1b[K"  #: go to the start of the line and erase it
_REFRESH_S = 0.25


def clean(text: str, *, limit: int = _LINE_LIMIT) -> str:
    """Return text that is safe on a terminal: unprintable characters are escaped, and the length is limited."""
    shown = text if len(text) <= limit else text[:limit] + "..."
    if shown.isprintable():
        return shown
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown)


def quantiles_ms(step_s: Sequence[float]) -> tuple[float, float, float]:
    """Return median, 95th percentile and maximum of step times, in milliseconds (nearest rank; zeros if none)."""
    if not step_s:
        return 0.0, 0.0, 0.0
    ranked = sorted(step_s)
    at = [-(-len(ranked) * percent // 100) - 1 for percent in (50, 95, 100)]
    return ranked[at[0]] * 1e3, ranked[at[1]] * 1e3, ranked[at[2]] * 1e3


def duration(seconds: float) -> str:
    """Return seconds as text: `36s`, `2m05s`, `1h03m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


def quantity(number: float, unit: str = "") -> str:
    """Return a number with three digits and a decimal prefix: `5.02 Mtok/s`."""
    # 999.5 rounds to 1.00 of the next prefix.
    sizes = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    size, prefix = next(((size, prefix) for size, prefix in sizes if number >= 0.9995 * size), (1.0, ""))
    shown = number / size
    digits = 2 if shown < 9.995 else 1 if shown < 99.95 else 0
    return f"{shown:.{digits}f} {prefix}{unit}".rstrip()


def memory(num_bytes: int) -> str:
    """Return bytes as MiB or GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _of_islands(event: runlog.Island | runlog.Round) -> str | None:
    """Return who joined, left or was late, or what a round refused."""
    if isinstance(event, runlog.Island):
        return f"island {event.island}  {event.why or 'joined'}, after round {event.version}"
    why = [f"{work.island}: {work.refused}" for work in event.works if work.refused]
    return f"round {event.version + 1}  {'; '.join(why)}" if why else None


class TextLog:
    """Turns events into text."""

    def __init__(self) -> None:
        self._num_steps = 0
        self.every = 1  # steps of a round, which have one time
        self._clock_runs = False
        self._state_hash = ""
        self._step_s: list[float] = []
        self._train_time_s = 0.0
        self._earlier_s = 0.0  # train time of the run that this one resumes
        self._shown = (0, 0.0, 0)  # steps done, train time and tokens at the last step line

    def __call__(self, line: Line) -> str | None:
        """Return the text of an event, or None if it is not shown."""
        text = self._text(line)
        if text is None:
            return None
        # Split before cleaning: a line break in a hostile field is escaped.
        return "\n".join(map(clean, [text] if isinstance(text, str) else text))

    def _text(self, line: Line) -> str | list[str] | None:
        match line.event:
            case runlog.RunStart() as run:
                self._num_steps = run.num_steps
                return f"speedrun  track {run.track}  recipe {run.recipe}  seed {run.seed}  run {run.run_id}"
            case runlog.Preflight() as hw:
                software = ", ".join(f"{name} {version}" for name, version in hw.software.items())
                peak = quantity(hw.matmul_gflops * 1e9, "flop/s")
                many = f" in {hw.num_processes} processes" * (hw.num_processes > 1)
                many += f", {hw.num_replicas} replicas" * (hw.num_replicas > 1)
                return f"hw    {hw.num_devices} x {hw.device_kind} ({hw.platform}){many} | matmul {peak} | {software}"
            case runlog.DataReady() as data:
                shards = f"{len(data.train_shards)} training shard{'s' * (len(data.train_shards) != 1)}"
                return f"data  {data.folder} | {shards} | val {data.val_tokens:,} tokens of {data.val_shard}"
            case runlog.Exported() as made:
                size_kb = made.num_bytes / 1e3
                return f"prog  {size_kb:.1f} kB of programs for the record in {made.seconds:.1f} s"
            case runlog.Plan() as plan:
                return self._plan(plan)
            case runlog.Compile() as done:
                cache = "" if done.cache == "off" else f" (cache: {done.cache})"
                return f"comp  {done.name}  {done.seconds:.1f} s{cache}"
            case runlog.WarmupStart() as warm:
                self._state_hash = warm.state_hash
                return None
            case runlog.WarmupEnd() as warm:
                how = "restored" if warm.state_hash == self._state_hash else "NOT restored"
                return f"warm  {warm.num_steps} steps in {warm.seconds:.1f} s | state {warm.state_hash[:8]} {how}"
            case runlog.Resume() as old:
                self._train_time_s = self._earlier_s = old.train_time_s
                self._shown = (old.step, old.train_time_s, old.tokens_seen)
                return f"{self._at(old.step)}  resumes {old.run_id}, state {old.state_hash[:8]}"
            case runlog.Checkpoint() as kept:
                at, held_s = self._at(kept.step), kept.seconds
                return f"{at}  checkpoint, state {kept.state_hash[:8]}  ({held_s:.2f} s)"
            case runlog.ClockStart() | runlog.ClockStop() as event:
                self._clock_runs = isinstance(event, runlog.ClockStart)
                return f"---- clock {'start' if self._clock_runs else 'stop'} ".ljust(_RULE_WIDTH, "-")
            case runlog.Step() as step:
                return self._step(step)
            case runlog.StageChange() as change:
                inputs = [f"{name} {value}" for name, value in change.inputs.items()]
                return f"{self._at(change.step)}  stage {change.stage}: {', '.join(inputs) or 'begins'}"
            case runlog.Islands() as fleet:
                self.every = fleet.every
            case runlog.Island() | runlog.Round() as one:
                return _of_islands(one)
            case runlog.Val() as val:
                clock = "clock paused" if self._clock_runs else "clock stopped"
                return f"{self._at(val.step)}  val {val.loss:.4f}  ({clock}, {val.seconds:.1f} s)"
            case runlog.HeldOut(val=val):
                return f"{self._at(val.step)}  held-out text {val.loss:.4f}  ({val.seconds:.1f} s)"
            case runlog.Warning() as warning:
                return f"warn  {warning.message}"
            case runlog.Error() as error:
                return f"error {error.kind}: {error.message}"
            case runlog.RunEnd() as end:
                return self._result(end)
        return None

    def _plan(self, plan: runlog.Plan) -> list[str]:
        sizes = (
            f"plan  {quantity(plan.num_params)} parameters | {self._num_steps:,} steps x "
            f"{plan.tokens_per_step:,} tokens = {plan.total_tokens:,} | per device: state "
            f"{memory(plan.state_bytes_per_device)}, temporary {memory(plan.temp_bytes_per_device)}"
        )
        impls: dict[str, dict[str, None]] = {}  # the log says why, and of which shapes
        for call, impl in plan.kernels.items():
            impls.setdefault(call.split()[0], {})[impl.partition(":")[0]] = None
        return [sizes, "kern  " + " | ".join(f"{name} {', '.join(kinds)}" for name, kinds in impls.items())]

    def _at(self, steps_done: int) -> str:
        return f"step  {steps_done:>{len(str(self._num_steps))}}/{self._num_steps}"

    def _step(self, step: runlog.Step) -> str | None:
        """Return a line for every tenth of a run; times and rates are means since the previous line."""
        done, tenth = step.step + 1, max(1, -(-self._num_steps // 10))
        is_last = done == self._num_steps
        if done % self.every and not is_last:
            return None
        num = (done - 1) % self.every + 1
        self._step_s += [(step.train_time_s - self._train_time_s) / num] * num
        self._train_time_s = step.train_time_s
        if done // tenth == (done - num) // tenth and not is_last:
            return None
        steps, seconds, tokens = self._shown
        self._shown = (done, step.train_time_s, step.tokens_seen)
        step_s = (step.train_time_s - seconds) / max(1, done - steps)
        rate = (step.tokens_seen - tokens) / max(1e-9, step.train_time_s - seconds)
        eta = duration(step_s * (self._num_steps - done))
        return (
            f"{self._at(done)}  train {step.train_time_s:8.2f} s  {step_s * 1e3:7.1f} ms/step  "
            f"{quantity(rate, 'tok/s'):>10}  loss {step.loss:.4f}  eta {eta}"
        )

    def _result(self, end: runlog.RunEnd) -> list[str]:
        val = "none" if end.val_loss is None else f"{end.val_loss:.4f}"
        p50_ms, p95_ms, max_ms = quantiles_ms(self._step_s)
        wait = end.data_wait_s / max(1e-9, end.train_time_s)
        parts_s = {"compile": end.compile_s, "warm-up": end.warmup_s, "val": end.val_s}
        own_s = end.train_time_s - self._earlier_s
        parts_s["other"] = end.cold_wall_s - own_s - sum(parts_s.values())
        lines = [
            f"result  {end.status} | val {val} | train {end.train_time_s:.2f} s | "
            f"total wall {end.cold_wall_s:.1f} s ({_seconds(parts_s)})",
            f"        p50 {p50_ms:.1f} ms  p95 {p95_ms:.1f}  max {max_ms:.1f} | data wait {wait:.1%} | "
            f"peak {memory(end.peak_bytes)}",
        ]
        if wall_s := sum(end.phases.values()):
            share = end.phases.get("step", 0.0) / (wall_s + end.lost_s)
            lost = f"lost to restarts {end.lost_s:.1f} s"
            lines.append(
                f"        goodput {share:.1%} | wall {wall_s:.1f} s = {_seconds(end.phases)} | {lost}"
            )
        return lines


def _seconds(parts_s: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts_s.items())


def render(lines: Iterable[Line]) -> str:
    """Return the text log of a run."""
    text = TextLog()
    return "".join(f"{shown}\n" for line in lines if (shown := text(line)) is not None)


class _Ghost(Protocol):
    """A record to race: has a legend for the start of the run, and a text for each step."""

    @property
    def legend(self) -> str: ...

    def __call__(self, step: runlog.Step, /) -> str: ...


class Printer:
    """Prints the log during a run. As a context manager on a terminal, it shows the newest step in a last line."""

    def __init__(self, stream: TextIO, ghost: _Ghost | None = None) -> None:
        """Print to `stream`. The text of a `ghost` is not logged."""
        self._stream, self._ghost = stream, ghost
        self._text, self._num_steps, self._is_live = TextLog(), 0, False
        #: Since the line of the newest step was written; None if there is none.
        self._status: Stopwatch | None = None

    def __call__(self, line: Line) -> None:
        """Show one event."""
        shown, step = self._text(line), line.event
        if isinstance(step, runlog.RunStart):
            self._num_steps = step.num_steps
            if self._ghost is not None:
                self.say(self._ghost.legend)
        is_step = isinstance(step, runlog.Step)
        ghost = f"  {self._ghost(step)}" if is_step and self._ghost is not None else ""
        if shown is not None:
            self._write(shown + ghost)
        elif is_step and self._is_live and (step.step + 1) % self._text.every == 0:
            self._show(step, ghost)

    def say(self, text: str) -> None:
        """Show a line that is not an event."""
        self._write(clean(text))

    def relay(self, text: str) -> None:
        """Show a line that another process printed, which may be an event."""
        try:
            self(runlog.decode(text.encode()))
        except DecodeError:
            self.say(text)

    def __enter__(self) -> Self:
        self._is_live = self._stream.isatty()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._status is not None:
            self._stream.write(_CLEAR)
            self._stream.flush()

    def _write(self, text: str) -> None:
        self._stream.write((_CLEAR if self._status else "") + text + "\n")
        self._stream.flush()
        self._status = None

    def _show(self, step: runlog.Step, ghost: str) -> None:
        """Write the line of the newest step, at most four times a second: a slow terminal delays the run."""
        if self._status is not None and self._status.seconds < _REFRESH_S:
            return
        done = step.step + 1
        rate = quantity(step.tokens_seen / max(1e-9, step.train_time_s), "tok/s")
        eta = duration(step.train_time_s / done * (self._num_steps - done))
        text = f"step  {done}/{self._num_steps}  {rate}  loss {step.loss:.4f}  eta {eta}{ghost}"
        self._stream.write(_CLEAR + text[: shutil.get_terminal_size().columns - 1])
        self._stream.flush()
        self._status = Stopwatch()
