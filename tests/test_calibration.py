"""The cost model against measurements: a record, and rates that stay as they are."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from typed import invoke

from speedrun import recipes
from speedrun.base import accelerators
from speedrun.plan import calibration, shares

RECORD = Path(__file__).parent.parent / "records" / "smoke-cpu" / "2026-11-25-first"
H100 = accelerators.load("h100")


def test_rates_are_frozen():
    """They were fitted once. A faster plan needs less work, not better rates; docs/LOG.md says how."""
    rates = json.dumps([shares.REACHES, shares.ERRORS, shares.START_S], sort_keys=True).encode()
    assert hashlib.sha256(rates).hexdigest()[:16] == "10eba980d4685be8"


def test_a_record_of_another_revision_is_refused(monkeypatch):
    monkeypatch.setitem(accelerators.DEVICES, "toy", H100._replace(name="cpu"))
    other = dataclasses.replace(recipes.load("smoke"), revision=2)
    monkeypatch.setattr(recipes, "load", lambda _: other)
    assert "smoke was another then" in invoke("plan", "--check", RECORD).stderr
    refused = invoke("plan", "--check", RECORD, "--dollars", "2")
    assert "--check measures nothing with --dollars" in refused.stderr


def test_a_record_is_compared_with_the_plan_of_its_recipe(monkeypatch):
    assert "ran on cpu, for which there are no rates" in invoke("plan", "--check", RECORD).stderr
    monkeypatch.setitem(accelerators.DEVICES, "toy", H100._replace(name="cpu"))
    (stage,) = calibration.check(RECORD)
    planned = json.loads(invoke("plan", "--recipe", "smoke", "--json").stdout)
    assert (stage.num_steps, stage.predicted_s) == (280, planned["stages"][0]["step_s"])
    (log,) = RECORD.glob("runs/*/metrics.jsonl")
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    times = [0.0, *(event["train_time_s"] for event in events if event["ev"] == "step")]
    assert stage.measured_s == pytest.approx(np.median(np.diff(times)))
