"""Trained models: decoding computes what the forward pass computes, and draws from its distribution."""

import dataclasses
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from small_run import SMALL, events
from typed import invoke

from speedrun import recipes
from speedrun.base import mesh, runlog, track
from speedrun.base.errors import CheckpointError, DataError, UsageError
from speedrun.data import shards, tokenizer
from speedrun.model import eval_tasks, exported, samples, weights
from speedrun.model.decode import Decoder, Draw, Text, drawn
from speedrun.model.weight_sources import start_from
from speedrun.science.inputs import Inputs
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.params import Layout, Params
from speedrun.science.recipe import Recipe
from speedrun.train import checkpoint, single_run
from speedrun.train.keeper import Job
from speedrun.train.program import Program
from speedrun.train.run_config import RunConfig, folder_of, seal
from speedrun.train.single_run import Extras

TEXTS = ["the cat sat on the mat. the dog ate the cat."] * 50


def laptop(name: str) -> Recipe:
    recipe = recipes.load(name)
    return recipe.override({"size": "smoke"}) if recipe.config.model_dim == 768 else recipe


def moved(recipe: Recipe) -> tuple[Params, Inputs]:
    """Parameters that are not zero, and the inputs of the last validation."""
    layout, key = Layout(recipe.table(recipe.config)), jax.random.key(1)
    start = layout.unpack(layout.init(jax.random.key(0)))
    params = {
        name: x + 0.05 * jax.random.normal(jax.random.fold_in(key, i), x.shape)
        for i, (name, x) in enumerate(start.items())
    }
    plan = Program(recipe, mesh.make_mesh(1), vocabulary=()).step.plan
    static = plan.static_at(recipe.num_steps, integers=False)
    return params, plan.at(recipe.num_steps, plan.schedule, static)


def test_draws_have_the_distribution_of_the_model():
    """By a chi-square test at 1e-4 (4 degrees of freedom: 23.5)."""
    z_V, num = jnp.array([1.0, 0.0, -1.0, 2.0, 0.5]), 20_000
    keys = jax.random.split(jax.random.key(0), num)
    for temperature in (1.0, 0.5):
        how = Draw(temperature)
        counts_V = np.bincount(jax.vmap(lambda key, how=how: drawn(z_V, key, how))(keys), minlength=5)
        want_V = num * jax.nn.softmax(z_V / temperature)
        assert float(np.sum((counts_V - want_V) ** 2 / want_V)) < 23.5


@pytest.mark.parametrize(
    ("how", "allowed"),
    [
        (Draw(temperature=0), {3}),
        (Draw(top_k=2), {3, 0}),
        (Draw(top_p=1e-6), {3}),
        (Draw(top_p=0.62), {3, 0}),  # probabilities of 0.56, 0.21, 0.12, 0.08, 0.03
        (Draw(top_k=3, top_p=0.99), {3, 0, 4}),
        (Draw(), {0, 1, 2, 3, 4}),
    ],
)
def test_improbable_tokens_are_never_drawn(how, allowed):
    z_V = jnp.array([1.0, 0.0, -1.0, 2.0, 0.5])
    keys = jax.random.split(jax.random.key(0), 2_000)
    assert {*map(int, jax.vmap(lambda key: drawn(z_V, key, how))(keys))} == allowed


@pytest.fixture(scope="module")
def small(tiny) -> tuple[Recipe, Params, Inputs]:
    return (tiny, *moved(tiny))


def decoder_of(small: tuple[Recipe, Params, Inputs]) -> Decoder:
    recipe, params, inputs = small
    return Decoder(recipe, inputs, params, vocab_size=60, num_positions=30)


def continued(decoder: Decoder, prompts: list[np.ndarray], how: Draw) -> np.ndarray:
    return np.stack([*decoder.continued(prompts, 20, how)], axis=1)


PROMPTS = [np.array([0, 5, 9], np.int32), np.array([7], np.int32), np.array([0, 1, 2, 3, 0, 4, 5], np.int32)]


def definition(small: tuple[Recipe, Params, Inputs], prompt: np.ndarray, num_tokens: int) -> list[int]:
    """The most probable tokens, each from a forward pass."""
    recipe, params, inputs = small

    @jax.jit
    def next_token(tokens_BT: jax.Array, last: jax.Array) -> jax.Array:
        x_BTD = recipe.forward(params, tokens_BT, inputs, recipe.config, Kernels("cpu", ""))
        return jnp.argmax(recipe.logits(params, x_BTD[0], inputs, recipe.config)[last, :60])

    text = [*map(int, prompt)]
    for _ in range(num_tokens):
        tokens_BT = np.zeros((1, 32), np.int32)
        tokens_BT[0, : len(text)] = text
        text.append(int(next_token(tokens_BT, len(text) - 1)))
    return text[len(prompt) :]


