"""What people do with runs and trained models: watch them, let them write, here or in a browser, and score them."""

import shlex
import socket
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from speedrun.base import signals
from speedrun.base.clock import Stopwatch
from speedrun.base.console import clean
from speedrun.base.errors import UsageError
from speedrun.base.serving import serving, stoppable
from speedrun.cli import options as cli
from speedrun.cli.progress import Progress

if TYPE_CHECKING:
    import numpy as np

    from speedrun.model.decode import Decoder, Draw, Text

_RUNS = Path("runs")


@cli.new_command(
    "speedrun watch",
    "speedrun watch runs/first runs/second --ghost best",
    "speedrun run --track smoke-cpu --watch",
    cls=click.Command,
)
@click.argument("runs", nargs=-1, type=cli.PATH, metavar="[RUN]...")
@cli.port_option(cli.WATCH_PORT)
@cli.option(
    "--ghost RECORD|best",
    str,
    "Draw this record beside the runs; 'best': the fastest qualified one of the track in records/.",
)
def watch(*, runs: tuple[Path, ...], port: int, ghost: str | None) -> None:
    """Show runs on a page until Ctrl-C or SIGTERM: loss, step times, memory, events.

    Logs are only read. Default: the newest folder below runs/. A folder that does not exist yet is waited for.
    """
    from speedrun.model import watch_server

    folders = runs or (_newest(),)
    for folder in folders:
        watch_server.check(folder)
    # Outside: pages still get the last lines.
    with stoppable() as stopped, watch_server.watching(folders, port, ghost) as url:
        used = url.rstrip("/").rpartition(":")[2]
        click.echo(clean(f"watch   {shlex.join(map(str, folders))}"))
        click.echo(f"page    {url}   Ctrl-C ends it")
        click.echo(f"remote  ssh -L {used}:127.0.0.1:{used} {socket.gethostname()}   then open it there")
        stopped()


def _newest() -> Path:
    """Return the folder below runs/ that was made last."""
    folders = [path for path in _RUNS.glob("*") if path.is_dir() and not path.name.endswith(".checkpoints")]
    if not folders:
        raise UsageError(f"there is nothing below {_RUNS}/ to watch; name the folder of a run")
    return max(folders, key=lambda path: path.stat().st_mtime_ns)


@cli.new_command(
    "speedrun sample runs/docs --prompt 'Return the'",
    'speedrun sample runs/docs --prompt "$(cat prompt.txt)" --tokens 200 --temperature 0.5 --top-k 40',
    "speedrun sample runs/docs --prompt 'A list' --samples 4 --seed 1 --json",
    "speedrun sample runs/first --ids 0,17,4",
    "speedrun sample gpt2 --prompt 'Hello, my name is' --data data/fineweb10B",
)
@click.argument("source", type=cli.PATH, metavar="RUN")
@cli.option(
    "--prompt TEXT",
    str,
    "What the text begins with. Default: the start of a document.",
    name="prompts",
    multiple=True,
)
@cli.option("--ids I,J,...", str, "A prompt as ids, taken as they are.", multiple=True)
@cli.option("--tokens N", cli.COUNT, "How many to write.", 100)
@cli.option("--samples N", cli.COUNT, "Texts of each prompt.", 1)
@cli.option("--temperature X", cli.Number(0), "Of the softmax; 0: always the most probable token.", 0.8)
@cli.option("--top-k K", cli.NATURAL, "Only the K most probable tokens; 0: all.", 0)
@cli.option("--top-p P", cli.Number(0, 1), "Only the most probable tokens with probability P together.", 1.0)
@cli.option("--seed N", cli.SEED, "Of the draws.", 0)
@cli.weights_options
@cli.dtype_option
@click.pass_context
def sample(
    ctx: click.Context, *, source: Path, prompts: tuple[str, ...], ids: tuple[str, ...], **given: Any
) -> cli.Answer:
    """Continue prompts with the weights of RUN, which it keeps with --checkpoint-every.

    Or with those of a folder that 'speedrun export' made, of a GPT-2 in a folder, or of gpt2, gpt2-medium, gpt2-large
    or gpt2-xl on the hub. A text ends where the model ends the document. The same seed gives the same text.
    """
    from speedrun.model import decode, weight_sources

    chosen = {name: given[name] for name in ("data", "recipe", "step", "dtype")}
    trained = weight_sources.load(source, **chosen)
    spoken = trained.words
    texts = prompts if prompts or ids else ("",)
    starts = [*map(spoken.encode, texts), *(spoken.checked(cli.numbers("--ids", text)) for text in ids)]
    starts = [start for start in starts for _ in range(given["samples"])]
    decoder = decode.decoder_of(trained, max(map(len, starts)) + given["tokens"])
    click.echo(str(trained), err=True)
    how = decode.Draw(given["temperature"], given["top_k"], given["top_p"], given["seed"])
    found = [decode.Text(spoken, start) for start in starts]
    num_written, seconds = _write(
        decoder, starts, found, given["tokens"], how, is_shown=not ctx.params["as_json"]
    )
    rate = num_written / seconds if seconds else None
    if rate is not None:
        rates = f"{num_written:,} tokens in {seconds:.2f} s, {rate:,.0f} tokens/s"
        click.echo(f"{rates} after the first {decode.CHUNK} of each text", err=True)
    samples = [x.facts | {"prompt_ids": start.tolist()} for x, start in zip(found, starts, strict=True)]
    return cli.Answer({**trained.facts, **how._asdict(), "tokens_per_s": rate, "samples": samples}, ())


