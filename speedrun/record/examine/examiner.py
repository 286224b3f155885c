"""Trains and scores the programs that a record carries, as StableHLO; imports nothing of its source.

    python -m speedrun.record.examine.examiner EXAMINATION.json      a child process of `validate --replay`

Legend: B sequences, T time, D model, N tokens, K rows of the head, V vocabulary, R sequences of a text.
"""

import math
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from speedrun.base import mesh as meshes
from speedrun.base import track as tracks
from speedrun.base.console import clean
from speedrun.base.errors import SpeedrunError, UsageError
from speedrun.base.output import reported
from speedrun.base.progress import over
from speedrun.data import shards, stream, synthetic, vocabulary
from speedrun.record import layout
from speedrun.record.examination import Examination, Findings
from speedrun.record.examine import causality
from speedrun.record.examine.stablehlo import Programs
from speedrun.record.examine.training import Trainer, finite
from speedrun.record.reader import read_programs
from speedrun.train.checkpoint import state_hash
from speedrun.train.run_config import decoded

_TEXTS = 140  #: scored sequences to change
#: Limits for other text: sequences, or tokens if that allows more sequences.
_OTHERS, _OTHER_TOKENS = 64, 2**16
#: Sequences to change and to score on another platform than the run's, where a CPU takes minutes for each.
_FEW, _SAMPLE = 8, 16


def examine(request: Examination) -> Findings:
    """Examine a run; raise SpeedrunError if its programs, checkpoints or data cannot be used."""
    meshes.prepare(tracks.version(request.track).rules.platform)
    try:
        return _Examiner(request).findings()
    except SpeedrunError:
        raise
    except Exception as error:  # untrusted programs can raise anything
        why = clean(repr(error), limit=200)
        raise UsageError(
            f"its programs cannot be examined ({why}); need the programs that a run exports"
        ) from error


