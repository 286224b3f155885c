"""Record 89 against an independent implementation: gradients, weights and losses of float32 runs.

tests/golden/golden2026.py explains the keys of the files. Sizes, lengths and schedules come from the file.
"""

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import golden_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import OPTIMISED, Arrays, leaves, probe

from speedrun import recipes
from speedrun.base import mesh
from speedrun.recipes.record89 import model
from speedrun.recipes.record89 import tokens as tokens89
from speedrun.science.inputs import Inputs
from speedrun.science.kernels.cross_entropy import Targets
from speedrun.science.params import Params
from speedrun.science.recipe import Batch, Loss, Recipe, Stage
from speedrun.train.program import Program

LAYERS = [i for i in range(11) if i != 6]  #: with attention
VALUES = (1, 2, 8, 9, 10)  #: layers with value embeddings


def phases_of(phases: Any, stages: Any, **own: Callable[[int, Arrays], Any]) -> tuple[Any, ...]:
    """The phases of a schedule with the lengths, rates, windows and weights of a file."""
    return tuple(
        dataclasses.replace(
            phase,
            num_steps=stage["end"] - stage["start"],
            lr_scale=stage["lr"],
            short_blocks=stage["short"],
            long_blocks=stage["long"],
            target_weights=tuple(stage["mtp0"]),
            end_weights=tuple(stage["mtp1"]),
            **{name: of(i, stage) for name, of in own.items()},
        )
        for i, (phase, stage) in enumerate(zip(phases, stages, strict=True))
    )


def in_float32(
    record: Recipe, config: Arrays, num_rows: int, given: Any, sizes: Any, **changes: Any
) -> Recipe:
    """A recipe with the sizes, stages and constants of a file."""
    sizes = {name: config[name] for name in ("vocab_size", "model_dim", "num_heads", "sign_rows")} | sizes
    sizes |= {"gate_dim": config["gate_hidden"], "document_token": config["document_token"]}
    dtypes = [name for name in type(record.config).__dataclass_fields__ if name.endswith("_dtype")]
    sizes |= {"head_fp8": None, **dict.fromkeys(dtypes, "float32")}
    return dataclasses.replace(
        record,
        config=dataclasses.replace(record.config, **sizes),
        constants=lambda _config, _vocabulary: given,
        stages=tuple(
            Stage(stage["end"] - stage["start"], num_rows, stage["tokens"], stage["max_doc"])
            for stage in config["stages"]
        ),
        eval_sequences=8,
        compute_dtype="float32",
        **changes,
    )


def recipe_of(config: Arrays, num_rows: int, starts: Arrays, prefix_table: np.ndarray) -> Recipe:
    record = recipes.load("record89")
    schedule = dataclasses.replace(
        record.schedule,
        phases=phases_of(
            record.schedule.phases,
            config["stages"],
            prefix_weight=lambda _, stage: stage["prefix0"],
            end_prefix_weight=lambda _, stage: stage["prefix1"],
        ),
        cooldown_fraction=config["cooldown_frac"],
        momentum_warmup_steps=config["momentum_warmup_steps"],
        momentum_cooldown_steps=config["momentum_cooldown_steps"],
        block_tokens=config["block_size"],
        final_long_blocks=config["final_long"],
        rotary_pairs=config["head_dim"] // 4,
    )
    optimizer = dataclasses.replace(
        record.optimizer,
        muon_lr=config["muon_lr"],
        muon_decay=config["muon_weight_decay"],
        muon_beta2=config["muon_beta2"],
        polar_dtype="float32",
        adam_lr=config["adam_lr"],
        adam_eps=config["adam_eps"],
        adam_decay=config["adam_weight_decay"],
    )
    sizes = {"bigram_rows": config["bigram_rows"], "compose_keys": config["dc_window"]}
    sizes |= {"mlp_dim": 4 * config["model_dim"]}
    signs = starts["bigram_signs"].astype(np.int8)
    given = {"bigram_signs": signs, "prefixes": prefix_table.astype(np.int32)}
    parts = {"optimizer": optimizer, "schedule": schedule, "eval_seq_len": config["val_tokens_per_pass"]}
    return in_float32(record, config, num_rows, given, sizes, **parts)


def unit_order(head_dim: int) -> np.ndarray:
    """Where our heads keep each dimension: the file rotates neighbours, we rotate i and i + K/2."""
    quarter = head_dim // 4
    still = np.arange(2 * quarter, 4 * quarter)
    even, odd = np.arange(0, 2 * quarter, 2), np.arange(1, 2 * quarter, 2)
    return np.concatenate([even, still[:quarter], odd, still[quarter:]])


