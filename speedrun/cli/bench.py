"""`speedrun bench`: how far operations are from their bounds on this machine."""

import click

from speedrun.cli import measure, program, rates, sample
from speedrun.cli.options import (
    Decorator,
    Group,
    Integer,
    example,
    json_option,
    parse_settings,
    recipe_option,
    settings_option,
)
from speedrun.cli.program import show


@click.command(cls=Group, epilog=example("speedrun bench head", "speedrun bench attention"))
def command() -> None:
    """Time operations side by side, in one run."""


for _command in (measure.everything, measure.rival, program.step, sample.bench, *rates.COMMANDS):
    command.add_command(_command)


def _size(option: str, name: str, default: int, what: str, *, least: int = 1) -> Decorator:
    """An option for one size of the inputs, as the argument `name`."""
    return click.option(option, name, type=Integer(least), default=default, show_default=True, help=what)


@command.command(epilog=example("speedrun bench head", "speedrun bench head --tokens 4096 --dim 768"))
@_size("--tokens", "num_tokens", 1024, "Rows of the logits.")
@_size("--dim", "model_dim", 128, "Width of the model.")
@_size("--vocab", "vocab_size", 50304, "Columns of the logits.")
@json_option
def head(*, as_json: bool, **sizes: int) -> None:
    """Loss and gradients of the vocabulary head, against its definition and its three matrix products."""
    from speedrun.bench import kernels

    show(kernels.head(**sizes), as_json=as_json)


@command.command(
    epilog=example(
        "speedrun bench attention",
        "speedrun bench attention --tokens 49152 --heads 6 --dim 128 --window 14 --block 128 --document 600",
    )
)
@_size("--tokens", "num_tokens", 2048, "Sequence length.")
@_size("--heads", "num_heads", 4, "Number of heads.")
@_size("--dim", "head_dim", 32, "Width of a head.")
@_size("--window", "window_blocks", 4, "Blocks that a query sees.")
@_size("--block", "block_tokens", 64, "Tokens of a block.")
@_size("--document", "document_tokens", 600, "Tokens of a document.")
@click.option("--without", multiple=True, metavar="FORM", help="Leave out a form. Repeatable.")
@json_option
def attention(*, without: tuple[str, ...], as_json: bool, **sizes: int) -> None:
    """Attention and its gradients, in every form that runs here, against the definition."""
    from speedrun.bench import kernels

    show(kernels.attention(without=without, **sizes), as_json=as_json)


@command.command(epilog=example("speedrun bench norm", "speedrun bench norm --tokens 49152 --dim 128"))
@_size("--tokens", "num_tokens", 2048, "Sequence length.")
@_size("--heads", "num_heads", 4, "Number of heads.")
@_size("--dim", "head_dim", 32, "Width of a head.", least=4)
@json_option
def norm(*, as_json: bool, **sizes: int) -> None:
    """QK-norm and rotary with their gradients, in every form that runs here, against the definition."""
    from speedrun.bench import kernels

    show(kernels.norm(**sizes), as_json=as_json)


@command.command(epilog=example("speedrun bench muon", "speedrun bench muon --recipe record21 --devices 8"))
@recipe_option("smoke", "Whose matrices.")
@click.option(
    "--devices", type=click.Choice(["1", "2", "4", "8"]), default="1", help="Time the share of one of N."
)
@settings_option
@json_option
def muon(*, recipe: str, devices: str, settings: tuple[str, ...], as_json: bool) -> None:
    """Newton-Schulz on the matrices of one device, against its products alone and against optax."""
    overrides = parse_settings(settings)
    from speedrun.bench import kernels
    from speedrun.ground import mesh
    from speedrun.science import recipes
    from speedrun.training.program import Program

    mesh.prepare("any")
    one = Program(recipes.load(recipe).override(overrides), mesh.make_mesh(1))
    show(kernels.muon(one, int(devices)), as_json=as_json)
