"""Kernels against their definitions: on a GPU with `SPEEDRUN_TEST_PLATFORM=gpu`, else what runs on a CPU, tiny."""

import json

import jax
import pytest
from click.testing import CliRunner

from speedrun import cli
from speedrun.bench import agreement
from speedrun.ground.errors import UsageError

ON_GPU = jax.default_backend() == "gpu"


#: Those of which a CPU runs less in other tests. It interprets a kernel as slowly as it compiles one.
QUICK = {"head-fp8", "banded"}


@pytest.mark.parametrize(
    "name",
    [
        name if ON_GPU or name in QUICK else pytest.param(name, marks=pytest.mark.compile)
        for name in agreement.names()
    ],
)
def test_a_kernel_agrees_with_its_definition(name):
    size = agreement.FULL if ON_GPU else agreement.TINY
    try:
        found = list(agreement.compare(name, size, begin=lambda _: None))
    except UsageError as error:
        pytest.skip(str(error))
    assert len(found) >= 2
    assert all(one.is_right for one in found), found


def test_a_wrong_kernel_is_found_and_named(monkeypatch):
    right = agreement._interpreted
    monkeypatch.setattr(agreement, "TINY", agreement.TINY._replace(windows=(4,)))
    monkeypatch.setattr(agreement, "_interpreted", lambda *args, **named: 1.05 * right(*args, **named))
    shown = CliRunner().invoke(cli.command, ["bench", "agree", "triton", "--tiny", "--json"])
    rows = json.loads(shown.stdout)
    assert shown.exit_code == 1
    assert {row["verdict"] for row in rows} == {"wrong"}
    assert "triton, window of 4 blocks, short documents" in shown.stderr


def test_what_is_not_a_number_is_wrong():
    most = {"o": 0.02, "dq": 0.02}
    assert not agreement.Agreement("case", {"o": float("nan"), "dq": 0.0}, most).is_right
    assert agreement.Agreement("case", {"o": 0.01, "dq": 0.0}, most).is_right
