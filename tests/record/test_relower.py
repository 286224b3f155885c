"""Programs of a record: archives that are none, and source that must make the same ones again."""

import dataclasses
import io
import json
import lzma
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import pytest
from jax import export
from msgspec.structs import replace
from small_run import log_of
from test_referee import NONCE, programs_in, validated

from speedrun.base import provenance, runlog
from speedrun.base.errors import SpeedrunError, UsageError
from speedrun.base.mesh import make_mesh
from speedrun.record.archive import Archive, Lowered, pack
from speedrun.record.examine import sandbox
from speedrun.record.examine.replay import Options, relowered
from speedrun.record.examine.rerun import Rerun, RerunFacts, lowering
from speedrun.record.examine.stablehlo import Programs
from speedrun.record.reader import load, read_programs
from speedrun.record.source import split_source
from speedrun.record.validate import Report, validate

_NAMES = ("init", "constants", "train", "hidden-0", "logits-0")


LOWERED = Lowered(("train",), {1: "0"}, dict.fromkeys(_NAMES, b""))


ARCHIVE = Archive(("step",), 0, (0,), {"cpu": LOWERED})


def holding(**changes: Any) -> Archive:
    return replace(ARCHIVE, platforms={"cpu": replace(LOWERED, **changes)})


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (pack(ARCHIVE) + b"more", "is cut or too long"),
        (b"", "is cut"),
        (b"\x00" * 99, "format not supported"),
        (lzma.compress(bytes(2**26 + 1), preset=0), "at most 67,108,864 bytes"),
        (lzma.compress(b"\x81" * 2000), "object"),
        (lzma.compress(b"\x81\xa6leaves\xdd\x03\x00\x00\x00", preset=0), "of length <= 1000000"),
        (pack(holding(steps=("train", "another"))), "holds other programs than it names"),
        (pack(holding(steps=("train", "train"))), "contradicts itself"),
        (pack(replace(ARCHIVE, num_params=1)), "contradicts itself"),
    ],
    ids=range(9),
)
def test_what_is_no_archive_is_told(raw, said):
    assert read_programs(pack(ARCHIVE)) == ARCHIVE
    with pytest.raises(UsageError, match=said):
        read_programs(raw)


def as_exported(function: Any, *args: Any, **named: Any) -> bytes:
    return bytes(export.export(jax.jit(function), **named)(*args).serialize())


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "cannot be read by this JAX"),
        (as_exported(jnp.sin, jnp.ones(3))[:-99], "cannot be read by this JAX"),
        (as_exported(jnp.sin, jnp.ones(3), platforms=["tpu"]), "is for 1 devices of tpu"),
    ],
    ids=["nothing", "cut", "of another platform"],
)
def test_a_program_that_cannot_be_examined_is_told(raw, said):
    with pytest.raises(UsageError, match=said):
        Programs(holding(programs={"init": raw}), make_mesh(1)).compiled("init")


def test_leaves_that_no_step_takes_and_programs_for_other_devices_alone_are_told(trained):
    found = read_programs(programs_in(trained.out).read_bytes())
    assert len(Programs(found, make_mesh(8)).state) == len(found.leaves)
    with pytest.raises(UsageError, match=r"a step takes \d+ arrays, its archive says \d+"):
        _ = Programs(replace(found, leaves=(*found.leaves, "params.more")), make_mesh(8)).state
    with pytest.raises(UsageError, match="its archive of programs is for cuda; this examination has cpu"):
        Programs(replace(ARCHIVE, platforms={"cuda": LOWERED}), make_mesh(1))


def test_programs_name_no_folder_of_this_machine(trained):
    """So that equal code gives equal bytes in any checkout, and a record tells nothing of its author's disk."""
    found = read_programs(programs_in(trained.out).read_bytes())
    assert list(found.platforms) == ["cpu"]
    assert {"init", "train-0", "logits-0"} < found.platforms["cpu"].portable.keys()
    for one in found.platforms["cpu"].portable.values():
        assert not [
            word for word in (b".py", b"site-packages", b"sdy", b"mhlo", b"xla.") if word in one.module
        ]


def test_the_source_of_a_run_makes_its_programs_again(trained, smoke_data):
    done = validated(trained.out, smoke_data, "--relower")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"ok +V610", done.stdout)


