"""Random tokens in documents as long as FineWeb's, for timing without real shards.

Lengths are log-normal, with the median and mean that modded-nanogpt's authors counted in ten shards of GPT-2 tokens.
Ids are independent draws from a Zipf distribution.
"""

from pathlib import Path

import numpy as np

from speedrun.data.shards import write_shard
from speedrun.ground.track import Data

MEDIAN, MEAN = 403, 690  #: tokens of a document of FineWeb
_ZIPF_OFFSET = 2.7  #: the weight of rank r is 1 / (r + offset)


def document_lengths(num_tokens: int, seed: int) -> np.ndarray:
    """Return lengths of consecutive documents, i64 [N], with the sum `num_tokens`; the last one is cut off."""
    sigma = np.sqrt(2 * np.log(MEAN / MEDIAN))
    rng, ends = np.random.default_rng(seed), np.zeros(1, np.int64)
    while ends[-1] < num_tokens:
        more = np.ceil(rng.lognormal(np.log(MEDIAN), sigma, 1024)).astype(np.int64)
        ends = np.concatenate([ends, ends[-1] + np.cumsum(more)])
    return np.diff(np.minimum(ends, num_tokens)[: np.searchsorted(ends, num_tokens) + 1])


def tokens(num_tokens: int, *, vocab_size: int, document_token: int, seed: int) -> np.ndarray:
    """Return a stream of documents.

    The document token opens each document and occurs nowhere else. All ids are below `vocab_size`.

    Returns:
        int32 [num_tokens].
    """
    rng = np.random.default_rng(seed)
    weights = np.cumsum(1 / (np.arange(vocab_size - 1) + _ZIPF_OFFSET))
    ids = np.searchsorted(weights, rng.random(num_tokens) * weights[-1], side="right").astype(np.int32)
    ids += ids >= document_token
    lengths = document_lengths(num_tokens, seed)
    ids[np.cumsum(lengths) - lengths] = document_token
    return ids


def write(folder: Path, rules: Data, train_tokens: int) -> None:
    """Write a training shard and a validation shard, named as a track finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = {"val_000000": rules.val_tokens + 1, "train_000001": train_tokens}
    for seed, (part, count) in enumerate(counts.items()):
        ids = tokens(count, vocab_size=rules.vocab_size, document_token=rules.document_token, seed=seed)
        write_shard(folder / f"imitation_{part}.bin", ids.astype(np.uint16))
