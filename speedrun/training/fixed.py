"""What a track fixes: model, loss and batch, so that only the optimiser makes a difference."""

from dataclasses import fields

from speedrun.ground.errors import UsageError
from speedrun.ground.track import Track
from speedrun.science import recipes
from speedrun.science.recipe import IDENTITY, Recipe


def check(recipe: Recipe, track: Track) -> None:
    """Check that a recipe has the very objects of the track's own recipe where the track fixes them.

    Raises:
        UsageError: naming what differs.
    """
    if track.fixed is None:
        return
    own, by_value, num_steps = recipes.load(track.recipe), ("stages", *track.fixed.inputs), recipe.num_steps
    names = {field.name for field in fields(own)} - {*IDENTITY, "optimizer", "schedule", "stages"}
    differs = [name for name in sorted(names) if getattr(recipe, name) is not getattr(own, name)]
    differs += [name for name in by_value if _all(name, recipe, num_steps) != _all(name, own, num_steps)]
    if differs:
        raise UsageError(
            f"recipe {recipe.name} changes {', '.join(differs)}, which {track.id} fixes; change only optimizer, "
            "schedule and numbers of steps, or choose another track"
        )


def _all(name: str, recipe: Recipe, num_steps: int) -> list[tuple[type, object]]:
    """Return the sizes of all stages, or an input at all steps, with their types: an object could claim to be equal."""
    values = [recipe.schedule.at(step, num_steps).get(name) for step in range(num_steps + 1)]
    if name == "stages":
        values = [x for one in recipe.stages for x in (one.num_sequences, one.seq_len, one.document_tokens)]
    return [(type(x), x) for x in values]
