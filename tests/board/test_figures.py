"""Figures of records/context.toml and pages: a malformed file is refused, and a prediction is what `plan` says."""

import re
from pathlib import Path

import pictures
import pytest
from test_leaderboard import CONTEXT as RESULT

from speedrun import recipes
from speedrun.base.console import duration
from speedrun.base.errors import UsageError
from speedrun.board.leaderboard import BoardContext, read_context
from speedrun.lab.budget import budget
from speedrun.plan import estimate as planning
from speedrun.train.batch import BatchRequest
from speedrun.train.run_config import RunConfig

CONTEXT, DOCS = pictures.read_figures(), Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    "text",
    [
        "history = [[1, 2024-05-28, -1.0]]",
        "history = [[1, 2024-05-28, inf]]",
        'history = [[1, 2024-05-28, 45, "", "", "javascript:x"]]',
        RESULT.replace("https", "javascript"),
        f'{RESULT}claim = "open"\ndate = "2026-08"',
        f'{RESULT}claim = "verified"',
        "x = 1",
        "[[published",
    ],
)
def test_a_malformed_file_is_refused_and_none_states_nothing(tmp_path, text):
    assert read_context(tmp_path) == BoardContext()
    (tmp_path / "context.toml").write_text(text)
    with pytest.raises(UsageError, match="correct it"):
        read_context(tmp_path)


@pytest.mark.compile
@pytest.mark.parametrize(
    "row", CONTEXT.predicted, ids=lambda row: f"{row.recipe}-{row.num_devices}x{row.kind}"
)
def test_a_prediction_is_what_plan_says(row):
    recipe = recipes.load(row.recipe)
    found = planning.plan(recipe, row.kind, row.num_devices, 8)
    total_s, mfu = found.total_s, found.stages[0].mfu
    now = (total_s, 1e3 * total_s / recipe.num_steps, found.memory_bytes / 1e9, mfu)
    assert found.fits
    assert now == pytest.approx((row.total_s, row.step_ms, row.memory_gb, row.mfu), rel=0.01), "write these"


@pytest.mark.compile
def test_the_page_of_tracks_says_what_a_proof_takes():
    row = r"^\| `(.+)`, `(\w+)`.* \| (\d+) \| (.+) \| (.+) \| (.+) \| (\d+) \|$"
    said = re.findall(row, (DOCS / "tracks.md").read_text(), re.M)
    assert len(said) == 4
    for track, recipe, *figures in said:
        request = BatchRequest(RunConfig(track, Path(), recipe=recipe), None)
        found = budget(request, "h100", dollars=2.5)
        (row,) = (row for row in found.rows if row.is_asked)
        times = found.run_s or 0.0, found.first_s, row.total_s or 0.0
        assert figures == [str(row.num_runs), *map(duration, times), f"{row.dollars:.0f}"]
