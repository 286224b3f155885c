"""Trains again with the programs that a record carries: stretches of a run, or all rounds of islands."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from msgspec.structs import replace

from speedrun.base import mesh as meshes
from speedrun.base import track as tracks
from speedrun.base.errors import CheckpointError, UsageError
from speedrun.base.progress import over
from speedrun.base.rounds import Work
from speedrun.data import shards, stream
from speedrun.islands.outer import Weights
from speedrun.islands.replay import repeated
from speedrun.islands.rounds import Answer
from speedrun.record import layout
from speedrun.record.archive import Archive
from speedrun.record.examine.stablehlo import Programs
from speedrun.record.findings import Examination, Replayed, Stretch
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
            found, leaves, cursor = self._islands(self.request.islands.every)
            return [found], leaves, cursor
        for stretch in self.request.stretches:
            found, leaves, cursor = self._stretch(stretch)
            done.append(found)
        return done, leaves, cursor

    def _stretch(self, stretch: Stretch) -> tuple[Replayed, State, stream.Cursor]:
        """Train a stretch of steps again, with the track's validations."""
        leaves, cursor = self.restored(stretch.start) if stretch.from_checkpoint else self._initial()
        began, begun, losses, vals, first = state_hash(leaves), cursor, [], [], ""
        tokens = self._stream(cursor)
        for at in over("train", range(stretch.start, stretch.stop), "steps"):
            if self.track.validates_at(at):
                vals.append((at, self.loss(leaves, at)))
            leaves, loss, batch = self._step(leaves, at, tokens)
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

    def _stream(self, cursor: stream.Cursor) -> stream.TokenStream:
        return stream.TokenStream(self.shards.train, cursor, document_token=self.track.data.document_token)

    def _step(self, leaves: State, at: int, tokens: stream.TokenStream) -> tuple[State, float, stream.Batch]:
        """Train a step; return the state, the loss and the batch."""
        name = self.programs.lowered.steps[at]
        num_sequences, seq_len = self.programs.shape(name)
        batch = tokens.batch(num_sequences, seq_len, self.archive.document_tokens[at])
        ids = (meshes.place(x, self.programs.mesh) for x in batch)
        outs = (*self._places, NamedSharding(self.programs.mesh, P()))
        *leaves, loss = self.programs.compiled(name, outs=outs)(*leaves, *self._constants, *ids)
        return leaves, float(finite(loss)), batch

    @cached_property
    def _constants(self) -> Any:
        return meshes.replicate(self.programs.constants, self.programs.mesh)

    def _islands(self, every: int) -> tuple[Replayed, State, stream.Cursor]:
        """Train all rounds again, each island from a state of its own, with the track's validations."""
        fresh, end, states = self._initial()[0], self.request.num_steps, dict[str, State]()
        names = self.archive.leaves[1:][: self.archive.num_params]
        weights = {name: np.asarray(x) for name, x in zip(names, fresh[1:], strict=False)}
        losses, vals, last = list[float](), list[tuple[int, float]](), stream.START

        def adopted(leaves: State, weights: Weights, step: int) -> State:
            given = [np.asarray(step, leaves[0].dtype), *weights.values()]
            return [*map(jax.device_put, given, self._places), *leaves[len(given) :]]

        def train(island: str, work: Work, weights: Weights) -> Answer:
            nonlocal last
            at, tokens, costs = work.version * every, self._stream(stream.Cursor(*work.start)), []
            leaves = adopted(states.pop(island, None) or self._initial()[0], weights, at)
            for step in range(at, min(at + every, end)):
                leaves, loss, _ = self._step(leaves, step, tokens)
                costs.append(loss)
            if tokens.cursor != work.stop:
                raise UsageError(
                    f"lease {work.lease} ends at {work.stop} by the log, at {tokens.cursor} when read"
                )
            states[island], last = leaves, max(last, tokens.cursor)
            moved = dict(zip(weights, map(np.asarray, leaves[1:]), strict=False))
            return Answer(replace(work, losses=tuple(costs)), "", moved)

        assert self.request.islands is not None
        for one in repeated(self.request.islands, self.request.rounds, weights, train):
            at = one.round.version * every
            if self.track.validates_at(at):
                vals.append((at, self.loss(adopted(fresh, weights, at), at)))
            losses += [fmean(step) for step in zip(*(new.losses for _, new in one.works), strict=True)]
            weights = one.weights
        found = Replayed(
            start=0,
            stop=end,
            from_checkpoint=False,
            state_hash=state_hash(fresh),
            stop_hash=state_hash(leaves := adopted(fresh, weights, end)),
            losses=tuple(losses),
            vals=tuple(vals),
            cursors=(stream.START, last),
            first_batch_sha256="",
            ranges=(),
        )
        return found, leaves, last

    def _initial(self) -> tuple[State, stream.Cursor]:
        key = jax.random.key_data(jax.random.key(self.request.run_seed))
        return list(self.programs.compiled("init", outs=self._places)(key)), stream.START

    @property
    def _places(self) -> tuple[Any, ...]:
        return tuple(leaf.sharding for leaf in self.programs.state)

    def restored(self, step: int) -> tuple[State, stream.Cursor]:
        """Restore a state and its position in the data from a checkpoint."""
        assert self.request.checkpoints is not None
        folder = self.request.checkpoints.absolute() / str(step)
        if not folder.is_dir():
            raise CheckpointError(
                f"{self.request.checkpoints}: no checkpoint {step}; need it; train with --keep-checkpoints 0"
            )
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
