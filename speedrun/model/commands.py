"""The commands that use runs and models: `watch`, `sample`, `play` and `eval`."""

import os
import shlex
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NotRequired, TypedDict
from urllib.parse import unquote

import click
import msgspec

from speedrun.base import signals
from speedrun.base.atomic_files import read_regular
from speedrun.base.console import clean
from speedrun.base.errors import UsageError, translate_read_errors
from speedrun.base.progress import Progress
from speedrun.base.serving import CONTENT_TYPES, Reply, file_below, serving, stoppable
from speedrun.base.serving import Answer as Answering
from speedrun.base.subprocesses import say
from speedrun.cli import options as cli

if TYPE_CHECKING:
    from speedrun.model.eval_tasks import Answers, Score

Page = TypedDict("Page", {"url": str})
Text = TypedDict(
    "Text", {"prompt": str, "prompt_ids": list[int], "text": str, "ids": list[int], "has_ended": bool}
)

_RUNS = Path("runs")
_LIST = "models.json"
_LIST_BYTES = 2**20  #: at most


@cli.command(
    "speedrun watch",
    "speedrun watch runs/first runs/second --ghost best",
    "speedrun run --track smoke-cpu --watch",
)
def watch(
    ctx: click.Context,
    runs: Annotated[tuple[Path, ...], "[RUN]..."] = (),
    *,
    port: cli.Port = cli.WATCH_PORT,
    ghost: Annotated[str | None, "--ghost RECORD|best"] = None,
) -> cli.Answer[Page] | None:
    """Show runs on a page until Ctrl-C or SIGTERM: loss, step times, memory, events.

    The default is the newest folder below runs/. A folder may appear later.

    Options:
        ghost: Also draw this record; 'best': the fastest qualified one of the track in records/.
    """
    from speedrun.model import watch_server

    folders = runs or (_newest(),)
    for folder in folders:
        if os.path.isfile(folder):  # a method of Path raises OSError if a name is too long
            raise UsageError(f"{folder} is a file; need the folder of a run or record")
    # Outside: pages still get the last lines.
    with stoppable() as stopped, watch_server.watching(folders, port, ghost) as url:
        used = url.rstrip("/").rpartition(":")[2]
        lines = [
            clean(f"watch   {shlex.join(map(str, folders))}"),
            *(clean(f"waits   for {one}, which is not there") for one in folders if not one.exists()),
            f"page    {url}   Ctrl-C ends it",
            f"remote  ssh -L {used}:127.0.0.1:{used} {socket.gethostname()}   then open it there",
        ]
        cli.show(Page(url=url), lines, as_json=ctx.params["as_json"])
        stopped()


def _newest() -> Path:
    """Return the newest folder below runs/."""
    folders = [path for path in _RUNS.glob("*") if path.is_dir() and not path.name.endswith(".checkpoints")]
    if not folders:
        raise UsageError(f"nothing to watch below {_RUNS}/; name the folder of a run")
    return max(folders, key=lambda path: path.stat().st_mtime_ns)


class Model(TypedDict):
    """A trained model."""

    recipe: str
    step: int | None  #: None for weights that no run of ours trained
    track: str
    dtype: str
    weights: NotRequired[str]  #: their folder, or repository on the hub, with its revision
    revision: NotRequired[str]
    sha256: NotRequired[str]


