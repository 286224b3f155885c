"""`speedrun run --check`: whether a recipe runs, and whether its loss falls. Writes no log and no record."""

from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any

import jax
import msgspec
import numpy as np

from speedrun.base import mesh as meshes
from speedrun.base import track as tracks
from speedrun.base.clock import Stopwatch
from speedrun.data import generated, stream
from speedrun.science.step import TrainState
from speedrun.train.preflight import Ready, prepare
from speedrun.train.program import StepShape, evaluate, finite, finite_step
from speedrun.train.run_config import RunConfig

_STEPS = 12  #: of the first stage; of each other one, the first step


class FirstSteps(msgspec.Struct, frozen=True):
    """What the first steps of a recipe showed."""

    recipe: str
    track: str
    steps: list[int]  #: that were trained, by their numbers in the schedule
    losses: list[float]  #: of each; stages may have different losses
    step_s: float  #: median, without the first
    first_loss: float  #: of some validation tokens before the steps
    last_loss: float  #: and of the same tokens after them
    fell: bool
    val_tokens: int

    def __str__(self) -> str:
        losses = f"{self.first_loss:.4f} -> {self.last_loss:.4f} on {self.val_tokens:,} validation tokens"
        verdict = f"it runs, and the loss {'falls' if self.fell else 'does NOT fall'}: {losses}"
        return f"check   {self.recipe} on {self.track}: {verdict}, {len(self.steps)} steps of {self.step_s:.3f} s"


def check(config: RunConfig, say: Callable[[str], None]) -> FirstSteps:
    """Train the first steps of a run."""
    generated.ensure(tracks.load(config.track), config.data, say)
    return train(prepare(config), say)


def train(ready: Ready, say: Callable[[str], None]) -> FirstSteps:
    """Train the first steps, and the first of each later stage; score one batch before and after, as at step 0.

    Raise NonFiniteError for a loss, a gradient or an update that is not finite.
    """
    program, recipe = ready.program, ready.recipe
    first, *later = map(recipe.steps_of, range(len(recipe.stages)))
    steps = [*first[:_STEPS], *(steps[0] for steps in later)]
    state, tokens = program.init(jax.random.key(ready.config.seed)), ready.stream(stream.START)

    def at(step: int) -> TrainState:
        return state._replace(step=meshes.replicate(np.int32(step), program.mesh))

    def compiled(what: str, lowered: Any) -> Any:
        watch = Stopwatch()
        done = program.compiled(lowered)
        say(f"compiled {what} in {watch.seconds:.1f} s")
        return done

    @cache
    def step_of(shape: StepShape) -> Any:
        return compiled(f"the step {shape}", program.traced_step(shape).lower())

    scored = program.eval_shape_at(0)
    score = compiled(f"the validation {scored}", program.traced_score(scored).lower())
    num_tokens = scored.num_sequences * scored.seq_len

    def val_loss() -> float:
        loss = evaluate(program, score, at(0), ready.shards.val[0], num_tokens).loss
        return finite(program, loss, "validation")

    first_loss, losses, seconds = val_loss(), [], []
    for step in steps:
        stage, run = recipe.stages[recipe.stage_of(step)], step_of(program.shape_at(step))
        batch = tokens.batch(stage.num_sequences, stage.seq_len, stage.document_tokens)
        watch, ids = Stopwatch(), [meshes.shard(x_BT, program.mesh) for x_BT in batch]
        state, metrics = run(at(step), *ids, program.schedule)
        metrics = metrics._replace(bad=meshes.replicated(metrics.bad))
        losses.append(finite_step(program, metrics, f"step {step}"))
        seconds.append(watch.seconds)
    step_s = median(seconds[1:] or seconds)
    found = steps, losses, step_s, first_loss, (last := val_loss()), last < first_loss, num_tokens
    return FirstSteps(recipe.name, ready.track.id, *found)
