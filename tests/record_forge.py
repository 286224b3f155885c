"""Makes small records without training: honest ones, and forgeries with correct hashes.

A forger edits events before the log is chained and the record is assembled, so only the edit is wrong.
"""

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec

from speedrun.base import provenance, runlog, track
from speedrun.base.runlog import DataRead, ShardRange
from speedrun.base.sourcefile import join_source
from speedrun.record import archive, git_history, layout
from speedrun.record.archive import Archive, Lowered
from speedrun.record.batch import Look, Preregistration, TrackRef
from speedrun.record.checks.v3_claims import CURVES
from speedrun.record.layout import Recipe
from speedrun.record.reader import encode
from speedrun.record.source import is_science, split_source
from speedrun.record.summary import assemble

VAL_TOKENS = 1000
SHARD_TOKENS = 5000
BATCH_TOKENS = 100
VAL_S = 0.5
PAUSE_S = 0.6
EPOCH = datetime(2026, 10, 2, tzinfo=UTC)
RECIPE = "speedrun/recipes/tiny.py"
#: A recipe of one line, and the harness; never executed.
SOURCE = {RECIPE: "SIZE = 1\n", **split_source(provenance.closure(["speedrun.train.recorded"], []))}
LOCK = "run.lock"
NAMES = ("init", "constants", "train", "hidden-eval", "logits-eval")


def programs_of(num_steps: int) -> bytes:
    """An archive of empty programs."""
    steps = Lowered(
        ("train",) * num_steps, dict.fromkeys((0, 4, 8, num_steps), "eval"), dict.fromkeys(NAMES, b"")
    )
    return archive.pack(Archive(("step", "params.w"), 1, (0,) * num_steps, {"cpu": steps}))


PROGRAMS = programs_of(10)
LOCK_RAW = git_history.files_here([f"requirements/{LOCK}"])[f"requirements/{LOCK}"]
_PINS = provenance.pinned(LOCK_RAW.decode())
SOFTWARE = {name: min(filter(None, _PINS[name])) for name in ("jax", "jaxlib", "numpy", "optax")}
SOFTWARE = {"python": "3.11.2", **SOFTWARE}
#: Commits of forgers: edited science, and the honest harness.
_COMMITS: dict[str, dict[str, bytes]] = {}
_files_at = git_history.files_at


def _files_at_or_forged(commit: str, paths: tuple[str, ...]) -> dict[str, bytes] | None:
    if commit not in _COMMITS:
        return _files_at(commit, paths)
    return {path: _COMMITS[commit][path] for path in paths if path in _COMMITS[commit]}


git_history.files_at = _files_at_or_forged
CURVES["forged@1"] = {0: 5.5, 400: 4.0, 1000: 2.99}
CONFIG = {
    "recipe": {
        "kind": "Recipe",
        "name": "tiny",
        "revision": 1,
        "config": {"width": 8, "lr": 0.02},
        "stages": [{"num_steps": 10, "num_sequences": 10, "seq_len": 10}],
        "loss": None,
        "optimizer": {"name": "mine"},
    },
    "stages": [10],
    "num_devices": 8,
    "microbatches": 8,
    "attention": "auto",
}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _rules() -> str:
    shards = [f"t_{kind}_{number}.bin" for kind, number in (("val", 0), ("train", 1), ("train", 2))]
    table = "\n".join(f'"{name}" = "{digest(name)}"' for name in shards)
    rules = f"""
        name = "forged"
        version = 1
        summary = "a track for forgers"
        recipe = "tiny"
        [data]
        folder = "forged"
        train = "t_train_*.bin"
        val = "t_val_*.bin"
        val_tokens = {VAL_TOKENS}
        held_tokens = {VAL_TOKENS}
        vocab_size = 256
        document_token = 0
        get = "none"
        [data.sha256]
        {table}
        [target]
        loss = 3.28
        entropy_rate = 3.0
        sigma = 0.01
        [rules]
        platform = "cpu"
        num_devices = 8
        min_runs = 2
        val_every = 4
        untimed_cap_s = 1800.0
        ranked = true
        """
    return rules.rstrip() + "\n"


