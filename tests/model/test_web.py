"""Models in the browser: Chromium computes what JAX computes, draws the same tokens, and reports errors."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from browsers import chromium, tab
from test_trained import laptop, moved

from speedrun.base import track
from speedrun.base.atomic_files import make_folder
from speedrun.base.errors import DataError, UsageError
from speedrun.base.serving import CONTENT_TYPES, Reply, serving
from speedrun.data import tokenizer, vocabulary
from speedrun.model import commands, page_folder
from speedrun.model.decode import Decoder, Draw
from speedrun.model.page_program import ELEMENTWISE, Constants, program
from speedrun.science.inputs import Inputs
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.params import Params
from speedrun.science.recipe import Recipe

TRACK = track.load("smoke-cpu")
FACTS = {"name": "it", "track": "smoke-cpu@2", "step": 1, "has_text": False}
#: These have all operations of the ladder.
RECIPES = ("smoke", "muon", "record21")
Page = Any
Models = dict[str, tuple[Recipe, Params, Inputs]]


@pytest.fixture(scope="module")
def models() -> Models:
    """Models with random weights."""
    return {name: (laptop(name), *moved(laptop(name))) for name in RECIPES}


@pytest.fixture(scope="module")
def root(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("web") / "out"
    files = {
        name: page_folder.of_model(*model, TRACK, FACTS | {"name": name}) for name, model in models.items()
    }
    make_folder(out, page_folder.site(files))
    return out


@pytest.fixture(scope="module")
def page(request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page with all modules."""
    answer = commands.answering([request.getfixturevalue("root")])

    def with_blank(path: str, query: dict[str, str]) -> Reply | None:
        blank = Reply(
            [b"<!doctype html><title>.</title><link rel=icon href='data:,'>"], CONTENT_TYPES["html"]
        )
        return blank if path == "/blank" else answer(path, query)

    with chromium() as browser, serving(with_blank) as url, tab(browser.new_context()) as page:
        page.goto(f"{url}blank")
        page.evaluate(
            """async () => {
              for (const name of ["jaxpr", "draw", "tokenizer", "safetensors", "model"]) {
                window[name] = await import(`/${name}.js`);
              }
              await model.start();
            }"""
        )
        yield page


@pytest.fixture
def hand(page: Page) -> Iterator[Page]:
    """A page to use by hand."""
    with tab(page.context) as one:
        yield one


#: Arrays are text, since Playwright packs each number separately.
EVALUATE = """
async (sent) => {
  const [program, inputs, constants] = JSON.parse(sent);
  const kinds = { bool: Int32Array, float32: Float32Array, int32: Int32Array, uint32: Uint32Array };
  const array = ([dtype, shape, data]) => model.array({ dtype, shape, data: kinds[dtype].from(data) });
  const known = new Map(Object.entries(constants).map(([name, one]) => [name, array(one)]));
  const [out] = jaxpr.compiled(program, known)(...inputs.map(array));
  return [out.dtype, out.shape, Array.from(await out.data(), Number).join()];
}
"""


def _sent(x: np.ndarray) -> list[Any]:
    return [str(x.dtype), x.shape, x.ravel().tolist()]


def computed(page: Page, function: Callable[..., Any], *inputs: np.ndarray) -> np.ndarray:
    """Evaluate a function in the page."""
    constants = Constants({})
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    made = program(lambda _, *xs: function(*xs), {}, shapes, constants)
    arrays = {name: _sent(x) for name, x in constants.arrays.items()}
    dtype, shape, data = page.evaluate(EVALUATE, json.dumps([made, [*map(_sent, inputs)], arrays]))
    return _numbers(data).astype(dtype).reshape(shape)


def _numbers(text: str) -> np.ndarray:
    return np.array([float(one) for one in text.split(",")])


