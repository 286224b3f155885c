"""The demonstration: a tab of Chromium trains as JAX does, and tabs that train together lose some and go on.

It goes out with its room, or by itself: speedrun/model/demo, this file, docs/demo.md with its rows in docs/mkdocs.yml,
and the lines of scripts/site.sh that make it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
from browsers import chromium, tab

from speedrun import recipes
from speedrun.base.mesh import arranged
from speedrun.base.serving import CONTENT_TYPES, Reply, serving
from speedrun.data.stream import rows_of
from speedrun.model import commands
from speedrun.model.demo import folder
from speedrun.train.program import Program

Browser = Any
Arrays = dict[str, np.ndarray]
TEXT = np.frombuffer((Path(__file__).parents[2] / "LICENSE").read_bytes(), np.uint8)
SMALLER = {
    "config.model_dim": 32,
    "config.head_dim": 16,
    "config.mlp_dim": 64,
    "stages.0.seq_len": 32,
    "stages.0.num_steps": 40,
}
RECIPE = recipes.load("smoke").override(folder.TINY | SMALLER)
TINY = Program(RECIPE, arranged(jax.devices("cpu")[:1], 1), 1)
START = 10  #: the step that begins at JAX's state


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    """Losses of JAX, and its parameters and state around one step."""
    state, kept, losses = TINY.init(jax.random.key(0)), Arrays(), list[float]()
    for step in range(START + 1):
        if step == START:
            kept |= {f"state.{i}": np.array(x) for i, x in enumerate(jax.tree.leaves(state.opt_state))}
            kept |= {f"first.{name}": np.array(x) for name, x in state.params.items()}
        at = step % 8 * 128  # the text has eight batches
        batch = rows_of(TEXT[at : at + 129].astype(np.int32), 4)
        state, metrics = TINY.train_step_for(TINY.static_at(0))(state, *batch, TINY.schedule)
        losses.append(float(metrics.loss))
    kept |= {f"after.{name}": np.array(x) for name, x in state.params.items()}
    return kept | {"losses": np.array(losses, np.float32)}


@pytest.fixture(scope="module")
def browser(arrays: Arrays, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser at the address of the page, of an empty page, and of JAX's arrays."""
    with chromium() as browser:
        out = tmp_path_factory.mktemp("demo") / "out"
        folder.write(out, TEXT, {"tiny": TINY})
        answer = commands.answering([out])
        head = b"<!doctype html><title>.</title><link rel=icon href='data:,'>"
        others = {"/blank": Reply([head], CONTENT_TYPES["html"])}
        others["/arrays"] = Reply([safetensors.numpy.save(arrays)])
        with serving(lambda path, query: others.get(path) or answer(path, query)) as url:
            yield browser.new_context(base_url=url)


TRAIN = """
async (start) => {
  const { Trainer } = await import("/trainer.js");
  const { read, array } = await import("/model.js");
  const { parse } = await import("/safetensors.js");
  const kept = parse(await read("/arrays", "arrayBuffer"), "arrays"), one = await Trainer.load("tiny");
  const losses = [];
  while (losses.length < 4) losses.push(await one.step(losses.length, losses.length));
  one.put(one.facts.first.map((name) => kept.get(name).data));
  one.state = one.state.map((_, i) => array(kept.get(`state.${i}`)));
  losses.push(await one.step(start, start));
  const weights = await Promise.all(one.params.map((x) => x.ref.data()));
  return [losses, weights.map((x, i) => [one.facts.first[i], x.join()])];
}
"""


def test_a_tab_trains_as_jax_does(browser, arrays):
    with tab(browser) as page:
        page.goto("/blank")
        (*losses, loss), weights = page.evaluate(TRAIN, START)
    np.testing.assert_allclose(losses, arrays["losses"][:4], rtol=2e-3)
    np.testing.assert_allclose(loss, arrays["losses"][START], rtol=1e-5)
    assert [name for name, _ in weights] == sorted(name for name in arrays if name.startswith("first."))
    found = {name: np.array([float(x) for x in text.split(",")]) for name, text in weights}
    moves = {name: arrays[name.replace("first", "after")].ravel() - arrays[name].ravel() for name in found}
    off = {name: np.linalg.norm(x - arrays[name].ravel() - moves[name]) for name, x in found.items()}
    size = {name: np.linalg.norm(move) for name, move in moves.items()}
    # Together; Muon amplifies the rounding of a gradient.
    assert np.linalg.norm([*off.values()]) < 1e-5 * np.linalg.norm([*size.values()])
    assert not [name for name in off if off[name] > 5e-5 * size[name]]


MUTE = """
() => {
  navigator.locks.request("speedrun demo tiny mute", () => new Promise(() => {}));
  new BroadcastChannel("speedrun demo tiny all").postMessage({ join: "mute" });
}
"""
LISTEN = """
() => {
  globalThis.heard = [];
  new BroadcastChannel("speedrun demo tiny all").onmessage = ({ data: { order } }) => order && heard.push(order.leases);
}
"""


def test_a_closed_tab_gives_back_its_batches_and_another_one_takes_over_from_the_first(browser):
    """The tab that closes in a round has done nothing in it."""
    with tab(browser) as heir:
        heir.goto("/")
        heir.evaluate(LISTEN)
        with tab(browser) as first:
            first.goto("/?train")
            first.get_by_text("First tab, this one: batches 0 to 9").wait_for()
            with tab(browser) as mute:
                mute.goto("/blank")
                mute.evaluate(MUTE)
                first.get_by_text("Tab 2: batches 20 to 29").wait_for()
                heir.click("#train")
                heir.get_by_text("Tab 2: batches 20 to 29").wait_for()
            heir.get_by_text("Tab 2, this one").wait_for()
        heir.get_by_text("Step 40 of 40 on").wait_for()
        said, orders = heir.inner_text("#tabs"), heir.evaluate("() => heard")
    assert "Step 10: a tab closed; batches 20 to 29 go to another." in said
    assert "the first tab closed" in said
    *_, lease = (i for i, leases in enumerate(orders) if leases.get("mute") == 20)
    assert 20 in orders[lease + 1].values()
