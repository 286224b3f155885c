"""The training step: independent of devices and micro-batches, sharded, complete and causal."""

import dataclasses
import math
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from speedrun.base import mesh
from speedrun.base.errors import UsageError
from speedrun.science.inputs import Inputs
from speedrun.science.kernels.cross_entropy import logits
from speedrun.science.params import Dtype, Layout, Params, ParamSpec, Table, constant
from speedrun.science.recipe import Batch, Loss, Recipe, Stage
from speedrun.science.step import TrainState
from speedrun.train.checkpoint import fingerprint, state_hash
from speedrun.train.program import Program, recomputed

THREE_BLOCKS = Inputs({"window_blocks": 3}, {})


def batch(recipe: Recipe, seed: int = 0) -> np.ndarray:
    """Return random ids with a few documents in each sequence: [B, T + 1]."""
    stage = recipe.stages[0]
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, recipe.config.vocab_size, (stage.num_sequences, stage.seq_len + 1), np.int32)
    ids[rng.random(ids.shape) < 0.1] = recipe.config.document_token
    return ids


def placed(program: Program, seed: int = 0) -> list[jax.Array]:
    """Return tokens and targets of that batch on the devices."""
    ids = batch(program.recipe, seed)
    return [mesh.shard(x, program.mesh) for x in (ids[:, :-1], ids[:, 1:])]


def first_step(program: Program) -> Any:
    """Return the training step with the static inputs of step 0."""
    return program.train_step_for(program.static_at(0))


def run(program: Program, num_steps: int, seed: int = 0) -> tuple[TrainState, list[float]]:
    """Train on fixed random batches; return the final state and the losses."""
    state, losses = program.init(jax.random.key(seed)), []
    for i in range(num_steps):
        state, metrics = first_step(program)(state, *placed(program, i), program.schedule)
        losses.append(float(metrics.loss))
    return state, losses


def on_host(program: Program, state: TrainState) -> Any:
    """Return named parameters. Fetched before unpacking, which would be many small collectives on sharded arrays."""
    return program.layout.unpack(jax.device_get(state.params))


def gradients(program: Program, state: TrainState) -> tuple[float, dict[str, np.ndarray]]:
    """Return mean loss and packed gradients of one batch, on the host; the state may be on any mesh."""

    def both(packed, tokens_BT, targets_BT):
        batch = Batch(tokens_BT, targets_BT, {}, jnp.arange(len(tokens_BT)))
        loss, grads = program.step.loss_and_grads(packed, batch, THREE_BLOCKS)
        return jax.lax.pmean(loss.nll, program.mesh.axis_names), grads

    specs = program.layout.specs, P(program.mesh.axis_names), P(program.mesh.axis_names)
    packed = jax.device_put(jax.device_get(state.params), program.shardings(program.layout.specs))
    mapped = jax.shard_map(both, mesh=program.mesh, in_specs=specs, out_specs=(P(), program.layout.specs))
    loss, grads = jax.device_get(jax.jit(mapped)(packed, *placed(program, 7)))
    return float(loss), grads


@pytest.fixture(scope="module")
def on_eight(tiny: Recipe) -> tuple[Program, TrainState, list[float]]:
    program = Program(tiny, mesh.make_mesh(8))
    return program, *run(program, 5)


@pytest.fixture(scope="module")
def gradients_on_eight(on_eight) -> tuple[float, dict[str, np.ndarray]]:
    return gradients(*on_eight[:2])


MORE = [pytest.param(*case, marks=pytest.mark.compile) for case in [(2, 16), (8, 16), (1, 1), (4, 4)]]


@pytest.mark.parametrize(("num_devices", "microbatches"), [(1, 8), *MORE])
def test_devices_and_accumulation_do_not_matter(on_eight, gradients_on_eight, num_devices, microbatches):
    eight, state, eight_losses = on_eight
    program = Program(eight.recipe, mesh.make_mesh(num_devices), microbatches)
    (loss, grads), (eight_loss, eight_grads) = gradients(program, state), gradients_on_eight
    assert loss == pytest.approx(eight_loss, rel=1e-6)
    for name, grad in grads.items():
        error = np.linalg.norm(grad - eight_grads[name]) / np.linalg.norm(eight_grads[name])
        assert error < 1e-5, name
    _, losses = run(program, 5)
    # The order of sums changes last bits; Newton-Schulz amplifies directions without gradient by 3.4^5.
    np.testing.assert_allclose(losses[:2], eight_losses[:2], rtol=1e-6)
    np.testing.assert_allclose(losses, eight_losses, rtol=1e-3)


