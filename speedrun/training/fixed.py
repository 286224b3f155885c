"""What a track fixes: model, loss and batch, so that only the optimiser makes a difference."""

from dataclasses import fields
from typing import Any

from speedrun.ground.errors import UsageError
from speedrun.ground.track import Track
from speedrun.science import recipes
from speedrun.science.recipe import IDENTITY, Recipe


def check(recipe: Recipe, track: Track) -> None:
    """Check that a recipe has what its track fixes: objects of the track's own recipe, since equal ones could pretend.

    Raises:
        UsageError: naming what differs.
    """
    if track.fixed is None:
        return
    own, free = recipes.load(track.recipe), {*IDENTITY, "optimizer", "schedule", "stages"}
    differs = [
        name for field in fields(own) if (name := field.name) not in free
        and getattr(recipe, name) is not getattr(own, name)
    ]  # fmt: skip
    theirs, ours = (_numbers(one, [*track.fixed.inputs], recipe.num_steps) for one in (recipe, own))
    differs += [name for name in ours if theirs[name] != ours[name]]
    if differs:
        raise UsageError(
            f"recipe {recipe.name} changes {' and '.join(differs)}, which {track.id} fixes; change only optimizer, "
            "schedule and numbers of steps, or choose another track"
        )


def _numbers(recipe: Recipe, inputs: list[str], num_steps: int) -> dict[str, list[tuple[type, Any]]]:
    """Return the sizes of all batches and the inputs of all steps, with their types."""
    rows = [recipe.schedule.at(step, num_steps) for step in range(num_steps + 1)]
    found = {name: [row.get(name) for row in rows] for name in inputs}
    found["stages"] = [
        x for one in recipe.stages for x in (one.num_sequences, one.seq_len, one.document_tokens)
    ]
    return {name: [(type(x), x) for x in values] for name, values in found.items()}