@pytest.mark.parametrize(
    ("jax", "other", "status"),
    [
        (None, None, "ok"),
        (None, {}, "failed"),
        (None, {"config": {"recipe.name": "smoke"}}, "failed"),
        (None, {"plan": {"flops_per_token": 1.0}}, "failed"),
        (None, {"inputs": ()}, "failed"),
        ("0.0.1", {}, "warning"),
    ],
)
def test_source_that_makes_other_programs_or_another_config_is_refused(
    trained, smoke_data, monkeypatch, jax, other, status
):
    (run,), (path,) = load(trained.out).runs, trained.out.glob("programs-*.xz")
    plan, inputs = msgspec.to_builtins(run.of(runlog.Plan)[0]), tuple(step.inputs for step in run.steps)
    honest = RerunFacts(
        run.start.config, {name: plan[name] for name in ("shapes", "flops_per_token")}, inputs
    )
    facts = msgspec.json.decode(msgspec.json.encode(honest), type=RerunFacts)  # as the source writes them
    archive = b"another archive" if other == {} else path.read_bytes()
    made = archive, replace(facts, **other or {})
    monkeypatch.setattr(Rerun, "lowered", lambda *_: made)
    monkeypatch.setattr(sandbox, "problem", lambda: None)
    here = provenance.software()
    monkeypatch.setattr(provenance, "software", lambda: here | ({"jax": jax} if jax else {}))
    options = Options("some", NONCE, data=smoke_data)
    result = relowered(trained.out, validate(trained.out), options, io.StringIO()).results[-1]
    assert (result.check.id, result.status) == ("V610", status)


def test_source_of_a_harness_that_nobody_knows_proves_nothing(trained, smoke_data, monkeypatch):
    """What lowers it is its own harness, which V503 compares; nothing is executed."""
    monkeypatch.setattr(Rerun, "lowered", None)
    found = validate(trained.out)
    unknown = [dataclasses.replace(x, status="skipped") if x.check.id == "V503" else x for x in found.results]
    options = Options("some", NONCE, data=smoke_data)
    result = relowered(trained.out, Report(tuple(unknown), strict=True), options, io.StringIO()).results[-1]
    assert (result.check.id, result.status, "V503" in result.messages[0]) == ("V610", "warning", True)


@pytest.fixture
def of_gpu(trained, tmp_path) -> Path:
    """A record that says that it was made on a GPU, which its environment names."""
    folder = Path(shutil.copytree(trained.out, tmp_path / "of_gpu"))
    log = log_of(folder)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (preflight,) = (line["event"] for line in lines if line["event"]["ev"] == "preflight")
    preflight |= {"platform": "gpu", "environment": {"CUDA_VISIBLE_DEVICES": "3", "JAX_PLATFORMS": "cuda"}}
    log.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return folder


def test_a_machine_without_a_gpu_does_not_lower_the_programs_of_one(of_gpu, trained, smoke_data, monkeypatch):
    monkeypatch.setattr(Rerun, "lowered", None)
    options = Options("some", NONCE, data=smoke_data)
    result = relowered(of_gpu, validate(trained.out), options, io.StringIO()).results[-1]
    assert (result.check.id, result.status, "GPU" in result.messages[0]) == ("V610", "warning", True)


def test_the_gpus_of_another_machine_are_not_looked_for_here(of_gpu, smoke_data, monkeypatch):
    seen = {}

    def run(*_, environment, **__):
        seen.update(environment)
        raise SpeedrunError("enough")

    monkeypatch.setattr(sandbox, "run", run)
    with pytest.raises(SpeedrunError, match="enough"):
        Rerun(of_gpu, smoke_data, io.StringIO()).lowered()
    assert not {"JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"} & seen.keys()


@pytest.mark.parametrize("record", sorted(Path(__file__).parents[2].glob("records/*/*/source.txt")) + [None])
def test_a_source_is_lowered_by_the_names_of_its_own_modules(record):
    own = provenance.closure(["speedrun.recipes.smoke", "speedrun.train.recorded"], [])
    source = split_source(own if record is None else record.read_text())
    imported = re.findall(r"^from (speedrun\S+) import", lowering(source), re.MULTILINE)
    assert imported
    assert not [name for name in imported if name.replace(".", "/") + ".py" not in source]
