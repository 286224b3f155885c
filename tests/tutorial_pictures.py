"""Trains the ten steps of docs/tutorial.md, and draws a picture of each: docs/tutorial/<recipe>.svg.

python tests/tutorial_pictures.py    # runs stay in build/tutorial, and are not repeated
"""

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
import svg_pictures
from made_docs import BLOCK, DOCS
from matplotlib.colors import to_rgba

from speedrun.base.atomic_files import write_whole
from speedrun.base.recipe_files import resolve
from speedrun.board import plots
from speedrun.board.plots import GREY, INK, TARGET, TRAIN, VAL
from speedrun.data.shards import open_shard
from speedrun.data.synthetic import DOCUMENT, FIRST_WORD, REPEAT
from speedrun.model import weights
from speedrun.model.decode import DecodingKernels
from speedrun.record import reader

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILES = {f["file"]: f["code"] for f in BLOCK.finditer((DOCS / "tutorial.md").read_text()) if f["file"]}
LADDER = ("gpt2", "muon", "modern", "shortcuts", "unet", "windows", "values", "record21")
STEPS = (*(Path(name).stem for name in FILES), *LADDER)
RUNS = DOCS.parent / "build" / "tutorial"
LINE = 8  #: tokens of a line of the stream
LENGTH = 4 * LINE  #: tokens of the text
BLUE = "#3478c6"  #: seen on white and on black
NUM_OTHERS = 16  #: words that take the place of a token, in turns


def train(name: str) -> Path:
    """Return the record of a step, which has weights."""
    folder = RUNS / name
    if folder.exists():
        return folder
    recipe = [str(RUNS / f"{name}.py")] if f"{name}.py" in FILES else [name, "--set", "size=smoke"]
    for file, code in FILES.items():
        write_whole(RUNS / file, f"{code}\n".encode())
    run = [sys.executable, "-m", "speedrun", "run", "--track", "smoke-cpu", "--checkpoint-every", "280"]
    done = subprocess.run([*run, "--out", str(folder), "--recipe", *recipe], check=False)
    assert done.returncode in (0, 1), "1: the target is missed"
    return folder


def text(shard: Path, vocab_size: int) -> np.ndarray:
    """Return the first document of two new lines and their repeat, and the start of the next: i32 [LENGTH]."""
    tokens_T = open_shard(shard, vocab_size=vocab_size).read(0, 100_000).astype(np.int32)
    for start in np.flatnonzero(tokens_T == DOCUMENT):
        found_T = tokens_T[start : start + LENGTH]
        openers = found_T[::LINE].tolist()
        if openers[2:] == [REPEAT, DOCUMENT] and openers[1] not in (REPEAT, DOCUMENT):
            return found_T
    raise AssertionError("no such document")


def reach(trained: weights.Trained, tokens_T: np.ndarray) -> np.ndarray:
    """Return how much a prediction moves if an earlier token is another: f64 [T read, T predicted].

    It is the total variation between both distributions of the next token, mean of `NUM_OTHERS` words.
    """
    recipe, params, inputs = trained.program.recipe, trained.params, trained.inputs

    @jax.jit
    def chances(tokens_BT: jax.Array) -> jax.Array:
        def of_one(tokens_T: jax.Array) -> jax.Array:
            read = recipe.read(params, tokens_T[None])
            (x_TD,) = recipe.forward(read, tokens_T[None], inputs, recipe.config, DecodingKernels())
            return jax.nn.softmax(recipe.logits(params, x_TD, inputs, recipe.config).astype("float32"))

        return jax.lax.map(of_one, tokens_BT)

    others = np.random.default_rng(0).integers(FIRST_WORD, 256, NUM_OTHERS)
    places = np.arange(LENGTH)
    batch = np.tile(tokens_T, (LENGTH, NUM_OTHERS, 1))
    batch[places, :, places] = others
    batch = batch.reshape(-1, LENGTH)
    moved = abs(chances(batch) - chances(tokens_T[None])).sum(-1) / 2
    return np.asarray(moved, np.float64).reshape(LENGTH, NUM_OTHERS, LENGTH).mean(1)


def draw(number: int, curves: list[tuple[list[int], list[float]]], reach_TT: np.ndarray) -> bytes:
    """Draw the losses of this step and of those before it, and what its predictions read."""
    with plots.canvas(8.0, 3.4) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for at, losses in curves[:-1]:
            left.plot(at, losses, color=TRAIN, linewidth=0.8, zorder=1)
        at, losses = curves[-1]
        left.plot(at, losses, color=VAL, linewidth=2, zorder=3)
        plots.label(left, (at[-1], losses[-1]), f"{losses[-1]:.3f}", (0, 8), ha="right", fontweight="bold")
        plots.level(left, 3.15, "target 3.15", TARGET)
        left.set(xlim=(0, 290), ylim=(3.0, 5.6), xlabel="step", ylabel="loss (nats per token)")
        left.set_title(f"{number}. {STEPS[number - 1]}", loc="left", fontsize=11, color=INK)
        if len(curves) > 1:
            left.text(0.99, 0.97, "steps before", color=TRAIN, transform=left.transAxes, ha="right", va="top")
        _draw_reach(right, reach_TT)
        return svg_pictures.svg(figure)


def _draw_reach(axes: "Axes", reach_TT: np.ndarray) -> None:
    image = np.empty((LENGTH, LENGTH, 4))  # transparent: pages may be dark
    image[:] = to_rgba(BLUE)
    image[..., 3] = np.minimum(reach_TT.T**0.5, 1)  # no more than a rounding error above 1
    axes.imshow(image, interpolation="nearest")
    for place in range(LINE, LENGTH, LINE):
        axes.axhline(place - 0.5, color=GREY, linewidth=0.4)
        axes.axvline(place - 0.5, color=GREY, linewidth=0.4)
    names = ["line 1", "line 2", "repeat of 2", "next text"]
    middles = np.arange(LINE / 2, LENGTH, LINE)
    axes.set_xticks(middles, names, fontsize=7)
    axes.set_yticks(middles, names, fontsize=7, rotation=90, va="center")
    axes.tick_params(length=0)
    axes.set_xlabel("a token here is changed ...")
    axes.set_ylabel("... the prediction here moves")


def main() -> None:
    """Train, and write the pictures."""
    RUNS.mkdir(parents=True, exist_ok=True)
    curves = []
    for number, name in enumerate(STEPS, 1):
        record = train(name)
        (run,) = reader.load(record).runs
        steps = range(9, len(run.steps), 10)  # means of ten
        means = [float(np.mean([one.loss for one in run.steps[step - 9 : step + 1]])) for step in steps]
        curves.append(([step + 1 for step in steps], means))
        trained = weights.load(
            record, recipe=resolve(str(RUNS / f"{name}.py")) if f"{name}.py" in FILES else None
        )
        tokens_T = text(next(trained.folder.glob("smoke_val_*.bin")), trained.track.data.vocab_size)
        path = DOCS / "tutorial" / f"{name}.svg"
        path.parent.mkdir(exist_ok=True)
        write_whole(path, draw(number, curves, reach(trained, tokens_T)))
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
