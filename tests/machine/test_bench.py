"""The command `bench`: what it times, and what it says of forms that do not run here."""

import json
import re

import pytest
from typed import as_words, invoke


def test_bench_step_times_a_recipe():
    small = {"stages.0.seq_len": 32, "config.model_dim": 16, "config.num_heads": 2, "config.head_dim": 8}
    words = ["--devices", "1", "--steps", "3", *as_words(small), "--json"]
    result = json.loads(invoke("bench", "step", *words).stdout)
    assert len(result["ms"]) == len(result["losses"]) == 3
    assert result["mean_ms"] == pytest.approx(sum(result["ms"]) / 3)
    assert result["tokens_per_s"] == pytest.approx(8 * 32 / result["mean_ms"] * 1e3)
    assert result["mfu"] is None
    assert any(form.startswith("definition: ") for form in result["kernels"].values())
    large = invoke("bench", "step", "--set", "stages.0.num_sequences=2000000000")
    assert (large.exit_code, "GB on each device, this cpu gives JAX" in large.stderr) == (2, True)
    late = invoke("bench", "step", "--first-step", "280")
    assert (late.exit_code, "smoke has 280 steps" in late.stderr) == (2, True)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("attention --tokens 40 --dim 8 --window 2 --block 4 --document 7", ["definition", "banded"]),
        ("head --tokens 40 --dim 8 --vocab 64", ["three products", "for CPUs", "definition"]),
    ],
)
def test_bench_times_what_runs_and_says_why_the_rest_does_not(words, names):
    result = json.loads(invoke("bench", *words.split(), "--json").stdout)
    timings = result if isinstance(result, list) else result["timings"]
    assert [one["name"] for one in timings] == names
    assert timings[0]["ratio"] == 1
    assert all(one["median_ms"] > 0 for one in timings)
    if isinstance(result, dict):
        assert any("the kernels need an A100" in reason for reason in result["left_out"]["triton"])
        assert result["auto"] == "banded"
        shown = invoke("bench", *words.split()).stdout
        assert re.search(r"^definition +[\d.]+ ms \+- +[\d.]+ +[\d.]+ x$", shown, re.MULTILINE)