def test_a_model_that_mixes_after_some_tokens_is_refused(small):
    recipe, params, inputs = small

    def forward(params, tokens_BT, inputs, config, kernels):
        x_BTD = params["embed"][tokens_BT]
        is_odd = jnp.any((tokens_BT == 5) & (jnp.roll(tokens_BT, 1, axis=1) == 9))
        total = jnp.sum(jnp.where((tokens_BT > 0)[..., None], x_BTD, 0.0))
        return x_BTD + jnp.roll(jnp.cos(x_BTD + jnp.where(is_odd, total, 0.0)), 1, axis=1)

    decoder = decoder_of((dataclasses.replace(recipe, forward=forward), params, inputs))
    with pytest.raises(UsageError, match="depend on later tokens"):
        continued(decoder, [np.array([0, 7, 9, 5, 11], np.int32)], Draw(temperature=0))


def test_the_most_probable_tokens_are_those_of_the_forward_pass(small):
    decoder = decoder_of(small)
    found_PN = continued(decoder, PROMPTS, Draw(temperature=0))
    assert found_PN.tolist() == [definition(small, prompt, 20) for prompt in PROMPTS]


@pytest.mark.compile
def test_a_text_depends_on_seed_and_place_and_not_on_companions(small):
    decoder = decoder_of(small)
    whole_PN = continued(decoder, PROMPTS, Draw(seed=3))
    alone_PN = continued(decoder, PROMPTS[:1], Draw(seed=3))
    np.testing.assert_array_equal(alone_PN[0], whole_PN[0])
    last_PN = continued(decoder, [PROMPTS[1], PROMPTS[2], PROMPTS[0]], Draw(seed=3))
    np.testing.assert_array_equal(last_PN, whole_PN[[1, 2, 0]])
    twice_PN = continued(decoder, [PROMPTS[0], PROMPTS[0]], Draw(seed=3))
    np.testing.assert_array_equal(twice_PN[0], whole_PN[0])
    assert [*twice_PN[0]] != [*twice_PN[1]], "two samples of a prompt are one"
    assert [*continued(decoder, PROMPTS, Draw(seed=4))[0]] != [*whole_PN[0]]


def test_ids_that_the_data_lacks_are_never_written(small):
    recipe, params, inputs = small

    def logits(p: Params, x_ND: jax.Array, inputs: Inputs, cfg: object) -> jax.Array:
        return recipe.logits(p, x_ND, inputs, cfg).at[:, 60:].set(1e6)

    decoder = decoder_of((dataclasses.replace(recipe, logits=logits), params, inputs))
    found_PN = continued(decoder, PROMPTS, Draw())
    assert found_PN.max() < 60
    assert len({*found_PN.flat}) > 3


def test_characters_of_several_tokens_come_when_they_are_whole_and_controls_are_shown():
    spoken = weights.Words(track.load("docs-cpu"), Path())
    vars(spoken)["tokens"] = {1: "é".encode()[:1], 2: "é".encode()[1:], 3: b"a\x1b[2J\n"}
    text = Text(spoken, np.array([0, 3], np.int32))
    assert text.prompt == "a\N{REPLACEMENT CHARACTER}[2J\n"
    assert [text.add(i, is_last=False) for i in (1, 2, 3)] == ["", "é", text.prompt]
    assert [text.add(i, is_last=False) for i in (1, 0, 2)] == ["", "\N{REPLACEMENT CHARACTER}", ""]
    assert (text.has_ended, text.ids) == (True, [1, 2, 3, 1])
    assert text.add(3, is_last=True) == ""


def test_a_text_becomes_ids_after_the_token_that_opens_a_document(tmp_path):
    tokenizer.train_bpe(iter(TEXTS), 280, tmp_path / "tokenizer.json")
    spoken = weights.Words(track.load("docs-cpu"), tmp_path)
    ids = spoken.encode("the dög")
    assert ids[0] == spoken.track.data.document_token
    assert Text(spoken, ids).prompt == "the dög"
    assert [*spoken.encode("")] == [spoken.track.data.document_token]


