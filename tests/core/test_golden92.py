"""Record 92 against an independent implementation: units, activations, gradients, weights and losses in float32.

`golden92.py` beside the files explains their keys. Sizes, lengths and schedules come from the file.
"""

import copy
import dataclasses
import hashlib
import json
from functools import partial
from typing import Any

import golden_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_golden89
from golden_files import OPTIMISED, Arrays, leaves
from test_golden89 import assert_run_agrees, assert_weights_agree, in_float32, phases_of, unit_order

from speedrun import recipes
from speedrun.recipes.record89 import model as model89
from speedrun.recipes.record89.normuon_and_adam import AdamGroup
from speedrun.recipes.record89.tokens import targets_of
from speedrun.recipes.record92 import model
from speedrun.recipes.record92 import tokens as tokens92
from speedrun.recipes.record92.anvil import anvil
from speedrun.recipes.record92.row_adam import RowPeriod, row_adam
from speedrun.science.inputs import Inputs
from speedrun.science.kernels import cross_entropy
from speedrun.science.kernels.cross_entropy import Targets
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.params import Params
from speedrun.science.recipe import Recipe
from speedrun.science.rows import Rows, apply_update
from speedrun.train.program import Program

SLOTS = {0: "paired", 2: "paired", 5: "paired", 1: "short", 8: "short", 3: "long", 10: "long"}
TAILS = {"ema": "ema", "average": "avg", "value_average": "value", "blend": "blend"}
VALUES = (1, 2, 8, 10)  #: layers with value embeddings


