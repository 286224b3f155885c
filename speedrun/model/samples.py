"""`run --sample-every N`: a child process samples each checkpoint of the run into RECORD.samples.jsonl.

The run never waits: the child has the lowest priority, and computes on the CPU. Each checkpoint gets the same prompts
and random numbers.

python -m speedrun.model.samples REQUEST       in JSON; it ends with its standard input, after the last checkpoint
"""

import os
import select
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import jax
import msgspec

from speedrun.base import subprocesses
from speedrun.base import track as tracks
from speedrun.base.atomic_files import write_whole
from speedrun.base.errors import CheckpointError, UsageError, translate_read_errors
from speedrun.base.output import reported
from speedrun.base.subprocesses import samples_of as path_of
from speedrun.model import decode, weights
from speedrun.train.run_config import RunConfig, decoded, folder_of, steps_in

NUM_TOKENS = 64  #: of each text, or as many as the model takes
TEMPERATURE, SEED = 0.8, 0
_LEAVE_S = 600.0  #: to finish after the run
_POLL_S = 1.0


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a child samples."""

    record: Path
    every: int  #: steps; the last checkpoint is always sampled
    prompts: tuple[str, ...] = ()  #: none: the start of a document
    recipe: str | None = None
    data: Path | None = None


def beside(config: RunConfig, every: int | None, prompts: tuple[str, ...]) -> AbstractContextManager[None]:
    """Sample the checkpoints of a run inside the block.

    Raises:
        UsageError: for prompts without samples, steps without a checkpoint, and samples of another run.
    """
    if every is None or (prompts and tracks.load(config.track).synthetic is not None):
        found = f"--sample-prompt {prompts[0][:40]!r}"
        raise UsageError(f"{found}; need --sample-every, and a track of text, not {config.track}")
    path = path_of(config.out)
    if not config.resume and path.exists():
        raise UsageError(f"{path} has the samples of another run; move it away, or pass another --out")
    if every % (config.checkpoint_every or every):
        found = f"--sample-every {every}"
        raise UsageError(f"{found}; need a multiple of --checkpoint-every {config.checkpoint_every}")
    request = Request(config.out, every, prompts, config.recipe, config.data)
    sent = [msgspec.json.encode(request, enc_hook=str).decode()]
    again = shlex.join(["speedrun", "sample", str(config.out)])
    remedy = f"to sample the last checkpoint: {again}"
    return subprocesses.beside("samples", "speedrun.model.samples", sent, remedy, leave_s=_LEAVE_S)


def follow(request: Request, until: IO[bytes]) -> list[int]:
    """Sample checkpoints as they appear, the newest first, until a stream ends and none is left.

    Returns:
        Steps whose checkpoint was deleted before its turn.

    Raises:
        DataError: if earlier samples of the record cannot be read.
    """
    folder, path = folder_of(request.record), path_of(request.record)
    found, is_over = _written(path), False
    due_until = 0
    while not is_over:
        is_over = bool(select.select([until], [], [], _POLL_S)[0])
        while due := [step for step in _due(folder, request.every, is_over=is_over) if step not in found]:
            step = due[-1]
            due_until = max(due_until, step)
            try:
                found[step] = [msgspec.json.encode(sample) for sample in spoken(request, step)]
            except (CheckpointError, UsageError):
                time.sleep(_POLL_S)  # the run may be deleting it
                if (folder / str(step)).exists():
                    raise
                found[step] = []
            # In the order in which they were made: readers that follow the file have its beginning.
            write_whole(path, *(line + b"\n" for lines in found.values() for line in lines))
    return [step for step in range(request.every, due_until + 1, request.every) if not found.get(step)]


def _written(path: Path) -> dict[int, list[bytes]]:
    """Return earlier lines by step: a resumed run has some."""
    found: dict[int, list[bytes]] = {}
    with translate_read_errors(path, "need lines of JSON with a step; move it away", KeyError, TypeError):
        for line in path.read_bytes().splitlines() if path.exists() else ():
            found.setdefault(int(msgspec.json.decode(line, type=dict)["step"]), []).append(line)
    return found


def _due(folder: Path, every: int, *, is_over: bool) -> list[int]:
    """Return the steps to sample: at the end, they include the last one."""
    steps = steps_in(folder)[::-1]
    return [step for step in steps if step and (step % every == 0 or (is_over and step == steps[-1]))]


def spoken(request: Request, step: int) -> Iterator[dict[str, Any]]:
    """Yield the samples of a checkpoint; raise UsageError if prompts do not fit, or as `weights.load`."""
    trained = weights.load(request.record, data=request.data, recipe=request.recipe, step=step)
    starts = [trained.words.encode(prompt) for prompt in request.prompts or ("",)]
    longest = max(map(len, starts))
    num_tokens = max(1, min(NUM_TOKENS, trained.program.recipe.eval_seq_len - longest))
    decoder = decode.decoder_of(trained, longest + num_tokens)
    how = decode.Draw(temperature=TEMPERATURE, seed=SEED)
    for text in decode.written(decoder, trained.words, starts, num_tokens, how):
        yield {"step": step, "temperature": TEMPERATURE, "seed": SEED, **text.facts}


if __name__ == "__main__":
    os.nice(19)
    jax.config.update("jax_platforms", "cpu")  # the run uses the devices
    with reported():
        request = decoded(sys.argv[1].encode(), Request)
        if missed := follow(request, sys.stdin.buffer):
            steps = ", ".join(map(str, missed))
            found = f"checkpoints of steps {steps} were deleted before their turn"
            raise UsageError(f"{found}; keep all with --keep-checkpoints 0")
