"""The picture of the ladder: where runs cross the target, and which records it takes."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from record_forge import forge, install_track

from speedrun.cli.plot import command
from speedrun.exchange import ladder
from speedrun.exchange.history import read_rows
from speedrun.ground import track
from speedrun.ground.errors import UsageError
from speedrun.ledger.record import load
from speedrun.predict.plan import plan as predicted
from speedrun.science import recipes

RUNGS = read_rows(Path(__file__).parent.parent / "records" / "ladder.tsv", ladder.Rung)


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs of ten steps of 0.1 s, with validations before steps 0, 4 and 8, and at the end."""
    install_track(tmp_path)
    monkeypatch.setattr(track, "TRACKS_DIR", tmp_path)
    return forge(tmp_path / "record", seeds=(1, 2))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "ladder.tsv"
    path.write_text("# a comment\nrecipe\trecords\tminutes\tpredicted\ntiny\t1-2\t45\t60\n")
    return path


def test_the_target_is_crossed_between_two_validations(record):
    """3.4 before step 8 and 3.25 at the end: 3.28 is four fifths of the way."""
    run = load(record).finished[0]
    assert [val.loss for val in run.vals][:3] == [5.5, 4.0, 3.4]
    low = run.val_loss
    part = (3.4 - 3.28) / (3.4 - low)
    assert ladder.target_reached(run, 3.28) == pytest.approx((8 + 2 * part, 0.8 + 0.2 * part), rel=1e-6)
    assert ladder.target_reached(run, 4.0) == pytest.approx((4, 0.4), rel=1e-6)
    assert ladder.target_reached(run, 3.0) is None


def test_the_picture_names_every_rung(record, table, tmp_path):
    done = CliRunner().invoke(command, [str(record), "--ladder", str(table), "--out", str(tmp_path / "docs")])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "docs" / "ladder.svg").read_text()
    assert "tiny" in text
    assert "published, in PyTorch" in text
    assert (tmp_path / "docs" / "ladder.png").exists()


def test_each_rung_has_one_record(record, table, tmp_path):
    with pytest.raises(UsageError, match="one record with a result for each recipe"):
        ladder.climbs(table, [record, shutil.copytree(record, tmp_path / "copy")])
    table.write_text("recipe\trecords\tminutes\tpredicted\ntiny\t1\t2\t3\nother\t1\t2\t3\n")
    with pytest.raises(UsageError, match="no record of other"):
        ladder.climbs(table, [record])
    table.write_text("recipe\tminutes\ntiny\tmany\n")
    with pytest.raises(UsageError, match="need columns recipe, records, minutes and predicted"):
        ladder.climbs(table, [record])


def test_the_table_of_this_repository_follows_the_parents():
    rungs = [rung.recipe for rung in RUNGS]
    assert [recipes.load(name).parent for name in rungs] == [None, *rungs[:-1]]


@pytest.mark.compile
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.recipe)
def test_the_predicted_minutes_are_those_of_the_compiled_program(rung: ladder.Rung):
    """Memory and time on eight H100, without one."""
    found = predicted(recipes.load(rung.recipe), "h100", 8, 8, "compiled program")
    assert found.fits
    assert found.total_s / 60 == pytest.approx(rung.predicted, rel=0.03)