@pytest.mark.compile
@pytest.mark.parametrize(("replicas", "num_devices"), [(1, 8), (2, 8), (4, 8), (8, 8), (2, 4)])
def test_replicas_do_not_matter_and_stay_the_same_to_the_last_bit(tiny, on_eight, replicas, num_devices):
    program = Program(tiny, mesh.make_mesh(num_devices, replicas))
    state, losses = run(program, 5)
    np.testing.assert_allclose(losses[:2], on_eight[2][:2], rtol=1e-6)
    np.testing.assert_allclose(losses, on_eight[2], rtol=1e-3)
    for leaf in jax.tree.leaves(state):
        parts: dict[str, set[bytes]] = {}
        for shard in leaf.addressable_shards:
            parts.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert len(parts) in (1, num_devices // replicas)
        assert {len(copies) for copies in parts.values()} == {1}


class Descent:
    """Adds gradients, and schedules nothing: what a step changes is then the mean gradient itself."""

    def transform(self, _: Layout) -> optax.GradientTransformationExtraArgs:
        return optax.with_extra_args_support(optax.identity())

    def at(self, *_: int) -> dict[str, Any]:
        return {}


def linear(size: float, dtype: Dtype) -> Recipe:
    """A recipe whose gradient is the mean token times `size`, 2 `size`, 3 `size`, ...; its parameters are 1."""

    def table(_: Any) -> Table:
        ones = constant(1.0)
        return {
            "matrix": ParamSpec((3, 4, 6), ("k", "m", "n"), ones, "matrix"),
            "table": ParamSpec((9, 4), ("vocab", "model"), ones, "embed", "bfloat16"),
            "scalar": ParamSpec((5,), ("lambda",), ones, "scalar"),
        }

    def loss(p: Params, batch: Batch, *_: Any) -> Loss:
        token, whole = batch.tokens_BT.astype(jnp.float32).mean(), (x.astype(jnp.float32) for x in p.values())
        by = token * size
        objective = by * sum((x.ravel() * jnp.arange(1, x.size + 1)).sum() for x in whole)
        read = batch.carry["read"] + batch.tokens_BT[:, 0] + 100 * batch.index_B
        return Loss(jnp.asarray(objective), token + 0 * objective, {"read": read})

    config = SimpleNamespace(vocab_size=9)
    return Recipe(
        *("linear", "", None, 1, config, table),
        forward=lambda *_: jnp.zeros(()),
        logits=lambda *_: jnp.zeros(()),
        loss=loss,
        optimizer=Descent(),
        schedule=Descent(),
        stages=(Stage(num_steps=2, num_sequences=16, seq_len=2),),
        eval_sequences=16,
        eval_seq_len=2,
        compute_dtype=dtype,
        carry=lambda _: {"read": jnp.zeros((), jnp.int32)},
    )


def descend(program: Program, tokens_B: np.ndarray, num_steps: int) -> tuple[dict[str, Any], TrainState]:
    """Return what some steps add to each parameter, and the state."""
    state, ids_BT = program.init(jax.random.key(0)), np.stack([tokens_B, tokens_B], axis=1).astype(np.int32)
    for _ in range(num_steps):
        ids = mesh.shard(ids_BT, program.mesh)
        state, metrics = first_step(program)(state, ids, ids, program.schedule)
        assert float(metrics.loss) == tokens_B.mean()
    return {name: np.float64(x) - 1 for name, x in on_host(program, state).items()}, state


@pytest.mark.parametrize(
    ("num_devices", "replicas", "microbatches"),
    [(1, 1, 1), (1, 1, 16), (8, 1, 8), (8, 2, 8), (8, 8, 8), (8, 4, 16)],
)
def test_a_step_takes_the_mean_gradient_of_all_devices_and_carries_on(num_devices, replicas, microbatches):
    """To the last bit: the sums are whole numbers. A sequence knows its number, however the batch is divided."""
    program = Program(linear(1.0, "float32"), mesh.make_mesh(num_devices, replicas), microbatches)
    tokens_B = np.arange(16) % 8
    moved, state = descend(program, tokens_B, 2)
    for name, x in moved.items():
        np.testing.assert_array_equal(x.ravel(), 7.0 * np.arange(1, x.size + 1), name)
    np.testing.assert_array_equal(state.carry["read"], 2 * tokens_B + 200 * np.arange(16))
    assert int(state.step) == 2


def test_parameters_travel_in_16_bits_and_are_summed_and_updated_in_32():
    """In 16 bits 2^-4 + 2^-14 is 2^-4, and their mean over 16 would be half an ulp of 1: not enough to move it."""
    program = Program(linear(2.0**-14, "bfloat16"), mesh.make_mesh(2), 16)
    moved, _ = descend(program, np.array([1024, 1, *[0] * 14]), 1)
    firsts = {name: x.ravel()[0] for name, x in moved.items()}
    assert firsts == {"matrix": 2.0**-8 + 2.0**-18, "table": 2.0**-7, "scalar": 2.0**-8 + 2.0**-18}
    for microbatches, summed in ((16, "f32"), (2, "bf16")):
        once = Program(program.recipe, program.mesh, microbatches)
        ids = jax.ShapeDtypeStruct((16, 2), jnp.int32)
        text = first_step(once).lower(once.init(jax.random.key(0)), ids, ids, once.schedule).as_text()
        for kind, dtype in (("all_gather", "bf16"), ("reduce_scatter", summed)):
            sent = re.findall(rf'stablehlo\.{kind}"\(.*?: \(tensor<[\dx]*(\w+)>\) ->', text, re.DOTALL)
            assert sent == 2 * [dtype], kind


def test_a_replica_that_drifts_has_another_hash(tiny):
    """Processes on different nodes detect a drift by comparing hashes."""
    program = Program(tiny, mesh.make_mesh(8, 2))
    state = program.init(jax.random.key(0))
    head = state.params["head"]
    move = lambda x: jax.device_put(np.asarray(x.data) + 1e-3 * (x.device.id == 6), x.device)  # noqa: E731
    drifted = [move(shard) for shard in head.addressable_shards]
    state.params["head"] = jax.make_array_from_single_device_arrays(head.shape, head.sharding, drifted)
    lanes = [tuple(np.asarray(shard.data)) for shard in fingerprint(state).addressable_shards]
    assert len({*lanes[:4]}) == len({*lanes[4:]}) == 1
    assert lanes[0] != lanes[4]


def test_what_devices_cannot_share_is_refused_with_what_to_type(tiny):
    with pytest.raises(UsageError, match="3 replicas; need a multiple"):
        mesh.make_mesh(8, 3)
    typed = tiny.override({"stages.0.num_sequences": "24"})
    for recipe, shape, parts, said in (
        (tiny, (5,), 8, "need a divisor of 8; pass --devices"),
        (tiny.override({"stages.0.num_sequences": "12"}), (8, 2), 8, "num_sequences=16$"),
        (tiny, (6, 3), 8, r"pass --microbatches 12 --set stages.0.num_sequences=24$"),
        (typed, (6, 3), 12, r"pass --set eval_sequences=24$"),
    ):
        with pytest.raises(UsageError, match=said):
            Program(recipe, mesh.make_mesh(*shape), parts)
    Program(typed.override({"eval_sequences": "24"}), mesh.make_mesh(6, 3), 12)


def test_parameters_and_optimiser_state_are_divided_by_eight(on_eight):
    program, state, _ = on_eight
    whole = divided = 0
    for leaf in jax.tree.leaves(state):
        local = leaf.addressable_shards[0].data.size
        if leaf.size == local:
            whole += leaf.size
        else:
            assert leaf.size == 8 * local
            divided += leaf.size
    scalars = state.params["scalars"].size
    # Whole on every device: the scalars with their two Adam moments, and a few counters.
    assert whole <= 3 * scalars + 8
    # Muon keeps one number per weight, Adam two.
    muon = sum(x.size for name, x in state.params.items() if name in program.layout.banks)
    adam = sum(state.params[name].size for name in program.layout.tables)
    assert divided == 2 * muon + 3 * adam


def test_state_is_born_as_it_lives_and_is_donated(on_eight):
    program, after, _ = on_eight
    born = program.init(jax.random.key(0))
    for a, b in zip(jax.tree.leaves(born), jax.tree.leaves(after), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        assert a.dtype == b.dtype
    first_step(program)(born, *placed(program), program.schedule)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(born))


def test_starting_state_is_equal_on_any_number_of_devices_and_another_seed_is_another_run(tiny, on_eight):
    meshes = [mesh.make_mesh(*shape) for shape in ((1,), (8,), (8, 2))]
    assert len({state_hash(Program(tiny, one).init(jax.random.key(3))) for one in meshes}) == 1
    program = on_eight[0]
    assert run(program, 3, seed=1)[1] != on_eight[2][:3]
    assert run(program, 3)[1] == on_eight[2][:3]


def test_the_hash_sees_every_bit_every_place_and_every_leaf():
    x = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)
    states = x, x.T, x.at[2, 3].set(jnp.nextafter(x[2, 3], 99.0)), x[::-1]
    assert len({tuple(fingerprint((state,)).tolist()) for state in states}) == 4
    state = TrainState(jnp.int32(1), {"a": jnp.ones(3)}, {"b": jnp.ones(3)}, {"c": jnp.ones(3)})
    leaves, tree = jax.tree.flatten(state)
    changed = [jax.tree.unflatten(tree, [x + (i == k) for i, x in enumerate(leaves)]) for k in range(5)]
    assert len({*map(state_hash, changed)}) == 5  # the last is the state itself


