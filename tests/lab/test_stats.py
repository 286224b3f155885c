"""The command `stats`: what a record proves, and how it compares with another."""

import json

import pytest
from record_forge import forge
from typed import invoke


@pytest.mark.parametrize(
    ("made", "code", "facts"),
    [
        ({}, 0, {"rule": "z", "declared": True, "passed": True, "num_runs": 2}),
        # By the rule for few runs it would be 16.
        ({"val_losses": (5.5, 4.0, 3.4, 3.269)}, 1, {"rule": "z", "runs_needed": 14}),
        # The known noise would give a p.
        ({"seeds": (1,)}, 1, {"num_runs": 1, "rule": "z", "p": None, "passed": False}),
        ({"val_losses": (5.5, 4.0, 3.4, 3.3)}, 1, {"passed": False, "runs_needed": None}),
    ],
    ids=["a batch", "too few runs", "one run", "above the target"],
)
def test_stats_says_what_a_record_proves(forged, made, code, facts):
    folder = forge(forged / "record", **made)
    result = invoke("stats", str(folder), "--json")
    assert result.exit_code == invoke("stats", str(folder)).exit_code == code
    found = json.loads(result.stdout)
    assert {key: found[key] for key in facts} == facts


def test_stats_needs_whole_records_and_compares_two(forged, tmp_path):
    """Refuses a batch before its look, and a record with a damaged or edited log."""
    folder = forge(forged / "record", seeds=(1,), declared=(1, 2))
    assert "1 of the 2 runs before its first look" in invoke("stats", str(folder)).stderr
    log = min(forge(folder, seeds=(1, 2, 3)).glob("runs/*")) / "metrics.jsonl"
    raw = log.read_bytes()
    for changed in (raw[:-1], raw.replace(b'"seed":1,', b'"seed":9,', 1)):
        log.write_bytes(changed)
        assert "is not a complete record" in invoke("stats", str(folder)).stderr
    parent = str(forge(tmp_path / "parent"))
    found = json.loads(invoke("stats", str(forge(folder)), "--against", parent, "--json").stdout)
    no_proof = {"difference": 0, "margin": 0.001, "p": 1, "alpha": 0.05}  # without any scatter
    assert found["equivalent"] == no_proof