X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
POSITIVE, FLAGS = np.abs(X) + 0.1, X > 0
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "broadcast": (lambda x: jnp.broadcast_to(x[:, None], (2, 5, 3, 4)), X),
    "concatenate": (lambda x: jnp.concatenate([x, 2 * x, x[:, :1]], 1), X),
    "convert": (lambda x: (x > 0).astype(jnp.int32) + x.astype(jnp.int32), X),
    "cummax": (lambda x: jax.lax.cummax(x, 1), np.array([[1, 5, 2, 7, 3, 3, 9, 0, 1]], np.int32)),
    "cummin": (lambda x: jax.lax.cummin(x, 1), X),
    "cumsum": (lambda x: jnp.cumsum(x, 1), np.arange(21, dtype=np.int32).reshape(3, 7)),
    "dot": (lambda x, y: jnp.einsum("bthk,bshk->bhts", x, y), X[None], X[None, :1] * 3),
    "integer_pow": (lambda x: x**5 + x**3 - x**2, X),
    "floor_divide": (lambda x: x // 4, np.arange(-9, 9, dtype=np.int32)),
    # Too large to be evaluated at the export; only the end is compared.
    "iota": (
        lambda x: (x + jax.lax.broadcasted_iota(jnp.int32, (400, 400), 1))[398:, 300:],
        np.ones((1, 1), np.int32),
    ),
    "iota, moved": (
        lambda x: jnp.concatenate([x, jax.lax.broadcasted_iota(jnp.float32, (1, 140_000), 1)], 1)[:, -99:],
        np.ones((1, 1), np.float32),
    ),
    "pad": (lambda x: jnp.pad(x, ((1, 0), (0, 2), (0, 0)), constant_values=7.0), X),
    "literals, moved": (lambda x: jnp.concatenate([x[0], jnp.full((2000, 4), 3.0), x[1]]), X),
    "reduce_max": (lambda x: x.max((0, 2)), X),
    "reduce_min": (lambda x: x.min(1), X),
    "reduce_sum": (lambda x: x.sum((0, 1, 2)), X),
    "reduce_or": (lambda x: x.any(1), FLAGS),
    "reduce_and": (lambda x: x.all(0), FLAGS),
    "reshape": (lambda x: x.reshape(4, 6)[None], X),
    "rows": (lambda x: jnp.asarray(X[0]).at[x].get(mode="promise_in_bounds"), np.array([[2, 0]], np.int32)),
    "select_n": (lambda x, y: jnp.where(x, 1.5, y), FLAGS, X),
    "slice": (lambda x: x[:, 1:3, 2], X),
    "split": (lambda x: jnp.subtract(*jnp.split(x, 2, -1)), X),
    "transpose": (lambda x: x.transpose(2, 0, 1), X),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operations_are_those_of_jax(name, page):
    function, *inputs = FUNCTIONS[name]
    expected = np.asarray(jax.jit(function)(*inputs))
    found = computed(page, function, *inputs)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)


