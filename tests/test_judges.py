"""MLPerf's checker accepts a log of `speedrun export`, and AlgoPerf's scoring its table, once in its form.

Their packages are in requirements/judges.lock, which the compile group installs. `SPEEDRUN_ALGOPERF` names a checkout
of mlcommons/algorithmic-efficiency; nothing is fetched.
"""

import csv
import importlib
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from speedrun.base import runlog
from speedrun.board.exports import export
from speedrun.record.reader import Record, load

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "records" / "smoke-cpu" / "2026-11-25-first"
RULES = "training_5.1.0"  # later ones ask for the lowest precision of a model, which our recipes mix
TARGET = 3.28

pytestmark = pytest.mark.compile


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """MLPerf's rules of its open division, with our track as one more benchmark."""
    package = pytest.importorskip("mlperf_logging", reason="needs requirements/judges.lock")
    shutil.copytree(Path(package.__file__).parent / "compliance_checker" / RULES, tmp_path / RULES)
    path = tmp_path / RULES / "open_common.yaml"
    path.write_text(path.read_text().replace("in [", "in ['smoke-cpu@1', "))
    (tmp_path / RULES / "open_smoke-cpu@1.yaml").write_text("")
    return tmp_path


def complaints(log: Path, rules: Path) -> list[str]:
    compliance: Any = importlib.import_module("mlperf_logging.compliance_checker.mlp_compliance")
    with pytest.MonkeyPatch.context() as patched:
        # The only use of its own path: it looks for the rules beside itself.
        patched.setattr(compliance, "__file__", str(rules / "mlp_compliance.py"))
        checker = compliance.make_checker("training", RULES.rpartition("_")[2], quiet=False, werror=True)
        compliance.main(str(log), f"{RULES}/common.yaml", checker)
    return [*checker.overwritable.values(), *checker.not_overwritable]


def test_the_compliance_checker_of_mlperf_accepts_an_exported_log(rules, tmp_path):
    (log,) = export(load(RECORD), "mlperf", tmp_path / "out")
    assert complaints(log, rules) == []
    lines = log.read_text().splitlines(keepends=True)
    for key in ("run_stop", "eval_accuracy", "init_stop", "submission_platform"):
        broken = tmp_path / f"{key}.txt"
        broken.write_text("".join(line for line in lines if f'"{key}"' not in line))
        assert complaints(broken, rules), key


@pytest.fixture
def profile(monkeypatch) -> Iterator[Any]:
    """AlgoPerf's `performance_profile`, with one workload: ours, whose validations are of the loss."""
    if not (folder := os.environ.get("SPEEDRUN_ALGOPERF")):
        pytest.skip("needs a checkout of mlcommons/algorithmic-efficiency, which SPEEDRUN_ALGOPERF names")
    names = ("algoperf", "algoperf.workloads", "algoperf.workloads.workloads")
    stand_in: Any = ModuleType(names[-1])
    stand_in.WORKLOADS, stand_in.BASE_WORKLOADS = {}, ["smoke"]
    stand_in.get_base_workload_name = lambda name: name
    for name in names:  # the real one imports PyTorch, TensorFlow and all its models
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setattr(stand_in, "workloads", stand_in, raising=False)
    monkeypatch.syspath_prepend(folder)
    with warnings.catch_warnings():  # about odd escapes
        warnings.simplefilter("ignore")
        found: Any = importlib.import_module("scoring.performance_profile")
    monkeypatch.setattr(
        found.scoring_utils, "get_workload_metrics_and_targets", lambda _: ("validation/loss", TARGET)
    )
    monkeypatch.setattr(found, "NUM_BASE_WORKLOADS", 1)
    yield found
    for name in [name for name in sys.modules if name.partition(".")[0] == "scoring"]:
        del sys.modules[name]


def submission(record: Record, out: Path, slower: float) -> Any:
    """A table of trials, one for each run, from our exported validations."""
    pandas: Any = pytest.importorskip("pandas")
    validations, _ = export(record, "csv", out)
    runs = [run for _, run in pandas.read_csv(validations).groupby("log")]
    columns = {"time": [run["train_time_ms"].to_numpy() / 1e3 * slower for run in runs]}
    columns["validation/loss"] = [run["val_loss"].to_numpy() for run in runs]
    return pandas.DataFrame({"workload": "smoke", "study": 0, **columns})


def test_the_scoring_of_algoperf_reads_an_exported_table(profile, tmp_path):
    record = load(RECORD)
    given = {"ours": submission(record, tmp_path / "a", 1.0), "slow": submission(record, tmp_path / "b", 1.5)}
    found = profile.compute_performance_profiles(given, "time", output_dir=str(tmp_path), num_points=3)
    with (tmp_path / "time_to_targets.csv").open(newline="") as file:
        times_s = {row["submission"]: float(row["smoke"]) for row in csv.DictReader(file)}
    (run,) = record.runs
    at_s = [event.train_time_s for event in run.of(runlog.ClockPause)] + [run.end.train_time_s]
    reached_s = next(time_s for time_s, val in zip(at_s, run.vals, strict=True) if val.loss <= TARGET)
    assert times_s == pytest.approx({"ours": reached_s, "slow": 1.5 * reached_s})
    assert found.loc["ours"].tolist() == [1, 1, 1], "at each factor, on all workloads"
    assert found.loc["slow"].tolist() == [0, 0, 1], "only from a factor of 1.5 on"
