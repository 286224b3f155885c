"""Time the training step, alone or in turns with another program (ABBA)."""

import io
import subprocess
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

import jax
import msgspec
import numpy as np
from msgspec.structs import astuple

from speedrun.base import accelerators
from speedrun.base import mesh as meshes
from speedrun.base.atomic_files import write_whole
from speedrun.base.clock import Stopwatch
from speedrun.base.errors import DataError, SpeedrunError, UsageError
from speedrun.data import synthetic
from speedrun.data.shards import UINT16_IDS, Shard, open_shard
from speedrun.data.stream import Batch, Prefetch, TokenStream, rows_of
from speedrun.machine.bench_kernels import middle
from speedrun.record.statistics import Interval, mean_interval
from speedrun.science.params import Layout
from speedrun.science.recipe import Recipe, settings
from speedrun.science.step import TrainState
from speedrun.train import memory
from speedrun.train.memory import flops_per_token
from speedrun.train.program import Program, finite_step


class StepTimings(msgspec.Struct, frozen=True):
    """Training steps as in a run: each is dispatched before the loss of the one before is fetched."""

    ms: list[float]  #: between the arrivals of two losses
    mean_ms: float
    spread_ms: float  #: of `ms`, from the first to the ninth decile
    tokens_per_s: float
    mfu: float | None  #: of the vendor's bf16 rate, without attention scores; None for an unknown device
    peak_bytes: int  #: of the compiled program on one device, with its arguments
    compile_s: float
    losses: list[float]
    tokens: str  #: their source
    kernels: dict[str, str]  #: form and reason, by call

    def __str__(self) -> str:
        mfu = "" if self.mfu is None else f" | MFU {self.mfu:.1%}"
        lines = [
            f"step    mean {self.mean_ms:.2f} ms, spread {self.spread_ms:.2f} ms, {len(self.ms)} steps",
            f"tokens  {self.tokens}",
            f"rate    {self.tokens_per_s:,.0f} tokens/s{mfu}",
            f"memory  {self.peak_bytes / 1e9:.2f} GB of the program | compiled in {self.compile_s:.1f} s",
            *(f"kern    {call} | {form}" for call, form in self.kernels.items()),
        ]
        return "\n".join(lines)


def step(
    program: Program, *, num_steps: int, first_step: int = 0, shards: Sequence[Shard] = ()
) -> StepTimings:
    """Time the training step of a recipe, after two steps of warm-up from the initial state.

    `first_step` of the schedule decides the window. Without shards, one batch of `synthetic.imitated` is repeated.
    """
    lowered, (state, *batch, schedule) = lowered_step(program, first_step)
    watch = Stopwatch()
    train_step = program.compiled(lowered)
    compile_s, arrivals_ms, losses = watch.seconds, [0.0], []
    peak_bytes = train_step.memory_analysis().peak_memory_in_bytes
    memory.require(program, peak_bytes)
    for _ in range(2):
        state, _ = train_step(state, *batch, schedule)
    state, pending = jax.block_until_ready(_state(program, first_step)), None

    def fetch(metrics: Any) -> None:
        """Fetch a loss while the device runs the next step, as the loop does."""
        losses.append(finite_step(program, metrics, f"step {len(losses)} from step {first_step}"))
        arrivals_ms.append(watch.seconds * 1e3)

    shapes = repeat(batch[0].shape, num_steps)
    imitated = nullcontext(repeat(_imitated(program, first_step)))
    with Prefetch(TokenStream(shards), shapes) if shards else imitated as batches:
        watch = Stopwatch()
        for _ in range(num_steps):
            placed = (meshes.shard(x_BT, program.mesh) for x_BT in next(batches))
            state, metrics = train_step(state, *placed, schedule)
            if pending is not None:
                fetch(pending)
            pending = metrics
        fetch(pending)
    ms, mean_ms = np.diff(arrivals_ms).tolist(), arrivals_ms[-1] / num_steps
    tokens_per_s = batch[0].size / mean_ms * 1e3
    return StepTimings(
        ms=ms,
        mean_ms=mean_ms,
        spread_ms=middle(ms)[1],
        tokens_per_s=tokens_per_s,
        mfu=_mfu(program, tokens_per_s),
        peak_bytes=peak_bytes,
        compile_s=compile_s,
        losses=losses,
        tokens=f"{len(shards)} shards" if shards else "synthetic, document lengths of FineWeb",
        kernels={call: f"{one.name}: {one.reason}" for call, one in program.kernels.choices.items()},
    )


def _mfu(program: Program, tokens_per_s: float) -> float | None:
    """Return the share of the devices' peak rate that the step reaches; None if the rate is unknown."""
    device = accelerators.named(program.mesh.devices.flat[0].device_kind)
    flops_per_s = flops_per_token(program.layout.table) * tokens_per_s
    return flops_per_s / (device.bf16_flops * program.num_devices) if device else None


