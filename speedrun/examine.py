"""Looks at the final state of a run, and goes on from its checkpoints.

    python -m speedrun.examine EXAMINATION.json      what `speedrun validate --replay` calls on an unpacked source

Recipe, model and step are the record's; the scorer is written here once more, from its definition, so that a loss
that flatters itself is seen. Legend: B sequences, T time, D model, V vocabulary, N tokens.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from speedrun import mesh as meshes
from speedrun.checkpoint import Checkpoints
from speedrun.data import stream
from speedrun.fingerprint import state_hash
from speedrun.ledger import format
from speedrun.ledger.findings import Examination, Findings, Restart
from speedrun.output import told
from speedrun.prepare import Ready, RunConfig, prepare
from speedrun.program import StepShape
from speedrun.step import TrainState

_CHANGED = (1, 17, 40)  #: tokens near the start of a sequence, where a leak is easiest to see
_SHORT_TOKENS = (
    128  #: of the sequences whose probabilities are summed: a longer sum would hide more in its rounding
)
_MOST_IDS = 4096  #: a sequence for each of them is scored
_CHUNK_TOKENS = 1024


@dataclass(frozen=True)
class _Model:
    """Whole parameters on one device, in the compute dtype."""

    ready: Ready
    params: dict[str, jax.Array]

    @cached_property
    def _forward(self) -> Callable[[dict[str, jax.Array], jax.Array], jax.Array]:
        recipe, program = self.ready.recipe, self.ready.program
        window = program.step.window(int(recipe.inputs_at(recipe.num_steps).window_blocks))
        return jax.jit(lambda p, ids_BT: recipe.forward(p, ids_BT, window, recipe.config, program.kernels))

    def outputs(self, tokens_BT: np.ndarray) -> jax.Array:
        """What the head is given: [B, T, D]."""
        return self._forward(self.params, jnp.asarray(tokens_BT))

    def log_probs(self, x_ND: jax.Array) -> jax.Array:
        """Of every id, by the definition: log softmax of cap * tanh(x W^T / cap), f32 [N, V]."""
        cap = self.ready.recipe.config.logit_cap
        z_NV = x_ND.astype(jnp.float32) @ self.params["head"].astype(jnp.float32).T
        return jax.nn.log_softmax(cap * jnp.tanh(z_NV / cap), axis=1)


def examine(asked: Examination) -> Findings:
    """Everything that `Findings` holds.

    Raises:
        CheckpointError: if a checkpoint is missing or damaged.
    """
    config = msgspec.convert(asked.config, RunConfig, dec_hook=lambda kind, value: kind(value))
    ready = prepare(config)
    checkpoints = Checkpoints(asked.checkpoints, every=1, keep=0, say=print)
    state, _ = checkpoints.restore_at(ready.recipe.num_steps, ready.program, _config_sha256(ready))
    packed = {name: jnp.asarray(jax.device_get(x)) for name, x in state.params.items()}
    compute = ready.recipe.compute_dtype
    params = ready.program.layout.unpack(packed)
    kinds = ready.recipe.table(ready.recipe.config)
    model = _Model(
        ready, {n: x if kinds[n].group == "scalar" else x.astype(compute) for n, x in params.items()}
    )
    return Findings(
        final_hash=state_hash(state),
        val_loss=_val_loss(model),
        masses=_masses(model, state),
        leak=_leak(model),
        company=_company(model, state),
        restarts=tuple(_restart(ready, checkpoints, step, asked.num_replayed) for step in asked.restarts),
    )


def _config_sha256(ready: Ready) -> str:
    return format.config_sha256(ready.described)


def _val_loss(model: _Model) -> float:
    """Mean negative log likelihood of the track's validation tokens."""
    recipe, track, val = model.ready.recipe, model.ready.track, model.ready.shards.val[0]
    total, tokens = 0.0, 0

    @jax.jit
    def nll(x_ND: jax.Array, targets_N: jax.Array) -> jax.Array:
        return -jnp.take_along_axis(model.log_probs(x_ND), targets_N[:, None], axis=1)

    for batch in stream.validation_batches(val, track.data.val_tokens, 1, recipe.eval_seq_len):
        x_TD, targets_T = model.outputs(batch.tokens_BT)[0], batch.targets_BT[0]
        for at in range(0, len(targets_T), _CHUNK_TOKENS):
            part = nll(x_TD[at : at + _CHUNK_TOKENS], jnp.asarray(targets_T[at : at + _CHUNK_TOKENS]))
            total += float(np.sum(np.asarray(part), dtype=np.float64))
        tokens += targets_T.size
    return total / tokens


