"""This machine: what it can run (`doctor`), and how far operations and steps are from their bounds on it.

`bench` times them, `profile` traces them.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from speedrun.base import track as tracks
from speedrun.base.console import clean
from speedrun.base.errors import UsageError
from speedrun.cli import options as cli

if TYPE_CHECKING:
    from speedrun.machine.check_devices import Check
    from speedrun.machine.profile import Profile, Row, Usage
    from speedrun.train.program import Program


_COLOURS = {"ok": "green", "note": "yellow", "bad": "red"}


@cli.new_command("speedrun doctor", "speedrun doctor --track main-8xh100", "speedrun doctor --json")
@cli.option(
    "--track NAME",
    str,
    "Only what this track needs. Default: all tracks, with a proposal for the hardest one that fits.",
)
@click.pass_context
def doctor(ctx: click.Context, *, track: str | None) -> cli.Answer:
    """Check what this machine can run, and print the next command.

    Exits with 0 if the track can run here (its data may be missing), else with 1.
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
    report = {
        "ready": ready,
        "track": rules.name,
        "qualifies": [check.name[6:] for check in checks if check.name[:6] == "track " and check.ok],
        "checks": [{**msgspec.structs.asdict(check), "mark": check.mark} for check in checks],
        "next": following,
    }
    return cli.Answer(report, [f"next: {following}"], 0 if ready else 1)


def _print(check: "Check") -> None:
    """Print a check at once, as some take seconds."""
    mark = click.style(f"{check.mark:<4}", fg=_COLOURS[check.mark])
    click.echo(f"{mark}  {clean(f'{check.name}: {check.found}')}")


@cli.new_command("speedrun bench head", "speedrun bench attention", cls=cli.Group)
def bench() -> None:
    """Time operations side by side, in one run."""


def _answer(found: Any) -> cli.Answer:
    """Answer with timings, one or several, which know their own text."""
    return cli.Answer(found, found if isinstance(found, list) else [found])


# --- operations ------------------------------------------------------------------------------------------------


@cli.new_command("speedrun bench head", "speedrun bench head --tokens 4096 --dim 768", of=bench)
@cli.option("--tokens N", cli.COUNT, "Rows of the logits.", 1024, name="num_tokens")
@cli.option("--dim N", cli.COUNT, "Width of the model.", 128, name="model_dim")
@cli.option("--vocab N", cli.COUNT, "Columns of the logits.", 50304, name="vocab_size")
def head(**sizes: int) -> cli.Answer:
    """Loss and gradients of the vocabulary head, against its definition and its three matrix products."""
    from speedrun.machine import bench_kernels

    return _answer(bench_kernels.head(**sizes))


@cli.new_command(
    "speedrun bench attention",
    "speedrun bench attention --tokens 49152 --heads 6 --dim 128 --window 14 --block 128 --document 600",
    of=bench,
)
@cli.option("--tokens N", cli.COUNT, "Sequence length.", 2048, name="num_tokens")
@cli.option("--heads N", cli.COUNT, "Number of heads.", 4, name="num_heads")
@cli.option("--dim N", cli.COUNT, "Width of a head.", 32, name="head_dim")
@cli.option("--window N", cli.COUNT, "Blocks that a query sees.", 4, name="window_blocks")
@cli.option("--block N", cli.COUNT, "Tokens of a block.", 64, name="block_tokens")
@cli.option("--document N", cli.COUNT, "Tokens of a document.", 600, name="document_tokens")
def attention(**sizes: int) -> cli.Answer:
    """Attention and its gradients, in every form that runs here, against the definition."""
    from speedrun.machine import bench_kernels

    return _answer(bench_kernels.attention(**sizes))


@cli.new_command("speedrun bench norm", "speedrun bench norm --tokens 49152 --dim 128", of=bench)
@cli.option("--tokens N", cli.COUNT, "Sequence length.", 2048, name="num_tokens")
@cli.option("--heads N", cli.COUNT, "Number of heads.", 4, name="num_heads")
@cli.option("--dim N", cli.Integer(4), "Width of a head.", 32, name="head_dim")
def norm(**sizes: int) -> cli.Answer:
    """QK-norm and rotary with their gradients, in every form that runs here, against the definition."""
    from speedrun.machine import bench_kernels

    return _answer(bench_kernels.norm(**sizes))


