import json
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from record_forge import forge, install_track

from speedrun import track
from speedrun.cli.plot import command
from speedrun.errors import UsageError
from speedrun.ledger.plot import plot
from speedrun.ledger.validate import validate


@pytest.fixture
def record(tmp_path, monkeypatch):
    install_track(tmp_path)
    monkeypatch.setattr(track, "TRACKS_DIR", tmp_path)
    return forge(tmp_path / "record")


def test_the_same_record_gives_the_same_bytes(record):
    first = [path.read_bytes() for path in plot(record)]
    assert [path.read_bytes() for path in plot(record)] == first


def test_svg_and_png_are_what_they_say_and_the_record_stays_good(record):
    svg, png = plot(record)
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert validate(record).exit_code == 0


def test_another_loss_gives_another_picture(record, tmp_path):
    other = forge(tmp_path / "other", val_losses=(5.5, 4.0, 3.4, 3.1))
    assert plot(record)[1].read_bytes() != plot(other)[1].read_bytes()


def test_a_folder_without_runs_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="no run"):
        plot(tmp_path)


def test_the_command_prints_the_paths(record):
    result = CliRunner().invoke(command, [str(record), "--json"])
    assert result.exit_code == 0, result.output
    paths = [record / "plots" / name for name in ("loss.svg", "loss.png")]
    assert json.loads(result.output)["plots"] == [str(path) for path in paths]