class _Examiner:
    def __init__(self, request: Examination) -> None:
        self.request, self.track = request, tracks.version(request.track)
        self.archive = read_programs(request.programs.read_bytes())
        known = vocabulary.load(self.track, request.data) if self.archive.derived else ()
        self.programs = Programs(self.archive, meshes.make_mesh(request.num_devices, request.replicas), known)
        self.shards = shards.open_track(request.data, self.track.data)
        self.end = request.num_steps
        validated = {self.end, *filter(self.track.validates_at, range(self.end))}
        self.foreign = request.platform != jax.default_backend()
        if self.foreign and request.checkpoints is None:
            raise UsageError(f"it ran on a {request.platform}; need its final state; pass --checkpoints")
        steps, scored = self.programs.lowered.steps, self.programs.lowered.scored
        if len(steps) != self.end or validated != scored.keys():
            got = f"{len(steps):,} steps and {len(scored)} validations"
            raise UsageError(
                f"its programs are for {got}; the log and the track have {self.end:,} and {len(validated)}"
            )

    def findings(self) -> Findings:
        """Train all stretches again; then score the run's own final state, or the last state that was reached.

        On another platform than the run's, only score some sequences of its own final state.
        """
        given = self.request, self.track, self.archive, self.programs, self.shards
        trainer = Trainer(*given, lambda leaves, step: self._loss(self._params(leaves), step))
        replayed, leaves, cursor = ([], [], stream.START) if self.foreign else trainer.all()
        if own := self.request.checkpoints is not None:
            leaves, cursor = trainer.restored(self.end)
        params = self._params(leaves)
        scored, held, others = self._scored, self._held, self._others(cursor)
        first, sample_R = len(scored.tokens_BT), np.arange(len(scored.tokens_BT) + len(held.tokens_BT))
        if self.foreign:
            drawn = self._draw.permutation(sample_R)
            sample_R = np.concatenate([drawn[drawn < first][:_SAMPLE], drawn[drawn >= first][:_FEW]])
        both = (np.concatenate(ids)[sample_R] for ids in zip(scored, held, strict=True))
        sample, num_scored = stream.Batch(*both), int((sample_R < first).sum())
        scored = stream.Batch(sample.tokens_BT[:num_scored], sample.targets_BT[:num_scored])
        model = self._model(params, self.end)
        sample_nll_R, others_R = self._nll(model, sample), self._nll(model, others)
        nll_R = sample_nll_R[:num_scored]
        compared = min(len(nll_R), len(others_R)) > 1
        low_gap, low_error = _low(nll_R, others_R) if compared else (0.0, 0.0)
        shuffled = stream.Batch(
            scored.tokens_BT[:_OTHERS], self._draw.permutation(scored.targets_BT[:_OTHERS], axis=1)
        )
        known = self._leaks(params, scored, others if compared else None)
        return Findings(
            val_sha256=layout.sha256(self.shards.val[0].read(0, self.track.data.val_tokens + 1).tobytes()),
            final_hash=state_hash(leaves),
            val_loss=float(nll_R.mean()),
            own=own,
            dtype=self.programs.dtype,
            num_params=self.programs.num_params,
            state_bytes_per_device=self.programs.state_bytes_per_device,
            batch_tokens=tuple(math.prod(self.programs.shape(name)) for name in self.programs.lowered.steps),
            columns=self.programs.columns,
            num_ids=self.track.data.vocab_size,
            rows=known.rows,
            leak=known.later,
            leak_at=known.at,
            changes=known.changes,
            neighbours=known.neighbours,
            constant_bytes=self.programs.held.num_bytes,
            num_literals=self.programs.held.num_literals,
            shuffled_loss=float(self._nll(model, shuffled).mean()),
            other_loss=float(others_R.mean()) if compared else None,
            other_error=_error(nll_R, others_R, math.log(self.track.data.vocab_size)) if compared else 0.0,
            low_gap=low_gap,
            low_error=low_error,
            stretches=tuple(replayed),
            foreign=self.foreign,
            num_sequences=(first, len(held.tokens_BT)),
            sample=tuple(zip(sample_R.tolist(), sample_nll_R.tolist(), strict=True)),
        )

    # --- scoring

    def _params(self, leaves: list[Any]) -> list[jax.Array]:
        """Return the parameters, unsharded, on one device."""
        device = self.programs.mesh.devices.flat[0]
        return [jax.device_put(np.asarray(x), device) for x in leaves[1 : 1 + self.archive.num_params]]

    @property
    def _shape_BT(self) -> tuple[int, ...]:
        """Shape of the ids that a forward pass takes."""
        return self.programs.shape(self.programs.scorer("hidden", self.end))

    def _model(self, params: list[jax.Array], step: int) -> causality.Model:
        """Return the programs that score parameters in the validation at a step."""

        def outcome(part: str, x: jax.Array) -> jax.Array:
            run = self.programs.compiled(self.programs.scorer(part, step))
            (found,) = run(*params, *self.programs.constants, jnp.int32(step), x)
            return found

        return causality.Model(
            hidden=lambda ids_BT: outcome("hidden", jnp.asarray(ids_BT, jnp.int32)),
            log_probs=lambda x_KD: _log_softmax(outcome("logits", jnp.asarray(x_KD))),
            chunk=self.programs.shape(self.programs.scorer("logits", self.end))[0],
        )

    def _nll(self, model: causality.Model, text: stream.Batch) -> np.ndarray:
        """Return the mean loss of each sequence of a text: f64 [R].

        The order is random, so that a sequence or token cannot profit from its neighbours.
        """
        found_R, batch = np.empty(len(text.tokens_BT)), self._shape_BT[0]
        batches = causality.parts(len(found_R), batch, self._draw) if len(found_R) else ()
        for rows_B in over("score", [*batches], "batches"):
            x_ND = np.concatenate(np.asarray(model.hidden(text.tokens_BT[rows_B])))
            targets_N, costs_N = text.targets_BT[rows_B].reshape(-1), np.empty(len(x_ND))
            for rows_K in causality.parts(len(x_ND), model.chunk, self._draw):
                picked_K1 = jnp.asarray(targets_N[rows_K, None])
                log_probs_K1 = jnp.take_along_axis(model.log_probs(x_ND[rows_K]), picked_K1, axis=1)
                costs_N[rows_K] = -np.asarray(log_probs_K1[:, 0])
            found_R[rows_B] = finite(costs_N).reshape(batch, -1).mean(axis=1)
        return found_R

    def _loss(self, params: list[jax.Array], step: int) -> float:
        """Return the mean loss over the track's validation tokens, in the validation at a step."""
        return float(self._nll(self._model(params, step), self._scored).mean())

    # --- properties

    @cached_property
    def _scored(self) -> stream.Batch:
        """The validation text, in sequences."""
        return self._text(self.track.data.val_tokens, 0)

    @property
    def _held(self) -> stream.Batch:
        """The held-out text, in sequences; none if the track has none."""
        nonce, data = self.request.held_nonce, self.track.data
        start = data.held_start(nonce, self.shards.val[0].num_tokens) if nonce else 0
        return self._text(data.held_tokens if nonce else 0, start)

    def _text(self, num_tokens: int, start: int) -> stream.Batch:
        length = self._shape_BT[1]
        ids = self.shards.val[0].read(start, start + num_tokens + 1).astype(np.int32)
        return stream.Batch(ids[:-1].reshape(-1, length), ids[1:].reshape(-1, length))

    def _others(self, cursor: stream.Cursor) -> stream.Batch:
        """Return drawn sequences that were neither scored nor read up to a cursor, if there are any.

        They begin at any place of all such text. A synthetic track has more: a stream that nobody has seen.
        """
        length, data = self._shape_BT[1], self.track.data
        most = _FEW if self.foreign else max(_OTHERS, _OTHER_TOKENS // length)
        if source := self.track.synthetic:
            ids = synthetic.unseen(source, int(self._draw.integers(2**32)), most * length + 1).astype(
                np.int32
            )
            return stream.Batch(ids[:-1].reshape(most, length), ids[1:].reshape(most, length))
        (scored, *val), train = self.shards.val, self.shards.train[cursor.shard :]
        starts = [
            (scored, data.val_tokens),
            (train[0], cursor.offset),
            *((one, 0) for one in (*val, *train[1:])),
        ]
        places = []
        for shard, start in starts:
            spare = shard.num_tokens - start - length
            start += int(self._draw.integers(max(1, min(length, spare))))
            places += [(shard, at) for at in range(start, shard.num_tokens - length, length)]
        picked = self._draw.permutation(len(places))[:most]
        rows = [
            shard.read(at, at + length + 1).astype(np.int32) for shard, at in map(places.__getitem__, picked)
        ]
        ids_RT = np.array(rows, np.int32).reshape(len(rows), length + 1)
        return stream.Batch(ids_RT[:, :-1], ids_RT[:, 1:])

    @cached_property
    def _draw(self) -> np.random.Generator:
        return np.random.default_rng(self.request.draws)

    def _leaks(
        self, params: list[jax.Array], scored: stream.Batch, others: stream.Batch | None
    ) -> causality.Known:
        """Look for leaks in the last validation, and in a drawn one before it."""
        num_texts, num_others = (_FEW, _FEW) if self.foreign else (_TEXTS, _OTHERS)
        parts = [(scored, num_texts, self.end)]
        # A model that leaks in other text only would predict it as well as text that it memorised.
        if others is not None:
            parts.append((others, num_others, self.end))
        if earlier := sorted(self.programs.lowered.scored.keys() - {self.end}):
            parts.append((scored, num_others, int(self._draw.choice(earlier))))
        found, data, batch = causality.NOTHING, self.track.data, self._shape_BT[0]
        for text, number, step in parts:
            rows = causality.Text(text.tokens_BT, data.vocab_size, data.document_token)
            found = causality.known(self._model(params, step), rows, number, batch, self._draw, found)
        return found


@jax.jit
def _log_softmax(z_KV: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(z_KV.astype(jnp.float32), axis=1)


def _error(first_R: np.ndarray, second_R: np.ndarray, most: float) -> float:
    """Return the standard error of the difference between the mean losses of two samples of sequences.

    It uses the smaller sd of both, of losses cut at `most`; otherwise a few wild losses would hide any difference.
    """
    sds = [np.minimum(x_R, most).std(ddof=1) for x_R in (first_R, second_R)]
    return float(min(sds) * (1 / len(first_R) + 1 / len(second_R)) ** 0.5)


def _low(scored_R: np.ndarray, others_R: np.ndarray) -> tuple[float, float]:
    """Return by how much losses differ that are cut at the lower quartile of the other text, and its standard error.

    Memory lowers losses below that. A program cannot add to this noise: what it makes worse is cut.
    """
    scored_R, others_R = (np.minimum(x_R, np.quantile(others_R, 0.25)) for x_R in (scored_R, others_R))
    error = others_R.std(ddof=1) * (1 / len(scored_R) + 1 / len(others_R)) ** 0.5
    return float(others_R.mean() - scored_R.mean()), float(error)


if __name__ == "__main__":
    with reported():
        request = decoded(Path(sys.argv[1]).read_bytes(), Examination)
        request.findings.write_bytes(msgspec.json.encode(examine(request)))
