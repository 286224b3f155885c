"""Exported weights load bit for bit, transformers agrees with them, and damage is refused."""

import json
import runpy
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import yaml
from hub_server import COMMIT, FakeHub, serve
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save
from small_run import FIRST, SMALL
from typed import invoke

from speedrun import recipes
from speedrun.base import mesh, track
from speedrun.base.errors import DataError, UsageError
from speedrun.model import exported, transformers_gpt2, weight_sources, weights
from speedrun.model.weights import Trained
from speedrun.record.reader import load
from speedrun.science.params import Params, Table
from speedrun.train.program import Program

ROOT = Path(__file__).parents[2]
OVERRIDES = {name: value for name, value in SMALL.items() if name != "stages.0.num_steps"}
GOLDEN = Path(__file__).parents[1] / "golden" / "gpt2_transformers.npz"


def drawn(table: Table) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {k: rng.standard_normal(x.shape).astype(jax.numpy.dtype(x.dtype)) for k, x in table.items()}


def arbitrary(name: str, overrides: dict[str, str], step: int, data: Path, **more: Any) -> Trained:
    program = Program(recipes.load(name).override(overrides), mesh.make_mesh(1))
    packed = jax.jit(program.layout.pack)(drawn(program.layout.table))
    return Trained(program, track.load("smoke-cpu"), data, step, packed, **more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    run, data = load(FIRST).runs[0], tmp_path_factory.mktemp("data")
    return arbitrary("smoke", OVERRIDES, run.start.num_steps, data, run=(FIRST, run.folder))


@pytest.fixture(scope="module")
def folder(trained: Trained, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "model"
    exported.write(trained, out)
    return out


@pytest.fixture
def copy(folder: Path, tmp_path) -> Path:
    return shutil.copytree(folder, tmp_path / "model")


def same(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        x, y = np.asarray(got[name]), np.asarray(want[name])
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), name


def test_an_export_gives_the_packed_weights_back_bit_for_bit(trained, folder):
    want, got = trained, weight_sources.load(folder)
    same(got.packed, want.packed)
    assert (got.step, got.track.id, got.program.recipe) == (want.step, "smoke-cpu@2", want.program.recipe)
    assert got.is_ours
    for num_devices in (1, 8):
        program = replace(want.program, mesh=mesh.make_mesh(num_devices))
        packed, origin = weight_sources.packed_for(program, folder)
        same(packed, want.packed)
        shardings = program.shardings(program.specs).params
        assert all(x.sharding == shardings[name] for name, x in packed.items())
        assert origin["weights"] == "model"


@pytest.mark.parametrize("name", ["gpt2", "record89", "muon"])
def test_every_layout_comes_back(name, tmp_path):
    trained = arbitrary(name, {"size": "smoke"}, 3, tmp_path)
    written = exported.write(trained, tmp_path / "model")
    assert [path.name for path in written] == ["model.safetensors", "model.json", "README.md"]
    same(weight_sources.load(tmp_path / "model").packed, trained.packed)
    same(load_file(tmp_path / "model" / "model.safetensors"), drawn(trained.program.layout.table))


def test_the_card_has_the_loss_and_nothing_of_this_machine(folder):
    card, run = (folder / "README.md").read_text(), load(FIRST).runs[0]
    tokens = f"on {run.vals[-1].tokens:,} tokens in sequences of 64"
    assert f"| {run.val_loss:.4f} nats per token, {tokens}" in card
    assert f"| date | {run.begun:%Y-%m-%d} |" in card
    assert card.startswith('---\nlibrary_name: "speedrun"\n')
    front = card.split("---\n")[1]
    assert yaml.safe_load(front)["tags"] == ["speedrun", "smoke"]
    raw = b"".join(path.read_bytes() for path in folder.iterdir())
    assert not [word for word in (folder.parent, ROOT, Path.home()) if str(word).encode() in raw]


class Golden:
    def __init__(self) -> None:
        with np.load(GOLDEN) as file:
            arrays = dict(file)
        self.config = json.loads(str(arrays.pop("config")))
        self.tokens_BT, self.logits_BTV = arrays.pop("tokens"), arrays.pop("logits")
        self.weights = {name: x.astype(np.float32) for name, x in arrays.items()}

    def write(self, folder: Path, weights: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(save(self.weights if weights is None else weights))
        (folder / "config.json").write_text(json.dumps(self.config | changes))
        return folder


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden()


def test_logits_of_its_weights_are_those_of_transformers(golden, tmp_path):
    """A wrong orientation, order, scale or epsilon changes them by more than 1e-3."""
    trained = weight_sources.load(golden.write(tmp_path / "x"), dtype="float32")
    program = trained.program

    def compute(params: Params, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = program.forward(params, tokens_BT, trained.inputs)
        return program.logits(params, x_BTD.reshape(-1, x_BTD.shape[-1]), trained.inputs)

    found_NV = jax.jit(compute)(trained.params, golden.tokens_BT)
    np.testing.assert_allclose(found_NV.reshape(golden.logits_BTV.shape), golden.logits_BTV, atol=2e-4)


@pytest.mark.parametrize("form", ["prefix and buffers", "head", "float16", "bfloat16"])
def test_all_forms_of_its_files_are_read(golden, tmp_path, form):
    there, folder = dict(golden.weights), tmp_path / "x"
    prefix = "transformer." if form == "prefix and buffers" else ""
    there = {prefix + name: x for name, x in there.items()}
    if prefix:
        there |= {"transformer.h.1.attn.bias": np.ones((1, 1, 9, 9), bool)}
        there |= {"transformer.h.0.attn.masked_bias": np.full(1, -1e4, np.float32)}
    if form == "head":
        there["lm_head.weight"] = there["wte.weight"]
    if form == "float16":  # which holds the golden values exactly
        there = {name: x.astype(np.float16) for name, x in there.items()}
    if form == "bfloat16":
        there = {name: x.astype(ml_dtypes.bfloat16) for name, x in there.items()}
    trained = weight_sources.load(golden.write(folder, there), dtype="float32")
    if form != "bfloat16":
        same(trained.packed, weight_sources.load(golden.write(tmp_path / "y"), dtype="float32").packed)
    positions = trained.program.layout.unpack(trained.packed)["positions"]
    np.testing.assert_array_equal(positions, there[prefix + "wpe.weight"].astype(np.float32))


def test_what_is_written_for_transformers_is_what_was_read(golden, tmp_path):
    theirs = weight_sources.load(golden.write(tmp_path / "theirs"), dtype="float32")
    ours = replace(theirs, is_ours=True, step=5, origin={})
    files = transformers_gpt2.write(ours, tmp_path / "out")
    assert [path.name for path in files] == ["model.safetensors", "config.json", "README.md"]
    same(load_file(tmp_path / "out" / "model.safetensors"), golden.weights)
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert config | golden.config == config
    same(weight_sources.load(tmp_path / "out").packed, ours.packed)
    with pytest.raises(UsageError, match="need weights that a run of speedrun trained"):
        transformers_gpt2.write(weight_sources.load(tmp_path / "out"), tmp_path / "again")


@pytest.fixture
def hub(golden: Golden, tmp_path, monkeypatch) -> Iterator[FakeHub]:
    """A hub with a GPT-2 that has its vocabulary, and is small otherwise."""
    from huggingface_hub import constants

    config = golden.config | {"vocab_size": 50257, "bos_token_id": 50256, "n_embd": 4}
    there = runpy.run_path(str(GOLDEN.with_suffix(".py")))["drawn"](config, 0)
    assert there["wte.weight"].shape == (50257, 4)
    files = {"config.json": json.dumps(config).encode(), "model.safetensors": save(there)}
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with serve("openai-community/gpt2-xl", files) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


def test_a_name_is_a_model_of_the_hub_at_a_commit(hub, monkeypatch):
    trained = weight_sources.load(Path("gpt2-xl"))
    assert trained.origin == {"weights": "openai-community/gpt2-xl", "revision": COMMIT}
    assert f"model gpt2 | weights openai-community/gpt2-xl | revision {COMMIT} | bfloat16 on" in str(trained)
    assert (trained.facts["step"], trained.facts["revision"]) == (None, COMMIT)
    assert sorted(name for name, _ in hub.gets) == ["config.json", "model.safetensors"]
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # from now on without a network
    again = weight_sources.load(Path("gpt2-xl"), dtype="float32")
    assert (again.origin, again.facts["dtype"]) == (trained.origin, "float32")
    same(again.packed, trained.packed)
    refused("sample", "gpt2", exit_code=2)  # another one, which was not fetched


def refused(*words: object, exit_code: int) -> None:
    found = invoke(*map(str, words))
    assert (found.exit_code, found.stderr.count("\n")) == (exit_code, 1), found.output


@given(st.data())
@settings(max_examples=60)
def test_changed_bytes_are_a_model_or_a_data_error(tmp_path_factory, data):
    """Half of them are in the header. What is read has the forms that were wanted, and is finite."""
    form = weights.spec_of("F32", (2, 3))
    raw = bytearray(save({"a": np.ones((2, 3), np.float32), "b": np.ones((2, 3), np.float32)}))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("bytes")
    size = data.draw(st.sampled_from([len(raw), len(raw) // 2, 7, 0]))
    (folder / "model.safetensors").write_bytes(raw[:size])
    try:
        found = dict(weights.Tensors(folder).read({"a": (form,), "b": (form,)}))
    except DataError:
        return
    forms = {name: (x.shape, x.dtype.name) for name, x in found.items()}
    assert forms == dict.fromkeys("ab", ((2, 3), "float32"))
    assert all(np.isfinite(x).all() for x in found.values())


@pytest.mark.parametrize(
    "change",
    [
        {"wte.weight": np.zeros((255, 32), np.float32)},
        {"h.1.mlp.c_fc.weight": None},
        {"h.2.ln_1.bias": np.zeros(32, np.float32)},
        {"ln_f.bias": np.zeros(32, np.int32)},
        {"ln_f.bias": np.full(32, np.nan, np.float32)},
    ],
)
def test_parameters_that_do_not_fit_are_named(golden, tmp_path, change):
    there = {name: x for name, x in (golden.weights | change).items() if x is not None}
    with pytest.raises(DataError, match=next(iter(change))):
        weight_sources.load(golden.write(tmp_path / "x", there))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model_type": "llama"}, UsageError),
        ({"activation_function": "relu"}, UsageError),
        ({"scale_attn_by_inverse_layer_idx": True}, UsageError),
        ({"vocab_size": 300}, UsageError),
        ({"n_layer": 10**6}, DataError),
        ({"n_head": 5}, DataError),
        ({"n_positions": "many"}, DataError),
    ],
)
def test_a_config_that_does_not_fit_is_refused(golden, tmp_path, change, error):
    with pytest.raises(error):
        weight_sources.load(golden.write(tmp_path / "x", **change))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (b"{", DataError),
        (b"[" * 100_000, DataError),
        ({"schema": "speedrun.model/2"}, DataError),
        ({"tokenizer": "../../tokenizer.json"}, DataError),
        ({"weights_sha256": "0" * 64}, DataError),
        ({"revision": 7}, UsageError),
        ({"recipe": "gpt2"}, UsageError),
        ({"track": "no-such@1"}, UsageError),
        ({"document_token": 7}, UsageError),
        ({"overrides": {}}, UsageError),
    ],
)
def test_a_model_json_that_does_not_fit_is_refused(copy, change, error):
    path = copy / "model.json"
    facts = json.loads(path.read_bytes())
    path.write_bytes(change if isinstance(change, bytes) else json.dumps(facts | change).encode())
    with pytest.raises(error):
        weight_sources.load(copy)


def test_weights_of_another_recipe_are_not_placed(folder, golden, tmp_path):
    program = Program(recipes.load("smoke"), mesh.make_mesh(1))
    with pytest.raises(DataError, match=r"parameter .* need F32"):
        weight_sources.packed_for(program, folder)
    with pytest.raises(UsageError, match="is a GPT-2; got recipe smoke; choose gpt2"):
        weight_sources.packed_for(program, golden.write(tmp_path / "x"))
    with pytest.raises(UsageError, match="is no folder of weights"):
        weight_sources.packed_for(program, tmp_path)


def test_what_is_no_sound_source_is_refused(copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused("eval", "gpt3", exit_code=2)
    (tmp_path / "x.safetensors").touch()
    refused("eval", "x.safetensors", exit_code=2)
    refused("sample", copy, "--step", 3, exit_code=2)  # it has one step
    path = copy / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    refused("sample", copy, "--ids", 0, exit_code=3)
    path.unlink()
    refused("sample", copy, "--ids", 0, exit_code=3)


def test_where_nothing_may_be_written_nothing_is(folder):
    for form in ("safetensors", "web"):
        refused("export", folder, "--to", form, "--out", folder, exit_code=2)
    refused("export", folder, "--to", "transformers", exit_code=2)  # it has no such architecture
    refused("export", FIRST, "--to", "csv", "--step", 6, exit_code=2)