@cli.new_command("speedrun bench muon", "speedrun bench muon --recipe record21 --devices 8", of=bench)
@cli.recipe_option("smoke", "Whose matrices.")
@cli.option("--devices N", click.Choice(["1", "2", "4", "8"]), "Time the share of one of N.", "1")
@cli.settings_option
def muon(*, recipe: str, devices: str, settings: tuple[str, ...]) -> cli.Answer:
    """Newton-Schulz on the matrices of one device, against its products alone and against optax."""
    one = _program(recipe, settings)
    from speedrun.machine import bench_kernels

    return _answer(bench_kernels.muon(one, int(devices)))


@cli.new_command("speedrun bench loader", "speedrun bench loader --data data/fineweb10B", of=bench)
@cli.option(
    "--data DIR",
    cli.FOLDER,
    "Folder of shards. Default: two of 100 million tokens, made for this and removed.",
)
def loader(*, data: Path | None) -> cli.Answer:
    """Batches from shards, against what eight H100 consume: tokens per second, waiting, the first batch."""
    from speedrun.machine import bench_step as timing

    if data is None:
        click.echo("writes two shards of 100 million tokens, and removes them", err=True)
    with nullcontext(timing.folder_shards(data)) if data else timing.synthetic_shards() as shards:
        return _answer(timing.loader(shards))


@cli.new_command("speedrun bench target", of=bench)
def target() -> cli.Answer:
    """Print how XLA describes this GPU, to compile for it elsewhere (`speedrun/base/accelerators.py`)."""
    from speedrun.machine.rates import described

    text = described()
    return cli.Answer({"target": text}, [text])


# --- steps of a recipe -----------------------------------------------------------------------------------------

#: The options whose values `asked_program` takes.
program_options = cli.combined(
    cli.recipe_option("smoke", "What to train."),
    cli.option("--devices N", cli.COUNT, "Default: all there are."),
    cli.option("--microbatches N", cli.COUNT, "Parts of a step's batch.", 8),
    cli.attention_option,
    cli.first_step_option,
    cli.settings_option,
)


def asked_program(*, first_step: int, **asked: Any) -> "Program":
    """Return the program that the options ask for.

    Raises:
        UsageError: for a step past the end; what recipe, devices and kernels refuse; too little memory.
    """
    program = _program(**asked)
    from speedrun.train import footprint

    num_steps = program.recipe.num_steps
    if first_step >= num_steps:
        raise UsageError(f"--first-step {first_step}: {asked['recipe']} has {num_steps} steps; need less")
    return footprint.fitted_here(program)


def _program(
    recipe: str,
    settings: tuple[str, ...],
    devices: int | None = 1,
    microbatches: int = 8,
    attention: str = "auto",
) -> "Program":
    overrides = cli.parse_settings(settings)
    import jax

    from speedrun import recipes
    from speedrun.base import mesh
    from speedrun.train.program import Program

    chosen = recipes.load(recipe).override(overrides)
    mesh.prepare("any")
    return Program(chosen, mesh.make_mesh(devices or len(jax.devices())), microbatches, attention)


@cli.new_command("speedrun bench step --recipe smoke", "speedrun bench step --steps 20", of=bench)
@program_options
@cli.option("--steps N", cli.COUNT, "Number of timed steps.", 10)
@cli.option("--data DIR", cli.FOLDER, "Shards. Default: synthetic ids with the document lengths of FineWeb.")
@cli.flag("--no-command-buffers", "XLA launches kernels one by one.", "one_by_one")
def step(*, steps: int, data: Path | None, first_step: int, one_by_one: bool, **asked: Any) -> cli.Answer:
    """The training step as in a run, one ahead: milliseconds, tokens per second, MFU, memory."""
    program = asked_program(first_step=first_step, **asked)
    from speedrun.machine import bench_step as timing

    shards = timing.folder_shards(data, None) if data else ()
    when = {"num_steps": steps, "first_step": first_step}
    return _answer(timing.step(program, **when, shards=shards, command_buffers=not one_by_one))