class Sampled(Model):
    """Texts that a model wrote."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    samples: list[Text]


@cli.command(
    "speedrun sample runs/docs --prompt 'Return the'",
    'speedrun sample runs/docs --prompt "$(cat prompt.txt)" --tokens 200 --temperature 0.5 --top-k 40',
    "speedrun sample runs/docs --prompt 'A list' --samples 4 --seed 1 --json",
    "speedrun sample runs/first --ids 0,17,4",
    "speedrun sample gpt2 --prompt 'Hello, my name is' --data data/fineweb10B",
)
def sample(
    ctx: click.Context,
    source: Annotated[Path, "RUN"],
    weights: cli.Weights,
    *,
    prompts: Annotated[tuple[str, ...], "--prompt TEXT"] = (),
    ids: Annotated[tuple[str, ...], "--ids I,J,...", "A prompt as token ids."] = (),
    tokens: Annotated[cli.Count, "Number of tokens to write."] = 100,
    samples: Annotated[int, cli.Integer(1, 1000), "Number of texts for each prompt."] = 1,
    temperature: Annotated[float, cli.Number(0, 10)] = 0.8,
    top_k: Annotated[cli.Natural, "--top-k K", "Draw from the K most probable tokens; 0: all."] = 0,
    top_p: Annotated[float, cli.Number(0, 1), "--top-p P"] = 1.0,
    seed: Annotated[cli.Natural, "Seed of the draws."] = 0,
    dtype: cli.Dtype = None,
) -> cli.Answer[Sampled]:
    """Continue prompts with the weights of RUN, trained with --checkpoint-every.

    RUN may also be a folder from 'speedrun export', a folder with a GPT-2, or gpt2, gpt2-medium, gpt2-large or gpt2-xl
    on the hub. A text ends where the model ends the document. The same seed gives the same text.

    Options:
        prompts: Start of the text. Default: the start of a document.
        temperature: Softmax temperature; 0: always the most probable token.
        top_p: Draw from the most probable tokens that have the probability P together.
    """
    from speedrun.model import decode, weight_sources

    trained = weight_sources.load(source, **weights._asdict(), dtype=dtype)
    spoken = trained.words
    texts = prompts if prompts or ids else ("",)
    starts = [*map(spoken.encode, texts), *(spoken.checked(cli.numbers("--ids", text)) for text in ids)]
    starts = [start for start in starts for _ in range(samples)]
    decoder = decode.decoder_of(trained, max(map(len, starts)) + tokens)
    say(str(trained))
    how = decode.Draw(temperature, top_k, top_p, seed)
    is_shown, is_one = not ctx.params["as_json"], len(starts) == 1
    show = partial(click.echo, nl=False) if is_shown and is_one else (lambda _: None)
    found = decode.written(decoder, spoken, starts, tokens, how, show)
    if is_shown and is_one:
        click.echo()
    for number, text in enumerate(found, 1) if is_shown and not is_one else ():
        click.echo(f"--- {number} of {len(found)}\n{text.prompt}{text.text}")
    written = [Text(**x.facts, prompt_ids=start.tolist()) for x, start in zip(found, starts, strict=True)]
    return cli.Answer(Sampled(**trained.facts, **how._asdict(), samples=written), ())


def answering(folders: Sequence[Path]) -> Answering:
    """Return what answers requests for files of these folders, and of no others.

    Models of one name are told apart by the number of the folder.

    Raises:
        UsageError: if a folder is not one that 'speedrun export --to web' made.
    """
    roots = [Path(os.path.realpath(folder)) for folder in folders]
    models: dict[str, tuple[Path, str]] = {}
    advice = "need a folder that 'speedrun export RUN --to web' made"
    for number, root in enumerate(roots, 1):
        with translate_read_errors(root / _LIST, advice, kind=UsageError):
            names = msgspec.json.decode(read_regular(root / _LIST, _LIST_BYTES), type=list[str])
        for name in names:
            models[name if name not in models else f"{name} ({number})"] = root, name

    def answer(path: str, _: dict[str, str]) -> Reply | None:
        root, names = roots[0], [name for name in unquote(path).split("/") if name] or ["index.html"]
        if names == [_LIST]:
            return Reply([msgspec.json.encode(list(models))], CONTENT_TYPES["json"])
        if names[0] == "models" and len(names) > 1:
            if names[1] not in models:
                return None
            root, names[1] = models[names[1]]
        return file_below(root, *names)

    return answer


@cli.command("speedrun play docs-web", "speedrun play docs-web smoke-web")
def play(
    ctx: click.Context,
    folders: Annotated[tuple[Path, ...], "DIR..."],
    *,
    port: cli.Port = 3281,
) -> cli.Answer[Page] | None:
    """Serve the page of DIR, from 'speedrun export RUN --to web', on this machine only.

    The browser computes. With several folders, two models write next to each other, with the same seed. Ctrl-C or
    SIGTERM ends it.
    """
    with signals.handled_by(signals.stop), stoppable() as stopped, serving(answering(folders), port) as url:
        cli.show(Page(url=url), [f"{url}   Ctrl-C ends it"], as_json=ctx.params["as_json"])
        stopped()


class Evaluated(Model):
    """Scores of a model."""

    scores: "NotRequired[list[Score]]"
    hellaswag: "NotRequired[Answers]"


@cli.command(
    "speedrun eval runs/docs",
    "speedrun eval runs/docs --context 128 --tokens 65536",
    "speedrun eval runs/record21 --shard data/fineweb10B/fineweb_train_000103.bin",
    "speedrun eval runs/record21 --hellaswag hellaswag_val.jsonl --limit 1000",
    "speedrun eval gpt2 --data data/fineweb10B --dtype float32",
)
def eval(
    source: Annotated[Path, "RUN"],
    weights: cli.Weights,
    *,
    shards: Annotated[tuple[Path, ...], "--shard FILE"] = (),
    context: Annotated[int | None, cli.Integer(2)] = None,
    tokens: Annotated[cli.Count | None, "Largest number of tokens of each. Default: the track's."] = None,
    hellaswag: Annotated[Path | None, "--hellaswag FILE", "Questions of HellaSwag, as lines of JSON."] = None,
    limit: Annotated[cli.Count | None, "Ask only the first N questions."] = None,
    dtype: cli.Dtype = None,
) -> cli.Answer[Evaluated]:
    """Score the weights of RUN, trained with --checkpoint-every. Scores are never ranked.

    RUN may also be a folder from 'speedrun export', a folder with a GPT-2, or gpt2, gpt2-medium, gpt2-large or gpt2-xl
    on the hub.

    Options:
        shards: Shard to score. Default: the official slice of the track, and the one after it.
        context: Tokens of a sequence. Default: that of the run's validation.
    """
    from speedrun.model import eval_tasks, weight_sources

    scores = bool(shards) or hellaswag is None
    if limit is not None and hellaswag is None:
        raise UsageError("--limit has no effect; it needs --hellaswag; leave it out, or add that")
    for name, value in {"context": context, "tokens": tokens}.items():
        if value is not None and not scores:
            needs = "--shard, next to --hellaswag"
            raise UsageError(f"--{name} has no effect; it needs {needs}; leave it out, or add that")
    questions = [] if hellaswag is None else eval_tasks.read(hellaswag, limit)
    trained = weight_sources.load(source, **weights._asdict(), dtype=dtype)
    found = Evaluated(**trained.facts)
    context = context or trained.program.recipe.eval_seq_len
    parts = eval_tasks.slices(trained, shards, context, tokens) if scores else []
    say(str(trained))
    if parts:
        score = eval_tasks.scorer(trained, context, say)
        found["scores"] = []
        for part in parts:
            with Progress(part.name, "tokens") as progress:
                found["scores"].append(score(part, partial(progress.update, total=part.tokens)))
    lines: list[object] = [*found.get("scores", ())]
    if questions:
        with Progress("hellaswag", "questions") as progress:
            done = partial(progress.update, total=len(questions))
            found["hellaswag"] = eval_tasks.ask(trained, questions, done)
        lines.append(found["hellaswag"])
    return cli.Answer(found, lines)