class File(golden_files.File):
    """A golden file of record 89."""

    made_by = "golden2026.py"

    def __init__(self, name: str) -> None:
        super().__init__(name, self.made_by)
        self.schedule = json.loads(str(self.arrays["schedule"]))
        self.is_chaotic = self.config["adam_eps"] < 1e-6  # recipe learning rates

    @property
    def of_norms(self) -> float:
        """The relative tolerance of norms of weights."""
        return 1e-4 if self.is_chaotic else 1e-5

    def of_losses(self, step: int) -> float:
        """The relative tolerance of losses."""
        return self.of_norms if step else self.tolerance["losses[0]"]

    def named(self, ours: Arrays) -> dict[str, jax.Array]:
        """Return our parameters under the names and in the order of the file."""
        heads, width = self.config["num_heads"], self.config["head_dim"]
        given, back = {k: jnp.asarray(x) for k, x in ours.items()}, np.argsort(unit_order(width))
        qk = [given.pop(f"block.{i}.qk").reshape(2, heads, width, -1)[:, :, back] for i in LAYERS]
        mlp = [[given.pop(f"block.{i}.{name}") for name in ("up", "down")] for i in range(11)]
        banks = {
            "qk_bank": jnp.stack(qk).reshape(-1, 2 * width, self.config["model_dim"]),
            "vo_bank": jnp.concatenate([given.pop(f"block.{i}.vo") for i in LAYERS]),
            "mlp_bank": jnp.stack([jnp.stack(pair) for pair in mlp]),
            "value_embeds": jnp.concatenate([given.pop(f"value_embed.{i}") for i in VALUES]),
            "head": given.pop("head").T,
            "ve_gate_bank": given.pop("value_gates"),
        }
        return banks | given

    def rows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        batch = self.below(f"batch/{step}/")
        return tuple(
            np.stack([batch[f"{m}/{kind}"] for m in range(self.config["micro_batches"])]).astype(np.int32)
            for kind in ("inputs", "targets")
        )  # pyright: ignore[reportReturnType]

    def recipe(self, num_rows: int) -> Recipe:
        return recipe_of(self.config, num_rows, self.starts, self.arrays["prefix_table"])

    def ours(self) -> Params:
        """The starting values under our names."""
        recipe = self.recipe(self.config["micro_batches"])
        table = recipe.table(recipe.config).items()
        like = {name: jax.ShapeDtypeStruct(spec.shape, jnp.float32) for name, spec in table}
        theirs = {k: jnp.asarray(self.starts[k], jnp.float32) for k in self.below("trace_norm/")}
        # `named` only moves numbers, so its transpose moves them back.
        return jax.linear_transpose(self.named, like)(theirs)[0]


golden = golden_files.fixture("record2026_*.npz", File)


def test_golden89_schedules_agree(golden):
    recipe, rotary = golden.recipe(8), None
    for step, want in enumerate(golden.schedule):
        got, rotary = recipe.inputs_at(step), golden.arrays.get(f"rope/{step}", rotary)
        assert (got["short_keys"], got["long_keys"]) == (want["short"] + 1, want["long"] + 1)
        assert (got["adam"], bool(got["tied"])) == (want["adam"], want["tied"])
        assert got["targets"] == len(want["mtp"])
        close = partial(np.testing.assert_allclose, rtol=1e-6, err_msg=f"step {step}")
        close(got["lr_scale"], want["lr"])
        close(got["momentum"], want["momentum"])
        close(got["target_weights"][: got["targets"]], want["mtp"], atol=1e-7)
        close(got["prefix_weight"], want["prefix"], atol=1e-7)
        close(got["attention_scale"], want["attn_scale"])
        close(got["rotary"], rotary)
        assert recipe.stages[recipe.stage_of(step)].document_tokens == want["max_doc"]
    before, last = recipe.inputs_at(recipe.num_steps - 1), recipe.inputs_at(recipe.num_steps)
    assert last["long_keys"] == golden.config["final_long"] * golden.config["block_size"] + 1
    assert (last["short_keys"], last["rotary"].tolist()) == (before["short_keys"], before["rotary"].tolist())


