"""Tokens that look like web text to an attention mask: documents as long as FineWeb's, of ids without meaning.

For timing where no real shards are. A model learns the frequencies of the ids, and nothing else is there to learn.

Source of the lengths: the first 300 documents of FineWeb in GPT-2 tokens, the separator counted: median 379, mean 720.
A log-normal law with their logarithms' mean and deviation has median 415 and mean 681.
"""

from pathlib import Path

import numpy as np

from speedrun.data.shards import write_shard

_LOG_MEAN, _LOG_DEVIATION = 6.03, 0.995
_ZIPF_OFFSET = 2.7  #: the weight of rank r is 1 / (r + offset)


def tokens(num_tokens: int, *, vocab_size: int, document_token: int, seed: int) -> np.ndarray:
    """A stream that begins with a document.

    Args:
        num_tokens: how many.
        vocab_size: ids are below it.
        document_token: opens each document, and stands nowhere else.
        seed: of lengths and ids.

    Returns:
        int32, one axis.
    """
    rng = np.random.default_rng(seed)
    weights = np.cumsum(1 / (np.arange(vocab_size - 1) + _ZIPF_OFFSET))
    ids = np.searchsorted(weights, rng.random(num_tokens) * weights[-1], side="right").astype(np.int32)
    ids += ids >= document_token
    lengths = np.ceil(rng.lognormal(_LOG_MEAN, _LOG_DEVIATION, num_tokens // 100 + 1)).astype(np.int64)
    starts = np.cumsum(lengths) - lengths[0]
    ids[starts[starts < num_tokens]] = document_token
    return ids


def write(folder: Path, *, train_tokens: int, val_tokens: int, vocab_size: int, document_token: int) -> None:
    """One shard to train on and one to score, named as a track finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (part, count) in enumerate({"val_000000": val_tokens, "train_000001": train_tokens}.items()):
        ids = tokens(count, vocab_size=vocab_size, document_token=document_token, seed=seed)
        write_shard(folder / f"imitation_{part}.bin", ids.astype(np.uint16))
