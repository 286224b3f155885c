"""`speedrun sample`: let a trained model write."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from speedrun.base.clock import Stopwatch
from speedrun.base.errors import UsageError
from speedrun.cli import options as cli

if TYPE_CHECKING:
    import numpy as np

    from speedrun.model.decode import Decoder, Draw
    from speedrun.model.text_ids import Text


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
def command(
    ctx: click.Context, *, source: Path, prompts: tuple[str, ...], ids: tuple[str, ...], **given: Any
) -> cli.Answer:
    """Continue prompts with the weights of RUN, which it keeps with --checkpoint-every.

    Or with those of a folder that 'speedrun export' made, of a GPT-2 in a folder, or of gpt2, gpt2-medium, gpt2-large
    or gpt2-xl on the hub. A text ends where the model ends the document. The same seed gives the same text.
    """
    from speedrun.model import decode, text_ids, weight_sources

    chosen = {name: given[name] for name in ("data", "recipe", "step", "dtype")}
    trained = weight_sources.load(source, **chosen)
    spoken = trained.words
    texts = prompts if prompts or ids else ("",)
    starts = [*map(spoken.encode, texts), *(spoken.checked(_numbers(text)) for text in ids)]
    starts = [start for start in starts for _ in range(given["samples"])]
    decoder = decode.decoder_of(trained, max(map(len, starts)) + given["tokens"])
    click.echo(str(trained), err=True)
    how = decode.Draw(given["temperature"], given["top_k"], given["top_p"], given["seed"])
    found = [text_ids.Text(spoken, start) for start in starts]
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


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"--ids {text!r}; need numbers with commas between them: --ids 1,2,3") from None
