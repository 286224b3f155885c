"""`speedrun bench`: how far an operation is from its bound on this machine."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from speedrun.cli import data_prep, measure
from speedrun.cli.options import Group, Integer, example, json_option, parse_settings, settings_option
from speedrun.cli.program import asked_program, program_options
from speedrun.ground.errors import UsageError

if TYPE_CHECKING:
    from speedrun.bench.timing import FormTimings, Timing


@click.command(cls=Group, epilog=example("speedrun bench head", "speedrun bench attention"))
def command() -> None:
    """Time operations side by side, in one run."""


command.add_command(measure.everything, "all")
command.add_command(measure.rival)
command.add_command(measure.target)


@command.command(epilog=example("speedrun bench head", "speedrun bench head --tokens 4096 --dim 768"))
@click.option("--tokens", type=Integer(1), default=1024, show_default=True, help="Rows of the logits.")
@click.option("--dim", type=Integer(1), default=128, show_default=True, help="Width of the model.")
@click.option("--vocab", type=Integer(1), default=50304, show_default=True, help="Columns of the logits.")
@json_option
def head(*, tokens: int, dim: int, vocab: int, as_json: bool) -> None:
    """Loss and gradients of the vocabulary head, against its definition and its three matrix products."""
    from speedrun.bench.head import head as measure

    _tell(measure(num_tokens=tokens, model_dim=dim, vocab_size=vocab), as_json=as_json)


@command.command(epilog=example("speedrun bench muon", "speedrun bench muon --recipe record21 --devices 8"))
@click.option("--recipe", metavar="NAME", default="smoke", show_default=True, help="Whose matrices.")
@click.option(
    "--devices", type=click.Choice(["1", "2", "4", "8"]), default="1", help="One of so many does its part."
)
@settings_option
@json_option
def muon(*, recipe: str, devices: str, settings: tuple[str, ...], as_json: bool) -> None:
    """Newton-Schulz on the matrices of one device, against its products alone and against optax."""
    overrides = parse_settings(settings)
    from speedrun.bench.muon import muon as measure
    from speedrun.ground import mesh
    from speedrun.science import recipes
    from speedrun.training.program import Program

    mesh.prepare("any")
    program = Program(recipes.load(recipe).override(overrides), mesh.make_mesh(1))
    _tell(measure(program, int(devices)), as_json=as_json)


@command.command(epilog=example("speedrun bench health", "speedrun bench health --devices 8 --json"))
@click.option("--devices", type=Integer(1), metavar="N", help="Default: all there are.")
@json_option
def health(*, devices: int | None, as_json: bool) -> None:
    """What all devices together reach: products, memory, collectives, transfers from the host."""
    import jax

    from speedrun.bench.machine import measure
    from speedrun.ground import mesh

    mesh.prepare("any")
    found = measure(mesh.make_mesh(devices or len(jax.devices())))
    if as_json:
        click.echo(msgspec.json.encode(found._asdict()))
        return
    for name, value in found._asdict().items():
        what, _, unit = name.replace("_gb_per_s", " GB/s").replace("_gflops", " Gflop/s").partition(" ")
        click.echo(f"{what.replace('_', ' '):<16} {value:12,.1f} {unit}")


@command.command(epilog=example("speedrun bench agree triton", "speedrun bench agree head-fp8 --json"))
@click.argument("kernel")
@click.option("--tiny", is_flag=True, help="Inputs for a CPU.")
@json_option
@click.pass_context
def agree(ctx: click.Context, *, kernel: str, tiny: bool, as_json: bool) -> None:
    """Compare a kernel with its definition in float32: triton, flash3, mosaic, banded, qk-norm, head-bf16, head-fp8.

    Exits with 1 if an error is larger than the kernel's rounding explains.
    """
    from speedrun.bench.agreement import FULL, TINY, compare
    from speedrun.ground import mesh

    mesh.prepare("any")
    rows = []
    for one in compare(kernel, TINY if tiny else FULL, lambda case: click.echo(f"runs: {case}", err=True)):
        verdict = "right" if one.is_right else "wrong"
        rows.append({"verdict": verdict, "case": one.case, **one.errors})
        if not as_json:
            errors = ", ".join(f"{name} {error:.1e}" for name, error in one.errors.items())
            click.echo(f"{verdict}  {one.case}: {errors}")
    if as_json:
        click.echo(msgspec.json.encode(rows))
    ctx.exit(any(row["verdict"] == "wrong" for row in rows))


@command.command(
    epilog=example(
        "speedrun bench attention",
        "speedrun bench attention --tokens 49152 --heads 6 --dim 128 --window 14 --block 128 --document 600",
    )
)
@click.option("--tokens", type=Integer(1), default=2048, show_default=True, help="Sequence length.")
@click.option("--heads", type=Integer(1), default=4, show_default=True, help="Number of heads.")
@click.option("--dim", type=Integer(1), default=32, show_default=True, help="Width of a head.")
@click.option("--window", type=Integer(1), default=4, show_default=True, help="Blocks a query sees.")
@click.option("--block", type=Integer(1), default=64, show_default=True, help="Tokens of a block.")
@click.option("--document", type=Integer(1), default=600, show_default=True, help="Tokens of a document.")
@click.option("--without", multiple=True, metavar="FORM", help="Leave a form out. Repeatable.")
@json_option
def attention(
    *,
    tokens: int,
    heads: int,
    dim: int,
    window: int,
    block: int,
    document: int,
    without: tuple[str, ...],
    as_json: bool,
) -> None:
    """Attention and its gradients, in every form that runs here, against the definition."""
    from speedrun.bench.attention import attention as measure

    result = measure(
        num_tokens=tokens,
        num_heads=heads,
        head_dim=dim,
        window_blocks=window,
        block_tokens=block,
        document_tokens=document,
        without=without,
    )
    _tell_forms(result, as_json=as_json)


@command.command(
    epilog=example("speedrun bench norm", "speedrun bench norm --tokens 49152 --heads 6 --dim 128")
)
@click.option("--tokens", type=Integer(1), default=2048, show_default=True, help="Sequence length.")
@click.option("--heads", type=Integer(1), default=4, show_default=True, help="Number of heads.")
@click.option("--dim", type=Integer(4), default=32, show_default=True, help="Width of a head.")
@json_option
def norm(*, tokens: int, heads: int, dim: int, as_json: bool) -> None:
    """QK-norm and rotary with their gradients, in every form that runs here, against the definition."""
    from speedrun.bench.norm import norm as measure

    _tell_forms(measure(num_tokens=tokens, num_heads=heads, head_dim=dim), as_json=as_json)


@command.command(
    epilog=example("speedrun bench step --recipe smoke", "speedrun bench step --recipe record21 --steps 20")
)
@program_options
@click.option("--steps", type=Integer(1), default=10, show_default=True, help="How many to time.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of shards. Default: synthetic ids with the document lengths of FineWeb.",
)
@click.option("--no-command-buffers", is_flag=True, help="XLA launches kernels one by one.")
@json_option
def step(
    *, steps: int, data: Path | None, first_step: int, no_command_buffers: bool, as_json: bool, **asked: Any
) -> None:
    """The training step as a run takes it, one ahead: milliseconds, tokens per second, MFU, memory."""
    program = asked_program(first_step=first_step, **asked)
    from speedrun.bench import loading as pace
    from speedrun.bench.steps import step as measure

    result = measure(
        program,
        num_steps=steps,
        first_step=first_step,
        shards=pace.folder_shards(data, None) if data else (),
        command_buffers=not no_command_buffers,
    )
    if as_json:
        click.echo(msgspec.json.encode(result._asdict()))
        return
    mfu = "" if result.mfu is None else f" | MFU {result.mfu:.1%}"
    click.echo(
        f"step    mean {result.mean_ms:.2f} ms, spread {result.spread_ms:.2f} ms, {steps} steps\n"
        f"tokens  {result.tokens}\n"
        f"rate    {result.tokens_per_s:,.0f} tokens/s{mfu}\n"
        f"memory  {result.peak_bytes / 1e9:.2f} GB of the program | compiled in {result.compile_s:.1f} s"
    )
    for call, form in result.kernels.items():
        click.echo(f"kern    {call} | {form}")


@command.command(epilog=example("speedrun bench loader", "speedrun bench loader --data data/fineweb10B"))
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of shards. Default: two of 100 million tokens, made for this and removed.",
)
@click.option("--sequences", type=Integer(1), default=8, show_default=True, help="Of one batch.")
@click.option("--seq-len", type=Integer(1), default=49152, show_default=True, help="Tokens of a sequence.")
@click.option(
    "--step-ms", type=Integer(1), default=100, show_default=True, help="How long a step is taken to be."
)
@click.option("--steps", type=Integer(1), default=30, show_default=True, help="How many.")
@json_option
def loader(
    *, data: Path | None, sequences: int, seq_len: int, step_ms: int, steps: int, as_json: bool
) -> None:
    """Batches from shards, against what eight H100 use up: tokens per second, waiting, the first batch."""
    from speedrun.bench import loading as pace

    if data is None:
        click.echo("two shards of 100 million tokens are written for this, and removed", err=True)
    with nullcontext(pace.folder_shards(data)) if data else pace.synthetic_shards() as shards:
        result = pace.measure(shards, (sequences, seq_len), step_ms=step_ms, num_steps=steps)
    if as_json:
        click.echo(msgspec.json.encode(result._asdict()))
        return
    click.echo(
        f"rate    {result.tokens_per_s:,.0f} tokens/s | {result.times_h100:.0f} x what 8 H100 use up\n"
        f"wait    {result.waited:.2%} of {steps} steps of {step_ms} ms and {result.batch_tokens:,} tokens\n"
        f"first   batch after {result.first_batch_ms:.1f} ms, from the disk"
    )


@command.command(
    "prep", epilog=example("speedrun bench prep --source rows.jsonl.gz --tokenizer r50k_base.tiktoken")
)
@data_prep.source_option
@click.option("--tokenizer", "name", default="gpt2", show_default=True, help="gpt2, or its .tiktoken file.")
@click.option("--workers", type=Integer(2), default=2, show_default=True, help="Threads that tokenize.")
@data_prep.column_option
@json_option
def text_to_shards(*, sources: tuple[str, ...], name: str, workers: int, column: str, as_json: bool) -> None:
    """Text to shards with tiktoken and with gigatoken, against tiktoken in one thread; equal bytes or an error."""
    if not sources:
        raise UsageError("no --source; text is needed; name a file or a folder")
    from speedrun.bench import preparing as prep_speed
    from speedrun.data import tokenizer
    from speedrun.data.sources import open_source

    choice = tokenizer.choose(name, engine="gigatoken")
    source = open_source(sources, column=column)
    result = prep_speed.compare(source, choice, column=column, num_workers=workers)
    if as_json:
        timings = [timing._asdict() for timing in result.timings]
        click.echo(msgspec.json.encode(result._asdict() | {"timings": timings}))
        return
    for timing in result.timings:
        click.echo(
            f"{timing.name:<22} {timing.best_s:7.2f} s  {timing.text_mb_per_s:6.1f} MB/s  "
            f"{timing.tokens_per_s / 1e6:6.2f} Mtok/s  {timing.ratio:5.2f} x  (start {timing.start_s:.1f} s)"
        )
    click.echo(
        f"equal bytes | {result.text_bytes / 1e6:.1f} MB of text, {result.tokens:,} tokens | "
        f"memory at most {result.peak_bytes / 1e6:.0f} MB"
    )


def _tell(timings: "list[Timing]", *, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode([timing._asdict() for timing in timings]))
    else:
        _print(timings)


def _tell_forms(result: "FormTimings", *, as_json: bool) -> None:
    if as_json:
        timings = [timing._asdict() for timing in result.timings]
        click.echo(msgspec.json.encode(result._asdict() | {"timings": timings}))
        return
    _print(result.timings)
    for name, reasons in result.left_out.items():
        click.echo(f"{name:<16} not here: {'; '.join(reasons)}")
    click.echo(f"{'auto':<16} {result.auto}: {result.reason}")


def _print(timings: "list[Timing]") -> None:
    for one in timings:
        click.echo(f"{one.name:<16} {one.median_ms:9.2f} ms +- {one.spread_ms:6.2f}  {one.ratio:5.2f} x")
