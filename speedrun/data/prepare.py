"""Makes shards from text.

    documents  d0, d1, d2, ... in the order of the source
    tokens     D ids(d0) D ids(d1) D ids(d2) ...    D: the document token
    shards     those tokens, split every `shard_tokens`; the last shard is shorter
    names      PREFIX_val_000000.bin, PREFIX_train_000001.bin, PREFIX_train_000002.bin, ...

The bytes depend neither on the number of workers nor on interruptions: after each shard, the manifest records where the
next one begins.
"""

import hashlib
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from speedrun.base import faults
from speedrun.base.clock import Stopwatch
from speedrun.base.console import quantity
from speedrun.base.errors import DataError, UsageError, translate_os_errors
from speedrun.data import shards
from speedrun.data.documents import Source
from speedrun.data.shards import MANIFEST, Manifest, Position, ShardEntry, write_manifest, write_shard
from speedrun.data.tokenizer import Encoded, FromFile, Tokenizer, encoded, id_bytes_V

SCORED_TOKENS = 10_485_760  #: of the speedrun's validation
_PIECE_TOKENS = 2**18  #: fits into the processor's cache


class Cut(NamedTuple):
    """The division of the tokens into files."""

    prefix: str = "fineweb"
    shard_tokens: int = 100_000_000
    limit_tokens: int | None = None  #: of all shards together
    scored_tokens: int = SCORED_TOKENS  #: at the start of the validation shard, for bits per byte

    def name(self, index: int) -> str:
        """Return the file name of a shard; shard 0 is for validation."""
        return f"{self.prefix}_{'train' if index else 'val'}_{index:06d}.bin"


class Prepared(msgspec.Struct, frozen=True):
    """The result of a preparation, with the totals of all shards."""

    folder: str
    manifest: Manifest
    found_shards: int  #: of an earlier run
    tokens: int
    documents: int
    text_bytes: int | None

    def summary(self) -> list[str]:
        """Return the lines to print."""
        num_shards = len(self.manifest.shards)
        found = f" ({self.found_shards} were there)" if self.found_shards else ""
        said = f"{num_shards} shards{found}  {self.tokens:,} tokens  {self.documents:,} documents"
        if self.text_bytes is not None:
            said += f"  {self.text_bytes / max(1, self.tokens - self.documents):.2f} bytes a token"
        lines = [f"made    {self.folder}: {said}"]
        if num_shards == 1:
            lines += ["note    all tokens are in the validation shard; to train, choose fewer --shard-tokens"]
        return lines


def prepare(
    source: Source,
    chosen: Tokenizer,
    cut: Cut,
    out: Path,
    *,
    num_workers: int = 1,
    report: Callable[[int, int, str], None] = lambda *_: None,
) -> Prepared:
    """Make the shards of a source, or continue an interrupted preparation; callers lock the folder.

    `report` gets bytes read, bytes in total (0 if unknown), and other facts after every block.
    """
    if not re.fullmatch(r"\w[\w.-]*", cut.prefix, re.ASCII):
        raise UsageError(f"--prefix {cut.prefix!r}; it begins file names: need letters, digits and _ . -")
    settings, ids = _settings(source, chosen, cut), (chosen.vocab_size, chosen.document_token)
    fresh = Manifest(source.name, settings, *ids, shards={}, complete=False, next=Position("", 0))
    manifest = _found(out, fresh)
    found = len(manifest.shards)
    if manifest.complete:
        return _prepared(out, manifest, found)
    write_manifest(out, manifest)
    writer = _Writer(out, cut, manifest, id_bytes_V(chosen))
    watch, start_tokens = Stopwatch(), writer.tokens
    with closing(encoded(source.blocks(writer.next), chosen, num_workers=num_workers)) as blocks:
        for block in blocks:
            writer.add(block)
            rate = (writer.tokens - start_tokens) / max(1e-9, watch.seconds)
            facts = f"{writer.num_shards} shards  {writer.tokens:,} tokens  {quantity(rate, 'tok/s')}"
            report(block.read_bytes, source.total_bytes, facts)
            if not writer.left():
                break
    return _prepared(out, writer.finish(), found)


def _prepared(folder: Path, manifest: Manifest, found_shards: int) -> Prepared:
    entries = manifest.shards.values()
    tokens, documents = (sum(getattr(entry, name) for entry in entries) for name in ("tokens", "documents"))
    sizes = [entry.text_bytes for entry in entries]
    text_bytes = None if None in sizes else sum(filter(None, sizes))
    return Prepared(str(folder), manifest, found_shards, tokens, documents, text_bytes)


def _settings(source: Source, chosen: Tokenizer, cut: Cut) -> dict[str, str | int | float]:
    """Return everything that determines the bytes of the shards."""
    digest = hashlib.sha256(chosen.raw).hexdigest() if chosen.raw else ""
    own = {"document_text": chosen.document_text} if isinstance(chosen, FromFile) else {}
    lengths = {name: value for name, value in cut._asdict().items() if value is not None}
    return {**source.identity(), "tokenizer": chosen.name, "tokenizer_sha256": digest, **own, **lengths}


