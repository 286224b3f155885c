"""`speedrun bench`: how far an operation is from its bound on this machine."""

import click
import msgspec

from speedrun.cli.options import Group, Integer, example, json_option


@click.command(cls=Group, epilog=example("speedrun bench head"))
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
    for timing in timings:
        click.echo(f"{timing.name:<16} {timing.best_ms:9.1f} ms  {timing.ratio:5.2f} x")
