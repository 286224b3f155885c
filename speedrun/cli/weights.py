"""Options of the commands that read the weights of a trained model. No heavy imports."""

from pathlib import Path

import click

from speedrun.cli.options import Decorator, Integer

#: Weights, as the argument `source` for `trained.sources`.
source_argument: Decorator = click.argument("source", type=click.Path(path_type=Path), metavar="RUN")

#: `--step N`, as the argument `step`; None means the newest checkpoint.
step_option: Decorator = click.option(
    "--step", type=Integer(0), metavar="N", help="Of the checkpoint. Default: the newest."
)

#: `--dtype NAME`, as the argument `dtype`; None means the recipe's own.
dtype_option: Decorator = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Of the computation. Default: as the recipe computes.",
)
