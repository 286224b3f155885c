"""The commands about this machine: `doctor`, `bench` and `profile`."""

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict

import click
from msgspec.structs import replace

from speedrun.base import track as tracks
from speedrun.base.console import clean
from speedrun.base.errors import UsageError
from speedrun.base.subprocesses import say
from speedrun.cli import options as cli
from speedrun.machine.check_devices import Check

if TYPE_CHECKING:
    from speedrun.machine.bench_kernels import Timing, Timings
    from speedrun.machine.bench_step import Comparison, StepTimings
    from speedrun.machine.profile import Profile, Row, Usage
    from speedrun.train.program import Program


Report = TypedDict(
    "Report", {"ready": bool, "track": str, "qualifies": list[str], "checks": list[Check], "next": str}
)
_COLOURS = {"ok": "green", "note": "yellow", "bad": "red"}


@cli.command("speedrun doctor", "speedrun doctor --track main-8xh100", "speedrun doctor --json")
def doctor(ctx: click.Context, *, track: Annotated[str | None, "--track NAME"] = None) -> cli.Answer[Report]:
    """Check what this machine can run, and print the next command.

    Exits with 0 if the track can run here (its data may be missing), else with 1.

    Options:
        track: Check only what this track needs. Default: all, with the exit code of the smoke track.
    """
    from speedrun.machine import checkup

    rules, checks = tracks.load(track or checkup.SMOKE), []
    for check in checkup.checks(rules, alone=track is not None):
        checks.append(check)
        if not ctx.params["as_json"]:
            _print(check)
    ready = all(check.ok for check in checks if check.needed)
    again = "speedrun doctor" + (f" --track {track}" if track else "")
    repair = f"repair what is marked above, then: {again}"
    following = checkup.advice(checks, asked=track) if ready else repair
    qualifies = [check.name[6:] for check in checks if check.name[:6] == "track " and check.ok]
    report = Report(ready=ready, track=rules.name, qualifies=qualifies, checks=checks, next=following)
    return cli.Answer(report, [f"next: {following}"], 0 if ready else 1)


def _print(check: Check) -> None:
    """Print a check at once, since others take seconds."""
    mark = click.style(f"{check.mark:<4}", fg=_COLOURS[check.mark])
    click.echo(f"{mark}  {clean(f'{check.name}: {check.found}')}")


@click.group(epilog=cli.epilog("speedrun bench head", "speedrun bench attention"))
def bench() -> None:
    """Time operations against each other and their bounds."""


def _answer(found: Any) -> cli.Answer[Any]:
    return cli.Answer(found, found if isinstance(found, list) else [found])


@cli.command("speedrun bench head", "speedrun bench head --tokens 4096 --dim 768", of=bench, silent=True)
def head(
    *,
    tokens: Annotated[cli.Count, "Rows of the logits."] = 1024,
    dim: Annotated[cli.Count, "Width of the model."] = 128,
    vocab: Annotated[cli.Count, "Columns of the logits."] = 50304,
) -> "cli.Answer[list[Timing]]":
    """Loss and gradients of the vocabulary head, against its definition and its three matrix products."""
    from speedrun.machine import bench_kernels

    return _answer(bench_kernels.head(num_tokens=tokens, model_dim=dim, vocab_size=vocab))


class AttentionSizes(NamedTuple):
    """Options of `bench attention`."""

    num_tokens: Annotated[cli.Count, "--tokens N", "Sequence length."] = 2048
    num_heads: Annotated[cli.Count, "--heads N", "Number of heads."] = 4
    head_dim: Annotated[cli.Count, "--dim N", "Width of a head."] = 32
    window_blocks: Annotated[cli.Count, "--window N", "Blocks that a query sees."] = 4
    block_tokens: Annotated[cli.Count, "--block N", "Tokens of a block."] = 64
    document_tokens: Annotated[cli.Count, "--document N", "Tokens of a document."] = 600


