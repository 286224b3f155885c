"""Models in the browser: Chromium computes what JAX computes, draws the same tokens, and says what is wrong."""

import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import safetensors.numpy
from test_trained import laptop, moved

from speedrun.ground import track
from speedrun.ground.errors import DataError, UsageError
from speedrun.ground.serving import Answer, Reply, content_type, serving
from speedrun.science.recipe import Recipe
from speedrun.trained.decode import Decoder, Draw, drawn
from speedrun.trained.incremental import DecodingKernels
from speedrun.web import folder, serve
from speedrun.web.program import ELEMENTWISE, Constants, program

TRACK = track.load("smoke-cpu")
FACTS = {"name": "it", "track": "smoke-cpu@1", "step": 1, "has_text": False}
#: All of the ladder but record 89, which is refused.
RECIPES = ("smoke", "gpt2", "muon", "modern", "windows", "shortcuts", "unet", "values", "record21")
Page = Any


def chromium() -> str:
    """The browser's path."""
    found = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))]
    if not found:
        pytest.skip("needs Chromium on the PATH")
    return found[0]


@pytest.fixture(scope="module")
def models() -> dict[str, dict[str, bytes]]:
    """Models whose weights are random, by name."""
    made = {name: (laptop(name), *moved(laptop(name))) for name in RECIPES}
    return {
        name: folder.of_model(recipe, params, inputs, TRACK, FACTS | {"name": name}, dtype="float32")
        for name, (recipe, params, inputs) in made.items()
    }