def with_all_losses(recipe: Recipe, copies: int) -> Recipe:
    """Copies of a sequence have its number in the step."""

    def loss(p: Params, batch: Batch, *rest: Any) -> Loss:
        carried = {name: x for name, x in batch.carry.items() if name != "ce"}
        own = recipe.loss(p, batch._replace(carry=carried, index_B=batch.index_B // copies), *rest)
        rows, num_tokens = batch.tokens_BT.shape
        ce = {"ce": jnp.full(rows, own.nll)}
        return Loss(own.objective, own.objective / num_tokens, own.carry | ce)

    return dataclasses.replace(
        recipe, loss=loss, carry=lambda config: recipe.carry(config) | {"ce": np.float32(0)}
    )


class Run:
    """A file's run by our program. Eight devices get each of its micro-batches several times."""

    def __init__(self, golden: File, num_devices: int, options: Any = None) -> None:
        self.options = options
        num_rows = math.lcm(num_devices, golden.config["micro_batches"])
        self.golden, self.copies = golden, num_rows // golden.config["micro_batches"]
        recipe = with_all_losses(golden.recipe(num_rows), self.copies)
        self.program = Program(recipe, mesh.make_mesh(num_devices), microbatches=num_rows)
        self.compiled: dict[Any, Any] = {}

    def start(self) -> Any:
        state, program = self.program.init(jax.random.key(0)), self.program
        packed = program.layout.pack(self.golden.ours())
        return state._replace(params=jax.device_put(packed, program.shardings(program.specs).params))

    def named(self, packed: Params) -> dict[str, np.ndarray]:
        return jax.device_get(self.golden.named(self.program.layout.unpack(jax.device_get(packed))))

    def step(self, state: Any, step: int, **changed: Any) -> tuple[Any, float, float]:
        """Return the next state, the objective of each token, and the plain loss; `changed` inputs are compiled in."""
        program, own = self.program, self.program.shape_at(step)
        assert {*changed} <= {*dict(own.static)}
        shape = own._replace(static=tuple((name, changed.get(name, x)) for name, x in own.static))
        batch = [mesh.shard(np.repeat(x, self.copies, axis=0), program.mesh) for x in self.golden.rows(step)]
        if shape not in self.compiled:
            lowered = program.train_step_for(shape.static).lower(state, *batch, program.schedule)
            self.compiled[shape] = lowered.compile(compiler_options=self.options)
        state, metrics = self.compiled[shape](state, *batch, program.schedule)
        return state, float(metrics.loss), float(np.mean(jax.device_get(state.carry["ce"])))

    def first_gradients(self, state: Any) -> dict[str, np.ndarray]:
        """The gradients of the first step: Adam waits with them; Muon's momentum is a part of them."""
        part = 1 - float(self.program.recipe.inputs_at(0)["momentum"])
        means = {name: jax.device_get(x) / part for name, x in leaves(state.opt_state, "momentum").items()}
        return self.named(means | leaves(state.opt_state, "waiting"))

    def validate(self, state: Any, step: int) -> float:
        """Return the loss of the file's validation before a step."""
        config, program = self.golden.config, self.program
        size, passes = config["val_tokens_per_pass"], config["val_passes"]
        ids = self.golden.arrays["val_stream"].astype(np.int32)
        rows = [np.arange(size + 1) + size * (i % passes) for i in range(8 * -(-passes // 8))]
        batch = [mesh.shard(ids[rows][:, cut], program.mesh) for cut in (slice(0, -1), slice(1, None))]
        shape = program.eval_shape_at(step)
        score = program.eval_step_for(shape.static)
        nll_B = jax.device_get(score(state.params, *batch, program.schedule, jnp.int32(step))).sum(axis=1)
        return float(nll_B[:passes].sum() / (size * passes))


def assert_run_agrees(run: Run, num_steps: int) -> tuple[Any, dict[str, np.ndarray]]:
    """Compare each step, and the validations before it; return the state and the weights, before they are shipped."""
    golden, tolerance, state = run.golden, run.golden.tolerance, run.start()
    norms, updates = golden.below("trace_norm/"), golden.below("trace_update/")
    before = run.named(state.params)
    for step in range(num_steps):
        close = partial(pytest.approx, rel=golden.of_losses(step))
        if f"val/{step}" in golden.arrays:
            assert run.validate(state, step) == close(golden.arrays[f"val/{step}"])
        state, objective, ce = run.step(state, step)
        assert objective == close(golden.arrays["losses"][step]), step
        if "losses_f64" in golden.arrays:
            want = pytest.approx(golden.arrays["losses_f64"][step], rel=2 * golden.of_norms)
            assert objective == want, step
        assert ce == close(golden.arrays["ce"][step]), step
        if step == 0:
            most = tolerance["grad0_norm"], tolerance["grad0_probe"]
            golden.assert_agrees(run.first_gradients(state), "grad0", *most)
        after = run.named(state.params)
        assert {*after} == {*norms} == {*updates}
        for name, x in after.items():
            size, change = np.linalg.norm(x), np.linalg.norm(x - before[name])
            assert size == pytest.approx(norms[name][step + 1], rel=golden.of_norms), (name, step)
            largest = updates[name].max() * tolerance["trace_update"]
            assert change == pytest.approx(updates[name][step], abs=largest), (name, step)
        before = after
    return state, before


def assert_weights_agree(golden: File, weights: Arrays, kind: str = "final", place: int = -1) -> None:
    for name, x in weights.items():
        norm = golden.below("trace_norm/")[name][place]
        assert np.linalg.norm(x) == pytest.approx(norm, rel=golden.tolerance["trace_norm"]), name
        unit, want = norm / np.sqrt(x.size), golden.arrays[f"{kind}_probe/{name}"]
        atol = golden.tolerance["final_probe"]
        np.testing.assert_allclose(probe(x) / unit, want / unit, atol=atol, err_msg=name)


def assert_state_agrees(run: Run, state: Any) -> None:
    golden, norm = run.golden, run.golden.tolerance["state_norm"]
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    fields = {"m": "mean", "v": "square", "momentum": "momentum"}
    found = {}
    for key, field in fields.items():
        own = run.named(zeros | leaves(state.opt_state, field))
        found |= {f"{name}/{key}": x for name, x in own.items()}
    matrices = ("qk_bank/", "vo_bank/", "mlp_bank/")
    found = {k: x for k, x in found.items() if k.endswith("/momentum") == k.startswith(matrices)}
    found |= {f"{name}/second": x for name, x in seconds(run, leaves(state.opt_state, "second")).items()}
    # In a chaotic run single moments at the end are noise: our own on 1 and on 8 devices differ by 0.01.
    golden.assert_agrees(found, "state", norm, 0.1 if golden.is_chaotic else norm, norm)


def seconds(run: Run, banks: Arrays) -> dict[str, np.ndarray]:
    """NorMuon's means of squares under the file's names: a vector for each matrix, in the order of the file."""
    vectors: dict[str, list[np.ndarray]] = {}
    for name, members in run.program.layout.banks.items():
        for member, second in zip(members, jax.device_get(banks[name]), strict=False):
            bank = {"qk": "qk_bank", "vo": "vo_bank"}.get(member.name.rpartition(".")[2], "mlp_bank")
            vectors.setdefault(bank, []).append(second.ravel())
    return {name: np.stack(rows) for name, rows in vectors.items()}


def test_golden89_the_first_step_agrees(golden):
    """Only Muon moves weights in it; of Adam, test_cautious_adam.py has the formulas."""
    assert_run_agrees(Run(golden, 1), 1)


@pytest.mark.compile
@pytest.mark.parametrize("num_devices", [1, 8])
def test_golden89_all_steps_agree(golden, num_devices):
    run, num_steps = Run(golden, num_devices, OPTIMISED), len(golden.schedule)
    state, final = assert_run_agrees(run, num_steps)
    want = pytest.approx(golden.arrays[f"val/{num_steps}"], rel=golden.of_losses(num_steps))
    assert run.validate(state, num_steps) == want
    assert_weights_agree(golden, final)
    assert_state_agrees(run, state)


@pytest.mark.compile
def test_golden89_all_steps_agree_with_the_derivative_of_the_loss(golden, monkeypatch):
    """The second run of a file, whose softmax has no weights of targets that do not exist."""

    def exact(targets_BT: jax.Array, inputs: Inputs) -> Targets:
        own = tokens89.targets_of(targets_BT, inputs)
        return own._replace(softmax_N=jnp.sum(own.weights_NM, axis=1))

    monkeypatch.setattr(model, "targets_of", exact)
    other, same = copy.copy(golden), ("val_stream", "prefix_table", "batch/")
    own = {k: x for k, x in golden.arrays.items() if k.startswith(same)}
    other.arrays = own | golden.below("exact/")
    _, final = assert_run_agrees(Run(other, 1, OPTIMISED), len(golden.schedule))
    assert_weights_agree(other, final)


def test_golden89_the_schedule_of_the_real_run_agrees():
    """All 1,285 steps at full size, and the frequencies of each window."""
    units = golden_files.arrays("units2026.npz")
    recipe = recipes.load("record89")
    rows = [recipe.inputs_at(step) for step in range(recipe.num_steps)]
    assert len(rows) == len(units["full/lr"]) == 1285
    for ours, theirs in (("lr_scale", "lr"), ("momentum", "momentum"), ("prefix_weight", "prefix")):
        got = [row[ours] for row in rows]
        np.testing.assert_allclose(got, units[f"full/{theirs}"], rtol=1e-6, atol=1e-7, err_msg=ours)
    weights = np.stack([row["target_weights"] for row in rows])
    np.testing.assert_allclose(weights, units["full/mtp"], rtol=1e-6, atol=1e-7)
    for step, blocks, scale in zip((0, 423, 847, 1270), (3, 7, 11, 13), units["rope/scales"], strict=True):
        assert rows[step]["long_keys"] == 128 * blocks + 1
        np.testing.assert_allclose(rows[step]["rotary"], units[f"rope/{blocks}"], rtol=1e-6)
        assert rows[step]["attention_scale"] == pytest.approx(scale, rel=1e-6)