@cli.command(
    "speedrun bench attention",
    "speedrun bench attention --tokens 49152 --heads 6 --dim 128 --window 14 --block 128 --document 600",
    of=bench,
    silent=True,
)
def attention(sizes: AttentionSizes) -> "cli.Answer[Timings]":
    """Attention and its gradients, in every implementation that runs here, against the definition."""
    from speedrun.machine import bench_kernels

    return _answer(bench_kernels.attention(**sizes._asdict()))


class ProgramOptions(NamedTuple):
    """Options of a program to time."""

    recipe: Annotated[cli.Recipe, "Recipe to train."] = "smoke"
    devices: Annotated[cli.Count | None, "Number of devices. Default: all."] = None
    microbatches: Annotated[cli.Count, "Parts of a step's batch."] = 8
    attention: cli.Attention = "auto"
    first_step: cli.FirstStep = 0
    settings: cli.Settings = cli.UNCHANGED

    def program(self) -> "Program":
        """Return the program; raise UsageError if recipe, devices or kernels refuse an option."""
        import jax

        from speedrun import recipes
        from speedrun.base import mesh
        from speedrun.train.program import Program

        chosen = recipes.load(self.recipe).override(self.settings)
        if self.first_step >= chosen.num_steps:
            found = f"--first-step {self.first_step}: {self.recipe} has {chosen.num_steps} steps"
            raise UsageError(f"{found}; need fewer")
        mesh.prepare("any")
        devices = mesh.make_mesh(self.devices or len(jax.devices()))
        return Program(chosen, devices, self.microbatches, self.attention)


@cli.command("speedrun bench step --recipe smoke", "speedrun bench step --steps 20", of=bench, silent=True)
def step(
    asked: ProgramOptions,
    *,
    steps: Annotated[cli.Count, "Number of timed steps."] = 10,
    data: Annotated[cli.Folder | None, "--data DIR"] = None,
) -> "cli.Answer[StepTimings]":
    """The training step as in a run: milliseconds, tokens per second, MFU, memory.

    Options:
        data: Folder of shards. Default: synthetic ids with the document lengths of FineWeb.
    """
    program = asked.program()
    from speedrun.machine import bench_step as timing
    from speedrun.train.memory import fitted_here

    shards = timing.folder_shards(data) if data else ()
    when = {"num_steps": steps, "first_step": asked.first_step}
    return _answer(timing.step(fitted_here(program), **when, shards=shards))


@cli.command("speedrun bench baseline ../baseline --data DIR --recipe record21 --steps 60", of=bench)
def baseline(
    folder: cli.Folder,
    *,
    data: Annotated[cli.Folder, "--data DIR", "Shards for both programs."],
    recipe: Annotated[cli.Recipe, "Our recipe."] = "record21",
    steps: Annotated[cli.Count, "Steps of each run."] = 60,
    turns: Annotated[cli.Count, "Repetitions of ABBA."] = 1,
    first_step: cli.FirstStep = 0,
    devices: Annotated[cli.Count, "Devices of each program."] = 1,
    microbatches: Annotated[cli.Count, "Parts of a step's batch."] = 8,
    attention: cli.Attention = "auto",
    settings: cli.Settings = cli.UNCHANGED,
) -> "cli.Answer[Comparison]":
    """Time our step and that of the program FOLDER/run in turns (ABBA), on the same tokens.

    The program is called with --shards DIR --steps N --first-step I --sequences N --seq-len N --start FILE. For each
    step it prints a line of JSON: {"step": i, "time_s": seconds since the first step began, "loss": nats}. FILE, for
    np.load, has our initial parameters and the settings of the recipe.
    """
    from speedrun import recipes
    from speedrun.machine import bench_step as timing

    program = timing.executable(folder)
    chosen = recipes.load(recipe).override(settings)
    stage = chosen.stages[chosen.stage_of(first_step)]
    which = ["--steps", str(steps), "--first-step", str(first_step)]
    ours = [sys.executable, "-m", "speedrun", "bench", "step", "--json", *which]
    ours += ["--data", str(data), "--recipe", recipe, "--attention", attention]
    ours += ["--devices", str(devices), "--microbatches", str(microbatches)]
    ours += [word for pair in settings.items() for word in ("--set", "=".join(pair))]
    shape = ["--sequences", str(stage.num_sequences), "--seq-len", str(stage.seq_len)]
    with tempfile.TemporaryDirectory() as scratch:
        start = Path(scratch) / "start.npz"
        timing.write_start(chosen, start)
        theirs = [str(program), "--shards", str(data), *which, *shape, "--start", str(start)]
        return _answer(timing.compare(ours, theirs, steps, turns, say))


