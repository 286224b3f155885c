"""Time the preparation of shards from text, against the simplest way to make the same bytes."""

import resource
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np

from speedrun.data import documents, prep, shards, tokenizer
from speedrun.data.documents import Source
from speedrun.data.gpt2 import Tiktoken
from speedrun.data.writing import write_shard
from speedrun.ground.clock import Stopwatch
from speedrun.ground.errors import DataError, UsageError

_TRIALS = 3
_CUT = prep.Cut()


class Timed(msgspec.Struct, frozen=True):
    """One way to make the shards."""

    name: str
    best_s: float  #: from reading the first document to syncing the last shard
    start_s: float  #: to load the tokenizer, before that
    text_mb_per_s: float
    tokens_per_s: float
    ratio: float  #: of speed, to the first way

    def __str__(self) -> str:
        return (
            f"{self.name:<22} {self.best_s:7.2f} s  {self.text_mb_per_s:6.1f} MB/s  "
            f"{self.tokens_per_s / 1e6:6.2f} Mtok/s  {self.ratio:5.2f} x  (start {self.start_s:.1f} s)"
        )


class Comparison(msgspec.Struct, frozen=True):
    """All ways on one source."""

    timings: list[Timed]
    text_bytes: int
    tokens: int
    peak_bytes: int  #: of this process, before the plain way

    def __str__(self) -> str:
        last = (
            f"equal bytes | {self.text_bytes / 1e6:.1f} MB of text, {self.tokens:,} tokens | "
            f"memory at most {self.peak_bytes / 1e6:.0f} MB"
        )
        return "\n".join([*map(str, self.timings), last])


def compare(source: Source, choice: tokenizer.Choice, *, column: str, num_workers: int) -> Comparison:
    """Time both ways a few times, in turns. The source is read once in each trial; `choice` is GPT-2's tokenizer.

    Raises:
        DataError: if the two make different bytes; or from the preparation.
        UsageError: if the tokenizer is not GPT-2's.
    """
    first, ours = "one thread", f"{num_workers} workers"
    seconds: dict[str, list[float]] = {first: [], ours: []}
    starts_s, digests = {}, {}
    text_bytes = tokens = peak_bytes = 0
    with tempfile.TemporaryDirectory(prefix="speedrun-prep-") as folder:
        for trial in range(_TRIALS):
            out = Path(folder) / f"{ours}-{trial}"
            done = prep.prepare(source, choice, _CUT, out, column=column, num_workers=num_workers)
            seconds[ours].append(done.seconds)
            starts_s[ours], digests[ours] = done.start_s, _digests(out)
            # Before the plain way raises it in this process.
            peak_bytes = peak_bytes or _peak_bytes()
            out = Path(folder) / f"plain-{trial}"
            starts_s[first], took_s, text_bytes, tokens = plain(source, choice, column, out)
            seconds[first].append(took_s)
            digests[first] = _digests(out)
    if digests[ours] != digests[first]:
        raise DataError(f"{ours}: make other bytes than one thread; they must be equal; report it")
    best_s = {name: min(times) for name, times in seconds.items()}
    timings = [
        Timed(name, best, starts_s[name], text_bytes / best / 1e6, tokens / best, best_s[first] / best)
        for name, best in best_s.items()
    ]
    return Comparison(timings, text_bytes, tokens, peak_bytes)


def plain(source: Source, choice: tokenizer.Choice, column: str, out: Path) -> tuple[float, float, int, int]:
    """Make shards by definition: one document after the other, one thread, tiktoken's `encode_ordinary`.

    Returns:
        Seconds to load the tokenizer, seconds of the rest, bytes of text, tokens.
    """
    watch = Stopwatch()
    loaded = tokenizer.load(choice)
    if not isinstance(loaded, Tiktoken):
        raise UsageError(f"tokenizer {choice.name}: GPT-2's is compared; give gpt2 or its .tiktoken file")
    encoding = loaded.encoding
    start_s, watch = watch.seconds, Stopwatch()
    pieces, text_bytes = [], 0
    for text in documents.texts(source, column):
        pieces.append(np.array([encoding.eot_token, *encoding.encode_ordinary(text)], np.uint16))
        text_bytes += len(text.encode())
    ids = np.concatenate(pieces)
    out.mkdir()
    for index, at in enumerate(range(0, len(ids), _CUT.shard_tokens)):
        write_shard(out / _CUT.name(index), ids[at : at + _CUT.shard_tokens])
    return start_s, watch.seconds, text_bytes, len(ids)


def _digests(out: Path) -> list[str]:
    return [shards.sha256(path) for path in sorted(out.glob("*.bin"))]


def _peak_bytes() -> int:
    """Peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