def test_remat_changes_no_gradient_and_computes_activations_twice_and_no_product(
    on_eight, gradients_on_eight
):
    """To rounding: the same numbers are computed, some of them twice."""
    loss, grads = gradients(dataclasses.replace(on_eight[0], remat="on"), on_eight[1])
    assert loss == gradients_on_eight[0]
    for name, grad in gradients_on_eight[1].items():
        np.testing.assert_allclose(grads[name], grad, atol=1e-6 * np.abs(grad).max(), err_msg=name)
    program, state, _ = on_eight
    args = state, *placed(program), program.schedule
    kept, computed = (
        first_step(dataclasses.replace(program, remat=remat)).lower(*args).as_text()
        for remat in ("off", "on")
    )
    assert computed.count("stablehlo.maximum") > kept.count("stablehlo.maximum")
    assert computed.count("stablehlo.dot_general") == kept.count("stablehlo.dot_general")


@pytest.mark.parametrize("is_nested", [False, True])
def test_remat_runs_no_kernel_twice(is_nested):
    """Nested: the rule for gradients calls the operation again, as that of products in 8 bits does."""

    def double(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = 2 * x_ref[...]

    def once(x: jax.Array) -> jax.Array:
        return pl.pallas_call(double, out_shape=jax.typeof(x), interpret=True)(x)

    kernel = jax.custom_vjp(once)

    def forward(x: jax.Array, _: jax.Array, **more: Any) -> jax.Array:
        return jnp.exp(kernel(jnp.sin(x)) * more["scale"])

    kernel.defvjp(lambda x: ((kernel if is_nested else once)(x), ()), lambda _, dy: (2 * dy,))
    thrifty: Any = recomputed(forward)  # pyright: ignore[reportArgumentType]
    x = jnp.ones(8)
    text = str(jax.make_jaxpr(jax.grad(lambda x: thrifty(x, x, scale=3.0).sum()))(x))
    assert (text.count("pallas_call["), text.count(" exp ")) == (1, 2)


def test_every_parameter_moves_no_two_start_equal_and_padding_never_moves(on_eight):
    program, after, _ = on_eight
    first = on_host(program, program.init(jax.random.key(0)))
    last = on_host(program, after)
    still = [name for name in first if (first[name] == last[name]).all()]
    assert not still
    random = [x.ravel()[:8].tolist() for x in first.values() if x.size >= 8 and float(jnp.std(x)) > 0]
    assert len({tuple(x) for x in random}) == len(random)
    for name, bank in program.layout.banks.items():
        assert not np.asarray(after.params[name])[len(bank) :].any()
    for name in program.layout.tables:
        assert not np.asarray(after.params[name])[program.layout.table[name].shape[0] :].any()


#: Mesh axes of groups of devices, as older and newer JAX print them.
ACROSS = {
    "dense<[[0, 1, 2, 3], [4, 5, 6, 7]]>": "data",
    "dense<[[0, 4], [1, 5], [2, 6], [3, 7]]>": "replica",
    "dense<[[0, 1, 2, 3, 4, 5, 6, 7]]>": "both",
    '#stablehlo.replica_group_mesh_axes<mesh = @mesh_0, axes = [#stablehlo.axis_ref<name = "data">]>': "data",
    '#stablehlo.replica_group_mesh_axes<mesh = @mesh_0, axes = [#stablehlo.axis_ref<name = "replica">]>': "replica",
    '#stablehlo.replica_group_mesh_axes<mesh = @mesh_0, axes = [#stablehlo.axis_ref<name = "replica">, '
    '#stablehlo.axis_ref<name = "data">]>': "both",
}


def test_nodes_exchange_the_parts_of_gradients_and_nothing_else(tiny):
    """Two nodes of four devices: gathers and scatters stay inside a node; a device swaps its quarter with a peer."""
    program = Program(tiny, mesh.make_mesh(8, 2))
    state = program.init(jax.random.key(0))
    text = first_step(program).lower(state, *placed(program), program.schedule).as_text()
    divided = [*program.layout.banks, *program.layout.tables]
    found = [
        (kind, ACROSS[groups], math.prod(map(int, re.findall(r"(\d+)x", sent))))
        for kind, groups, sent in re.findall(
            r'stablehlo\.(all_\w+|reduce_scatter)"\(.*?replica_groups = (dense<.*?>|#.*?]>).*?: \(tensor<(.*?)>\) ->',
            text,
            re.DOTALL,
        )
    ]
    owned = sorted(state.params[name].size // 4 for name in divided)
    for kind, axes, sizes in (
        ("all_gather", "data", owned),
        ("reduce_scatter", "data", [4 * size for size in owned]),
        ("all_reduce", "replica", owned),
        ("all_reduce", "both", [1, state.params["scalars"].size]),  # the loss, and the scalars
    ):
        assert sorted(n for *what, n in found if what == [kind, axes]) == sizes
    assert len(found) == 3 * len(divided) + 2


@partial(jax.jit, static_argnums=0)
def named_nll(recipe: Recipe, params, ids: jax.Array) -> jax.Array:
    """Return the loss of every position under named parameters, by the definition: [B, T]."""
    program = Program(recipe, mesh.make_mesh(1))
    x_BTD = recipe.forward(params, ids[:, :-1], THREE_BLOCKS, recipe.config, program.kernels)
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    logits_NV = logits(x_ND, params["head"], cap=recipe.config.logit_cap)
    nll_NV = -jax.nn.log_softmax(logits_NV)
    return jnp.take_along_axis(nll_NV, ids[:, 1:].reshape(-1, 1), axis=1).reshape(len(ids), -1)


def test_no_position_sees_a_later_token_another_document_or_another_sequence(tiny, on_eight):
    trained = on_host(*on_eight[:2])  # after a few steps, so that no path is multiplied by zero
    ids = batch(tiny)[:2]
    base = named_nll(tiny, trained, ids)
    for t in (1, 9, 20, 31):
        changed = ids.copy()
        changed[0, t] = (ids[0, t] + 7) % tiny.config.vocab_size
        nll = named_nll(tiny, trained, changed)
        # It is the target of position t - 1; earlier positions must not depend on it.
        np.testing.assert_array_equal(nll[0, : t - 1], base[0, : t - 1])
        assert nll[0, t - 1] != base[0, t - 1]
    ids = np.maximum(ids, 1)
    ids[0, 16] = tiny.config.document_token
    base = named_nll(tiny, trained, ids)
    changed = ids.copy()
    changed[0, 3:12] = 5
    nll = named_nll(tiny, trained, changed)
    np.testing.assert_array_equal(nll[0, 16:], base[0, 16:])
    np.testing.assert_array_equal(nll[1], base[1])
    assert (nll[0, 3:12] != base[0, 3:12]).any()


@pytest.mark.parametrize(
    ("leaf", "value"), [("block.0.qkv", jnp.nan), ("head", jnp.inf), ("block.2.lambdas", -jnp.inf)]
)
def test_the_first_parameter_with_a_bad_gradient_is_named(tiny, on_eight, leaf, value):
    program, state, _ = on_eight
    named = jax.tree.map(jnp.zeros_like, on_host(program, state))
    bad = program.layout.pack(named | {leaf: named[leaf].at[..., 0].set(value)})
    assert program.layout.first_flagged(jax.device_get(program.layout.flags(bad))) == leaf
