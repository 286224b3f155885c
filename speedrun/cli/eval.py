"""`speedrun eval`: the loss of a trained model on other text, and HellaSwag."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from speedrun.cli.options import Integer, data_option, devices_option, example, json_option, recipe_option
from speedrun.ground.clock import Stopwatch
from speedrun.ground.console import duration


@click.command(
    epilog=example(
        "speedrun eval runs/docs",
        "speedrun eval runs/docs --context 128 --tokens 65536",
        "speedrun eval runs/record21 --shard data/fineweb10B/fineweb_train_000103.bin",
        "speedrun eval runs/record21 --hellaswag hellaswag_val.jsonl --limit 1000",
    )
)
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option(
    "--shard",
    "shards",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Shard to score, repeatable. Default: the official slice of the track, and the one after it.",
)
@click.option(
    "--context", type=Integer(2), metavar="N", help="Tokens of a sequence. Default: as the run scored."
)
@click.option(
    "--tokens", type=Integer(1), metavar="N", help="At most so many of each. Default: as the track."
)
@click.option(
    "--hellaswag", type=click.Path(path_type=Path), metavar="FILE", help="Its questions, as lines of JSON."
)
@click.option("--limit", type=Integer(1), metavar="N", help="Only the first N questions.")
@click.option("--step", type=Integer(0), metavar="N", help="Of the checkpoint. Default: the newest.")
@recipe_option(text="The run's recipe, if it is in a file of your own.")
@devices_option
@data_option
@json_option
def command(*, run: Path, shards: tuple[Path, ...], as_json: bool, **given: Any) -> None:
    """Score the weights of a run, which it keeps with --checkpoint-every. Nothing of it is ranked."""
    from speedrun.trained import held_out, hellaswag, weights, words

    devices = given["devices"] or 1
    trained = weights.load(
        run, data=given["data"], recipe=given["recipe"], step=given["step"], devices=devices
    )
    spoken = words.of_track(trained.track, trained.folder)
    context, tokens = held_out.context_of(trained, given["context"]), given["tokens"]
    found: dict[str, Any] = {"recipe": trained.program.recipe.name, "step": trained.step, "scores": []}
    if shards or given["hellaswag"] is None:
        for slice_ in held_out.slices(trained, shards, context, tokens):
            say = _progress(slice_.name, slice_.tokens, "tokens")
            found["scores"].append(held_out.score(trained, slice_, context, spoken, say))
    if given["hellaswag"] is not None:
        questions = hellaswag.read(given["hellaswag"], given["limit"])
        say = _progress("hellaswag", len(questions), "questions")
        found["hellaswag"] = hellaswag.ask(trained, spoken, questions, say)
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        click.echo("\n".join(map(str, [*found["scores"], *filter(None, [found.get("hellaswag")])])))


def _progress(what: str, total: int, unit: str) -> Callable[[int], None]:
    """Return a function that says how far the work is: rate and remaining time, every ten seconds."""
    watch, said = Stopwatch(), [0.0]

    def say(done: int) -> None:
        if watch.seconds - said[0] > 10:
            said[0] = watch.seconds
            rate = done / watch.seconds
            left = duration((total - done) / rate)
            click.echo(f"{what}: {done:,} of {total:,} {unit}, {rate:,.0f}/s, eta {left}", err=True)

    return say
