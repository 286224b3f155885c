"""A synthetic token stream with a known entropy rate, which `tests/data/test_generated.py` computes.

    document   one or more lines; each line is an opener and `line_words` words
    opener     DOCUMENT (0) for the first line of a document; then NEW (1) or REPEAT (2)
    new line   words of a sparse Markov chain: the next word is one of a few successors, a hash of the last
               word and the class of the one before it, or any word (Zipf). The first word is any word
    repeat     exactly the words of the previous line

A model needs attention to repeat a line and to see the word before the last, and must store the rows in its matrices.
All probabilities are multiples of 2^-32, and all draws come from a counter-based integer hash, so the stream is the
same, bit for bit, on every platform.

Legend: L lines, W words a line, V vocabulary, C classes, S successors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speedrun.base.errors import DataError, translate_os_errors
from speedrun.base.track import Data, Track
from speedrun.data.shards import Manifest, ShardEntry, sha256, write_manifest, write_shard

DOCUMENT, NEW, REPEAT = 0, 1, 2
FIRST_WORD = 3
ONE = 1 << 32  #: probability one


@dataclass(frozen=True, slots=True)
class Source:
    """The stream's parameters. Probabilities are numerators over 2^32."""

    seed: int
    vocab_size: int
    line_words: int
    num_classes: int  #: of the word before the last; its id modulo this
    num_successors: int
    zipf_offset: int  #: the weight of the word of rank r is 1 / (r + zipf_offset)
    noise: int  #: probability of any word instead of a successor
    repeat: int  #: probability that a line repeats the previous one
    end: int  #: probability that a document ends after a line
    val_lines: int
    shard_lines: int  #: of each training shard
    num_shards: int

    @property
    def line_tokens(self) -> int:
        """Length of a line: opener and words."""
        return 1 + self.line_words


