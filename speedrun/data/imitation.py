"""Tokens that look like web text to an attention mask: documents as long as FineWeb's, of ids without meaning.

For timing where no real shards are. A model learns the frequencies of the ids, and nothing else is there to learn.

Lengths are log-normal, with the median and mean that modded-nanogpt's authors counted in ten shards of GPT-2 tokens.
"""

from pathlib import Path

import numpy as np

from speedrun.data.shards import write_shard

#: Tokens of a document of FineWeb.
MEDIAN, MEAN = 403, 690
_ZIPF_OFFSET = 2.7  #: the weight of rank r is 1 / (r + offset)


def document_lengths(num_tokens: int, seed: int) -> np.ndarray:
    """Lengths of documents that follow one another: i64 [N], their sum is `num_tokens`. The last one is cut."""
    sigma = np.sqrt(2 * np.log(MEAN / MEDIAN))
    rng, ends = np.random.default_rng(seed), np.zeros(1, np.int64)
    while ends[-1] < num_tokens:
        more = np.ceil(rng.lognormal(np.log(MEDIAN), sigma, 1024)).astype(np.int64)
        ends = np.concatenate([ends, ends[-1] + np.cumsum(more)])
    return np.diff(np.minimum(ends, num_tokens)[: np.searchsorted(ends, num_tokens) + 1])


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
    lengths = document_lengths(num_tokens, seed)
    ids[np.cumsum(lengths) - lengths] = document_token
    return ids


def write(folder: Path, *, train_tokens: int, val_tokens: int, vocab_size: int, document_token: int) -> None:
    """One shard to train on and one to score, named as a track finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (part, count) in enumerate({"val_000000": val_tokens, "train_000001": train_tokens}.items()):
        ids = tokens(count, vocab_size=vocab_size, document_token=document_token, seed=seed)
        write_shard(folder / f"imitation_{part}.bin", ids.astype(np.uint16))