def _found(out: Path, fresh: Manifest) -> Manifest:
    """Return the manifest of a folder with the same settings, or `fresh` for an empty folder."""
    with translate_os_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    found = shards.read_manifest(out)
    if found is None:
        if others := sorted(path.name for path in out.glob("*.bin")):
            raise UsageError(f"{out}: {others[0]} is there without {MANIFEST}; choose an empty --out")
        return fresh
    for key in {**found.settings, **fresh.settings}:
        got, need = fresh.settings.get(key, "nothing"), found.settings.get(key, "nothing")
        if got != need:
            what = f"{out} was begun with {key} {need}, this is {key} {got}"
            raise UsageError(f"{what}; need the same to continue; choose another --out, or remove the folder")
    for name, entry in found.shards.items():
        if shards.open_shard(out / name, vocab_size=fresh.vocab_size).num_tokens != entry.tokens:
            said = f"{out / name}: not its {entry.tokens:,} tokens of {MANIFEST}"
            raise DataError(f"{said}; choose another --out")
    return found


class _Writer:
    """Writes one shard after the other, each with its entry in the manifest."""

    def __init__(self, out: Path, cut: Cut, manifest: Manifest, id_bytes_V: np.ndarray | None) -> None:
        self._out, self._cut, self._manifest, self._id_bytes_V = out, cut, manifest, id_bytes_V
        #: Places of the next token, and of the first one in the current shard.
        self.next = self._first = manifest.next or Position("", 0)
        self._filled = 0
        self._buffer = np.empty(self.left(), np.uint16)

    def left(self) -> int:
        """Return the number of tokens that the current shard still takes."""
        cut, left = self._cut, self._cut.shard_tokens - self._filled
        return left if cut.limit_tokens is None else min(left, cut.limit_tokens - self.tokens)

    @property
    def num_shards(self) -> int:
        """Number of whole shards."""
        return len(self._manifest.shards)

    @property
    def tokens(self) -> int:
        """Tokens in whole shards and in the current one."""
        return sum(entry.tokens for entry in self._manifest.shards.values()) + self._filled

    def add(self, block: Encoded) -> None:
        """Append the tokens of a block; write the shards that are full."""
        at = self.next.token  # not 0 if an earlier shard holds the beginning of the document
        while at < len(block.ids) and self.left():
            if self._filled == 0:
                self._first = _place(block, at)
            stop = min(len(block.ids), at + self.left())
            self._buffer[self._filled : self._filled + stop - at] = block.ids[at:stop]
            self._filled += stop - at
            at = stop
            self.next = _place(block, at)
            if not self.left():
                self._write()

    def _write(self) -> None:
        name, ids = self._cut.name(self.num_shards), self._buffer[: self._filled]
        write_shard(self._out / name, ids)
        faults.point("shard")
        counts_V = self._counts(ids)
        entry = ShardEntry(
            tokens=self._filled,
            documents=int(counts_V[self._manifest.document_token]),
            sha256=shards.sha256(self._out / name),
            first=self._first,
            text_bytes=None if self._id_bytes_V is None else int(counts_V @ self._id_bytes_V),
        )
        changes: dict[str, Any] = {"shards": {**self._manifest.shards, name: entry}, "next": self.next}
        if self.num_shards == 0 and self._id_bytes_V is not None:
            scored = ids[1 : self._cut.scored_tokens + 1]
            scored_bytes = int(self._counts(scored) @ self._id_bytes_V)
            changes |= {"scored_tokens": len(scored), "scored_bytes": scored_bytes}
        self._manifest = msgspec.structs.replace(self._manifest, **changes)
        write_manifest(self._out, self._manifest)
        self._filled = 0

    def _counts(self, ids: np.ndarray) -> np.ndarray:
        """Return the number of each id, int64 [V]; in pieces, since `bincount` copies to int64."""
        pieces = (ids[at : at + _PIECE_TOKENS] for at in range(0, len(ids), _PIECE_TOKENS))
        counts_V = np.zeros(self._manifest.vocab_size, np.int64)
        for piece in pieces:
            counts_V += np.bincount(piece, minlength=len(counts_V))
        return counts_V

    def finish(self) -> Manifest:
        """Write the rest as a last, shorter shard, and mark the manifest complete."""
        if self._filled:
            self._write()
        if not self._manifest.shards:
            found = f"{self._manifest.source}: holds no document"
            raise DataError(f"{found}; need at least one; name another --source")
        self._manifest = msgspec.structs.replace(self._manifest, complete=True)
        write_manifest(self._out, self._manifest)
        return self._manifest


def _place(block: Encoded, at: int) -> Position:
    """Return the place of an index of a block, which may be its end."""
    if at == len(block.ids):
        row, token = len(block.starts), 0
    else:
        row = int(np.searchsorted(block.starts, at, side="right")) - 1
        token = at - int(block.starts[row])
    return msgspec.structs.replace(block.first, row=block.first.row + row, token=token)
