import statistics
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from record_forge import Spec, change, forge, shard, write_run

from speedrun.base.errors import UsageError
from speedrun.base.runlog import Step
from speedrun.board import plots
from speedrun.board.plots import KINDS, plot
from speedrun.record.summary import assemble
from speedrun.record.validate import validate


def test_pictures_of_a_record_are_part_of_it_and_their_bytes_do_not_change(record):
    paths = plot(record, KINDS)
    assert [path.name for path in paths] == [f"{kind}.png" for kind in KINDS]
    assert validate(record).exit_code == 0
    first = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in plot(record, KINDS)] == first


@pytest.fixture
def drawn(monkeypatch) -> dict[str, Figure]:
    """Return the figures that were written, by name."""
    figures: dict[str, Figure] = {}

    def save(figure: Figure, folder: Path, name: str) -> Path:
        figures[name] = figure
        return folder / name

    monkeypatch.setattr(plots, "save", save)
    return figures


def test_the_band_is_the_range_over_the_runs_of_each_step(tmp_path, record, drawn):
    """In a forged record, step n of seed s has a loss of 5 - n / 10 + s / 100 and takes 0.1 s."""
    three = forge(tmp_path / "three", seeds=(1, 2, 5))
    plot(three, ("loss", "tokens"))
    for name, each in (("loss", 0.1), ("tokens", 100)):
        axes = drawn[name].axes[0]
        (band,) = axes.collections
        corners = {(round(x, 6), round(y, 6)) for x, y in band.get_paths()[0].vertices.tolist()}
        want = {(round(each * (n + 1), 6), round(5 - n / 10 + s / 100, 6)) for n in range(10) for s in (1, 5)}
        assert corners == want
        mean = next(line for line in axes.lines if len(line.get_xdata()) == 10)
        assert list(mean.get_ydata()) == pytest.approx([5 - n / 10 + 8 / 300 for n in range(10)])
    assert "mean and range of 3 runs" in {text.get_text()[7:] for text in drawn["loss"].axes[0].texts}


def test_a_label_stands_at_its_own_point_and_the_mean_has_a_mark(tmp_path, forged, drawn):
    """The runs differ in loss and time; the third is far above the mean."""
    many = forge(tmp_path / "many", seeds=(1,))
    for seed, last in ((2, 3.3), (5, 3.7)):
        write_run(many, Spec(seed=seed, step_s=(0.1 + seed / 100,) * 10, val_losses=(5.5, 4.0, 3.9, last)))
    assemble(many)
    for folder, mark in ((many, "D"), (forge(tmp_path / "one", seeds=(1,)), "o")):
        plot(folder)
        axes = drawn["loss"].axes[0]
        marks = [line.get_xydata().tolist() for line in axes.lines if line.get_marker() == mark]
        points = {(round(x, 6), round(y, 6)) for line in marks for x, y in line}
        labels = [(note.get_text(), note.xy) for note in axes.texts if note.get_text()[0].isdigit()]
        assert len(labels) == len(points) == 4
        for text, (x, y) in labels:
            assert float(text) == pytest.approx(y, abs=0.006)
            assert (round(x, 6), round(y, 6)) in points


def test_one_run_has_no_band_and_another_config_is_not_averaged(tmp_path, record, drawn):
    plot(forge(tmp_path / "one", seeds=(1,)))
    assert not drawn["loss"].axes[0].collections
    shards = (shard("t_train_1.bin", 0, 600),)
    write_run(record, Spec(seed=3, step_s=(0.1,) * 6, shards=shards, val_losses=(5.5, 4.0, 3.9)))
    assemble(record)
    plot(record)
    axes = drawn["loss"].axes[0]
    assert len(axes.collections) == 1
    assert [len(line.get_xdata()) for line in axes.lines].count(6) == 1
    assert {"train: mean and range of 2 runs", "other runs"} < {text.get_text() for text in axes.texts}


def test_every_step_of_every_run_is_in_the_histogram(tmp_path, record, drawn):
    step_s = (0.1, 0.11, 0.12, 0.13, 0.14, 0.15, 0.16, 0.17, 0.18, 0.2)
    plot(forge(tmp_path / "other", step_s=step_s), ("steps",))
    axes = drawn["steps"].axes[0]
    assert sum(patch.get_height() for patch in axes.patches) == 20
    assert "median 140.0 ms" in {text.get_text() for text in axes.texts}
    at_ms = sorted(line.get_xdata()[0] for line in axes.lines)
    assert at_ms == pytest.approx([1e3 * statistics.median_low(step_s * 2), 200])


def test_outliers_are_counted_and_do_not_stretch_the_histogram(tmp_path, record, drawn):
    num_steps = 400
    far = forge(
        tmp_path / "far",
        seeds=(1,),
        step_s=(0.1,) * (num_steps - 2) + (0.11, 9.0),
        shards=(shard("t_train_1.bin", 0, num_steps * 100),),
        val_losses=(4.0,) * 101,
    )
    plot(far, ("steps",))
    axes = drawn["steps"].axes[0]
    assert sum(patch.get_height() for patch in axes.patches) == num_steps - 1
    assert axes.get_xlim()[1] < 400
    assert "1 of 400 beyond the right end" in {text.get_text() for text in axes.texts}


@pytest.mark.parametrize(
    ("kind", "field", "value"), [("steps", "train_time_s", 0.0), ("loss", "loss", 1.7e18)]
)
def test_impossible_numbers_and_no_run_are_an_error(forged, kind, field, value):
    with pytest.raises(UsageError, match="no run"):
        plot(forged)
    hostile = forge(forged / "hostile", edit_log=change(Step, at=4, **{field: value}))
    with pytest.raises(UsageError, match="a time of at least 0" if value == 0 else "cannot be drawn"):
        plot(hostile, (kind,))
