"""The cost model against measurements: a trace whose answers are known, a record, and rates that stay as they are."""

import dataclasses
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typed import invoke

from speedrun import recipes
from speedrun.base import accelerators
from speedrun.plan import calibration, scaling, shares
from speedrun.plan.deviceless import Collective

RECORD = Path(__file__).parent.parent / "records" / "smoke-cpu" / "2026-11-25-first"
H100 = accelerators.load("h100")
BF16, F32 = "c10::BFloat16", "float"


def test_rates_are_frozen():
    """They were fitted once. A faster plan needs less work, not better rates; docs/LOG.md says how to fit them anew."""
    rates = json.dumps([shares.REACHES, shares.ERRORS, shares.START_S], sort_keys=True).encode()
    assert hashlib.sha256(rates).hexdigest()[:16] == "29b8711f66b02e61"


class Trace:
    """A trace of one process, as PyTorch writes it."""

    def __init__(self, device: str = H100.name) -> None:
        self.device, self.events, self.now = device, [], 0.0

    def launch(self, name: str, dims: list[Any], types: list[str], *durations: float, **more: Any) -> None:
        """Add an operation, the call that it makes, and the kernels that this starts; durations in seconds."""
        number = len(self.events) + 1
        arguments = {"Input Dims": dims, "Input type": types, "Input Strides": [[1] for _ in dims]}
        self.events += [
            {"cat": "cpu_op", "name": name, "args": {"External id": number, **arguments}},
            {"cat": "cuda_runtime", "name": "call", "args": {"correlation": number, "External id": number}},
        ]
        for seconds in durations:
            at = {"correlation": number, "stream": 7, **more}
            self.events.append(
                {"cat": "kernel", "name": "k", "ts": self.now, "dur": 1e6 * seconds, "args": at}
            )
            self.now += 1e6 * seconds + 1.25

    def write(self, path: Path) -> Path:
        """Write it, compressed."""
        trace = {"traceEvents": self.events, "deviceProperties": [{"name": self.device}]}
        path.write_bytes(gzip.compress(json.dumps(trace).encode()))
        return path


def test_a_trace_is_compared_kernel_by_kernel(tmp_path):
    trace, peak, memory = Trace(), H100.bf16_flops, H100.memory_rate
    left, right = [4096, 1024], [1024, 2048]
    product_s = 2 * 4096 * 1024 * 2048 / (shares.REACHES["bf16"] * peak)
    for factor in (1.0, 1.5, 9.0):  # the median, of two kernels: a product and the sum of its parts
        trace.launch(
            "aten::mm", [left, right], [BF16, BF16], 0.75 * factor * product_s, 0.25 * factor * product_s
        )
    head_s = 2 * 4096 * 1024 * 2048 / (shares.REACHES["fp8"] * H100.fp8_flops)
    fp8 = ["c10::Float8_e4m3fn", "c10::Float8_e5m2", F32, F32]  # with two scales
    trace.launch("aten::_scaled_mm", [left, right, [], []], fp8, 2 * head_s)
    large = [50304, 768]
    cast_s = 50304 * 768 * (4 + 2) / (shares.REACHES["memory"] * memory)
    trace.launch("triton_poi_fused__to_copy_1", [large, large, []], [F32, BF16, "Scalar"], 0.5 * cast_s)
    trace.launch("aten::add_", [large, large, []], [BF16, BF16, "Scalar"], cast_s)  # reads two, writes one
    gather = {"Collective name": "_allgather_base", "dtype": "Float", "Group size": 8, "In msg nelems": 2**20}
    sent = Collective("all-gather", "f32", 2**25, is_synchronous=False, times=1, name="")
    sent_s = scaling.seconds(sent, 8, 1, H100)
    for factor in (3.0, 2.0):  # the shortest: in the other, it waited
        trace.launch("record_param_comms", [], [], factor * sent_s, **gather, **{"Out msg nelems": 2**23})
    trace.launch("triton_red_fused_softmax", [large], [BF16], 1e-3)
    trace.launch("aten::mm", [[4096, 12], [12, 6]], [BF16, BF16], 2e-3)  # too narrow for a term
    found = calibration.check([trace.write(tmp_path / "a.json.gz")])
    rows = [(row.kind, row.name, row.calls, round(row.ratio, 6)) for row in found.rows]
    assert rows == [
        ("GEMM bf16", "mm", 3, 1.5),
        ("GEMM FP8", "_scaled_mm", 1, 2.0),
        ("elementwise", "sum", 1, 1.0),
        ("elementwise", "cast", 1, 0.5),
        ("communication", "all-gather", 2, 2.0),
    ]
    product, _, passes, links = found.terms
    assert (product.error, product.reach) == pytest.approx((0.5, shares.REACHES["bf16"] / 1.5))
    assert passes.error == pytest.approx(0.5 / 3)  # weighted by time
    assert links.predicted_s == pytest.approx(2 * sent_s)
    assert found.other_s == pytest.approx({"mm": 2e-3, "loss head": 1e-3})
    assert found.gap_s == pytest.approx(1.25e-6)
    shown = invoke("plan", "--check", tmp_path / "a.json.gz")
    assert "GEMM bf16      mm                 4096x1024 . 1024x2048" in shown.output
    twice = invoke("plan", "--check", tmp_path / "a.json.gz", "--check", tmp_path / "a.json.gz", "--json")
    assert json.loads(twice.output)["traces"]["rows"][0]["calls"] == 6


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([], "no operation has shapes; need a trace of torch.profiler"),
        ([{"cat": "cpu_op", "args": {"Input Dims": [[1]]}}], "no kernel ran on a GPU"),
        ([{"args": {"Input Dims": 3}}], "Expected `array`, got `int`"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, events, told):
    trace = Trace()
    trace.events = events
    refused = invoke("plan", "--check", trace.write(tmp_path / "x.json.gz"))
    assert refused.exit_code == 3
    assert told in refused.stderr


