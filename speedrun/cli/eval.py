"""`speedrun eval`: the loss of a trained model on other text, and HellaSwag."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from speedrun.cli.options import (
    Integer,
    data_option,
    example,
    json_option,
    recipe_option,
)
from speedrun.cli.weights import dtype_option, source_argument, step_option
from speedrun.ground.clock import Stopwatch
from speedrun.ground.console import duration
from speedrun.ground.errors import UsageError


@click.command(
    epilog=example(
        "speedrun eval runs/docs",
        "speedrun eval runs/docs --context 128 --tokens 65536",
        "speedrun eval runs/record21 --shard data/fineweb10B/fineweb_train_000103.bin",
        "speedrun eval runs/record21 --hellaswag hellaswag_val.jsonl --limit 1000",
        "speedrun eval runs/record21 --tasks lambada_openai,piqa",
        "speedrun eval gpt2 --data data/fineweb10B --dtype float32",
    )
)
@source_argument
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
@click.option(
    "--tasks",
    metavar="A,B,...",
    help="Tasks of lm-evaluation-harness, by name or file; needs pip install lm-eval.",
)
@click.option("--limit", type=Integer(1), metavar="N", help="Only the first N questions.")
@step_option
@dtype_option
@recipe_option(text="The run's recipe, if it is in a file of your own.")
@data_option
@json_option
def command(*, source: Path, shards: tuple[Path, ...], as_json: bool, **given: Any) -> None:
    """Score the weights of RUN, which it keeps with --checkpoint-every. Nothing of it is ranked.

    Or those of a folder that 'speedrun export' made, of a GPT-2 in a folder, or of gpt2, gpt2-medium, gpt2-large or
    gpt2-xl on the hub.
    """
    from speedrun.trained import held_out, hellaswag, sources, words

    tasks = [task.strip() for task in (given["tasks"] or "").split(",") if task.strip()]
    asks, scores = given["hellaswag"] is not None, bool(shards) or not (given["hellaswag"] or tasks)
    _refuse_what_has_no_effect(given, asks=asks or bool(tasks), scores=scores)
    questions = hellaswag.read(given["hellaswag"], given["limit"]) if asks else []
    chosen = {name: given[name] for name in ("data", "recipe", "step", "dtype")}
    trained = sources.load(source, **chosen)
    recipe, spoken = trained.program.recipe, words.Words(trained.track, trained.words_folder)
    found: dict[str, Any] = trained.facts
    context = given["context"] or recipe.eval_seq_len
    parts = held_out.slices(trained, shards, context, given["tokens"]) if scores else []
    click.echo(str(trained), err=True)
    if parts:
        scorer = held_out.Scorer(trained, context, held_out.bytes_of(spoken, partial(click.echo, err=True)))
        found["scores"] = [scorer.score(part, _progress(part.name, part.tokens, "tokens")) for part in parts]
    if asks:
        say = _progress("hellaswag", len(questions), "questions")
        found["hellaswag"] = hellaswag.ask(trained, spoken, questions, say)
    lines = [*found.get("scores", []), *([found["hellaswag"]] if asks else [])]
    if tasks:
        from speedrun.trained import harness

        found["tasks"] = harness.scores(trained, spoken, tasks, given["limit"], partial(click.echo, err=True))
        lines += [
            f"{task}  " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            for task, metrics in found["tasks"].items()
        ]
    click.echo(msgspec.json.encode(found) if as_json else "\n".join(map(str, lines)))


def _refuse_what_has_no_effect(given: dict[str, Any], *, asks: bool, scores: bool) -> None:
    idle = [*([] if asks else ["limit"]), *([] if scores else ["context", "tokens"])]
    for name in idle:
        if given[name] is not None:
            needs = "--hellaswag or --tasks" if name == "limit" else "--shard, beside --hellaswag or --tasks"
            raise UsageError(f"--{name} has no effect; it needs {needs}; leave it out, or add that")


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