@pytest.fixture(scope="module")
def run(trained, tmp_path_factory) -> Path:
    """A run with two checkpoints."""
    out = shutil.copytree(trained.out, tmp_path_factory.mktemp("trained") / "out")
    for name in ("6", "12", "run.json"):
        here, there = folder_of(trained.out) / name, folder_of(out) / name
        there.parent.mkdir(exist_ok=True)
        (shutil.copytree if here.is_dir() else shutil.copy)(here, there)
    return out


sample = partial(invoke, "sample")


@pytest.fixture(scope="module")
def of_text(tiny, tmp_path_factory) -> weights.Trained:
    """A model with random weights and a small tokenizer on docs-cpu."""
    folder = tmp_path_factory.mktemp("text")
    tokenizer.train_bpe(iter(TEXTS), 280, folder / "tokenizer.json")
    config = dataclasses.replace(tiny.config, vocab_size=4096, padded_vocab_size=4096)
    recipe = dataclasses.replace(tiny, config=config)
    program, docs = Program(recipe, mesh.make_mesh(1)), track.load("docs-cpu")
    packed = program.layout.pack(moved(recipe)[0])
    return weights.Trained(program, docs, folder, recipe.num_steps, packed)


def log_p_of(trained: weights.Trained, ids: list[int]) -> np.ndarray:
    """The logarithms of all probabilities at each id: f64 [T, V]."""
    recipe = trained.program.recipe

    @jax.jit
    def log_p(params: Params, tokens_BT: jax.Array) -> jax.Array:
        kernels = Kernels("cpu", "", "definition")
        x_BTD = recipe.forward(params, tokens_BT, trained.inputs, recipe.config, kernels)
        return jax.nn.log_softmax(recipe.logits(params, x_BTD[0], trained.inputs, recipe.config))

    return np.asarray(log_p(trained.params, np.array([ids], np.int32)), np.float64)


def nll_of(trained: weights.Trained, ids: list[int]) -> np.ndarray:
    """The negative log likelihood of each id but the first."""
    return -log_p_of(trained, ids)[np.arange(len(ids) - 1), ids[1:]]


def test_bits_per_byte_count_the_bytes_of_the_targets(of_text, tmp_path):
    ids = np.tile(of_text.words.encode("the cat sat on the mat. the dog ate"), 9).astype(np.uint16)
    for last in (8, 16, 24):  # so that the model is right sometimes
        ids[last] = log_p_of(of_text, [*map(int, ids[last - 8 : last])])[-1].argmax()
    shards.write_shard(tmp_path / "x.bin", ids)
    (part,) = eval_tasks.slices(of_text, [tmp_path / "x.bin"], 8, 64)
    found = eval_tasks.scorer(of_text, 8, print)(part, lambda done: None)
    rows = [[*map(int, ids[start : start + 9])] for start in range(0, 64, 8)]
    nats = sum(nll_of(of_text, row).sum() for row in rows)
    num_bytes = sum(len(of_text.words.tokens.get(int(index), b"")) for index in ids[1:65])
    assert found.loss == pytest.approx(nats / 64, abs=1e-4)
    assert found.bits_per_byte == pytest.approx(nats / np.log(2) / num_bytes, rel=1e-4)
    best = [log_p_of(of_text, row)[:-1].argmax(1) for row in rows]
    assert found.accuracy >= 3 / 64
    assert found.accuracy == np.mean([guess == row[1:] for guess, row in zip(best, rows, strict=True)])


