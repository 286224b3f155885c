"""The scorer against its definition in float64, and what a program may not contain."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_run import SMALL

from speedrun.base import mesh, track
from speedrun.base.errors import SpeedrunError, UsageError
from speedrun.data import shards
from speedrun.science.inputs import Inputs
from speedrun.science.params import Params
from speedrun.science.step import Step
from speedrun.train import program as programs
from speedrun.train import recorded, run
from speedrun.train.program import Program, evaluate
from speedrun.train.run_config import RunConfig

TOKENS, WIDTH, VOCAB = 24, 8, 50


@pytest.fixture
def hidden() -> tuple[jax.Array, jax.Array, jax.Array]:
    kx, kw, kt = jax.random.split(jax.random.key(0), 3)
    head_VD = 3 * jax.random.normal(kw, (64, WIDTH))
    return jax.random.normal(kx, (TOKENS, WIDTH)), head_VD, jax.random.randint(kt, (TOKENS,), 0, VOCAB)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("cap", [2.0, 15.0, None])
@pytest.mark.parametrize("chunk", [1, 6, 1000])
def test_the_scorer_is_the_definition_for_any_cap_and_chunk(hidden, cap, chunk, dtype, monkeypatch):
    """Logits of 16 bits are summed in 32."""
    x_TD, head_VD, targets_T = hidden
    monkeypatch.setitem(programs.CHUNK_BYTES, "cpu", 4 * 64 * chunk)

    def logits(x_ND: jax.Array) -> jax.Array:
        z_NV = x_ND @ head_VD.T
        return (z_NV if cap is None else cap * jnp.tanh(z_NV / cap)).astype(dtype)

    sums_C = programs.nll_sums(logits, x_TD, targets_T, vocab_size=VOCAB, platform="cpu")
    assert len(sums_C) == max(1, TOKENS // chunk)
    z_TV = np.asarray(logits(x_TD), np.float64)
    nll_T = np.log(np.exp(z_TV).sum(axis=1)) - z_TV[np.arange(TOKENS), np.asarray(targets_T)]
    assert np.asarray(sums_C, np.float64).sum() == pytest.approx(nll_T.sum(), rel=1e-6)


def test_logits_that_no_exponential_survives_are_scored(hidden):
    x_TD, head_VD, targets_T = hidden
    logits = lambda x: 1e4 * x @ head_VD.T  # noqa: E731
    sums_C = programs.nll_sums(logits, x_TD, targets_T, vocab_size=VOCAB, platform="cpu")
    assert np.isfinite(sums_C).all()


def test_a_mask_of_the_current_token_is_scored_as_its_distribution(hidden):
    """RULES.md, masks: hidden states carry the current id in two digits, and masked ids have probability zero."""
    x_TD, head_VD, _ = hidden
    ids_T, column_V = 2_111 * np.arange(TOKENS), np.arange(64)
    digits_T2 = np.stack([ids_T // 256, ids_T % 256], axis=1)
    carried_TD = jnp.concatenate([x_TD, digits_T2], axis=1).astype(jnp.bfloat16)
    targets_T = jnp.asarray((ids_T + 1) % 3 + 3 * (ids_T % 10))  # never congruent to the current id

    def logits(x_ND: jax.Array) -> jax.Array:
        id_N = x_ND[:, -2:].astype(jnp.int32) @ jnp.array([256, 1])
        z_NV = x_ND[:, :-2].astype(jnp.float32) @ head_VD.T
        return jnp.where(id_N[:, None] % 3 == column_V[None, :] % 3, -jnp.inf, z_NV)

    score = partial(programs.nll_sums, logits, carried_TD, vocab_size=VOCAB, platform="cpu")
    p_TV = np.exp(np.asarray(carried_TD[:, :-2].astype(jnp.float32) @ head_VD.T, np.float64))
    p_TV *= column_V % 3 != ids_T[:, None] % 3
    p_TV /= p_TV.sum(axis=1, keepdims=True)
    nll_T = -np.log(p_TV[np.arange(TOKENS), targets_T])
    assert np.asarray(score(targets_T), np.float64).sum() == pytest.approx(nll_T.sum(), rel=1e-6)
    assert np.isinf(score(targets_T.at[5].set(int(ids_T[5] % 3)))).any(), "a masked target"


@pytest.mark.parametrize("shape", [(TOKENS, VOCAB - 1), (TOKENS - 1, 64)])
def test_logits_of_a_part_of_the_vocabulary_or_of_the_tokens_are_refused(hidden, shape):
    x_TD, _, targets_T = hidden
    said = (
        rf"its logits are \[{shape[0]}, {shape[1]}\] for 24 hidden states; config.vocab_size needs 50 columns"
    )
    with pytest.raises(UsageError, match=said):
        programs.nll_sums(lambda x: jnp.zeros(shape), x_TD, targets_T, vocab_size=VOCAB, platform="cpu")


def test_validation_sums_in_float64_and_divides_once(tiny, smoke_data, tmp_path):
    """2^25 + 1 is not a float32, and a mean of means would differ."""
    program, rules = Program(tiny, mesh.make_mesh(1)), track.load("smoke-cpu")
    (val,) = shards.open_track(smoke_data, rules.data).val
    batches = 2 * tiny.eval_sequences * tiny.eval_seq_len
    answers = iter([jnp.array([[2.0**25, 1.0]]), jnp.array([[1.0, 1.0]])])
    state = program.init(jax.random.key(0))
    score = evaluate(program, lambda *_: next(answers), state, val, batches)
    assert (float.fromhex(score.nll_sum), score.tokens) == (2**25 + 3, batches)
    assert score.loss == (2**25 + 3) / batches
    first, second = ((2**25 + 1) / tiny.eval_seq_len, 2 / tiny.eval_seq_len)
    assert score.sequences == pytest.approx((first, second), rel=1e-8)


def test_a_validation_has_the_window_of_its_own_step(tiny):
    wide = dataclasses.replace(tiny, schedule=dataclasses.replace(tiny.schedule, final_window=2.2))
    program = Program(wide, mesh.make_mesh(1))
    windows = [int(wide.inputs_at(step)["window_blocks"]) for step in range(wide.num_steps + 1)]
    assert windows[-2] < windows[-1] == program.step.plan.spans["window_blocks"][1]
    keys = iter(jax.random.split(jax.random.key(0), 99))
    state = program.init(next(keys))
    packed = {name: x + 0.1 * jax.random.normal(next(keys), x.shape) for name, x in state.params.items()}
    shape = wide.eval_sequences, wide.eval_seq_len + 1
    ids = jax.random.randint(next(keys), shape, 1, wide.config.vocab_size)
    tokens_BT, targets_BT = (mesh.shard(np.asarray(x), program.mesh) for x in (ids[:, :-1], ids[:, 1:]))
    given, scores = (packed, tokens_BT, targets_BT, program.schedule), []
    for step, blocks in enumerate(windows[-2:], wide.num_steps - 1):
        scores.append(float(program.eval_step_for(program.static_at(0))(*given, jnp.int32(step)).sum()))
        fixed = program.eval_step_for((("window_blocks", blocks),))(*given, jnp.int32(0))
        assert scores[-1] == pytest.approx(float(fixed.sum()), rel=1e-6)
    assert abs(scores[0] - scores[1]) > 1e-4 * scores[0]


def test_logits_have_the_inputs_of_their_validation(tiny):
    """All logits are 0, except that of id 0, which is the window. Every target is 0."""

    def logits(_: Params, x_ND: jax.Array, inputs: Inputs, cfg: Any) -> jax.Array:
        return jnp.zeros((len(x_ND), cfg.vocab_size)).at[:, 0].set(inputs["window_blocks"])

    program = Program(dataclasses.replace(tiny, logits=logits), mesh.make_mesh(1))
    state = program.init(jax.random.key(0))
    zeros_BT = np.zeros((tiny.eval_sequences, tiny.eval_seq_len), np.int32)
    ids = [mesh.shard(zeros_BT, program.mesh)] * 2
    for step in (0, tiny.num_steps):
        z = float(tiny.inputs_at(step)["window_blocks"])
        expected = zeros_BT.size * (math.log(math.exp(z) + tiny.config.vocab_size - 1) - z)
        fixed, first = (
            program.eval_step_for(one) for one in ((("window_blocks", int(z)),), program.static_at(0))
        )
        for program_at, at in (first, step), (fixed, 3):
            found = program_at(state.params, *ids, program.schedule, jnp.int32(at))
            assert float(found.sum()) == pytest.approx(expected, rel=1e-5)


def asks_the_host(x: jax.Array) -> jax.Array:
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")


def prints(x: jax.Array) -> jax.Array:
    jax.debug.print("{}", x.sum())
    return x


@pytest.mark.parametrize("talks", [asks_the_host, prints])
@pytest.mark.parametrize("where", ["forward", "logits"])
def test_no_program_talks_to_the_host(tiny, talks, where):
    honest = getattr(tiny, where)
    recipe = dataclasses.replace(tiny, **{where: lambda *args: talks(honest(*args))})
    program = Program(recipe, mesh.make_mesh(1))
    state = program.init(jax.random.key(0))
    ids_BT = mesh.shard(np.ones((recipe.eval_sequences, recipe.eval_seq_len), np.int32), program.mesh)
    lowered = program.eval_step_for(program.static_at(0)).lower(
        state.params, ids_BT, ids_BT, program.schedule, state.step
    )
    with pytest.raises(UsageError, match=r"a compiled program would call .*callback"):
        program.compiled(lowered)


STREAMS = ("infeed", "outfeed", "send", "recv", "rng")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        *((f'%0 = "stablehlo.{name}"(%1) : (tensor<f32>) -> tensor<f32>', name) for name in STREAMS),
        ("%0 = stablehlo.custom_call @cpu_callback(%1)", "cpu_callback"),
        ('%0 = "stablehlo.custom_call"(%1) <{call_target_name = "cpu_callback"}> : () -> ()', "cpu_callback"),
        ('%0 = mhlo.custom_call @"cpu_callback"(%1)', "cpu_callback"),
        ('%0 = mhlo.custom_call @" x"(%1)', " x"),
    ],
)
def test_foreign_calls_and_streams_are_refused_in_every_form_of_the_text(line, name):
    with pytest.raises(UsageError, match=f"would call {name}"):
        programs.inspect(line)


def test_a_start_that_talks_to_the_host_is_refused_before_it_runs(smoke_data, tmp_path, monkeypatch):
    honest, heard = Step.init, []

    def init(self, key):
        jax.debug.callback(heard.append, 1)
        return honest(self, key)

    monkeypatch.setattr(Step, "init", init)
    with pytest.raises(UsageError, match=r"would call .*callback"):
        recorded.train(RunConfig("smoke-cpu", tmp_path / "out", overrides=SMALL, data=smoke_data))
    assert not heard


def test_a_generator_that_counts_calls_is_refused_and_one_that_does_not_is_not():
    """On a CPU, the state of the first one outlives a call."""
    programs.inspect(jax.jit(jax.random.uniform).lower(jax.random.key(0, impl="rbg")).as_text())
    for name in programs.FOREIGN:  # kernels of Pallas
        programs.inspect(f"%0 = stablehlo.custom_call @{name}(%1)")
    with pytest.raises(UsageError, match="would call rng;"):
        programs.inspect(jax.jit(lambda: jax.lax.rng_uniform(0.0, 1.0, (2,))).lower().as_text())


def test_a_validation_that_changes_the_state_ends_the_run(smoke_data, tmp_path, monkeypatch):
    """The third state hash of a run precedes its validation, and the fourth follows it."""
    honest, calls = run.state_hash, iter(range(100))
    monkeypatch.setattr(run, "state_hash", lambda state: honest(state)[:-1] + str(next(calls)))
    said = r"validation at step \d+ changed the state, \w+, to \w+; it may only read it"
    with pytest.raises(SpeedrunError, match=said):
        recorded.train(RunConfig("smoke-cpu", tmp_path / "out", overrides=SMALL, data=smoke_data))