_GAPS = 3  #: shown of each device
_SHOWN_SHARE = 0.01


@cli.command(
    "speedrun profile --recipe smoke",
    "speedrun profile --recipe record21 --devices 1 --first-step 1769 --out trace",
    silent=True,
)
def profile(
    asked: ProgramOptions,
    *,
    steps: Annotated[cli.Count, "Number of traced steps."] = 3,
    top: Annotated[cli.Count, "Rows of the table."] = 20,
    out: Annotated[cli.Folder | None, "--out DIR", "Keep the trace, for XProf or Perfetto."] = None,
) -> "cli.Answer[Profile]":
    """Trace training steps on synthetic ids: longest operations, idle gaps, overlap of collectives."""
    program = asked.program()
    from speedrun.machine import profile as profiles
    from speedrun.train.memory import fitted_here

    found = profiles.profile(fitted_here(program), num_steps=steps, first_step=asked.first_step, folder=out)
    devices = [replace(one, gaps=one.gaps[:_GAPS]) for one in found.devices]
    device = f"{program.num_devices} x {program.mesh.devices.flat[0].device_kind}"
    shares = ", ".join(f"{kind} {share:.1%}" for kind, share in found.shares.items() if share >= _SHOWN_SHARE)
    lines = [
        f"step    {found.step_ms:.2f} ms, {steps} steps of {program.recipe.name} on {device}",
        *map(_device, devices),
        f"kinds   {shares}",
        *(
            f"model   {one.kind} {one.ms:.2f} ms, predicted {one.predicted_ms:.2f}, ratio "
            f"{one.ms / one.predicted_ms:.2f}"
            for one in found.kinds
        ),
        *_table(found, top),
        *([] if out is None else [f"trace   {out}"]),
    ]
    return cli.Answer(replace(found, rows=found.rows[:top], devices=devices), lines)


def _device(usage: "Usage") -> str:
    parts = {
        "computes": usage.compute_ns,
        "sends": usage.collective_ns,
        "hidden behind computing": usage.hidden_ns,
        "idle": usage.idle_ns,
    }
    shares = ", ".join(f"{name} {ns / usage.span_ns:.1%}" for name, ns in parts.items())
    gaps = [
        f"\n        idle {gap.length_ns / 1e6:.3f} ms after {gap.after}, before {gap.before}"
        for gap in usage.gaps
    ]
    return f"dev {usage.device:<4}{shares}{''.join(gaps)}"


def _table(found: "Profile", top: int) -> list[str]:
    """Format the longest operations, then all others in one row."""
    shown, rest = found.rows[:top], found.rows[top:]
    lines = [f"{'ms':>9} {'share':>6} {'calls':>6}  {'kind':<24} name, source", *map(_line, shown)]
    if rest:
        ms, share = sum(row.ms for row in rest), sum(row.share for row in rest)
        lines.append(f"{ms:9.3f} {share:6.1%} {'':>6}  {len(rest)} others")
    return lines


def _line(row: "Row") -> str:
    kind = row.kind if len(row.kind) <= 24 else f"{row.kind[:23]}~"
    return f"{row.ms:9.3f} {row.share:6.1%} {row.calls:6.1f}  {kind:<24} {row.name} {row.source[-70:]}"