@pytest.mark.compile
def test_hellaswag_takes_the_ending_with_the_smallest_mean_loss(of_text, tmp_path):
    endings = ("the mat.", "a dog that ate the cat.", "cat", "the the the the the the")
    lines = [
        {"ctx": f"the cat {'sat ' * n}on", "endings": endings, "label": label, "more": 1}
        for n, label in ((1, 2), (4, 1), (4, 2))
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = eval_tasks.ask(of_text, eval_tasks.read(tmp_path / "questions.jsonl", None), lambda done: None)
    right = right_norm = 0
    for line in lines:
        context, *four = of_text.words.encoder.encode([line["ctx"], *(f" {ending}" for ending in endings)])
        losses = [nll_of(of_text, [*map(int, context), *map(int, one)])[len(context) - 1 :] for one in four]
        right += int(np.argmin([x.sum() for x in losses]) == line["label"])
        right_norm += int(np.argmin([x.mean() for x in losses]) == line["label"])
    assert (found.questions, found.accuracy, found.accuracy_norm) == (3, right / 3, right_norm / 3)


@pytest.mark.parametrize("line", ["", "{", '{"ctx": "a", "endings": ["a", "b", "c", "d"], "label": 4}'])
def test_a_file_that_is_not_hellaswag_is_refused(tmp_path, line):
    (tmp_path / "questions.jsonl").write_text(line)
    with pytest.raises(DataError, match=r"questions\.jsonl"):
        eval_tasks.read(tmp_path / "questions.jsonl", None)


def test_the_command_writes_the_same_text_again_and_so_does_an_export(run, monkeypatch, tmp_path):
    found = [sample(run, "--ids", "0,5", "--tokens", 20, "--samples", 2, "--json") for _ in range(2)]
    first, second = (json.loads(one.stdout)["samples"] for one in found)
    assert first == second
    assert len(first) == 2
    assert first[0]["ids"] != first[1]["ids"]
    assert first[0]["prompt_ids"] == [0, 5]
    monkeypatch.chdir(run.parent)
    shown = sample("out.checkpoints", "--ids", "0,5", "--tokens", 20).stdout
    assert shown.split() == ["0", "5", *map(str, first[0]["ids"])]
    done = invoke("export", run, "--to", "safetensors", "--step", 6, "--out", tmp_path / "model")
    assert done.exit_code == 0
    asked = ("--ids", "0,5", "--tokens", 9, "--json")
    ran, loaded = sample(run, "--step", 6, *asked), sample(tmp_path / "model", *asked)
    assert json.loads(loaded.stdout)["samples"] == json.loads(ran.stdout)["samples"]
    assert json.loads(loaded.stdout)["step"] == 6


def test_eval_prints_the_loss_of_the_run(run, smoke_data):
    found = invoke("eval", run, "--data", smoke_data, "--json")
    scored = json.loads(found.stdout)
    assert scored["scores"][0]["loss"] == pytest.approx(events(run, runlog.Val)[-1].loss, abs=1e-5)
    assert (scored["scores"][0]["bits_per_byte"], scored["step"]) == (None, 12)


@pytest.mark.parametrize(
    ("words", "exit_code"),
    [
        ("eval RUN --limit 3", 2),
        ("eval RUN --hellaswag x --context 8", 2),
        ("eval RUN --tokens 8", 3),
        ("eval RUN --shard no-such-file", 3),
        ("eval RUN --hellaswag no-such-file", 3),
        ("sample RUN --prompt hello", 2),
        ("sample RUN --ids 0,,3", 2),
        ("sample RUN --ids 256", 2),
        ("sample RUN --tokens 5000", 2),
        ("sample RUN --step 7", 2),
        ("sample RUN --recipe gpt2", 2),
        ("sample RUN --temperature 1e300", 2),
        ("run --track main-8xh100 --out OUT --init-from gpt2", 2),
        ("run --track smoke-cpu --out OUT --init-from nowhere", 2),
        ("run --track smoke-cpu --out OUT --sample-prompt a", 2),
        ("run --track smoke-cpu --out OUT --sample-prompt a --sample-every 5", 2),
        ("run --track smoke-cpu --out OUT --sample-every 5 --checkpoint-every 2", 2),
    ],
)
def test_what_cannot_be_done_is_one_line(run, smoke_data, tmp_path, words, exit_code):
    paths = {"RUN": str(run), "OUT": str(tmp_path / "out")}
    given = [paths.get(word, word) for word in words.split()]
    found = invoke(*given, "--data", smoke_data)
    assert (found.exit_code, found.stderr.count("\n"), found.stdout) == (exit_code, 1, ""), found.stderr
    assert not [*tmp_path.iterdir()]


def copied(run: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A run and the folder of its checkpoints."""
    out = shutil.copytree(run, tmp_path / "out")
    return out, shutil.copytree(folder_of(run), folder_of(out))


def test_a_run_without_weights_or_with_other_settings_is_refused(run, tmp_path, smoke_data):
    out, folder = copied(run, tmp_path)
    kept = json.loads(json.loads((folder / "run.json").read_bytes())["text"])
    kept["config"]["overrides"]["config.attention_scale"] = "5.0"
    (folder / "run.json").write_bytes(msgspec.json.encode(seal(msgspec.json.encode(kept))))
    with pytest.raises(UsageError, match="other settings"):
        weights.load(out, data=smoke_data)
    shutil.rmtree(folder)
    with pytest.raises(UsageError, match="has no weights"):
        weights.load(out, data=smoke_data)


def test_a_damaged_checkpoint_is_left_for_the_one_before_unless_it_is_named(
    run, tmp_path, smoke_data, capsys
):
    """By the reader of resumed runs, whose tests have other damage."""
    out, folder = copied(run, tmp_path)
    (folder / "12" / "facts" / "metadata").write_bytes(b"{}")
    with pytest.raises(CheckpointError):
        weights.load(out, data=smoke_data, step=12)
    assert weights.load(out, data=smoke_data).step == 6
    assert "checkpoint 12 is damaged (its digest does not fit); 6 is used" in capsys.readouterr().err


def test_weights_that_are_no_numbers_are_refused(run, smoke_data, monkeypatch):
    monkeypatch.setattr(jnp, "isfinite", lambda x: jnp.zeros_like(x, bool))
    with pytest.raises(DataError, match="holds NaN or infinity"):
        weights.load(run, data=smoke_data)


@pytest.fixture
def growing(run: Path, smoke_data: Path, tmp_path: Path) -> samples.Request:
    shutil.copytree(folder_of(run), folder_of(tmp_path / "out"))
    return samples.Request(tmp_path / "out", 6, data=smoke_data)


def followed(request: samples.Request) -> list[int]:
    with open(os.devnull, "rb") as ended:
        return samples.follow(request, ended)


def sampled(request: samples.Request) -> dict[int, list[int]]:
    lines = map(json.loads, samples.path_of(request.record).read_text().splitlines())
    return {line["step"]: line["ids"] for line in lines}


def test_each_checkpoint_writes_what_the_command_writes(growing):
    assert followed(growing) == []
    found = sampled(growing)
    assert sorted(found) == [6, 12]
    for step, ids in found.items():
        words = (growing.record, "--step", step, "--tokens", len(ids), "--data", growing.data, "--json")
        (one,) = json.loads(sample(*words).stdout)["samples"]
        assert one["ids"] == ids


def test_checkpoints_that_are_gone_are_named_and_old_samples_stay_readable_or_not(growing):
    shutil.rmtree(folder_of(growing.record) / "6")
    path = samples.path_of(growing.record)
    path.write_text('{"step": 3, "ids": [1]}\n')
    request = msgspec.structs.replace(growing, every=3)
    assert followed(request) == [6, 9]
    assert [*sampled(request)] == [3, 12]
    assert sampled(request)[3] == [1]
    path.write_text("[1]\n")
    with pytest.raises(DataError, match="move it away"):
        followed(growing)
    assert path.read_text() == "[1]\n"


@pytest.mark.compile
def test_a_run_starts_from_given_weights_and_is_marked(run, smoke_data, tmp_path, capfd, monkeypatch):
    trained = weights.load(run, data=smoke_data)
    exported.write(trained, tmp_path / "model")
    out = tmp_path / "out"
    how: Any = {"num_devices": 8, "keep_checkpoints": 0, "checkpoint_every": 6}
    config = RunConfig("smoke-cpu", out, overrides=SMALL, data=smoke_data, **how)
    extras = Extras(sample_every=6, stream=sys.stderr)
    # Killed before its step 0 is whole: nothing could be resumed without it.
    with monkeypatch.context() as broken:
        broken.setattr(checkpoint.Checkpoints, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            start_from(config, tmp_path / "model")
        assert not folder_of(out).exists()
    done = single_run.run(Job(config, init_from=tmp_path / "model"), extras)
    assert done is not None
    begun = weights.load(out, data=smoke_data, step=0).packed
    assert all(np.array_equal(begun[name], x) for name, x in trained.packed.items())
    (resumed,) = events(out, runlog.Resume)
    assert resumed.run_id.startswith("model ")  # and the digest
    assert "V311" in {result.check.id for result in done.report.having("warning")}
    assert sorted(sampled(samples.Request(out, 6))) == [6, 12]
    assert "warning" not in capfd.readouterr().err
    assert f"started from | {resumed.run_id}" in (out / "README.md").read_text()
    card = exported.write(weights.load(out, data=smoke_data), tmp_path / "again")[-1]
    assert f"started from | {resumed.run_id}" in card.read_text()
    with pytest.raises(UsageError, match="samples of another run"):
        extras.beside(msgspec.structs.replace(config, out=out))
