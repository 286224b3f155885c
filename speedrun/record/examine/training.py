"""Trains again with the programs that a record carries: stretches of a run, or all of its rounds."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from speedrun.base import mesh as meshes
from speedrun.base import track as tracks
from speedrun.base.errors import CheckpointError
from speedrun.base.progress import over
from speedrun.commands import added
from speedrun.data import shards, stream
from speedrun.record import layout
from speedrun.record.archive import Archive
from speedrun.record.examination import Examination, Replayed, Stretch
from speedrun.record.examine.stablehlo import Programs
from speedrun.train import checkpoint
from speedrun.train.checkpoint import state_hash

State = list[Any]  #: the leaves of a state: step, parameters, the rest


@dataclass
class Trainer:
    """Repeats the training of a run."""

    request: Examination
    track: tracks.Track
    archive: Archive
    programs: Programs
    shards: shards.TrackShards
    loss: Callable[[State, int], float]  #: of a state, in the validation at a step

    def all(self) -> tuple[list[Replayed], State, stream.Cursor]:
        """Train everything that is asked; return what was found, the last state, and the position after it."""
        done, leaves, cursor = [], [], stream.START
        if self.request.islands is not None:
            found, leaves, cursor = added("rounds")(self)
            return [found], leaves, cursor
        for stretch in self.request.stretches:
            found, leaves, cursor = self._stretch(stretch)
            done.append(found)
        return done, leaves, cursor

    def _stretch(self, stretch: Stretch) -> tuple[Replayed, State, stream.Cursor]:
        """Train a stretch of steps again, with the track's validations."""
        leaves, cursor = self.restored(stretch.start) if stretch.from_checkpoint else self.initial()
        began, begun, losses, vals, first = state_hash(leaves), cursor, [], [], ""
        tokens = self.read_from(cursor)
        for at in over("train", range(stretch.start, stretch.stop), "steps"):
            if self.track.validates_at(at):
                vals.append((at, self.loss(leaves, at)))
            leaves, loss, batch = self.stepped(leaves, at, tokens)
            first = first or layout.sha256(batch.tokens_BT.astype("<u2").tobytes())
            losses.append(loss)
        found = Replayed(
            **msgspec.structs.asdict(stretch),
            state_hash=began,
            stop_hash=state_hash(leaves),
            losses=tuple(losses),
            vals=tuple(vals),
            cursors=(begun, tokens.cursor),
            first_batch_sha256=first,
            ranges=tokens.ranges,
        )
        return found, leaves, tokens.cursor

    def read_from(self, cursor: stream.Cursor) -> stream.TokenStream:
        """Return the training tokens from a position on."""
        return stream.TokenStream(self.shards.train, cursor, document_token=self.track.data.document_token)

    def stepped(
        self, leaves: State, at: int, tokens: stream.TokenStream
    ) -> tuple[State, float, stream.Batch]:
        """Train a step; return the state, the loss and the batch."""
        name = self.programs.lowered.steps[at]
        num_sequences, seq_len = self.programs.shape(name)
        batch = tokens.batch(num_sequences, seq_len, self.archive.document_tokens[at])
        ids = (meshes.shard(x, self.programs.mesh) for x in batch)
        outs = (*self.places, NamedSharding(self.programs.mesh, P()))
        *leaves, loss = self.programs.compiled(name, outs=outs)(*leaves, *self._constants, *ids)
        return leaves, float(finite(loss)), batch

    @cached_property
    def _constants(self) -> Any:
        return meshes.replicate(self.programs.constants, self.programs.mesh)

    def initial(self) -> tuple[State, stream.Cursor]:
        """Return the state before training, and the position there."""
        key = jax.random.key_data(jax.random.key(self.request.run_seed))
        return list(self.programs.compiled("init", outs=self.places)(key)), stream.START

    @property
    def places(self) -> tuple[Any, ...]:
        """The sharding of each leaf."""
        return tuple(leaf.sharding for leaf in self.programs.state)

    def restored(self, step: int) -> tuple[State, stream.Cursor]:
        """Restore a state and its position in the data from a checkpoint."""
        assert self.request.checkpoints is not None
        folder = self.request.checkpoints.absolute() / str(step)
        if not folder.is_dir():
            found = f"{self.request.checkpoints}: no checkpoint {step}"
            raise CheckpointError(f"{found}; need it; train with --keep-checkpoints 0")
        wanted = dict(zip(self.archive.leaves, self.programs.state, strict=True))
        try:
            facts = checkpoint.read_facts(folder.parent, step)
            arrays = checkpoint.read_arrays(folder.parent, facts, wanted)
        except checkpoint.Damaged as damage:
            raise CheckpointError(f"{folder} is damaged ({damage}); restore its files") from None
        return [arrays[name] for name in self.archive.leaves], facts.cursor


def finite(x: Any) -> np.ndarray:
    """Replace what is not finite by a large number: JSON has no NaN, and comparisons drop it."""
    most = float(np.finfo(np.float32).max)
    return np.nan_to_num(x, nan=most, posinf=most, neginf=-most)
