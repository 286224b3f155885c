"""Pages and pictures state the figures of records/context.toml, and a malformed file is refused."""

import re
from pathlib import Path

import pictures
import pytest
from test_leaderboard import CONTEXT as RESULT

from speedrun import recipes
from speedrun.base.errors import UsageError
from speedrun.board.standings import Context, read_built, read_context
from speedrun.plan import estimate as planning

ROOT = Path(__file__).parent.parent


CONTEXT = pictures.read_figures()


def test_pages_and_pictures_are_those_of_the_file() -> None:
    """The board itself is compared by `leaderboard check` (tests/test_validate.py)."""
    stale = [path.name for path, content in pictures.outputs().items() if path.read_bytes() != content]
    assert not stale, "python tests/pictures.py"


#: What README says, with the names of its figures. It has no marks, as people read it in a terminal.
README = (
    "the PyTorch record took {published 21 minutes} minutes, or ${published 21 dollars}",
    "ours is predicted to take {predicted record21 8xh100 minutes} minutes and ${predicted record21 8xh100 dollars}",
    "six runs have a mean loss of {record smoke-cpu/2026-11-25-six-seeds loss}, and after 400, of "
    "{record smoke-cpu/2026-11-25-400-steps loss}",
    "(published: {published 89 seconds} s)",
    "({published 92 seconds} s)",
)


def test_readme_states_the_figures():
    board = read_built(ROOT / "records")
    assert board is not None
    stated, text = pictures.texts(CONTEXT, board), " ".join((ROOT / "README.md").read_text().split())
    due = [re.sub(r"{(.*?)}", lambda name: stated[name[1]], sentence) for sentence in README]
    assert not [sentence for sentence in due if sentence not in text], "write these"
    assert "<!--" not in text


def test_no_line_begins_with_a_figure():
    """Markdown takes it for a block of its own, and ends the sentence."""
    pages = ROOT.glob("docs/*.md")
    assert not [path.name for path in pages if re.search(r"^ *<!-- figure", path.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("name", ["history", "ladder"])
def test_every_colour_of_a_picture_has_a_dark_one(name):
    text = (ROOT / "docs" / f"{name}.svg").read_text()
    swaps = dict(re.findall(r'"(?:fill|stroke): (#\w+)"\]\{\w+:(#\w+)!important', text))
    used = set(re.findall(r"(?:fill|stroke): (#\w+)", text.partition("</style>")[2]))
    assert len(used) > 3
    assert used <= swaps.keys()
    assert not swaps.keys() & set(swaps.values())


def test_a_wrong_mark_is_refused():
    with pytest.raises(UsageError, match="unknown figure 'b'"):
        pictures.filled("<!-- figure: b -->1<!-- end -->", {"a": "1"})
    for page in ("<!-- figure: a -->1", "<!-- figure: a -->1 <!-- figure: a -->2<!-- end -->"):
        with pytest.raises(UsageError, match="has no <!-- end -->"):
            pictures.filled(page, {"a": "1"})


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
    assert read_context(tmp_path) == Context()
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
