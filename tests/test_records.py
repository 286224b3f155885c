"""The records in this repository: every one passes every check, offline."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from speedrun.cli import command
from speedrun.record.validate import validate

ROOT = Path(__file__).parent.parent
RECORDS = sorted(path.parent for path in (ROOT / "records").glob("*/*/about.json"))


def test_there_is_a_record_of_the_smoke_track():
    assert any(record.parent.name == "smoke-cpu" for record in RECORDS)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_committed_record_is_valid(record):
    report = validate(record, strict=True)
    assert report.exit_code == 0, {r.check.id: r.messages for r in report.results if r.status == "failed"}


def test_the_board_is_up_to_date(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(command, ["leaderboard", "check"])
    assert result.exit_code == 0, result.output