def mix(*keys: int | np.ndarray) -> np.ndarray:
    """Hash integers, which broadcast, to uint32 with rounds of splitmix64. Source: Steele et al. 2014."""
    with np.errstate(over="ignore"):
        h = np.zeros((), np.uint64)
        for key in keys:
            h = (h ^ np.asarray(key).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
            h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            h = h ^ (h >> np.uint64(31))
    return (h >> np.uint64(32)).astype(np.uint32)


def zipf_weights_V(source: Source) -> np.ndarray:
    """Return the numerators over 2^32 of the word marginal, i64 [V]; 0 for openers, the rest to rank 0."""
    ranks = np.arange(source.vocab_size - FIRST_WORD, dtype=np.int64)
    raw = (1 << 40) // (ranks + source.zipf_offset)
    words = raw * (1 << 20) // raw.sum() * (1 << 12)
    words[0] += ONE - words.sum()
    return np.concatenate([np.zeros(FIRST_WORD, np.int64), words])


def successors_CVS(source: Source) -> np.ndarray:
    """Return the words that may follow a class and a word, i64 [C, V, S]: draws from Zipf, with repetition."""
    cumulative_V = np.cumsum(zipf_weights_V(source))
    first, second, slot = np.ogrid[: source.num_classes, : source.vocab_size, : source.num_successors]
    return np.searchsorted(cumulative_V, mix(source.seed, 1, first, second, slot), side="right")


def slot_weights_S(source: Source) -> np.ndarray:
    """Return the numerators over 2^32 - noise of the successors: each slot 1.5 times as likely as the next."""
    raw = np.array([(1 << 40) * 2**i // 3**i for i in range(source.num_successors)], np.int64)
    weights = raw * (1 << 20) // raw.sum() * ((ONE - source.noise) >> 20)
    weights[0] += ONE - source.noise - weights.sum()
    return weights


def generate(source: Source, stream: int, num_lines: int) -> np.ndarray:
    """Return the first `num_lines` lines of a stream, u16 [L * (1 + W)]; each shard is another stream."""
    lines_L = np.arange(num_lines)
    ends_L = mix(source.seed, 2, stream, lines_L) < source.end
    ends_L[0] = True  # the first line opens a document
    repeats_L = mix(source.seed, 3, stream, lines_L) < source.repeat
    zipf_V, next_CVS = np.cumsum(zipf_weights_V(source)), successors_CVS(source)
    slots_S = np.cumsum(slot_weights_S(source))
    tokens = np.zeros((num_lines, source.line_tokens), np.uint16)
    tokens[:, 0] = np.where(ends_L, DOCUMENT, np.where(repeats_L, REPEAT, NEW))
    tokens[:, 1] = np.searchsorted(zipf_V, mix(source.seed, 4, stream, lines_L, 1), side="right")
    for column in range(2, source.line_tokens):
        slot_L = np.searchsorted(slots_S, mix(source.seed, 5, stream, lines_L, column), side="right")
        noise_L = np.searchsorted(zipf_V, mix(source.seed, 4, stream, lines_L, column), side="right")
        last_slot_L = np.minimum(slot_L, source.num_successors - 1)
        class_L = tokens[:, column - 2] % source.num_classes if column > 2 else 0 * lines_L  # an opener
        followed_L = next_CVS[class_L, tokens[:, column - 1], last_slot_L]
        tokens[:, column] = np.where(slot_L < source.num_successors, followed_L, noise_L)
    # A repeated line takes the words of the last line that was not a repeat.
    origin_L = np.maximum.accumulate(np.where(tokens[:, 0] == REPEAT, 0, lines_L))
    tokens[:, 1:] = tokens[origin_L, 1:]
    return tokens.reshape(-1)


def unseen(settings: Mapping[str, int], draw: int, num_tokens: int) -> np.ndarray:
    """Return the beginning of a drawn stream of a track, u16 [num_tokens]; none of its shards is that stream."""
    source = Source(**settings)
    return generate(source, 1 + source.num_shards + draw, -(-num_tokens // source.line_tokens))[:num_tokens]


def write(track: Track, folder: Path) -> Manifest:
    """Make the shards of a synthetic track; callers lock the folder.

    Correct shards are not written again: another program may be reading them.
    """
    settings = track.synthetic or {}
    source = Source(**settings)
    names = [track.data.val.replace("*", "000000")]
    names += [track.data.train.replace("*", f"{i:06d}") for i in range(1, source.num_shards + 1)]
    with translate_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    shards = {}
    for stream, name in enumerate(names):
        path, want = folder / name, track.data.sha256.get(name)
        tokens = generate(source, stream, source.shard_lines if stream else source.val_lines)
        if not path.is_file() or sha256(path) != want:
            write_shard(path, tokens)
        if want not in (got := sha256(path), None):
            found = f"{path}: sha256 is {got}, {track.id} says {want}"
            raise DataError(f"{found}; this machine makes other bytes; report it")
        shards[name] = ShardEntry(tokens.size, int(np.sum(tokens == DOCUMENT)), got)
    ids = track.data.vocab_size, track.data.document_token
    manifest = Manifest(f"speedrun data synth --track {track.name}", dict(settings), *ids, shards)
    write_manifest(folder, manifest)
    return manifest


# --- random tokens in documents as long as FineWeb's, for timing without real shards -----------------------

#: Tokens of a document of FineWeb, counted by modded-nanogpt's authors in ten shards; lengths are log-normal.
MEDIAN, MEAN = 403, 690
#: The weight of the id of rank r is (r + offset)^-exponent. Text repeats the ids of its document; with this exponent,
#: independent ids have as few distinct ones, within 7 % for 2,048 to 98,304 tokens of web text.
_ZIPF_OFFSET, _ZIPF_EXPONENT = 2.7, 1.15


def document_lengths(num_tokens: int, seed: int) -> np.ndarray:
    """Return the lengths of documents, i64 [N], with the sum `num_tokens`; the last one is cut off."""
    sigma = np.sqrt(2 * np.log(MEAN / MEDIAN))
    rng, ends = np.random.default_rng(seed), np.zeros(1, np.int64)
    while ends[-1] < num_tokens:
        more = np.ceil(rng.lognormal(np.log(MEDIAN), sigma, 1024)).astype(np.int64)
        ends = np.concatenate([ends, ends[-1] + np.cumsum(more)])
    return np.diff(np.minimum(ends, num_tokens)[: np.searchsorted(ends, num_tokens) + 1])


def imitated(num_tokens: int, *, vocab_size: int, document_token: int, seed: int) -> np.ndarray:
    """Return documents with independent ids from a Zipf distribution below `vocab_size`: i32 [num_tokens]."""
    rng = np.random.default_rng(seed)
    weights = np.cumsum((np.arange(vocab_size - 1) + _ZIPF_OFFSET) ** -_ZIPF_EXPONENT)
    ids = np.searchsorted(weights, rng.random(num_tokens) * weights[-1], side="right").astype(np.int32)
    ids += ids >= document_token
    lengths = document_lengths(num_tokens, seed)
    ids[np.cumsum(lengths) - lengths] = document_token
    return ids


def write_imitation(folder: Path, rules: Data, train_tokens: int) -> None:
    """Write a training shard and a validation shard, with the names that tracks use."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = {"val_000000": rules.val_tokens + rules.held_tokens + 1, "train_000001": train_tokens}
    for seed, (part, count) in enumerate(counts.items()):
        ids = imitated(count, vocab_size=rules.vocab_size, document_token=rules.document_token, seed=seed)
        write_shard(folder / f"imitation_{part}.bin", ids.astype(np.uint16))
