"""What a track fixes: model, loss and batch, so that only the optimiser makes a difference."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from speedrun.ground.errors import UsageError
from speedrun.ground.track import Track
from speedrun.science import recipes
from speedrun.science.recipe import IDENTITY, Recipe


def check(recipe: Recipe, rows: Sequence[Mapping[str, Any]], track: Track) -> None:
    """Check that a recipe has the very objects of the track's own recipe, and its inputs, where the track fixes them.

    `rows` has the inputs of all steps and of the last validation as they are compiled: a schedule may answer otherwise
    when it is asked again.

    Raises:
        UsageError: naming what differs.
    """
    if track.fixed is None:
        return
    own, num_steps = recipes.load(track.recipe), recipe.num_steps
    names = {field.name for field in fields(own)} - {*IDENTITY, "optimizer", "schedule", "stages"}
    differs = [name for name in sorted(names) if getattr(recipe, name) is not getattr(own, name)]
    differs += ["stages"] if _sizes(recipe) != _sizes(own) else []
    wanted = [track.fixed.inputs_at(step, num_steps) for step in range(num_steps + 1)]
    pairs = list(zip(wanted, rows, strict=True))
    differs += [k for k in track.fixed.inputs if not all(_is_traced(b.get(k), a[k]) for a, b in pairs)]
    if differs:
        raise UsageError(
            f"recipe {recipe.name} changes {', '.join(differs)}, which {track.id} fixes; change only optimizer, "
            "schedule and numbers of steps, or choose another track"
        )


def _sizes(recipe: Recipe) -> list[tuple[type, int]]:
    """Return the sizes of all stages, with their types: an object could claim to be equal."""
    sizes = [x for one in recipe.stages for x in (one.num_sequences, one.seq_len, one.document_tokens)]
    return [(type(x), x) for x in sizes]


def _is_traced(value: Any, number: int) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.int32 and np.array_equal(value, number)