def _write(
    decoder: "Decoder",
    starts: "list[np.ndarray]",
    found: "list[Text]",
    num_tokens: int,
    how: "Draw",
    *,
    is_shown: bool,
) -> tuple[int, float]:
    """Continue all texts, and show one as it grows, several when they are done.

    Returns:
        Tokens that were computed after the first chunk, and the seconds for them: the first one compiles.
    """
    is_one = is_shown and len(found) == 1
    if is_one:
        click.echo(found[0].prompt, nl=False)
    watch, num_timed, left = Stopwatch(), 0, num_tokens
    for ids_PN in decoder.continued(starts, num_tokens, how):
        if left < num_tokens:
            num_timed += ids_PN.size
        left -= ids_PN.shape[1]
        for text, ids_N in zip(found, ids_PN, strict=True):
            new = text.add(ids_N, is_last=not left)
            if is_one:
                click.echo(new, nl=False)
        if not num_timed:
            watch = Stopwatch()
        if all(text.has_ended for text in found):
            break
    seconds = watch.seconds
    if is_one:
        click.echo()
    elif is_shown:
        for number, text in enumerate(found, 1):
            click.echo(f"--- {number} of {len(found)}\n{text.prompt}{text.text}")
    return num_timed, seconds if num_timed else 0.0


@cli.new_command("speedrun play docs-web", "speedrun play docs-web smoke-web", "speedrun play --recipe smoke")
@click.argument("folders", nargs=-1, metavar="[DIR...]", type=cli.PATH)
@cli.recipe_option(text="Also a page that trains this recipe, made tiny, beside what JAX computed.")
@cli.port_option(3281)
@click.pass_context
def play(ctx: click.Context, *, folders: tuple[Path, ...], recipe: str | None, port: int) -> None:
    """Serve the page of DIR, which 'speedrun export RUN --to web' made, on this machine only.

    The browser computes. With several folders, two models write beside each other, with one seed. With --recipe, JAX
    first trains a tiny preset on the CPU, for some seconds. Ctrl-C or SIGTERM ends it.
    """
    from speedrun.model.page_server import answering

    if not folders and recipe is None:
        raise UsageError("got nothing to serve; name a folder that 'export --to web' made, or pass --recipe")
    with tempfile.TemporaryDirectory() as scratch, signals.handled_by(signals.stop):
        if recipe is not None:
            folders = (_trainable(recipe, Path(scratch) / "page"), *folders)
        with stoppable() as stopped, serving(answering(folders), port) as url:
            url += "train.html" if recipe is not None else ""
            cli.show({"url": url}, [f"{url}   Ctrl-C ends it"], as_json=ctx.params["as_json"])
            stopped()


def _trainable(recipe: str, out: Path) -> Path:
    from speedrun import recipes
    from speedrun.base import mesh
    from speedrun.model import page_training

    mesh.prepare("cpu")
    page_training.write(recipes.load(recipe), out)
    return out


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
def eval(*, source: Path, shards: tuple[Path, ...], **given: Any) -> cli.Answer:
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
        score = eval_tasks.scorer(trained, context, partial(click.echo, err=True))
        found["scores"] = []
        for part in parts:
            with Progress(part.name, "tokens") as progress:
                found["scores"].append(score(part, partial(progress.update, total=part.tokens)))
    if asks:
        with Progress("hellaswag", "questions") as progress:
            say = partial(progress.update, total=len(questions))
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