@cli.new_command("speedrun bench rival ../rival --data DIR --recipe record21 --steps 60", of=bench)
@click.argument("folder", type=cli.FOLDER)
@cli.option("--data DIR", cli.FOLDER, "Shards that both read.", required=True)
@cli.recipe_option("record21", "Ours.")
@cli.option("--steps N", cli.COUNT, "Of each run.", 60)
@cli.first_step_option
@cli.option("--devices N", cli.COUNT, "Of each program.", 1)
@cli.option("--microbatches N", cli.COUNT, "Parts of a step's batch.", 1)
@cli.attention_option
@cli.settings_option
def rival(*, folder: Path, steps: int, first_step: int, settings: tuple[str, ...], **same: Any) -> cli.Answer:
    """Time our step and another program's in turns, ABBA, on the same tokens; FOLDER/run is that program.

    It is called with --shards DIR --steps N --first-step I --sequences N --seq-len N, and writes a line of JSON for
    each step: {"step": i, "time_s": seconds since the first began, "loss": nats}.
    """
    from speedrun import recipes
    from speedrun.machine import bench_step as timing

    program = timing.executable(folder)
    chosen = recipes.load(same["recipe"]).override(cli.parse_settings(settings))
    stage = chosen.stages[chosen.stage_of(first_step)]
    which = ["--steps", str(steps), "--first-step", str(first_step)]
    ours = [sys.executable, "-m", "speedrun", "bench", "step", "--json", *which]
    ours += [word for name, value in same.items() for word in (f"--{name}", str(value))]
    ours += [word for text in settings for word in ("--set", text)]
    shape = ["--sequences", str(stage.num_sequences), "--seq-len", str(stage.seq_len)]
    theirs = [str(program), "--shards", str(same["data"]), *which, *shape]
    return _answer(timing.compare(ours, theirs, steps, lambda line: click.echo(line, err=True)))


_GAPS = 3  #: shown of each device
_SHOWN_SHARE = 0.01


@cli.new_command(
    "speedrun profile --recipe smoke",
    "speedrun profile --recipe record21 --devices 1 --first-step 1769 --out trace",
)
@program_options
@cli.option("--steps N", cli.COUNT, "Number of traced steps.", 3)
@cli.option("--top N", cli.COUNT, "Rows of the table.", 20)
@cli.option("--out DIR", cli.FOLDER, "Keep the trace, for XProf or Perfetto.")
def profile(*, steps: int, first_step: int, top: int, out: Path | None, **asked: Any) -> cli.Answer:
    """Trace training steps on synthetic ids: longest operations, idle gaps, overlap of collectives.

    Bytes are those of the compiled program, without caching.
    """
    program = asked_program(first_step=first_step, **asked)
    from speedrun.machine import profile as profiles

    found = profiles.profile(program, num_steps=steps, first_step=first_step, folder=out)
    rows, usage = [row._asdict() for row in found.rows[:top]], [_facts(one) for one in found.devices]
    facts = {**found._asdict(), "rows": rows, "devices": usage, "shares": found.shares}
    device = f"{program.num_devices} x {program.mesh.devices.flat[0].device_kind}"
    shares = ", ".join(f"{kind} {share:.1%}" for kind, share in found.shares.items() if share >= _SHOWN_SHARE)
    lines = [
        f"step    {found.step_ms:.2f} ms, {steps} steps of {program.recipe.name} on {device}",
        *map(_device, found.devices),
        f"kinds   {shares}",
        *_table(found, top),
        *([] if out is None else [f"trace   {out}"]),
    ]
    return cli.Answer(facts, lines)


def _facts(usage: "Usage") -> dict[str, object]:
    gaps = [gap._asdict() for gap in usage.gaps[:_GAPS]]
    return {**usage._asdict(), "idle_ns": usage.idle_ns, "gaps": gaps}


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
        for gap in usage.gaps[:_GAPS]
    ]
    return f"dev {usage.device:<4}{shares}{''.join(gaps)}"


def _table(found: "Profile", top: int) -> list[str]:
    """Format the longest operations, then all others in one row."""
    shown, rest = found.rows[:top], found.rows[top:]
    lines = [
        f"{'ms':>9} {'share':>6} {'calls':>6} {'GB/s':>6}  {'kind':<24} name, source",
        *map(_line, shown),
    ]
    if rest:
        ms, share = sum(row.ms for row in rest), sum(row.share for row in rest)
        lines.append(f"{ms:9.3f} {share:6.1%} {'':>6} {'':>6}  {len(rest)} others")
    return lines


def _line(row: "Row") -> str:
    rate = "" if row.gb_per_s is None else f"{row.gb_per_s:.0f}"
    kind = row.kind if len(row.kind) <= 24 else f"{row.kind[:23]}~"
    return (
        f"{row.ms:9.3f} {row.share:6.1%} {row.calls:6.1f} {rate:>6}  {kind:<24} {row.name} {row.source[-70:]}"
    )
