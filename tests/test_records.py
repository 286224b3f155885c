"""The records in this repository: every one passes every check, offline."""

from pathlib import Path

import pytest

from speedrun.ledger.validate import validate

RECORDS = sorted(path.parent for path in (Path(__file__).parent.parent / "records").glob("*/*/manifest.json"))


def test_there_is_a_record_of_the_smoke_track():
    assert any(record.parent.name == "smoke-cpu" for record in RECORDS)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_committed_record_is_valid(record):
    report = validate(record, strict=True)
    assert report.exit_code == 0, {r.check.id: r.messages for r in report.results if r.status == "failed"}
