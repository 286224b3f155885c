"""Compare the plan of a recipe with the steps that a record measured."""

from pathlib import Path
from statistics import median

import msgspec

from speedrun import recipes
from speedrun.base import accelerators
from speedrun.base.errors import UsageError
from speedrun.plan import cost
from speedrun.plan.estimate import plan
from speedrun.record.reader import load_result


class StageCheck(msgspec.Struct, frozen=True):
    """The steps of one stage."""

    num_steps: int
    measured_s: float  #: the median of a step, over all runs
    predicted_s: float
    error: float  #: of the prediction, relative

    def __str__(self) -> str:
        ratio = self.measured_s / self.predicted_s
        return (
            f"stage  {self.num_steps:,} steps | measured {cost.ms(self.measured_s)} | "
            f"predicted {cost.ms(self.predicted_s)} +-{self.error:.0%} | ratio {ratio:.2f}"
        )


def check(path: Path) -> list[StageCheck]:
    """Compare the steps of a record with the plan of its recipe on its devices.

    Raises:
        UsageError: if it ran on devices without rates, or is no record with a finished run.
    """
    record = load_result(path)
    num_devices, name = record.lead.hardware
    kinds = {device.name: kind for kind, device in accelerators.DEVICES.items()}
    if name not in kinds:
        raise UsageError(
            f"{path} ran on {name}, for which there are no rates; need one of {', '.join(kinds)}"
        )
    start = record.lead.start
    recipe = recipes.load(start.recipe).override(start.overrides)
    if (recipe.revision, recipe.num_steps) != (start.recipe_revision, start.num_steps):
        raise UsageError(f"{path}: {start.recipe} was another then; check out the commit of the record")
    planned = plan(recipe, kinds[name], num_devices, start.config.get("microbatches", 8))
    found = []
    for index, expected in enumerate(planned.stages):
        steps = recipe.steps_of(index)
        measured_s = median(s for run in record.finished for s in run.step_s[steps.start : steps.stop])
        found.append(StageCheck(len(steps), measured_s, expected.step_s, expected.error))
    return found
