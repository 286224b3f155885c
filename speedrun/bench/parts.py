"""The parts of `speedrun bench all`, most important first: for half an hour on one GPU, and tiny for a rehearsal."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from speedrun.ground.errors import unknown

_COMPILES_S, _RUNS_S = 300.0, 120.0


class Part(NamedTuple):
    """A command of `speedrun`."""

    name: str
    argv: tuple[str, ...]
    limit_s: float
    alone: bool = False  #: in a process of its own, while no other holds a device
    makes: str = ""  #: a new folder in OUT; that of an earlier try is removed
    ends_well: tuple[int, ...] = (0,)  #: exit codes that count as success


class Size(NamedTuple):
    """Options that set the size of every measurement."""

    recipe: tuple[str, ...]  #: of a step
    one_sequence: tuple[str, ...]  #: added for a step on one sequence, the share of one of eight GPUs
    steps: tuple[str, ...]  #: number of timed steps
    windows: dict[str, int]  #: name of an attention window, and a step of the schedule that has it
    text: tuple[str, ...]  #: of steps on real text
    run: tuple[str, ...]  #: added for the short run
    text_steps: int  #: steps of the short run and of the comparison with a rival
    text_tokens: int  #: tokens of each of those steps
    attention: tuple[str, ...]
    attention_windows: tuple[int, ...]
    norm: tuple[str, ...]
    head: tuple[str, ...]
    muon: tuple[str, ...]
    loader: tuple[str, ...]
    agree: tuple[str, ...]


_RECORD21 = ("--recipe", "record21", "--devices", "1")
_ONE = ("--microbatches", "1", "--set", "stages.0.num_sequences=1")

FULL = Size(
    recipe=_RECORD21,
    one_sequence=_ONE,
    steps=("--steps", "5"),
    windows={"w1": 0, "w7": 787, "w14": 1769},
    text=(*_RECORD21, *_ONE),
    run=("--set", "stages.0.num_steps=60", "--set", "eval_seq_len=16384"),
    text_steps=60,
    text_tokens=49_152,
    attention=("--tokens", "49152", "--heads", "6", "--dim", "128", "--block", "128"),
    attention_windows=(1, 2, 4, 7, 10, 14),
    norm=("--tokens", "49152", "--heads", "6", "--dim", "128"),
    head=("--tokens", "49152", "--dim", "768"),
    muon=("--recipe", "record21", "--devices", "1"),
    loader=(),
    agree=(),
)

_SMOKE = ("--recipe", "smoke", "--devices", "1", "--set", "stages.0.seq_len=64")
_TINY_WEB = (
    *("--recipe", "webmini", "--devices", "1", "--microbatches", "1", "--set", "stages.0.num_sequences=1"),
    *("--set", "config.model_dim=32", "--set", "config.num_heads=2", "--set", "config.head_dim=16"),
    *("--set", "config.mlp_dim=64"),
)

TINY = Size(
    recipe=_SMOKE,
    one_sequence=_ONE,
    steps=("--steps", "2"),
    windows={"w1": 0, "w3": 279},
    text=_TINY_WEB,
    run=("--set", "stages.0.num_steps=6"),
    text_steps=6,
    text_tokens=512,
    attention=("--tokens", "512", "--heads", "2", "--dim", "16", "--block", "32"),
    attention_windows=(1, 4),
    norm=("--tokens", "64", "--heads", "2", "--dim", "32"),
    head=("--tokens", "64", "--dim", "32", "--vocab", "512"),
    muon=("--recipe", "smoke", "--devices", "1"),
    loader=("--seq-len", "256", "--step-ms", "1", "--steps", "3"),
    agree=("--tiny",),
)

_FORMS = ("triton", "flash3", "banded")  #: of attention
_KERNELS = ("triton", "flash3", "qk-norm", "mlp-bf16", "mlp-fp8", "head-bf16", "head-fp8", "banded")


def parts(size: Size, out: Path, shards: Path, rival: Path | None) -> list[Part]:
    """Return all parts in the order in which they run.

    `shards` is a folder of tokens to train on and to score, `rival` one with another program (`bench.rival`).
    """
    return [
        _bench("target"),
        *(_agree(kernel, size) for kernel in _KERNELS),
        *(_step(form, window, size) for form in _FORMS for window in size.windows),
        *(_step(form, window, size, one=True) for form in _FORMS[:2] for window in _ends(size)),
        _run(size, out, shards),
        *([_rival(size, shards, rival)] if rival else []),
        *(_profile(window, size, out) for window in _ends(size)),
        _step("auto", _ends(size)[1], size, launches=True),
        _bench("health", limit_s=_RUNS_S),
        Part("doctor", ("doctor", "--json"), _RUNS_S, ends_well=(0, 1)),
        _bench("norm", *size.norm),
        _bench("muon", *size.muon, limit_s=_COMPILES_S),
        _bench("head", *size.head),
        *(_attention(window, size) for window in size.attention_windows),
        _bench("loader", *size.loader),
        # Both choose their own devices, which a process can do once.
        Part("plan", ("plan", "--recipe", "record21", "--devices", "1", "--json"), _RUNS_S, alone=True),
        Part(
            "estimate",
            ("attempt", "--track", "single-gpu", "--dry-run"),
            _RUNS_S,
            alone=True,
            ends_well=(0, 1),
        ),
    ]


def chosen(parts: Sequence[Part], names: str) -> list[Part]:
    """Return the parts of these names, split at commas, in the order of all; raise UsageError for an unknown name."""
    asked = [name for name in names.split(",") if name]
    known = [part.name for part in parts]
    for name in asked:
        if name not in known:
            raise unknown("part", name, known)
    return [part for part in parts if part.name in asked]


def _ends(size: Size) -> list[str]:
    """Return the narrowest and the widest window."""
    narrowest, *_, widest = size.windows
    return [narrowest, widest]


def _bench(what: str, *words: str, limit_s: float = _RUNS_S, name: str = "") -> Part:
    return Part(name or what, ("bench", what, *words, "--json"), limit_s)


def _agree(kernel: str, size: Size) -> Part:
    return _bench("agree", kernel, *size.agree, limit_s=2 * _RUNS_S, name=f"agree-{kernel}")


def _step(form: str, window: str, size: Size, *, one: bool = False, launches: bool = False) -> Part:
    words = [*size.recipe, "--attention", form, "--first-step", str(size.windows[window]), *size.steps]
    words += [*(size.one_sequence if one else ()), *(["--no-command-buffers"] if launches else [])]
    kind = "rank" if one else "step"
    name = f"{kind}-{form}-{window}" + ("-no-command-buffers" if launches else "")
    return _bench("step", *words, limit_s=_COMPILES_S, name=name)


def _run(size: Size, out: Path, shards: Path) -> Part:
    words = (
        "run",
        "--track",
        "webmini",
        *size.text,
        *size.run,
        "--data",
        str(shards),
        "--out",
        str(out / "record"),
    )
    return Part("run", words, _COMPILES_S, alone=True, makes="record", ends_well=(0, 1))


def _rival(size: Size, shards: Path, rival: Path) -> Part:
    steps = ("--steps", str(size.text_steps), "--data", str(shards))
    return Part("rival", ("bench", "rival", str(rival), *size.text, *steps, "--json"), 450.0, alone=True)


def _profile(window: str, size: Size, out: Path) -> Part:
    first = ("--first-step", str(size.windows[window]), "--steps", "2", "--top", "40")
    trace = f"trace-{window}"
    words = ("profile", *size.recipe, *size.one_sequence, *first, "--out", str(out / trace), "--json")
    return Part(f"profile-{window}", words, _COMPILES_S, makes=trace)


def _attention(window: int, size: Size) -> Part:
    return _bench("attention", *size.attention, "--window", str(window), name=f"attention-w{window}")
