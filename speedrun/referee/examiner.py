"""Trains and scores the programs that a record's source handed over; imports nothing of that source.

    python -m speedrun.referee.examiner EXAMINATION.json      run by `validate --replay` in a process of its own

A program is a pure function of its arguments: it is read as StableHLO, inspected, compiled and run. Batches, order,
scorer and comparisons belong to this file. Legend: B sequences, S ids of a text, T time, D model,
N tokens of a chunk, V vocabulary, L leaves of the state.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from speedrun.data import inventory, stream
from speedrun.ground import mesh as meshes
from speedrun.ground import track as tracks
from speedrun.ground.errors import CheckpointError
from speedrun.ground.output import reported
from speedrun.ledger.findings import Examination, Findings, HandedOver, Replayed, Stretch
from speedrun.referee import causality
from speedrun.referee.programs import Programs
from speedrun.training.checkpoint import unseal
from speedrun.training.fingerprint import state_hash
from speedrun.training.prepare import decoded

#: Texts to change: as many as positions, so that a leak in few texts is as likely to be found as one at few positions.
_TEXTS = 140
_BATCHES = 4  #: in which sequences, and rows of the head, are permuted


def examine(request: Examination) -> Findings:
    """Examine a run.

    Raises:
        SpeedrunError: if a program is not permitted, or a checkpoint or data is missing or damaged.
    """
    meshes.prepare(tracks.load(request.track).rules.platform)
    return _Examiner(request).findings()


class _Examiner:
    """One run under examination."""

    def __init__(self, request: Examination) -> None:
        self.request, self.track = request, tracks.load(request.track)
        handed = msgspec.json.decode((request.programs / "programs.json").read_bytes(), type=HandedOver)
        self.handed = handed
        self.programs = Programs(
            request.programs, handed, meshes.make_mesh(request.num_devices, request.replicas)
        )
        self.shards = inventory.open_track(request.data, self.track.data)
        self.end = len(handed.steps)

    def findings(self) -> Findings:
        """Train all stretches again, then look at the run's own final state, or at the last one that was reached."""
        replayed, leaves = [], []
        for stretch in self.request.stretches:
            found, leaves = self._replayed(stretch)
            replayed.append(found)
        if own := self.request.checkpoints is not None:
            leaves, _ = self._restored(self.end)
        params = self._params(leaves)
        seen = self._leak(params)
        return Findings(
            final_hash=state_hash(leaves),
            val_loss=self._loss(params),
            own=own,
            columns=self.handed.programs["logits"].outputs[0].shape[1],
            num_ids=self.track.data.vocab_size,
            rows=self._rows(params),
            leak=seen.nats,
            leak_at=seen.at,
            changes=seen.changes,
            company=self._company(params),
            stretches=tuple(replayed),
        )

    # --- training

    def _replayed(self, stretch: Stretch) -> tuple[Replayed, list[Any]]:
        """Train a stretch of steps again, with the validations that the track declares before and inside it."""
        leaves, cursor = self._restored(stretch.start) if stretch.from_checkpoint else self._initial()
        began, losses, vals = state_hash(leaves), [], []
        opens = self.track.data.document_token
        tokens = stream.TokenStream(self.shards.train, cursor, document_token=opens)
        outs = (*self.programs.state_places, NamedSharding(self.programs.mesh, P()))
        for at in range(stretch.start, stretch.stop):
            if self.track.validates_at(at):
                vals.append((at, self._loss(self._params(leaves), at)))
            name = self.handed.steps[at]
            num_sequences, seq_len = self.handed.programs[name].inputs[-1].shape
            documents = self.handed.document_tokens
            batch = tokens.batch(num_sequences, seq_len, documents[at] if documents else 0)
            ids = (meshes.place(x, self.programs.mesh) for x in batch)
            *leaves, loss = self.programs.compiled(name, outs=outs)(*leaves, *ids)
            losses.append(float(loss))
        found = Replayed(
            stretch.start, stretch.stop, stretch.from_checkpoint, began, tuple(losses), tuple(vals)
        )
        return found, leaves

    def _initial(self) -> tuple[list[Any], stream.Cursor]:
        key = jax.random.key_data(jax.random.key(self.request.run_seed))
        places = tuple(self.programs.state_places)
        return list(self.programs.compiled("init", outs=places)(key)), stream.START

    def _restored(self, step: int) -> tuple[list[Any], stream.Cursor]:
        """Restore a state of the run and its position in the data from a checkpoint."""
        import orbax.checkpoint as ocp

        assert self.request.checkpoints is not None
        folder = self.request.checkpoints.absolute() / str(step)
        if not folder.is_dir():
            raise CheckpointError(
                f"{self.request.checkpoints}: no checkpoint {step}, which is needed; train with --keep-checkpoints 0"
            )
        arrays = self.handed.programs[self.handed.steps[0]].inputs
        wanted = {
            name: jax.ShapeDtypeStruct(one.shape, jnp.dtype(one.dtype), sharding=place)
            for name, one, place in zip(self.handed.leaves, arrays, self.programs.state_places, strict=False)
        }
        try:
            facts = json.loads(unseal(json.loads((folder / "facts" / "metadata").read_bytes())))
            arrays = ocp.StandardCheckpointer().restore(folder / "state", wanted)
            cursor = stream.Cursor(*map(int, facts["cursor"]))
        except Exception as error:  # noqa: BLE001 - orbax raises this very class, with 60 lines of text
            said = str(error).strip().partition("\n")[0][:120]
            raise CheckpointError(f"{folder}: cannot be read ({said}); restore its files") from None
        return [arrays[name] for name in self.handed.leaves], cursor

    # --- scoring

    def _params(self, leaves: list[Any]) -> list[jax.Array]:
        """Return the parameters, unsharded, on one device."""
        device = self.programs.mesh.devices.flat[0]
        return [jax.device_put(np.asarray(x), device) for x in leaves[1 : 1 + self.handed.num_params]]

    @property
    def _shape_BT(self) -> tuple[int, ...]:
        """Shape of the ids that a forward pass takes."""
        return self.handed.programs[self.handed.hidden[self.end]].inputs[-1].shape

    def outputs(self, params: list[jax.Array], ids_BT: np.ndarray, at: int | None = None) -> jax.Array:
        """Return the hidden state before the head in the validation at a step, by default the last: [B, T, D]."""
        forward = self.programs.compiled(self.handed.hidden[self.end if at is None else at])
        (x_BTD,) = forward(*params, jnp.asarray(ids_BT, jnp.int32))
        return x_BTD

    def log_probs(self, params: list[jax.Array], x_ND: Any) -> Iterator[jax.Array]:
        """Yield log softmax over all columns of the logits, by the definition: f32 [N, V], chunk by chunk."""
        chunk, width = self.handed.programs["logits"].inputs[-1].shape
        dtype = jnp.dtype(self.handed.programs["logits"].inputs[-1].dtype)
        for at in range(0, len(x_ND), chunk):
            part = jnp.asarray(x_ND[at : at + chunk], dtype)
            padded = jnp.zeros((chunk, width), dtype).at[: len(part)].set(part)
            (z_NV,) = self.programs.compiled("logits")(*params, padded)
            yield jax.nn.log_softmax(z_NV.astype(jnp.float32), axis=1)[: len(part)]

    def costs(self, params: list[jax.Array], x_ND: Any, targets_N: np.ndarray) -> np.ndarray:
        """Return the negative log likelihood of each target in nats: f64 [N]."""
        found, at = [], 0
        for log_probs_NV in self.log_probs(params, x_ND):
            picked = jnp.asarray(targets_N[at : at + len(log_probs_NV), None])
            found.append(-np.asarray(jnp.take_along_axis(log_probs_NV, picked, axis=1)[:, 0], np.float64))
            at += len(log_probs_NV)
        return np.concatenate(found)

    def _loss(self, params: list[jax.Array], at_step: int | None = None) -> float:
        """Return the mean loss over the track's validation tokens, in the validation at a step."""
        num_tokens, total = self.track.data.val_tokens, 0.0
        batch, length = self._shape_BT
        rows = list(stream.validation_batches(self.shards.val[0], num_tokens, 1, length))
        # In an unknown order, so that what a sequence or token learns from its neighbours is of no use.
        order = self._draw.permutation(len(rows))
        for start in range(0, len(rows), batch):
            part = [rows[at] for at in order[start : start + batch]]
            ids = [row.tokens_BT[0] for row in part] + [part[-1].tokens_BT[0]] * (batch - len(part))
            x_ND = np.concatenate(np.asarray(self.outputs(params, np.stack(ids), at_step))[: len(part)])
            targets_N = np.concatenate([row.targets_BT[0] for row in part])
            shuffled = self._draw.permutation(len(x_ND))
            total += float(self.costs(params, x_ND[shuffled], targets_N[shuffled]).sum())
        return total / num_tokens

    # --- properties

    def _distance(self, params: list[jax.Array]) -> Callable[[np.ndarray, np.ndarray], float]:
        def distance(first_ND: np.ndarray, second_ND: np.ndarray) -> float:
            pairs = zip(self.log_probs(params, first_ND), self.log_probs(params, second_ND), strict=True)
            return max(_apart(*pair) for pair in pairs)

        return distance

    def _scored(self, which: np.ndarray) -> np.ndarray:
        """Return rows of the validation text as they are scored: a model may recognise them by their first ids."""
        length = self._shape_BT[1]
        shard, starts = self.shards.val[0], which % self._num_rows * length
        return np.stack([shard.read(int(at), int(at) + length).astype(np.int32) for at in starts])

    @property
    def _num_rows(self) -> int:
        return self.track.data.val_tokens // self._shape_BT[1]

    def _texts(self, num_rows: int) -> np.ndarray:
        """Return rows of the validation text in random order, each equally often."""
        return self._scored(np.resize(self._draw.permutation(self._num_rows), num_rows))

    @cached_property
    def _draw(self) -> np.random.Generator:
        return np.random.default_rng(self.request.draws)

    def _leak(self, params: list[jax.Array]) -> causality.Leak:
        data, batch = self.track.data, self._shape_BT[0]
        return causality.leak(
            lambda ids_BT: np.asarray(self.outputs(params, ids_BT)),
            self._distance(params),
            self._texts(_TEXTS),
            batch,
            data.vocab_size,
            data.document_token,
            self._draw,
        )

    def _company(self, params: list[jax.Array]) -> float:
        """Return the largest change when sequences get other neighbours and places in the batch."""
        batch, _ = self._shape_BT
        if batch == 1:
            return 0.0
        largest = 0.0
        for _ in range(_BATCHES):
            rows_RT = self._scored(self._draw.integers(self._num_rows) + np.arange(2 * batch))
            order = self._draw.permutation(len(rows_RT))
            first_RTD, second_RTD = (self._both(params, rows) for rows in (rows_RT[order], rows_RT))
            for one_TD, other_TD in zip(first_RTD, second_RTD[order], strict=True):
                if (one_TD != other_TD).any():
                    largest = max(largest, self._distance(params)(one_TD, other_TD))
        return largest

    def _both(self, params: list[jax.Array], rows_RT: np.ndarray) -> np.ndarray:
        """Return the outputs of two batches."""
        return np.concatenate([self.outputs(params, half_BT) for half_BT in np.split(rows_RT, 2)])

    def _rows(self, params: list[jax.Array]) -> float:
        """Return the largest change when the rows of the head are permuted."""
        chunk, width = self.handed.programs["logits"].inputs[-1].shape
        batch, _ = self._shape_BT
        largest = 0.0
        for ids_BT in np.split(self._texts(_BATCHES * batch), _BATCHES):
            x_ND = np.asarray(self.outputs(params, ids_BT)).reshape(-1, width)
            for start in range(0, len(x_ND), chunk):
                part_ND = x_ND[start : start + chunk]
                order = self._draw.permutation(len(part_ND))
                (first,), (second,) = self.log_probs(params, part_ND), self.log_probs(params, part_ND[order])
                largest = max(largest, _apart(first[order], second))
        return largest


def _apart(first_NV: jax.Array, second_NV: jax.Array) -> float:
    """Return the largest difference of log-probabilities; two zero probabilities are equal, NaN differs from all."""
    # Never NaN itself: `max` would drop it, and a column of -inf would hide all others.
    differ_NV = jnp.where(first_NV == second_NV, 0.0, jnp.abs(first_NV - second_NV))
    return float(jnp.nan_to_num(jnp.max(differ_NV), nan=jnp.finfo(jnp.float32).max))


if __name__ == "__main__":
    with reported():
        request = decoded(Path(sys.argv[1]).read_bytes(), Examination)
        request.findings.write_bytes(msgspec.json.encode(examine(request)))
