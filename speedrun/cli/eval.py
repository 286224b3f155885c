"""`speedrun eval`: the loss of a trained model on other text, and HellaSwag."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from speedrun.base.errors import UsageError
from speedrun.cli import options as cli
from speedrun.cli.progress import counted


@cli.new_command(
    "speedrun eval runs/docs",
    "speedrun eval runs/docs --context 128 --tokens 65536",
    "speedrun eval runs/record21 --shard data/fineweb10B/fineweb_train_000103.bin",
    "speedrun eval runs/record21 --hellaswag hellaswag_val.jsonl --limit 1000",
    "speedrun eval runs/record21 --tasks lambada_openai,piqa",
    "speedrun eval gpt2 --data data/fineweb10B --dtype float32",
)
@click.argument("source", type=cli.PATH, metavar="RUN")
@cli.option(
    "--shard FILE",
    cli.PATH,
    "Shard to score. Default: the official slice of the track, and the one after it.",
    name="shards",
    multiple=True,
)
@cli.option("--context N", cli.Integer(2), "Tokens of a sequence. Default: as the run scored.")
@cli.option("--tokens N", cli.COUNT, "At most so many of each. Default: as the track.")
@cli.option("--hellaswag FILE", cli.PATH, "Its questions, as lines of JSON.")
@cli.option("--tasks A,B,...", str, "Tasks of lm-evaluation-harness, by name or file; pip install lm-eval.")
@cli.option("--limit N", cli.COUNT, "Only the first N questions.")
@cli.weights_options
@cli.dtype_option
def command(*, source: Path, shards: tuple[Path, ...], **given: Any) -> cli.Answer:
    """Score the weights of RUN, which it keeps with --checkpoint-every. Nothing of it is ranked.

    Or those of a folder that 'speedrun export' made, of a GPT-2 in a folder, or of gpt2, gpt2-medium, gpt2-large or
    gpt2-xl on the hub.
    """
    from speedrun.model import eval_tasks, weight_sources

    named = [task.strip() for task in (given["tasks"] or "").split(",") if task.strip()]
    asks, scores = given["hellaswag"] is not None, bool(shards) or not (given["hellaswag"] or named)
    _refuse_what_has_no_effect(given, asks=asks or bool(named), scores=scores)
    questions = eval_tasks.read(given["hellaswag"], given["limit"]) if asks else []
    chosen = {name: given[name] for name in ("data", "recipe", "step", "dtype")}
    trained = weight_sources.load(source, **chosen)
    found: dict[str, Any] = trained.facts
    context = given["context"] or trained.program.recipe.eval_seq_len
    parts = eval_tasks.slices(trained, shards, context, given["tokens"]) if scores else []
    click.echo(str(trained), err=True)
    if parts:
        scorer = eval_tasks.Scorer(
            trained, context, eval_tasks.bytes_of(trained, partial(click.echo, err=True))
        )
        found["scores"] = []
        for part in parts:
            with counted(part.name, part.tokens, "tokens") as say:
                found["scores"].append(scorer.score(part, say))
    if asks:
        with counted("hellaswag", len(questions), "questions") as say:
            found["hellaswag"] = eval_tasks.ask(trained, questions, say)
    lines = [*found.get("scores", []), *([found["hellaswag"]] if asks else [])]
    if named:
        found["tasks"] = eval_tasks.scores(trained, named, given["limit"], partial(click.echo, err=True))
        lines += [
            f"{task}  " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            for task, metrics in found["tasks"].items()
        ]
    return cli.Answer(found, lines)


def _refuse_what_has_no_effect(given: dict[str, Any], *, asks: bool, scores: bool) -> None:
    idle = [*([] if asks else ["limit"]), *([] if scores else ["context", "tokens"])]
    for name in idle:
        if given[name] is not None:
            needs = "--hellaswag or --tasks" if name == "limit" else "--shard, beside --hellaswag or --tasks"
            raise UsageError(f"--{name} has no effect; it needs {needs}; leave it out, or add that")