def recipe_of(config: Arrays, ticks: Arrays, num_rows: int, given: Arrays) -> Recipe:
    record, num_steps = recipes.load("record92"), config["total_steps"]
    phases = phases_of(
        record.schedule.phases,
        config["stages"],
        prefix_weights=lambda _, stage: tuple(stage["prefix"]),
        columns=lambda i, _: tuple(config["candidates"].get(str(i), ())),
    )
    rail, tail = config["rail"], config["tail"]
    rates = {"ema": 2 / (tail["ema_window"] + 1), "avg": tail["avg_rate"], "value": tail["avg_rate"]}
    rates["blend"] = ticks["blend"][1][1]
    tails = tuple(
        dataclasses.replace(
            one, last_steps=num_steps - ticks[TAILS[one.name]][0][0], rate=rates[TAILS[one.name]]
        )
        for one in record.schedule.tails
    )
    schedule = dataclasses.replace(
        record.schedule,
        phases=phases,
        cooldown_fraction=config["cooldown_frac"],
        final_lr_scale=config["lr_floor"],
        momentum_start=rail["low"],
        momentum_end=rail["high"],
        momentum_warmup_steps=rail["warmup"],
        momentum_cooldown_steps=rail["cooldown"],
        one_mean_steps=rail["engage"],
        fast_beta=rail["fast_beta"],
        fast_weight=rail["fast_weight"],
        frequent_steps=config["period4_start"],
        block_tokens=config["block_size"],
        final_long_blocks=config["final_long"],
        rotary_pairs=config["head_dim"] // 4,
        short_scale=config["narrow_attn_scale"],
        long_scale=config["wide_attn_scale"],
        tails=tails,
    )
    sizes = {name: config[name] for name in ("mlp_dim", "ngram_rows")}
    sizes |= {"mix_dim": config["model_dim"] // config["mudd_groups"]}
    sizes |= {"segment_tokens": config["virtual_cap"], "sweep_starts": config["micro_batches"]}
    blends = {("qk",): tail["blend"], ("vo", "mlp"): tail["blend"] - tail["richardson"]}
    shares = {"ema": lambda _: tail["ema_blend"], "blend": lambda groups: blends[groups]}
    averages = tuple(
        dataclasses.replace(one, share=shares.get(one.input, lambda _: 1.0)(one.groups))
        for one in record.optimizer.averages
    )
    optimizer = dataclasses.replace(
        record.optimizer,
        anvil_lr=config["anvil"]["lr"],
        anvil_decay=config["anvil"]["decay"],
        anvil_betas=(0.98, config["anvil"]["beta2"]),
        polar_dtype="float32",
        adam_lr=config["adam"]["lr"],
        adam_eps=config["adam"]["eps"],
        adam_decay=config["adam"]["decay"],
        **dict(zip(("tables", "later_tables"), value_periods(config["value"]), strict=True)),
        rows=row_periods(config["ngram"]),
        averages=averages,
    )
    parts = {"optimizer": optimizer, "schedule": schedule, "eval_seq_len": config["val_tokens"]}
    return in_float32(record, config, num_rows, given, sizes, **parts)


def value_periods(given: Arrays) -> list[tuple[AdamGroup]]:
    """The settings of the value tables before and after they are updated every fourth step."""
    decays: list[tuple[int, str]] = [(1, "wd_mul"), (2, "wd_mul4")]
    return [
        (AdamGroup("value", given["lr_mul"], given["beta1"] ** power, given["beta2"] ** power, given[decay]),)
        for power, decay in decays
    ]


def row_periods(given: Arrays) -> tuple[RowPeriod, ...]:
    """The same of the n-grams."""
    decays: list[tuple[int, str]] = [(1, "wd_mul"), (2, "wd_mul4")]
    return tuple(RowPeriod(given["lr_mul"], given["beta2"] ** power, given[decay]) for power, decay in decays)


def row_order(kind: str, head_dim: int) -> np.ndarray:
    """Where our heads keep each row of queries and keys: the file rotates neighbours."""
    if kind == "long":
        return unit_order(head_dim)
    half = head_dim // 2
    return np.concatenate([np.arange(0, half, 2), np.arange(1, half, 2), np.arange(half, head_dim)])


def places(rows: int) -> np.ndarray:
    """Where our table keeps each row of the file: every eighth together, and what is over at the end."""
    whole = rows - rows % 8
    return np.argsort(np.append(np.arange(whole).reshape(-1, 8).T, np.arange(whole, rows)))


class File(test_golden89.File):
    """A golden file of record 92."""

    made_by = "golden92.py"

    def __init__(self, name: str) -> None:
        golden_files.File.__init__(self, name, self.made_by)
        self.schedule, self.ticks = (json.loads(str(self.arrays[key])) for key in ("schedule", "tail_ticks"))
        # Each pass has a sequence for each micro-batch.
        self.config["val_passes"] *= self.config["micro_batches"]
        self.config["val_tokens_per_pass"] = self.config["val_tokens"]

    @property
    def of_norms(self) -> float:
        return self.tolerance["trace_norm"]

    def of_losses(self, step: int) -> float:
        return self.tolerance["losses"]

    def recipe(self, num_rows: int) -> Recipe:
        signs, prefixes = self.starts["signs"], self.arrays["prefix_table"]
        given = {"bigram_signs": signs.astype(np.int8), "prefixes": prefixes.astype(np.int32)}
        return recipe_of(self.config, self.ticks, num_rows, given)

    def named(self, ours: Arrays) -> dict[str, jax.Array]:
        heads, width = self.config["num_heads"], self.config["head_dim"]
        given = {k: jnp.asarray(x) for k, x in ours.items()}
        qk = [
            given.pop(f"block.{i}.qk").reshape(2, heads, width, -1)[:, :, np.argsort(row_order(kind, width))]
            for i, kind in SLOTS.items()
        ]
        mlps = [f"block.{i}.{{}}" for i in range(11)] + ["block.8.{}_twin"]
        mlp = [jnp.stack([given.pop(name.format(part)) for part in ("up", "down")]) for name in mlps]
        banks = {
            "qk_bank": jnp.stack(qk).reshape(-1, 2 * width, self.config["model_dim"]),
            "vo_bank": jnp.concatenate([given.pop(f"block.{i}.vo") for i in SLOTS]),
            "mlp_bank": jnp.stack(mlp),
            "value_embeds": jnp.concatenate([given.pop(f"value_embed.{i}") for i in VALUES]),
            "head": given.pop("head").T,
            "ve_gate_bank": given.pop("value_gates"),
            "ngram_table": given.pop("ngram_embed")[places(self.config["ngram_rows"])],
        }
        return banks | given


golden = golden_files.fixture("record92_*.npz", File)


@pytest.fixture(scope="module")
def unit(golden) -> dict[str, Any]:
    return golden.below("unit/")


# Units


def test_golden92_hashes_agree(unit):
    ids, rows = jnp.asarray(unit["hash/ids"], jnp.int32)[None], 84_602_880
    both = np.concatenate([unit["hash/rows2"], unit["hash/rows3"]])
    shard, place = np.divmod(tokens92.ngram_rows(ids, rows)[0], rows // 8)
    np.testing.assert_array_equal(8 * place + shard, both)
    # The table's first channel is 1 where the sign's row is wanted, so the sum of both shows each.
    signs_SD = jnp.stack([jnp.arange(8192), jnp.zeros(8192, int)], axis=1)
    for part, key in ((0, "hash/sign2"), (1, "hash/sign3")):
        vectors = jnp.zeros((1, 2, len(ids[0]), 2)).at[:, part].set(1.0).reshape(1, -1, 2)
        found = tokens92.ngrams({"ngram_embed": vectors}, ids, signs_SD)[0, :, 0]
        np.testing.assert_array_equal(found, unit[key])


@pytest.mark.parametrize("rank", [0, 3])
def test_golden92_two_sweeps_in_a_row_agree(unit, rank):
    vocab_size, counts = 50_304, unit["candidates/counts"]
    offset = jnp.int32(vocab_size * rank // 8)
    for i, count in enumerate(counts):
        found = tokens92.sampled(jnp.asarray(unit["candidates/targets"][i]), offset, int(count), vocab_size)
        ids, offset, prefix = np.asarray(found.ids_P), found.offset, f"candidates/{rank}/{i}/"
        np.testing.assert_array_equal(ids[::97], unit[f"{prefix}probe"])
        assert hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest() == str(unit[f"{prefix}sha256"])
        assert (ids.sum(), offset) == (unit[f"{prefix}sum"], unit[f"{prefix}offset"])


def test_golden92_a_sweep_with_too_few_free_ids_agrees(unit):
    vocab_size = int(unit["candidates/fallback/vocab"])
    offset = vocab_size * int(unit["candidates/fallback/rank_of_8"]) // 8
    targets = jnp.asarray(unit["candidates/fallback/targets"], jnp.int32)
    found = tokens92.sampled(targets, jnp.int32(offset), int(unit["candidates/fallback/count"]), vocab_size)
    np.testing.assert_array_equal(found.ids_P, unit["candidates/fallback/result"])
    assert found.offset == unit["candidates/fallback/offset"]


def test_golden92_the_sampled_loss_and_its_gradients_agree(unit):
    x, head, ids = unit["sampled/x"], unit["sampled/head"].T, unit["sampled/targets"].astype(np.int32)
    values = {
        "targets": 3,
        "target_weights": jnp.asarray(unit["sampled/mtp"], jnp.float32),
        "has_prefix": True,
    }
    values |= {"prefixes": jnp.asarray(unit["sampled/prefix_table"], jnp.int32)}
    values |= {"prefix_weight": jnp.float32(unit["sampled/prefix_weight"])}
    offset = len(head) * int(unit["sampled/rank_of_8"]) // 8
    columns = tokens92.sampled(
        jnp.asarray(ids), jnp.int32(offset), len(unit["sampled/candidates"]), len(head)
    )
    np.testing.assert_array_equal(columns.ids_P, unit["sampled/candidates"])
    targets = columns.of(targets_of(jnp.asarray(ids)[None], Inputs(values, {})))
    for place, key in ((0, "sampled/target_pos"), (3, "sampled/prefix_pos")):
        np.testing.assert_array_equal(targets.ids_NM[:, place], unit[key])

    def score(x: jax.Array, head: jax.Array) -> jax.Array:
        return cross_entropy.weighted_on_cpu(x, head[columns.ids_P], targets, cap=model.CAP).weighted

    each = per_token(x, head[np.asarray(columns.ids_P)], targets)
    np.testing.assert_allclose(each, unit["sampled/per_token"], rtol=2e-6)
    total, (grad_x, grad_head) = jax.value_and_grad(score, (0, 1))(jnp.asarray(x), jnp.asarray(head))
    assert total == pytest.approx(unit["sampled/per_token"].sum(), rel=2e-6)
    np.testing.assert_allclose(grad_x, unit["sampled/grad_x"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grad_head.T, unit["sampled/grad_head"], rtol=1e-5, atol=1e-6)


def per_token(x: Any, head: Any, targets: Targets) -> np.ndarray:
    def score(x_ND: jax.Array, targets: Targets) -> jax.Array:
        return cross_entropy.weighted_cross_entropy(x_ND, jnp.asarray(head), targets, cap=model.CAP).weighted

    rows = jax.tree.map(lambda a: jnp.asarray(a)[:, None], (x, targets))
    return np.asarray(jax.vmap(score)(*rows))


def test_golden92_too_many_targets_for_the_columns_make_a_loss_that_is_no_number():
    found = tokens92.sampled(jnp.arange(9), jnp.int32(0), 8, 20)
    one = jnp.ones(1)
    assert np.isnan(found.of(Targets(jnp.zeros((1, 1), int), one[None], one)).weights_NM).all()


@pytest.mark.parametrize("shape", ["wide", "square", "tall"])
def test_golden92_anvil_agrees(unit, shape):
    def turned(name: str) -> jax.Array:
        x = jnp.asarray(unit[f"anvil/{shape}/{name}"])
        return x.swapaxes(-1, -2) if shape == "tall" else x

    eta, decay = float(unit["anvil/eta"]), float(unit["anvil/wd"])
    ones = {"bank": jnp.ones((2, 1, 1))}
    beta2 = float(unit["anvil/beta2"])
    transform = anvil(["bank"], lambda: ones, eta, decay / eta, (0.98, beta2), "float32")
    params: Params = {"bank": turned("w0")}
    state: Any = transform.init(params)
    for i, grads in enumerate(turned("grads")):
        names = {"momentum": "beta", "fast_beta": "fast_beta", "fast_weight": "fast_weight"}
        values = {ours: jnp.float32(unit[f"anvil/{theirs}"][i]) for ours, theirs in names.items()}
        inputs = Inputs(values | {"lr_scale": jnp.float32(1)}, {})
        moves: Any
        moves, state = transform.update({"bank": grads}, state, params, inputs=inputs)
        params = {"bank": params["bank"] + moves["bank"]}
        np.testing.assert_allclose(params["bank"], turned(f"w{i + 1}"), atol=2e-6)
    for ours, theirs in zip(state, ("fast", "slow", "energy"), strict=True):
        np.testing.assert_allclose(ours["bank"], turned(theirs), rtol=2e-5, atol=1e-7)


def test_golden92_row_adam_agrees(unit):
    given = json.loads(str(unit["row_adam/constants"]))
    settings = row_periods(given)
    transform = row_adam(
        ["table"], settings, given["lr"], eps=given["eps"], decay=given["decay"], when="update_tables"
    )
    params: Params = {"table": jnp.asarray(unit["row_adam/w0"])}
    state: Any = transform.init(params)
    for i in range(3):
        rows, grads = unit[f"row_adam/rows{i}"], unit[f"row_adam/grads{i}"]
        event = 1 if unit[f"row_adam/step{i}"] < given["period4_start"] else 2
        # A cycle's gradient comes in parts, the first of them without an update.
        for part, now in ((0.25, 0), (0.75, event)):
            inputs = Inputs({"update_tables": now, "rows_room": 8, "lr_scale": jnp.float32(1)}, {})
            moves: Any
            grad = Rows(jnp.asarray(rows), jnp.asarray(part * grads))
            moves, state = transform.update({"table": grad}, state, params, inputs=inputs)
            params = {"table": apply_update(params["table"], moves["table"])}
        np.testing.assert_allclose(params["table"], unit[f"row_adam/w{i + 1}"], rtol=2e-6, atol=2e-7)
    # The file's rows decay when they are read, ours at every event.
    last, betas = unit["row_adam/last_event"], [settings[0].beta2] * 2 + [settings[1].beta2]
    missed = np.array([np.prod(betas[event:]) if event else 1.0 for event in last])
    np.testing.assert_allclose(state.square["table"], unit["row_adam/v3"] * missed, rtol=2e-6)


# Batches and schedules


def test_golden92_rows_segments_and_columns_of_each_batch_agree(golden):
    config, recipe = golden.config, golden.recipe(golden.config["micro_batches"])
    offsets = [config["vocab_size"] * m // config["micro_batches"] for m in range(config["micro_batches"])]
    for step in range(len(golden.schedule)):
        batch = golden.below(f"batch/{step}/")
        for m in range(config["micro_batches"]):
            ids = jnp.asarray(batch[f"{m}/inputs"], jnp.int32)[None]
            rows = tokens92.ngram_rows(ids, config["ngram_rows"])[0]
            np.testing.assert_array_equal(rows, places(config["ngram_rows"])[batch[f"{m}/rows"]])
            first = tokens92.segments(ids, config["document_token"], recipe.config.segment_tokens)[0]
            ends = [*(np.flatnonzero(np.diff(first)) + 1), len(first)]
            # Upstream lists empty segments, too.
            np.testing.assert_array_equal(ends, np.unique(batch[f"{m}/ends"]))
            if count := recipe.inputs_at(step)["columns"]:
                targets = jnp.asarray(batch[f"{m}/targets"], jnp.int32)
                found = tokens92.sampled(targets, jnp.int32(offsets[m]), count, config["vocab_size"])
                np.testing.assert_array_equal(found.ids_P, batch[f"{m}/candidates"])
                offsets[m] = found.offset


def assert_ticks_agree(rows: list[dict[str, Any]], ticks: Arrays) -> None:
    for ours, theirs in TAILS.items():
        got = [(step, row[ours]) for step, row in enumerate(rows) if row[ours]]
        (first, _), *rest = ticks[theirs]
        np.testing.assert_allclose(got, [(first, 1.0), *rest], rtol=1e-6, err_msg=ours)


def test_golden92_schedules_agree(golden):
    recipe = golden.recipe(8)
    rows = [recipe.inputs_at(step) for step in range(recipe.num_steps + 1)]
    rotary: dict[str, Any] = {}
    for step, (got, want) in enumerate(zip(rows, golden.schedule, strict=False)):
        assert (got["short_keys"], got["long_keys"]) == (want["short"] + 1, want["long"] + 1)
        assert (got["adam"], bool(got["update_tables"]), bool(got["tied"])) == (
            want["adam"],
            want["event"],
            want["tied"],
        )
        assert (got["targets"], got["columns"]) == (len(want["mtp"]), want["count"])
        assert got["use_averages"] == (step == recipe.num_steps - 1)
        close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7, err_msg=f"step {step}")
        names = {"lr_scale": "lr", "momentum": "beta", "prefix_weight": "prefix"}
        for ours, theirs in (names | {x: x for x in ("fast_beta", "fast_weight")}).items():
            close(got[ours], want[theirs])
        close(got["target_weights"][: got["targets"]], want["mtp"])
        close([got["short_scale"], got["long_scale"]], want["scales"])
        rotary |= golden.below(f"rope/{step}/")
        close(got["short_rotary"], rotary["narrow"])
        close(got["long_rotary"], rotary["wide"])
    assert_ticks_agree(rows[:-1], golden.ticks)
    assert rows[-1]["long_keys"] == golden.config["final_long"] * golden.config["block_size"] + 1
    assert not any(rows[-1][name] for name in ("adam", "update_tables", "use_averages"))


def test_golden92_the_schedule_of_the_real_run_agrees(unit):
    """All 1,194 steps at full size, and the frequencies of each window."""
    record, want = recipes.load("record92"), {k[9:]: x for k, x in unit.items() if k.startswith("schedule/")}
    rows = [record.inputs_at(step) for step in range(record.num_steps)]
    stages = [record.stages[record.stage_of(step)] for step in range(record.num_steps)]
    assert len(rows) == len(want["lr"]) == 1194
    names = {"lr_scale": "lr", "momentum": "beta", "prefix_weight": "prefix", "columns": "count"}
    names |= {"fast_beta": "fast_beta", "fast_weight": "fast_weight", "target_weights": "mtp"}
    names |= {"short_scale": "narrow_scale", "long_scale": "wide_scale"}
    for ours, theirs in names.items():
        got = np.stack([row[ours] for row in rows])
        np.testing.assert_allclose(got, want[theirs], rtol=1e-6, atol=1e-7, err_msg=ours)
    for ours, theirs in (("short_keys", "short"), ("long_keys", "long")):
        np.testing.assert_array_equal([row[ours] // 128 for row in rows], want[theirs])
    np.testing.assert_array_equal([bool(row["update_tables"]) for row in rows], want["event"])
    np.testing.assert_array_equal([stage.seq_len for stage in stages], want["tokens"])
    np.testing.assert_array_equal([stage.document_tokens for stage in stages], want["max_doc"])
    assert_ticks_agree(rows, json.loads(str(want["ticks"])))
    for step in (320, 681, 1174):
        np.testing.assert_allclose(rows[step]["short_rotary"], want[f"rope/{step}/narrow"], rtol=1e-6)
        np.testing.assert_allclose(rows[step]["long_rotary"], want[f"rope/{step}/wide"], rtol=1e-6)


# A file's run


class Tap:
    """Records what functions of the models return, under the names of the file."""

    def __init__(self, golden: File, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[str, np.ndarray] = {}
        self.golden, self.inputs, self.layer, self.normed = golden, recipe.inputs_at(0), -1, jnp.zeros(())
        self.replace, attention = monkeypatch.setattr, model89.attention
        self.after("ngrams", lambda out, *_: self.keep("bigram", out), model)
        self.after("smeared", lambda out, *_: self.keep("smeared_embed", out))
        self.after("embeddings", lambda out, *_: self.keep("x0", out[0]))
        self.after("gates", lambda out, *given: self.keep_gates(out, given[2]))
        self.after("add_attention", self.keep_sum)
        self.after("mix_positions", lambda out, *given: self.keep(f"attn.{given[2]}.out", out))
        self.before("mix_positions", self.enter)
        self.after("correct", lambda out, *given: self.keep(f"attn.{given[2]}.heads", out))
        self.after("mix_channels", lambda out, x, _, i, *__: self.keep(f"resid.{i}.mid", x) if out else None)
        self.after("add_mlp", lambda out, *given: self.keep(f"resid.{given[2]}.out", out))
        self.after("network", lambda out, *given: self.keep_network(out, *given[2:4]))
        self.after("mixed_end", lambda out, *_: self.keep("resid.final", out), model)
        self.before("mixed_end", self.keep_end, model)
        monkeypatch.setattr(attention, "attend", partial(self.attend, attention.attend))

    def keep(self, name: str, x: Any) -> None:
        self.found[name] = np.asarray(x)

    def after(self, name: str, see: Any, module: Any = model89) -> None:
        old = getattr(module, name)

        def new(*given: Any) -> Any:
            out = old(*given)
            see(out, *given)
            return out

        self.replace(module, name, new)

    def before(self, name: str, see: Any, module: Any = model89) -> None:
        old = getattr(module, name)

        def new(*given: Any) -> Any:
            see(*given)
            return old(*given)

        self.replace(module, name, new)

    def keep_gates(self, gates: Any, half: int) -> None:
        self.keep(("pre_gate", "post_gate")[half], jnp.concatenate([*gates.values()], axis=-1))

    def keep_sum(self, out: jax.Array, x: jax.Array, h: Any, p: Any, i: int, *_: Any) -> None:
        if i == 0:
            self.keep("resid.in", x)
        self.keep(f"resid.{i}.mid", out)

    def enter(self, h: Any, p: Any, i: int, *given: Any) -> None:
        self.layer = i
        if len(given) == 5 and given[4] is not None:
            width = self.golden.config["head_dim"] // (2 if SLOTS[i] == "short" else 1)
            self.keep(f"attn.{i}.aux_v", given[4][..., :width])

    def attend(self, old: Any, heads: Any, view: Any, kernels: Kernels) -> jax.Array:
        out, kind, full = old(heads, view, kernels), SLOTS[self.layer], self.golden.config["head_dim"]
        width = full if kind == "long" else full // 2
        if view.angles is not None:
            heads, _ = model89.attention.rotated(heads, view, kernels)
        root = np.sqrt(self.inputs["long_scale" if kind == "long" else "short_scale"])
        back = np.argsort(row_order(kind, full)[:width])
        for name in ("q", "k"):
            self.keep(f"attn.{self.layer}.{name}", getattr(heads, name)[..., back] / root)
        self.keep(f"attn.{self.layer}.v", heads.v)
        self.keep(f"attn.{self.layer}.softmax_out", out)
        return out

    def keep_network(self, out: jax.Array, name: str, i: int) -> None:
        if name == "mudd":
            self.keep(("mudd.layer10", "mudd.post")[i], out[..., : (14, 10)[i]])

    def keep_end(self, x: jax.Array, middle: Any, stream: Any, p: Params, *_: Any) -> None:
        self.keep("resid.10.out", x)
        weights = model.mix_weights(x, p)[:, :, :10]
        self.keep("mudd.groups", weights - self.found["mudd.post"][..., None])


@pytest.mark.compile
def test_golden92_activations_of_the_first_micro_batch_agree(golden, monkeypatch):
    recipe, params = golden.recipe(golden.config["micro_batches"]), golden.ours()
    tap, (ids, targets) = Tap(golden, recipe, monkeypatch), (x[:1] for x in golden.rows(0))
    values = recipe.inputs_at(0) | recipe.constants(recipe.config, ())
    inputs = Inputs(values | {"segment_tokens": recipe.config.segment_tokens}, {})
    inputs = Inputs(
        jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, inputs.values), {}
    )
    read = recipe.read(params, jnp.asarray(ids))
    x_BTD = model.forward(read, jnp.asarray(ids), inputs, recipe.config, Kernels("cpu", ""))
    columns = tokens92.sampled(jnp.asarray(targets[0]), jnp.int32(0), inputs["columns"], len(params["head"]))
    head = params["head"][columns.ids_P]
    tap.keep("logits", x_BTD[0] @ head.T)
    tap.keep(
        "loss_per_token", per_token(x_BTD[0], head, columns.of(targets_of(jnp.asarray(targets), inputs)))
    )
    norm, probe = golden.tolerance["act_norm"], golden.tolerance["act_probe"]
    golden.assert_agrees(tap.found, "act", norm, probe)


class Run(test_golden89.Run):
    """A file's run by our program."""

    golden: File

    def first_gradients(self, state: Any) -> dict[str, np.ndarray]:
        part = 1 - float(self.program.recipe.inputs_at(0)["fast_beta"])
        fast = {name: jax.device_get(x) / part for name, x in leaves(state.opt_state, "fast").items()}
        return self.named(fast | leaves(state.opt_state, "waiting"))


def masked(run: Run) -> Run:
    """The run's validations with the file's mask."""
    ids = np.arange(run.golden.config["vocab_size"], dtype=np.uint16)
    mask = {"bits": run.golden.arrays["canon_mask"], "row_of": ids, "column_of": ids}
    own, record = run.program.recipe, recipes.load("record92_masked")
    given = own.constants(own.config, ()) | {f"impossible.{name}": x for name, x in mask.items()}
    recipe = dataclasses.replace(
        own, forward=record.forward, logits=record.logits, constants=lambda *_: given
    )
    scored = copy.copy(run)
    scored.program = Program(recipe, run.program.mesh, microbatches=run.program.microbatches)
    return scored


@pytest.mark.compile
@pytest.mark.parametrize("num_devices", [1, 8])
def test_golden92_all_steps_agree(golden, num_devices):
    run, num_steps = Run(golden, num_devices, OPTIMISED), len(golden.schedule)
    tolerance = golden.tolerance
    close = partial(pytest.approx, rel=tolerance["losses"])
    before, _ = assert_run_agrees(run, num_steps - 1)
    held = jax.device_get(before)
    raw, _, _ = run.step(before, num_steps - 1, use_averages=False)
    assert run.validate(raw, num_steps) == close(golden.arrays["val/raw"])
    assert masked(run).validate(raw, num_steps) == close(golden.arrays["val/raw_masked"])
    assert_weights_agree(golden, run.named(raw.params), "final", -2)
    assert_state_agrees(run, raw)
    again = jax.device_put(held, run.program.shardings(run.program.specs))
    shipped, _, _ = run.step(again, num_steps - 1)
    assert run.validate(shipped, num_steps) == close(golden.arrays["val/shipped"])
    assert masked(run).validate(shipped, num_steps) == close(golden.arrays["val/shipped_masked"])
    assert_weights_agree(golden, run.named(shipped.params), "shipped", -1)


def assert_state_agrees(run: Run, state: Any) -> None:
    """Of the optimiser's state and the averages, norms and 16 entries."""
    golden, norm = run.golden, run.golden.tolerance["state_norm"]
    zeros, found = jax.tree.map(jnp.zeros_like, state.params), {}
    matrices = {"qk_bank", "vo_bank", "mlp_bank"}
    for key, field in {"m": "mean", "v": "square", "fast": "fast", "slow": "slow"}.items():
        given = leaves(state.opt_state, field)
        given.pop("ngram_embed", None)  # one number a row
        own = run.named(zeros | given)
        del own["ngram_table"]
        found |= {f"{name}/{key}": x for name, x in own.items() if (name in matrices) == (field == key)}
    found |= {f"{name}/energy": x for name, x in energies(run, leaves(state.opt_state, "second")).items()}
    missed = decay_since_read(golden)
    square = np.asarray(leaves(state.opt_state, "square")["ngram_embed"])[places(len(missed))]
    found["ngram_table/v"] = square / missed
    golden.arrays = {k: x for k, x in golden.arrays.items() if "/last_event" not in k}
    golden.assert_agrees(found, "state", norm, norm, norm)
    for i, name in enumerate(("ema", "avg", "value", "blend", "blend")):
        means = run.named(zeros | state.opt_state[-1][i])
        wanted = golden.below(f"tail_norm/{name}/")
        of_group = [k for k in wanted if np.any(means[k])]
        assert of_group
        for key in of_group:
            assert np.linalg.norm(means[key]) == pytest.approx(wanted[key], rel=norm), (name, key)


def energies(run: Run, banks: Arrays) -> dict[str, np.ndarray]:
    """The means of squared directions under the file's names: a vector for each matrix, in the order of the file."""
    vectors: dict[str, np.ndarray] = {}
    for name, members in run.program.layout.banks.items():
        for member, second in zip(members, jax.device_get(banks[name]), strict=False):
            vectors[f"{member.name}.{member.number}"] = second.ravel()
    config, found = run.golden.config, {}
    found["qk_bank"] = [vectors[f"block.{i}.qk.{k}"] for i in SLOTS for k in range(config["num_heads"])]
    found["vo_bank"] = [vectors[f"block.{i}.vo.{k}"] for i in SLOTS for k in (0, 1)]
    mlps = [f"block.{i}.{{}}.0" for i in range(11)] + ["block.8.{}_twin.0"]
    found["mlp_bank"] = [[vectors[name.format(part)] for part in ("up", "down")] for name in mlps]
    return {name: np.array(rows) for name, rows in found.items()}


def decay_since_read(golden: File) -> np.ndarray:
    """How much each row's mean of squares has decayed since the row was last read: the file's waits."""
    ngram, period4 = golden.config["ngram"], golden.config["period4_start"]
    factors = np.ones(golden.config["ngram_rows"])
    read: set[int] = set()
    for step, row in enumerate(golden.schedule):
        batch = golden.below(f"batch/{step}/")
        read |= {int(i) for m in range(golden.config["micro_batches"]) for i in batch[f"{m}/rows"]}
        if row["event"]:
            factors *= ngram["beta2"] if step < period4 else ngram["beta2"] ** 2
            factors[[*read]] = 1.0
            read = set()
    return factors
