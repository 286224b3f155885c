"""Two records side by side: order, seeds, the verdict; the runs themselves are forged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from forgeries import BROKE
from record_forge import Spec, install_track, source_text, write_run

from speedrun import cli
from speedrun.ground import track
from speedrun.ledger.record import read_files
from speedrun.ledger.run import Run, read_run
from speedrun.referee import sandbox
from speedrun.referee.rerun import Rerun
from speedrun.study import comparison
from speedrun.study.comparison import compare


@pytest.fixture(autouse=True)
def tracks(tmp_path, monkeypatch):
    install_track(tmp_path)
    monkeypatch.setattr(track, "TRACKS_DIR", tmp_path)


def made(folder: Path, *, step_s: float = 0.1, loss: float = 3.25, seed: int = 1) -> Run:
    spec = Spec(seed=seed, step_s=(step_s,) * 10, val_losses=(5.5, 4.0, 3.4, loss))
    write_run(folder, spec)
    return read_run(read_files(folder)[0], spec.run_id)


def test_a_nat_costs_what_is_published_whatever_the_end_of_the_curve(tmp_path):
    """At record 21: 100 of 1,770 steps for 0.0045 nats. Of a run of 1 s, so many hundredths."""
    for loss in (3.25, 3.5):
        run = made(tmp_path / f"{loss}", loss=loss)
        assert comparison.seconds_per_nat([run]) == pytest.approx(1.0 * (100 / 1770) / 0.0045)
    assert "0.0045 nats for 100 of record 21's 1,770 steps" in comparison.RATE_FROM


def test_loss_counts_as_time(tmp_path):
    """B takes 0.9 s instead of 1 s, and ends 0.0045 nats higher: that is worth 100 steps of 1,770, 0.0565 s."""
    first = [made(tmp_path / f"a{i}") for i in range(2)]
    second = [made(tmp_path / f"b{i}", step_s=0.09, loss=3.2545) for i in range(2)]
    found = compare((1, 2), first, second)
    assert found.time_ratio.mean == pytest.approx(0.9)
    assert found.loss_difference.mean == pytest.approx(0.0045)
    assert found.equivalent_s == pytest.approx(-0.1 + 100 / 1770)
    assert found.is_resolved


def test_what_the_node_does_to_both_is_no_difference(tmp_path):
    first = [made(tmp_path / f"a{i}", step_s=s) for i, s in enumerate((0.1, 0.12, 0.11))]
    second = [made(tmp_path / f"b{i}", step_s=s) for i, s in enumerate((0.101, 0.119, 0.11))]
    assert not compare((1, 2, 3), first, second).is_resolved


@pytest.fixture
def command(monkeypatch, tmp_path):
    """`speedrun compare a b` whose runs are forged: B's steps take the given share of A's. Tells what was run."""

    def invoke(share: float, *args: str):
        ran: list[tuple[str, int]] = []

        def run(self: Rerun, out: Path, *, seed: int, **_: object) -> Run:
            side = "B" if self.old.start.seed == 2 else "A"
            ran.append((side, seed))
            noise = 1 + 0.001 * (len(ran) % 3)
            return made(out, step_s=0.1 * noise * (share if side == "B" else 1.0))

        monkeypatch.setattr(Rerun, "run", run)
        for name, seed in (("a", 1), ("b", 2)):
            if not (tmp_path / name).exists():
                folder = tmp_path / name
                folder.mkdir()
                (folder / "source.txt").write_text(source_text())
                made(folder, seed=seed)
        words = ["compare", str(tmp_path / "a"), str(tmp_path / "b"), *args]
        return CliRunner().invoke(cli.command, words, prog_name="speedrun"), ran

    return invoke


def test_pairs_alternate_and_share_a_seed(command):
    result, ran = command(0.9, "--pairs", "3")
    assert [side for side, _ in ran] == list("ABBAAB")
    seeds = [seed for _, seed in ran]
    assert seeds[::2] == seeds[1::2]
    assert len(set(seeds)) == 3
    assert result.exit_code == 0, result.output
    assert "B is faster" in result.stdout
    assert "pair 2/3 A" in result.stderr


def test_a_node_that_cannot_tell_says_so(command):
    result, _ = command(1.0)
    assert result.exit_code == 1
    assert "not resolvable here" in result.stdout


def test_slower_is_slower_and_the_result_is_kept(command, tmp_path):
    result, _ = command(1.2, "--json", "--out", str(tmp_path / "kept"))
    assert result.exit_code == 1
    assert json.loads(result.stdout)["time_ratio"]["low"] > 1
    assert json.loads((tmp_path / "kept" / "compare.json").read_text()) == json.loads(result.stdout)
    again, _ = command(1.2, "--out", str(tmp_path / "kept"))
    assert (again.exit_code, "exists already" in again.stderr) == (2, True)


def test_other_hardware_is_refused(command, tmp_path):
    command(1.0)
    file = next((tmp_path / "b").glob("runs/*/metrics.jsonl"))
    file.write_text(file.read_text().replace('"num_devices":8', '"num_devices":2'))
    result, ran = command(1.0)
    assert (result.exit_code, ran) == (2, [])
    assert "number of devices of A is 8, of B 2" in result.stderr


@pytest.fixture
def foreign(monkeypatch, tmp_path):
    """A record whose source, when it is run, ends with a code and does something to its new record's folder."""

    def make(code: int = 0, leave: Callable[[Path], object] = lambda out: None) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def child(argv: list[str], *_: object, **__: object) -> int:
            asked.append(json.loads(Path(argv[-1]).read_bytes()))
            leave(Path(asked[-1]["out"]))
            return code

        made(tmp_path / "old")
        (tmp_path / "old" / "source.txt").write_text(source_text())
        monkeypatch.setattr(sandbox, "run", child)
        monkeypatch.setattr(sandbox, "problem", lambda: None)
        return asked

    return make


def replay(tmp_path: Path):
    words = ["replay", str(tmp_path / "old"), "--out", str(tmp_path / "new")]
    return CliRunner().invoke(cli.command, words, prog_name="speedrun")


@pytest.mark.parametrize(
    "leave",
    [
        lambda out: None,
        lambda out: (out / "runs" / "x").mkdir(parents=True),
        lambda out: [made(out, seed=seed) for seed in (1, 2)],
        lambda out: (made(out), next(out.glob("runs/*/metrics.jsonl")).write_text("{}")),
        lambda out: write_run(out, BROKE[0]),
    ],
    ids=["nothing", "an empty run", "two runs", "a damaged run", "a run that broke off"],
)
def test_what_a_foreign_source_leaves_is_not_trusted(foreign, tmp_path, leave):
    foreign(0, leave)
    result = replay(tmp_path)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.exception
    assert "need one" in result.stderr


@pytest.mark.parametrize(("code", "seen"), [(3, 3), (5, 5), (75, 75), (130, 130), (77, 1), (-9, 1)])
def test_a_foreign_source_that_ends_badly_ends_as_ours_would(foreign, tmp_path, code, seen):
    foreign(code)
    result = replay(tmp_path)
    assert result.exit_code == seen
    assert f"ended with exit code {code}" in result.stderr


def test_shards_that_the_source_cannot_make_are_looked_for_here(foreign, tmp_path, monkeypatch):
    """The documentation's are made by `speedrun run`, not by the source that a record carries."""
    with (track.TRACKS_DIR / "forged.toml").open("a") as rules:
        rules.write("[python_docs]\nvocab_size = 256\nshard_tokens = 5000\n")
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path / "here"))
    asked = foreign(1)
    replay(tmp_path)
    assert [request["data"] for request in asked] == [str(tmp_path / "here" / "forged")]
