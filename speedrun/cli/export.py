"""`speedrun export`: write a record, or the model that it trained, in the formats of other tools."""

import importlib
from pathlib import Path
from typing import Any

import click

from speedrun.base.errors import UsageError
from speedrun.board.log_formats import FORMS, export
from speedrun.cli import options as cli
from speedrun.record.reader import load

#: Forms of a trained model: modules with `write(trained, out)`, which returns the files that it wrote.
MODEL_FORMS = {
    "safetensors": "speedrun.model.exported",
    "transformers": "speedrun.model.transformers_gpt2",
    "web": "speedrun.model.page_folder",
}


@cli.new_command(
    "speedrun export records/smoke-cpu/2026-11-25-first --to classic",
    "speedrun export RECORD --to wandb --out curves",
    "speedrun export runs/docs --to safetensors --out docs-model",
    "speedrun export runs/docs --to web --out docs-web",
)
@click.argument("record", type=cli.PATH)
@cli.option(
    "--to",
    click.Choice([*FORMS, *MODEL_FORMS]),
    f"The format: {', '.join(FORMS)} of the curves; {', '.join(MODEL_FORMS)} of the model.",
    name="form",
    required=True,
)
@cli.out_option("New folder. Default: RECORD's name and the format.")
@cli.weights_options
@cli.option(
    "--dtype",
    click.Choice(["float32", "float16"]),
    "How web stores large arrays; the page computes in float32. Default: float32.",
)
def command(*, record: Path, form: str, out: Path | None, dtype: str | None, **given: Any) -> cli.Answer:
    """Write the curves of RECORD as text logs, CSV or offline wandb runs, or its model.

    A model needs weights, which a run keeps with --checkpoint-every. The files contain nothing about this machine, and
    nothing is sent. The record is not changed.
    """
    folder = out or Path(f"{record.resolve().name}-{form}")
    folder = folder if folder.name else folder.resolve()
    if dtype is not None and form != "web":
        raise UsageError(f"--dtype has no effect on {form}; leave it out")
    if form in MODEL_FORMS:
        from speedrun.model import exported, weight_sources

        stored, trained = {} if dtype is None else {"dtype": dtype}, weight_sources.load(record, **given)
        exported.check_out(trained, folder)
        paths = importlib.import_module(MODEL_FORMS[form]).write(trained, folder, **stored)
    else:
        for name, value in given.items():
            if value is not None:
                raise UsageError(f"--{name} has no effect on curves; leave it out, or choose a model's form")
        paths = export(load(record), form, folder)
    names = [str(path) for path in paths]
    return cli.Answer({"files": names}, names)