def _ids(model: _Model, num_sequences: int, length: int) -> np.ndarray:
    """Rows of the validation text, each one token longer than what is scored."""
    tokens = model.ready.shards.val[0].read(0, num_sequences * length + 1).astype(np.int32)
    return np.stack([tokens[i * length : (i + 1) * length + 1] for i in range(num_sequences)])


def _scores(model: _Model, state: TrainState, ids_BS: np.ndarray) -> np.ndarray:
    """Nats of each sequence by the record's own validation step: f64 [B]."""
    recipe, program = model.ready.recipe, model.ready.program
    score = program.eval_step_for(program.fixed_window_at(recipe.num_steps))
    found = []
    for at in range(0, len(ids_BS), recipe.eval_sequences):
        rows = ids_BS[at : at + recipe.eval_sequences]
        short = recipe.eval_sequences - len(rows)
        rows = np.concatenate([rows, np.repeat(rows[-1:], short, axis=0)])
        tokens_BT, targets_BT = (
            meshes.place(np.ascontiguousarray(x), program.mesh) for x in (rows[:, :-1], rows[:, 1:])
        )
        nll_BC = jax.device_get(score(state.params, tokens_BT, targets_BT, program.schedule, state.step))
        found.append(nll_BC[: recipe.eval_sequences - short].sum(axis=1, dtype=np.float64))
    return np.concatenate(found).astype(np.float64)


def _masses(model: _Model, state: TrainState) -> tuple[float, ...]:
    """Sum of the probabilities that the record's own step gives to all ids at a position.

    Its step tells sums over sequences only. So every id takes a turn as the last target, and what the other targets
    cost is taken from our scorer.
    """
    num_ids, masses = model.params["head"].shape[0], []
    if num_ids > _MOST_IDS:
        return ()
    for row_S in _ids(model, 2, min(_SHORT_TOKENS, model.ready.recipe.eval_seq_len)):
        log_probs_TV = np.asarray(model.log_probs(model.outputs(row_S[None, :-1])[0]), np.float64)
        others = -log_probs_TV[np.arange(len(row_S) - 2), row_S[1:-1]].sum()
        rows_VS = np.repeat(row_S[None], num_ids, axis=0)
        rows_VS[:, -1] = np.arange(num_ids)
        masses.append(float(np.exp(others - _scores(model, state, rows_VS)).sum()))
    return tuple(masses)


def _leak(model: _Model) -> float:
    """Outputs before a token must not know it."""
    (row_S,), largest = _ids(model, 1, model.ready.recipe.eval_seq_len), 0.0
    before_TD = np.asarray(model.outputs(row_S[None, :-1])[0], np.float32)
    for position in (*_CHANGED, len(row_S) // 2, len(row_S) - 2):
        changed_S = row_S.copy()
        changed_S[position] = (changed_S[position] + 1) % model.ready.track.data.vocab_size
        after_TD = np.asarray(model.outputs(changed_S[None, :-1])[0], np.float32)
        largest = max(largest, float(np.abs(after_TD[:position] - before_TD[:position]).max()))
    return largest


def _company(model: _Model, state: TrainState) -> float:
    """A sequence must cost the same whatever stands beside it; per token."""
    recipe = model.ready.recipe
    rows_BS = _ids(model, 2 * recipe.eval_sequences, recipe.eval_seq_len)
    order = np.random.default_rng(0).permutation(len(rows_BS))
    first, second = _scores(model, state, rows_BS), _scores(model, state, rows_BS[order])
    return float(np.abs(first[order] - second).max()) / (rows_BS.shape[1] - 1)


def _restart(ready: Ready, checkpoints: Checkpoints, step: int, num_replayed: int) -> Restart:
    """A few steps of training from a checkpoint on."""
    program, recipe = ready.program, ready.recipe
    state, facts = checkpoints.restore_at(step, program, _config_sha256(ready))
    began, losses = state_hash(state), []
    compiled: dict[StepShape, Any] = {}
    tokens = stream.TokenStream(ready.shards.train, stream.Cursor(*facts.cursor))
    for at in range(step, min(step + num_replayed, recipe.num_steps)):
        shape = program.shape_at(at)
        batch = tokens.batch(shape.num_sequences, shape.seq_len)
        args = state, *(meshes.place(x, program.mesh) for x in batch), program.schedule
        if shape not in compiled:
            compiled[shape] = program.compiled(program.train_step_for(shape.window_blocks).lower(*args))
        state, metrics = compiled[shape](*args)
        losses.append(float(np.sum(jax.device_get(metrics.loss))))
    return Restart(step, began, tuple(losses))


if __name__ == "__main__":
    with told():
        asked = msgspec.json.decode(
            Path(sys.argv[1]).read_bytes(), type=Examination, dec_hook=lambda k, v: k(v)
        )
        asked.findings.write_bytes(msgspec.json.encode(examine(asked)))
