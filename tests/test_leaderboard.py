"""The board: standing and rank from the logs alone, hostile words that stay words, a page that asks for nothing."""

import html.parser
import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from forgeries import broken_off
from record_forge import Spec, facts, forge, install_track, source_text, write_run

from speedrun import cli, track
from speedrun.errors import UsageError
from speedrun.ledger import board, board_pages
from speedrun.ledger.assemble import assemble

CONTEXT = """
[[published]]
name = "theirs"
track = "forged"
hardware = "8 X"
minutes = 3.0
link = "https://example.org/a"
caveat = "another clock"
"""
HOSTILE = "a|b<img src=x onerror=1>](javascript:x)\n| x | @all `c` ***"


@pytest.fixture
def records(tmp_path, monkeypatch) -> Path:
    """Slow and fast batches, one that proves nothing, one single run, one edited, one that broke off."""
    install_track(tmp_path)
    monkeypatch.setattr(track, "TRACKS_DIR", tmp_path)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "records"
    (folder / "forged").mkdir(parents=True)
    (folder / "context.toml").write_text(CONTEXT)
    forge(folder / "forged" / "slow", step_s=(0.2,) * 10)
    forge(folder / "forged" / "fast")
    forge(folder / "forged" / "unproven", step_s=(0.05,) * 10, val_losses=(5.5, 4.0, 3.4, 3.279))
    forge(folder / "forged" / "single", seeds=(1,), step_s=(0.01,) * 10)
    edited = forge(folder / "forged" / "edited", step_s=(0.02,) * 10) / "summary.json"
    edited.write_text(edited.read_text().replace('"num_steps": 10', '"num_steps": 9'))
    broke = folder / "forged" / "broke"
    broke.mkdir()
    (broke / "source.txt").write_text(source_text())
    write_run(broke, Spec(edit_log=broken_off, edit_run=facts(outcome="aborted", final_hash="")))
    assemble(broke)
    return folder


def invoke(*args: str):
    return CliRunner().invoke(cli.command, ["leaderboard", *args], prog_name="speedrun")


def test_only_a_proven_batch_has_a_rank_and_only_time_makes_it(records):
    found = [(row.path, row.standing, row.rank) for row in board.read(records).rows]
    assert found == [
        ("forged/fast", "qualified", 1),
        ("forged/slow", "qualified", 2),
        ("forged/single", "provisional", None),
        ("forged/unproven", "provisional", None),
        ("forged/broke", "no result", None),
        ("forged/edited", "refused", None),
    ]
    refused = board.read(records).rows[-1]
    assert refused.failed == ("V004",)
    assert refused.num_steps == 10, "from the logs, not from what the summary says"


def test_a_folder_that_is_no_record_is_left_out(records):
    (records / "forged" / "fast" / "runs").rename(records / "elsewhere")
    assert "forged/fast" not in [row.path for row in board.read(records).rows]


def test_build_then_check(records):
    assert invoke("check").exit_code == 1, "nothing was built yet"
    built = invoke("build")
    assert built.exit_code == 0, built.output
    assert invoke("check").stdout == "board   up to date\n"
    assert json.loads((records / "leaderboard.json").read_text())["rows"][0]["path"] == "forged/fast"
    shutil.rmtree(records / "forged" / "slow")
    stale = invoke("check")
    assert stale.exit_code == 1
    assert "run speedrun leaderboard build" in stale.stderr


def test_the_readme_gets_the_tables_between_its_marks(records):
    readme = Path("README.md")
    readme.write_text(f"before\n{board_pages.BEGIN}\nold\n{board_pages.END}\nafter\n")
    assert invoke("build").exit_code == 0
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "\nold\n" not in text
    assert "(records/forged/fast)" in text
    readme.write_text(f"{board_pages.BEGIN} no end")
    assert (invoke("build").exit_code, "put the marks back" in invoke("build").stderr) == (2, True)


def test_times_have_intervals_and_published_ones_stand_apart(records):
    text = board_pages.markdown(board.read(records))
    (fast,) = [line for line in text.splitlines() if "forged/fast" in line]
    assert fast.startswith("| 1 | 1.00 +- 0.00 s | 3.2500 (p = ")
    (theirs,) = [line for line in text.splitlines() if "theirs" in line]
    assert "| *published* |" in theirs
    assert "[theirs](https://example.org/a)" in theirs


class _Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_hostile_words_stay_words(records):
    calm = board_pages.markdown(board.read(records)), board_pages.page(board.read(records), {})
    assemble(records / "forged" / "fast", title=HOSTILE, authors=[HOSTILE], changes=[HOSTILE])
    text, page = board_pages.markdown(board.read(records)), board_pages.page(board.read(records), {})
    assert len(text.splitlines()) == len(calm[0].splitlines())
    pipes = [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")]
    assert set(pipes) == {11}
    assert "javascript:" not in re.findall(r"\]\(([^)]*)\)", text)
    tags = [_Tags(), _Tags()]
    for parser, source in zip(tags, (calm[1], page), strict=True):
        parser.feed(source)
    extra = [tag for tag, _ in tags[1].tags]
    for tag, _ in tags[0].tags:
        extra.remove(tag)
    assert extra == ["br"], "one for the change; nothing of the words became a tag"


def test_the_page_asks_nothing_of_any_network(records):
    assert invoke("build").exit_code == 0
    parser = _Tags()
    parser.feed((records / "leaderboard.html").read_text())
    for tag, attrs in parser.tags:
        assert tag not in {"link", "iframe", "object", "embed"}
        assert (attrs.get("src") or "data:").startswith("data:")
    assert [tag for tag, _ in parser.tags].count("img") == 2, (
        "history and trade-off of the one track with results"
    )
    links = {attrs["href"] for tag, attrs in parser.tags if tag == "a"}
    assert "https://example.org/a" in links
    assert all(
        link == "https://example.org/a" or re.fullmatch(r"forged/\w+/README\.md", str(link)) for link in links
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[published", "mend it"),
        (CONTEXT.replace("https", "javascript"), "begins with https://"),
        ("x = 1", "mend it"),
    ],
)
def test_a_malformed_context_is_refused(records, text, said):
    (records / "context.toml").write_text(text)
    with pytest.raises(UsageError, match=said):
        board.read(records)