def lowered_step(program: Program, first_step: int) -> tuple[Any, tuple[Any, ...]]:
    """Return the lowered step at `first_step`, and its arguments: state, synthetic ids and schedule."""
    batch = (meshes.shard(x_BT, program.mesh) for x_BT in _imitated(program, first_step))
    args = _state(program, first_step), *batch, program.schedule
    return program.train_step_for(program.static_at(first_step)).lower(*args), args


def _state(program: Program, first_step: int) -> TrainState:
    state = program.init(jax.random.key(0))
    return state._replace(step=meshes.replicate(np.int32(first_step), program.mesh))


def _imitated(program: Program, first_step: int) -> Batch:
    shape, config = program.shape_at(first_step), program.recipe.config
    number, opens = shape.num_sequences * shape.seq_len + 1, getattr(config, "document_token", 0)
    ids = synthetic.imitated(number, vocab_size=config.vocab_size, document_token=opens, seed=0)
    return rows_of(ids, shape.num_sequences)


def folder_shards(folder: Path) -> list[Shard]:
    """Return the training shards of a folder."""
    paths = sorted(folder.glob("*_train_*.bin"))
    if not paths:
        raise DataError(f"{folder}: no *_train_*.bin; need shards of tokens; choose another folder")
    return [open_shard(path, vocab_size=UINT16_IDS) for path in paths]


class Curve(msgspec.Struct, frozen=True):
    """One run of either program, step by step."""

    who: str
    ms: list[float]
    losses: list[float]


class _BaselineLine(msgspec.Struct):
    """A step as the other program prints it."""

    step: int
    time_s: float
    loss: float


class Comparison(msgspec.Struct, frozen=True):
    """Runs in the order ours, baseline, baseline, ours, and the ratio of our step time to the baseline's."""

    ratio: Interval  #: over pairs of neighbours
    runs: list[Curve]

    def __str__(self) -> str:
        return "step time, ours / baseline: {:.3f} (95 %: {:.3f} to {:.3f})".format(*astuple(self.ratio))


def write_start(recipe: Recipe, path: Path) -> None:
    """Write the initial parameters by name, in float32, and the settings of a recipe as JSON, for `np.load`."""
    meshes.prepare("cpu")  # the programs that are timed need the GPU
    layout = Layout(recipe.table(recipe.config))
    params = layout.unpack(layout.init(jax.random.key(0)))
    given: dict[str, Any] = {name: np.asarray(x, np.float32) for name, x in params.items()}
    np.savez(packed := io.BytesIO(), settings=msgspec.json.encode(settings(recipe)).decode(), **given)
    write_whole(path, packed.getvalue())


def compare(
    ours: Sequence[str], theirs: Sequence[str], num_steps: int, turns: int, say: Callable[[str], object]
) -> Comparison:
    """Run both command lines alternately, in `turns` of ABBA; `ours` is `speedrun bench step --json`."""
    runs = []
    for turn in "ABBA" * turns:
        if turn == "A":
            found = msgspec.json.decode(_output("ours", ours))
            runs.append(Curve("ours", found["ms"], found["losses"]))
        else:
            runs.append(run_baseline(theirs, num_steps))
        say(f"{runs[-1].who}: {num_steps} steps, last loss {runs[-1].losses[-1]:.4f}")
    return compared(runs)


def run_baseline(argv: Sequence[str], num_steps: int) -> Curve:
    """Run the other program and read its steps.

    The program warms up, then trains from the given or its own initial state on the first batches of the shards
    (`*_train_*.bin`, in the order of `data.stream`), with the schedule of the whole record from the first step on. The
    help of `bench baseline` has its arguments and output. Other lines are ignored. It must stay in its process group.
    """
    lines = []
    for text in _output("the baseline", argv).splitlines():
        with suppress(msgspec.DecodeError):  # other output
            lines.append(msgspec.json.decode(text, type=_BaselineLine))
    if len(lines) != num_steps:
        found = f"the baseline printed {len(lines)} steps, need {num_steps}"
        raise SpeedrunError(f"{found}; a line of JSON for each: step, time_s, loss")
    ms = 1e3 * np.diff([0.0, *(line.time_s for line in lines)])
    return Curve("baseline", ms.tolist(), [line.loss for line in lines])


def executable(folder: Path) -> Path:
    """Return the path of the program in a folder."""
    path = folder.absolute() / "run"
    if not path.is_file() or not path.stat().st_mode & 0o100:
        found = f"{path} is no executable file"
        raise UsageError(f"{found}; need one that trains; see 'speedrun bench baseline --help'")
    return path


def compared(runs: Sequence[Curve]) -> Comparison:
    """Compare runs in the order ours, baseline, baseline, ours."""
    ours_ms, its_ms = ([median(one.ms) for one in runs if one.who == who] for who in ("ours", "baseline"))
    ratio = mean_interval([a / b for a, b in zip(ours_ms, its_ms, strict=True)])
    assert ratio is not None, "ABBA has two pairs"
    return Comparison(ratio, list(runs))


def _output(who: str, argv: Sequence[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
        last = lines[-1] if lines else "nothing"
        raise SpeedrunError(f"{who} ended with exit code {done.returncode}; it said last: {last[:300]}")
    return done.stdout