@pytest.fixture(scope="module")
def root(models: dict[str, dict[str, bytes]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that is served. Tests add files."""
    out = tmp_path_factory.mktemp("web") / "out"
    folder.write_folder(out, models)
    return out


@pytest.fixture(scope="module")
def page(root: Path) -> Iterator[Page]:
    """A page of the server that can import its modules."""
    browser = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path, answer = chromium(), serve.answering([root])

    def with_blank(path: str, query: dict[str, str]) -> Reply | None:
        blank = Reply(b"<!doctype html><title>blank</title><link rel=icon href='data:,'>", content_type("a.html"))
        return blank if path == "/blank" else answer(path, query)

    with browser.sync_playwright() as driver, served(with_blank) as url:
        one = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = one.new_page()
        page.goto(f"{url}blank")
        names = ("jaxpr", "draw", "tokenizer", "safetensors", "model")
        page.evaluate(
            f"""async () => {{
              for (const name of {json.dumps(names)}) window[name] = await import(`/${{name}}.js`);
              window.np = (await import("/jax-js/index.js")).numpy;
              await model.start();
            }}"""
        )
        yield page
        one.close()


def served(answer: Answer) -> Any:
    """The server, on a free port."""
    return serving(answer)


# --- operations -------------------------------------------------------------------------------------------

EVALUATE = """
async ([program, inputs, constants]) => {
  const array = ([dtype, shape, data]) => {
    if (dtype === "bool") return np.array(Int32Array.from(data), { shape, dtype: "int32" }).astype("bool");
    const kind = { float32: Float32Array, int32: Int32Array, uint32: Uint32Array }[dtype];
    return np.array(kind.from(data), { shape, dtype });
  };
  const known = new Map(Object.entries(constants).map(([name, one]) => [name, array(one)]));
  const [out] = jaxpr.compiled(program, known)(...inputs.map(array));
  const found = [out.dtype, out.shape];
  return [...found, Array.from(await out.data(), Number)];
}
"""


def computed(page: Page, function: Callable[..., jax.Array], *inputs: np.ndarray, **params: Any) -> np.ndarray:
    """The function of inputs, evaluated by the page."""
    constants = Constants(params)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    wrapped = (lambda p, *xs: function(*xs, **p)) if params else (lambda _, *xs: function(*xs))
    found = program(wrapped, params, shapes, constants)
    sent = [[[str(x.dtype), x.shape, x.ravel().tolist()] for x in xs] for xs in (inputs, constants.arrays.values())]
    named = dict(zip(constants.arrays, sent[1], strict=True))
    dtype, shape, data = page.evaluate(EVALUATE, [found, sent[0], named])
    return np.array(data, dtype).reshape(shape)


X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
POSITIVE, SMALL, IDS = np.abs(X) + 0.1, X / 4, np.array([[3, 0, 1], [2, 2, 0]], np.int32)
FLAGS = X > 0
FUNCTIONS = {
    "broadcast": (lambda x: jnp.broadcast_to(x[:, None], (2, 5, 3, 4)), X),
    "concatenate": (lambda x: jnp.concatenate([x, 2 * x, x[:, :1]], 1), X),
    "convert": (lambda x: (x > 0).astype(jnp.int32) + x.astype(jnp.int32), X),
    "cummax": (lambda x: jax.lax.cummax(x, 1), np.array([[1, 5, 2, 7, 3, 3, 9, 0, 1]], np.int32)),
    "cummin": (lambda x: jax.lax.cummin(x, 1), X),
    "cumsum": (lambda x: jnp.cumsum(x, 1), np.arange(21, dtype=np.int32).reshape(3, 7)),
    "dot": (lambda x, y: jnp.einsum("bthk,bshk->bhts", x, y), X[None], X[None, :1] * 3),
    "integer_pow": (lambda x: x**5 + x**3 - x**2, X),
    "iota": (lambda x: x + jax.lax.broadcasted_iota(jnp.int32, (600, 600), 1), np.ones((1, 1), np.int32)),
    "iota, moved": (
        lambda x: jnp.concatenate([x, jax.lax.broadcasted_iota(jnp.float32, (1, 150_000), 1)], 0),
        np.ones((1, 150_000), np.float32),
    ),
    "pad": (lambda x: jnp.pad(x, ((1, 0), (0, 2), (0, 0)), constant_values=7.0), X),
    "reduce_max": (lambda x: x.max((0, 2)), X),
    "reduce_min": (lambda x: x.min(1), X),
    "reduce_sum": (lambda x: x.sum((0, 1, 2)), X),
    "reduce_or": (lambda x: x.any(1), FLAGS),
    "reduce_and": (lambda x: x.all(0), FLAGS),
    "reshape": (lambda x: x.reshape(4, 6)[None], X),
    "select_n": (lambda x, y: jnp.where(x, 1.5, y), FLAGS, X),
    "slice": (lambda x: x[:, 1:3, 2], X),
    "softmax": (lambda x: jax.nn.softmax(x * 30, -1), X),
    "split": (lambda x: jnp.subtract(*jnp.split(x, 2, -1)), X),
    "tile": (lambda x: jnp.tile(x, (2, 3, 1)), X),
    "transpose": (lambda x: x.transpose(2, 0, 1), X),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operations_are_those_of_jax(name: str, page: Page) -> None:
    function, *inputs = FUNCTIONS[name]
    expected = np.asarray(jax.jit(function)(*inputs))
    found = computed(page, function, *inputs)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)


def test_elementwise_operations_are_those_of_jax(page: Page) -> None:
    for name in sorted(ELEMENTWISE - {"select_n", "square"}):
        function = getattr(jax.lax, {"and": "bitwise_and", "or": "bitwise_or", "not": "bitwise_not"}.get(name) or {
            "xor": "bitwise_xor"}.get(name, name))
        inputs = [POSITIVE, X] if name == "pow" else [FLAGS, FLAGS[:, ::-1]] if name in ("and", "or", "xor") else [X, X[:, ::-1]]
        inputs = [FLAGS] if name == "not" else [POSITIVE] if name in ("log", "sqrt", "rsqrt") else inputs
        inputs = [SMALL] if name in ("log1p", "tan") else inputs
        try:
            expected = function(*inputs)
        except TypeError:
            inputs = inputs[:1]
            expected = function(*inputs)
        found = computed(page, function, *map(np.ascontiguousarray, inputs))
        np.testing.assert_allclose(found, np.asarray(expected), rtol=1e-5, atol=1e-6, err_msg=name)
