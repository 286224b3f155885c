"""`speedrun bench`: how far an operation is from its bound on this machine."""

from typing import TYPE_CHECKING

import click
import msgspec

from speedrun.cli import data_prep
from speedrun.cli.options import Group, Integer, example, json_option, parse_settings, settings_option
from speedrun.errors import UsageError

if TYPE_CHECKING:
    from speedrun.bench import Timing


@click.command(cls=Group, epilog=example("speedrun bench head", "speedrun bench attention"))
def command() -> None:
    """Time operations side by side, in one run."""


@command.command(epilog=example("speedrun bench head", "speedrun bench head --tokens 4096 --dim 768"))
@click.option("--tokens", type=Integer(1), default=1024, show_default=True, help="Rows of the logits.")
@click.option("--dim", type=Integer(1), default=128, show_default=True, help="Width of the model.")
@click.option("--vocab", type=Integer(1), default=50304, show_default=True, help="Columns of the logits.")
@json_option
def head(*, tokens: int, dim: int, vocab: int, as_json: bool) -> None:
    """Loss and gradients of the vocabulary head, against its definition and its three matrix products."""
    from speedrun import bench

    timings = bench.head(num_tokens=tokens, model_dim=dim, vocab_size=vocab)
    if as_json:
        click.echo(msgspec.json.encode([timing._asdict() for timing in timings]))
        return
    _print(timings)


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
@json_option
def attention(
    *, tokens: int, heads: int, dim: int, window: int, block: int, document: int, as_json: bool
) -> None:
    """Attention and its gradients, in every form that runs here, against the definition."""
    from speedrun import bench

    result = bench.attention(
        num_tokens=tokens,
        num_heads=heads,
        head_dim=dim,
        window_blocks=window,
        block_tokens=block,
        document_tokens=document,
    )
    if as_json:
        timings = [timing._asdict() for timing in result.timings]
        click.echo(msgspec.json.encode(result._asdict() | {"timings": timings}))
        return
    _print(result.timings)
    for name, reasons in result.left_out.items():
        click.echo(f"{name:<16} not here: {'; '.join(reasons)}")
    click.echo(f"{'auto':<16} {result.auto}: {result.reason}")


@command.command(
    epilog=example("speedrun bench step --recipe smoke", "speedrun bench step --recipe record21 --steps 20")
)
@click.option("--recipe", metavar="NAME", default="smoke", show_default=True, help="What to train.")
@click.option("--devices", type=Integer(1), metavar="N", help="Default: all there are.")
@click.option("--microbatches", type=Integer(1), default=8, show_default=True, help="Parts of a batch.")
@click.option("--attention", default="auto", show_default=True, metavar="FORM", help="Its kernels.")
@click.option("--steps", type=Integer(1), default=10, show_default=True, help="How many to time.")
@click.option("--first-step", type=Integer(0), default=0, show_default=True, help="Of the schedule.")
@settings_option
@json_option
def step(
    *,
    recipe: str,
    devices: int | None,
    microbatches: int,
    attention: str,
    steps: int,
    first_step: int,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """The whole training step on random ids: milliseconds, tokens per second, MFU, memory."""
    overrides = parse_settings(settings)
    import jax

    from speedrun import bench, mesh, recipes
    from speedrun.step import Program

    chosen = recipes.load(recipe).override(overrides)
    if first_step >= chosen.num_steps:
        raise UsageError(f"--first-step {first_step}: {recipe} has {chosen.num_steps} steps; need one below")
    mesh.prepare("any")
    program = Program(chosen, mesh.make_mesh(devices or len(jax.devices())), microbatches, attention)
    result = bench.step(program, num_steps=steps, first_step=first_step)
    if as_json:
        click.echo(msgspec.json.encode(result._asdict()))
        return
    mfu = "" if result.mfu is None else f" | MFU {result.mfu:.1%}"
    click.echo(
        f"step    median {result.median_ms:.2f} ms, spread {result.spread_ms:.2f} ms, {steps} steps\n"
        f"rate    {result.tokens_per_s:,.0f} tokens/s{mfu}\n"
        f"memory  {result.peak_bytes / 1e9:.2f} GB at most | compiled in {result.compile_s:.1f} s"
    )
    for call, form in result.kernels.items():
        click.echo(f"kern    {call} | {form}")


@command.command(
    "prep", epilog=example("speedrun bench prep --source rows.jsonl.gz --tokenizer r50k_base.tiktoken")
)
@data_prep.source_option
@click.option("--tokenizer", "name", default="gpt2", show_default=True, help="gpt2, or its .tiktoken file.")
@click.option("--workers", type=Integer(2), default=2, show_default=True, help="Processes that tokenize.")
@data_prep.column_option
@json_option
def text_to_shards(*, sources: tuple[str, ...], name: str, workers: int, column: str, as_json: bool) -> None:
    """Text to shards with tiktoken and with gigatoken, against tiktoken in one thread; equal bytes or an error."""
    if not sources:
        raise UsageError("no --source; text is needed; name a file or a folder")
    from speedrun.data import prep_speed, tokenizer
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
        f"memory at most {result.peak_bytes / 1e6:.0f} MB, all processes"
    )


def _print(timings: "list[Timing]") -> None:
    for timing in timings:
        click.echo(f"{timing.name:<16} {timing.best_ms:9.1f} ms  {timing.ratio:5.2f} x")