#: Operands of operations that do not take any floats.
GIVEN: dict[str, tuple[np.ndarray, ...]] = {
    **dict.fromkeys(("and", "or", "xor"), (FLAGS, ~FLAGS[:, ::-1])),
    **dict.fromkeys(("log", "sqrt", "rsqrt"), (POSITIVE,)),
    **dict.fromkeys(("log1p", "tan"), (X / 4,)),
    "not": (FLAGS,),
    "rem": (np.arange(-9, 9, dtype=np.int32), np.full(18, 4, np.int32)),
    "pow": (POSITIVE, X),
}
TWO = frozenset(["add", "div", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne", "sub"])
NAMES = {"and": "bitwise_and", "or": "bitwise_or", "not": "bitwise_not", "xor": "bitwise_xor"}


def test_elementwise_operations_are_those_of_jax(page):
    for name in sorted(ELEMENTWISE - {"select_n"}):
        function = getattr(jax.lax, NAMES.get(name, name))
        inputs = [np.ascontiguousarray(x) for x in GIVEN.get(name, (X, X[:, ::-1])[: 1 + (name in TWO)])]
        found, expected = computed(page, function, *inputs), np.asarray(function(*inputs))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_what_the_page_lacks_is_refused_at_the_export():
    cases: tuple[tuple[Any, Any, str], ...] = (
        (jnp.sort, jnp.float32, "the model uses sort of float32"),
        (lambda x: x.astype(jnp.bfloat16) * 2, jnp.float32, "the model computes with bfloat16"),
        (lambda x: jnp.zeros(9).at[x].add(1.0), jnp.int32, "the model uses scatter-add"),
    )
    for function, dtype, said in cases:
        shape = jax.ShapeDtypeStruct((4,), dtype)
        with pytest.raises(UsageError, match=said) as error:
            program(lambda _, x, function=function: function(x), {}, [shape], Constants({}))
        assert "\n" not in str(error.value)


def test_what_depends_on_no_token_is_computed_once():
    """But not evaluated if it is large."""
    constants, x = Constants({"w": X}), jax.ShapeDtypeStruct((3, 4), jnp.float32)
    made = program(lambda p, x: x * jnp.sin(p["w"]).sum(0), {"w": X}, [x], constants)
    assert [equation[0] for equation in made["equations"]] == ["mul"]
    x = jax.ShapeDtypeStruct((), jnp.float32)
    large = program(lambda _, x: x * jnp.tril(jnp.ones((3000, 3000))), {}, [x], constants)
    assert sum(array.size for array in constants.arrays.values()) < 10_000
    assert {"iota", "ge"} <= {equation[0] for equation in large["equations"]}


PREDICT = """
async ([name, ids]) => {
  const one = await model.Model.load(`models/${name}`);
  return (await one.predict(ids)).map((x) => x.join()).join();
}
"""
CONTINUE = """
async ([name, ids, how, numTokens]) => {
  const found = [];
  const one = await model.Model.load(`models/${name}`);
  for await (const token of one.continued(ids, how, numTokens)) if (!token.isPrompt) found.push(token);
  return found;
}
"""


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("num_tokens", [40, 150])
def test_logits_are_those_of_jax(name, num_tokens, page, models):
    recipe, params, inputs = models[name]
    ids = np.random.default_rng(0).integers(0, 256, num_tokens)
    ids[[0, 17]] = 0  # two documents
    padded = np.pad(ids, (0, 256 - num_tokens))[None].astype(np.int32)
    x_BTD = recipe.forward(params, jnp.asarray(padded), inputs, recipe.config, Kernels("cpu", ""))
    expected = np.asarray(recipe.logits(params, x_BTD[0, :num_tokens], inputs, recipe.config))[:, :256]
    found = _numbers(page.evaluate(PREDICT, [name, ids.tolist()])).reshape(expected.shape)
    assert np.abs(found - expected).max() < 1e-4


def test_the_page_writes_what_sample_writes(page, models):
    recipe, params, inputs = models["smoke"]
    prompt = np.array([0, 17, 4], np.int32)
    decoder = Decoder(recipe, inputs, params, vocab_size=256, num_positions=64)
    for temperature, top_k, seed in ((0.0, 0, 0), (0.8, 0, 3), (1.2, 20, 2**31 - 1)):
        ids = np.concatenate([*decoder.continued([prompt], 24, Draw(temperature, top_k, 1.0, seed))])
        expected = ids.tolist()
        expected = expected[: expected.index(0)] if 0 in expected else expected
        how = {"temperature": temperature, "topK": top_k, "seed": seed}
        found = page.evaluate(CONTINUE, ["smoke", prompt.tolist(), how, 24])
        assert [token["id"] for token in found] == expected
        assert len(expected) > 8
        for token in found:
            assert dict(token["top"]).get(token["id"], token["p"]) == token["p"]
            assert sum(p for _, p in token["top"]) <= 1 + 1e-6


HARD = (
    "Return the array.",
    "  two  spaces\t\ttabs\n\n\nlines \r\n end  ",
    "I'm you'll they've IT'S x'y '' 'S",
    "naïve Ünïcödé 中文字符 日本語 🙂 é e\u0301",
    "1234567890 3.14 ½ ² Ⅷ x1y2",
    "nbsp\u00a0here\u3000wide\u0085next\ufeffbom\u200bzero\u2028sep\x1cfs",
    "<|endoftext|> is text",
    "if x != y: return {'a': [1, 2], \"b\": (3,)}  # ...",
    "\x00\x01\x7f",
    "",
)


def test_the_tokenizer_is_that_of_the_data(page, tmp_path):
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    path = tmp_path / "tokenizer.json"
    tokenizer.train_bpe(iter(["the array of the output array " * 50, *HARD, *HARD]), 420, path)
    known = tokenizer.load(str(path))
    raw = path.read_bytes()
    described = page_folder.described_tokenizer("tokenizer.json", raw, vocabulary.byte_level(raw))
    ids = [one.tolist() for one in known.encode(list(HARD))]
    found, texts = page.evaluate(
        """([described, texts, ids]) => {
          const one = new tokenizer.Tokenizer(described);
          return [texts.map((text) => one.encode(text)), ids.map((of) => one.decode(of).join(""))];
        }""",
        [described, HARD, ids],
    )
    assert found == ids
    shown = ["".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text) for text in HARD]
    assert texts == shown


def test_merges_are_recovered_from_ranks_and_other_tokenizers_refused():
    """GPT-2's file has bytes, then the result of each merge."""
    tokens = {i: bytes([i]) for i in range(256)} | {256: b"th", 257: b"he", 258: b"the", 259: b"thethe"}
    merges = page_folder.described_tokenizer("gpt2", b"", tokens)["merges"]
    assert merges == [[116, 104, 256], [104, 101, 257], [256, 101, 258], [258, 258, 259]]
    other = {"model": {"type": "Unigram"}, "pre_tokenizer": {"type": "Metaspace"}}
    with pytest.raises(DataError, match="need byte-level BPE"):
        page_folder.described_tokenizer("spm.json", json.dumps(other).encode(), {0: b"a"})


def changed(**arrays: Any) -> Callable[[bytes], bytes]:
    def change(raw: bytes) -> bytes:
        old = safetensors.numpy.load(raw)
        return safetensors.numpy.save(old | {k: np.ascontiguousarray(f(old[k])) for k, f in arrays.items()})

    return change


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda raw: raw[:-100],
    "long header": lambda raw: (1 << 40).to_bytes(8, "little") + raw[8:],
    "short": lambda _: b"abc",
    "not a number": changed(embed=lambda x: x * np.float32("nan")),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_weights_are_refused(kind, page, root):
    at = root / "models" / "smoke" / "weights.safetensors"
    raw = at.read_bytes()
    try:
        at.write_bytes(BROKEN[kind](raw))
        name = page.evaluate("() => model.Model.load('models/smoke').catch((e) => e.constructor.name)")
    finally:
        at.write_bytes(raw)
    assert name == "Unusable"


def test_only_exported_files_are_served(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "models" / "m").mkdir(parents=True)
        (tmp_path / name / "models.json").write_text('["m"]')
        (tmp_path / name / "models" / "m" / "model.json").write_text(name)
    (tmp_path / "secret").write_text("no")
    answer = commands.answering([tmp_path / "a", tmp_path / "b"])

    def body(path: str) -> bytes | None:
        reply = answer(path, {})
        return None if reply is None else b"".join(reply.body)

    assert body("/models.json") == b'["m","m (2)"]'
    assert (body("/models/m/model.json"), body("/models/m%20(2)/model.json")) == (b"a", b"b")
    for path in ("/../secret", "/%2e%2e/secret", "/models/other/x", "/models", "/none", "/models/%FF"):
        assert body(path) is None
    with pytest.raises(UsageError, match="need a folder that 'speedrun export RUN --to web' made"):
        commands.answering([tmp_path])


def test_jax_js_is_what_was_published():
    """The digest is `dist.integrity` on npm."""
    raw = (Path(page_folder.__file__).parent / page_folder.JAX_JS).read_bytes()
    published = "g6PxWa6ZLjeQdDAM0ImBSqpdYnC6InCUTCCbMLxhMHMsMNu+JbHRjIQZ/anjBcP69of6hiqfGmTl+3gBn1qu/A=="
    assert base64.b64encode(hashlib.sha512(raw).digest()).decode() == published
    files = page_folder.jax_js()
    assert b"MIT License" in files["LICENSE"]
    for name in {*re.findall(rb'"\./([\w.-]+\.js)"', b"".join(files.values()))}:
        assert name.decode() in files


def test_the_page_writes_and_says_what_is_wrong(page, hand):
    """Write, select a token with the arrow keys, enter an unknown id, and a prompt that is too long."""
    hand.goto(page.url.replace("blank", ""))
    hand.wait_for_selector("#write:not([disabled])")
    hand.select_option("#left", "smoke")
    hand.select_option("#right", "muon")
    hand.fill("#tokens", "5")
    hand.fill("#temperature", "0")
    hand.click("#write")
    hand.wait_for_selector("#write:not([disabled])")
    sections = hand.locator("section")
    assert [sections.nth(i).locator("[role=option]").count() for i in range(2)] == [8, 8]
    assert re.fullmatch(r"5 tokens, \d+ ms each, on wasm", sections.nth(0).locator(".speed").inner_text())
    tokens = sections.nth(0).locator("[role=option]")
    tokens.nth(2).focus()
    hand.keyboard.press("ArrowRight")
    assert tokens.nth(3).get_attribute("aria-selected") == "true"
    assert re.fullmatch(r"“\d+ ”, [<.\d ]+ %", tokens.nth(3).get_attribute("aria-label"))
    assert sections.nth(0).locator(".bars li").count() in (10, 11)
    for prompt, said in (
        ("0, 256", "“256” is no id of smoke-cpu@2"),
        ("7 " * 1024, "The prompt has 1024 tokens"),
    ):
        hand.fill("#prompt", prompt)
        hand.click("#write")
        hand.wait_for_selector("#write:not([disabled])")
        assert said in hand.inner_text("#error")