@pytest.mark.parametrize("dims", [[[64, 64], [64, "x"]], [[64, 64], [64, None]]])
def test_shapes_that_are_none_end_in_one_line(tmp_path, dims):
    trace = Trace()
    trace.launch("aten::mm", dims, [BF16, BF16], 1e-6)
    refused = invoke("plan", "--check", trace.write(tmp_path / "x.json.gz"))
    assert (refused.exit_code, refused.stderr.count("\n")) == (3, 1)


def test_kernels_without_time_or_with_odd_names_are_harmless(tmp_path):
    trace = Trace()
    trace.launch("aten::mm", [[64, 64], [64, 64]], [BF16, BF16], 0.0)
    trace.launch("bell\x07\u202e", [[1]], [BF16], 1e-6)
    shown = invoke("plan", "--check", trace.write(tmp_path / "x.json.gz"))
    assert shown.exit_code == 0, shown.output
    assert "bell\\x07\\u202e 0.00 ms" in shown.output
    assert "GEMM" not in shown.output


def test_a_record_of_another_revision_is_refused(monkeypatch):
    monkeypatch.setitem(accelerators.DEVICES, "toy", H100._replace(name="cpu"))
    other = dataclasses.replace(recipes.load("smoke"), revision=2)
    monkeypatch.setattr(recipes, "load", lambda _: other)
    assert "smoke was another then" in invoke("plan", "--check", RECORD).stderr
    refused = invoke("plan", "--check", RECORD, "--dollars", "2")
    assert "--check measures nothing with --dollars" in refused.stderr


def test_traces_of_unknown_or_several_devices_are_refused(tmp_path):
    paths = []
    for name in ("Some GPU", H100.name):
        trace = Trace(name)
        trace.launch("aten::mm", [[64, 64], [64, 64]], [BF16, BF16], 1e-6)
        paths += ["--check", trace.write(tmp_path / f"{len(paths)}.json.gz")]
    refused = invoke("plan", *paths[:2])
    assert refused.exit_code == 2
    assert "measured on Some GPU, for which there are no rates; need one of NVIDIA H100" in refused.stderr
    assert "give traces of one device" in invoke("plan", *paths[2:], *paths[:2]).stderr


def test_a_record_is_compared_with_the_plan_of_its_recipe(monkeypatch):
    assert "measured on cpu, for which there are no rates" in invoke("plan", "--check", RECORD).stderr
    monkeypatch.setitem(accelerators.DEVICES, "toy", H100._replace(name="cpu"))
    monkeypatch.setattr(calibration, "missing_wheels", lambda: ["a compiler"])
    (stage,) = calibration.check_record(RECORD)
    planned = json.loads(invoke("plan", "--recipe", "smoke", "--arithmetic", "--json").output)
    assert (stage.num_steps, stage.predicted_s) == (280, planned["stages"][0]["step_s"])
    (log,) = RECORD.glob("runs/*/metrics.jsonl")
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    times = [0.0, *(event["train_time_s"] for event in events if event["ev"] == "step")]
    assert stage.measured_s == pytest.approx(np.median(np.diff(times)))