def install_track(folder: Path) -> None:
    (folder / "forged.toml").write_text(_rules())


def edit_track(before: str, after: str) -> None:
    path = track.TRACKS_DIR / "forged.toml"
    path.write_text(path.read_text().replace(before, after))


def rank(ranked: bool = True) -> None:
    edit_track("ranked = true", f"ranked = {str(ranked).lower()}")


def source_text(edit: Callable[[Mapping[str, str]], Mapping[str, str]] = dict) -> str:
    """The source text of a record, with the installed track if there is one."""
    path = track.TRACKS_DIR / "forged.toml"
    rules = path.read_text() if path.exists() else _rules()
    return join_source(dict(edit({**SOURCE, "speedrun/tracks/forged.toml": rules})))


def commit_of(edit: Callable[[Mapping[str, str]], Mapping[str, str]]) -> str:
    edited = {path: text for path, text in edit(SOURCE).items() if is_science(path)}
    commit = digest(repr(sorted(edited.items())))[:40]
    files = {**SOURCE, **edited}
    _COMMITS.setdefault(commit, {path: text.encode(errors="replace") for path, text in files.items()})
    return commit


class Moment(NamedTuple):
    event: runlog.AnyEvent
    mono_ns: int
    utc_ns: int


Moments = list[Moment]
Edit = Callable[[Moments], Moments]


def shard(name: str, start: int, stop: int) -> ShardRange:
    """The first shard has no room for another batch."""
    tokens = 690 if name == "t_train_1.bin" else SHARD_TOKENS
    return ShardRange(name=name, sha256=digest(name), tokens=tokens, start=start, stop=stop)


@dataclass(frozen=True)
class Spec:
    seed: int = 1
    attempt: str = "a"  #: distinguishes runs of one seed
    shards: tuple[ShardRange, ...] = (shard("t_train_1.bin", 0, 600), shard("t_train_2.bin", 0, 400))
    step_s: tuple[float, ...] = (0.1,) * 10
    val_losses: tuple[float, ...] = (5.5, 4.0, 3.4, 3.25)
    programs: bytes = PROGRAMS
    edit_log: Edit = list
    edit_source: Callable[[Mapping[str, str]], Mapping[str, str]] = dict

    @property
    def source_sha256(self) -> str:
        return digest(source_text(self.edit_source))

    @property
    def run_id(self) -> str:
        return f"tiny-{self.seed}-00{self.attempt}{self.seed}"


class _FakeClock:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.begun_ns = self.mono_ns = 10_000_000_000_000
        self.train_ns = 0
        self.moments: Moments = []

    def emit(self, event: runlog.AnyEvent, after_s: float = 0.0) -> None:
        self.mono_ns += round(after_s * 1e9) + 1000
        begun_h = 1 + (self.seed - 1) % 8  # after the declaration
        utc_ns = self.mono_ns - self.begun_ns + begun_h * 3_600_000_000_000
        self.moments.append(Moment(event, self.mono_ns, utc_ns))

    def train(self, seconds: float, step: int) -> float:
        """Advance by slightly different nanoseconds each time, as on a real machine."""
        step_ns = round(seconds * 1e9) + int(digest(f"{self.seed} {step}")[:8], 16) % 17 * (seconds > 0)
        self.train_ns += step_ns
        self.mono_ns += step_ns
        return self.train_s

    @property
    def train_s(self) -> float:
        return self.train_ns / 1e9


def state(when: str, spec: Spec) -> str:
    return digest(f"{when} {spec.seed}")[:16]


def moments(spec: Spec) -> Moments:
    clock, num_steps = _FakeClock(spec.seed), len(spec.step_s)
    losses = iter(spec.val_losses)
    ends = [range(part.start + BATCH_TOKENS, part.stop + 1, BATCH_TOKENS) for part in spec.shards]
    names = list(dict.fromkeys(part.name for part in spec.shards))
    at = accumulate((names.index(part.name) for part in spec.shards), max)
    places = [(number, offset) for number, offsets in zip(at, ends, strict=True) for offset in offsets]
    for event in _opening(spec, num_steps):
        clock.emit(event, after_s=0.2)
    clock.emit(runlog.ClockStart())
    for step, seconds in enumerate(spec.step_s):
        if step % 4 == 0:
            clock.emit(runlog.ClockPause("validation", clock.train_s))
            clock.emit(_val(step, next(losses)), after_s=PAUSE_S)
            clock.emit(runlog.ClockResume(clock.train_s))
        time_s, seen = clock.train(seconds, step), BATCH_TOKENS * (step + 1)
        loss = 5.0 - 0.1 * step + 0.01 * (spec.seed % 16) + 1e-5 * (spec.seed // 16 % 997)
        inputs = {"lr_scale": 1.0, "window_blocks": 3}
        clock.emit(runlog.Step(step, time_s, loss, BATCH_TOKENS, seen, places[step], inputs))
    clock.emit(runlog.ClockStop(clock.train_s))
    final = next(losses)
    clock.emit(_val(num_steps, final), after_s=PAUSE_S)
    clock.emit(runlog.HeldOut(f"{spec.seed:016x}", _val(num_steps, final)), after_s=PAUSE_S)
    clock.emit(run_end(spec, clock, final))
    return clock.moments


def run_end(spec: Spec, clock: _FakeClock, final: float) -> runlog.RunEnd:
    """The sums of an honest run whose log began after four seconds."""
    log_s = (clock.mono_ns - clock.begun_ns) / 1e9
    num_vals = sum(isinstance(moment.event, runlog.Val) for moment in clock.moments)
    spent = {"compile": 0.5, "warm-up": 0.2, "step": clock.train_s, "evaluation": PAUSE_S * (num_vals + 1)}
    return runlog.RunEnd(
        status="finished",
        val_loss=final,
        train_time_s=clock.train_s,
        cold_wall_s=4.0 + log_s,
        compile_s=0.4,
        warmup_s=0.2,
        val_s=VAL_S * num_vals,
        data_wait_s=0.01,
        peak_bytes=2**20,
        final_hash=state("end", spec),
        data=DataRead(spec.shards, shard("t_val_0.bin", 0, VAL_TOKENS), "a" * 64),
        first_batch_sha256="b" * 64,
        throttled_s=0.0,
        phases={"start": 4.0 + log_s - sum(spent.values()), **spent},
    )


def _opening(spec: Spec, num_steps: int) -> list[runlog.AnyEvent]:
    tokens, shapes = num_steps * BATCH_TOKENS, {"table": (1000, 900), "out": (100_000,)}
    committed = commit_of(spec.edit_source), False, LOCK, layout.sha256(LOCK_RAW)
    return [
        runlog.RunStart(
            format=2,
            run_id=spec.run_id,
            track="forged@1",
            track_sha256=track.sha256("forged"),
            recipe="tiny",
            recipe_revision=1,
            overrides={"config.lr": "0.02"},
            seed=spec.seed,
            num_steps=num_steps,
            source_sha256=spec.source_sha256,
            config=CONFIG,
            config_sha256=layout.config_sha256(CONFIG),
        ),
        runlog.Preflight("cpu", "cpu", 8, SOFTWARE, {"XLA_FLAGS": ""}, 50.0, *committed),
        runlog.DataReady("forged", ["t_train_1.bin", "t_train_2.bin"], "t_val_0.bin", VAL_TOKENS, "a" * 64),
        runlog.Exported(layout.sha256(spec.programs), len(spec.programs), 0.1),
        runlog.Plan(1_000_000, BATCH_TOKENS, tokens, 6e6, 2_000_000, 2**21, shapes=shapes),
        runlog.Compile("train/0", 0.3),
        runlog.Compile("eval", 0.1),
        runlog.WarmupStart(state("start", spec)),
        runlog.WarmupEnd(state("start", spec), 2, 0.2),
    ]


def _val(step: int, loss: float) -> runlog.Val:
    nll_sum = loss * VAL_TOKENS
    return runlog.Val(step, nll_sum / VAL_TOKENS, VAL_TOKENS, nll_sum.hex(), VAL_S)


def chain(log: Moments) -> list[runlog.Line]:
    lines, prev = [], runlog.GENESIS
    for number, (event, mono_ns, utc_ns) in enumerate(log):
        utc = (EPOCH + timedelta(microseconds=utc_ns // 1000)).isoformat(timespec="microseconds")
        lines.append(runlog.Line(number, mono_ns, utc, prev, event))
        prev = runlog.digest(lines[-1].encode())
    return lines


def write_code(root: Path, spec: Spec) -> None:
    (root / "source.txt").write_text(source_text(spec.edit_source))
    (root / archive.name_of(layout.sha256(spec.programs))).write_bytes(spec.programs)


def write_run(root: Path, spec: Spec) -> Path:
    """Writes one run into a record, as one of its batch if there is one; returns its folder."""
    honest, batch = moments(spec), root / layout.BATCH
    if batch.exists():
        honest = change(runlog.RunStart, batch_sha256=layout.sha256(batch.read_bytes()))(honest)
    lines = chain(spec.edit_log(list(honest)))
    folder = root / "runs" / spec.run_id
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(line.encode() + b"\n" for line in lines))
    return folder


def declaration(spec: Spec, seeds: Sequence[int]) -> Preregistration:
    start = spec.edit_log(moments(spec))[0].event
    assert isinstance(start, runlog.RunStart)
    return Preregistration(
        track=TrackRef(start.track, start.track_sha256),
        recipe=Recipe(start.recipe, start.recipe_revision, start.overrides),
        config_sha256=start.config_sha256,
        source_sha256=start.source_sha256,
        num_devices=8,
        microbatches=8,
        attention="auto",
        num_steps=len(spec.step_s),
        seeds=tuple(seeds),
        seeds_chosen=True,
        looks=(Look(len(seeds), 0.001),),
        expected_loss=None,
        created_utc="2026-10-02T00:00:00+00:00",
        purpose=start.purpose,
    )


def declare(root: Path, promise: Preregistration, spec: Spec = Spec()) -> Path:
    root.mkdir(exist_ok=True)
    write_code(root, spec)
    (root / layout.BATCH).write_bytes(encode(promise))
    return root


def forge(
    root: Path,
    *,
    seeds: Sequence[int] = (1, 2),
    declared: Sequence[int] = (),
    promise: Callable = copy,
    **spec,
) -> Path:
    """Replaces a folder by a batch with one run for each seed, all made from one spec."""
    shutil.rmtree(root, ignore_errors=True)
    first = Spec(seed=seeds[0], **spec)
    declare(root, promise(declaration(first, declared or seeds)), first)
    for seed in seeds:
        write_run(root, Spec(seed=seed, **spec))
    assemble(root, title="forged", authors=["nobody"])
    return root


def alone(root: Path, *specs: Spec) -> None:
    root.mkdir()
    write_code(root, specs[0])
    for spec in specs:
        write_run(root, spec)
    assemble(root)


def change(kind: type[runlog.Event], *, at: int | None = None, **fields) -> Edit:
    """Edit fields of all events of a kind, or of the one at a place among them."""

    def edit(log: Moments) -> Moments:
        places = [place for place, moment in enumerate(log) if isinstance(moment.event, kind)]
        for place in places if at is None else [places[at]]:
            new = {k: v(log[place].event) if callable(v) else v for k, v in fields.items()}
            log[place] = log[place]._replace(event=msgspec.structs.replace(log[place].event, **new))
        return log

    return edit


def both(*edits: Edit) -> Edit:

    def edit(log: Moments) -> Moments:
        for one in edits:
            log = one(log)
        return log

    return edit
