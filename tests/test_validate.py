"""One honest record passes; for each check, one forgery that this check alone refuses."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from record_forge import (
    CONFIG,
    VAL_TOKENS,
    Edit,
    Moments,
    Spec,
    both,
    change,
    facts,
    forge,
    install_track,
    shard,
    write_run,
)  # fmt: skip

from speedrun import runlog, track
from speedrun.cli.validate import command
from speedrun.errors import UsageError
from speedrun.ledger.assemble import HEAD_END, assemble
from speedrun.ledger.checks import CHECKS
from speedrun.ledger.format import DataRead, FormatError, ShardRange, Summary, config_sha256, decode, encode
from speedrun.ledger.validate import find_check, validate

Build = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    install_track(tmp_path)
    monkeypatch.setattr(track, "TRACKS_DIR", tmp_path)
    return tmp_path / "record"


def found(record: Path) -> dict[str, tuple[str, ...]]:
    """What was found wrong, by check."""
    return {r.check.id: r.messages for r in validate(record).results if r.status in ("failed", "warning")}


def test_an_honest_record_passes_every_check(folder):
    report = validate(forge(folder), strict=True)
    assert {result.status for result in report.results} == {"ok"}
    assert report.exit_code == 0


# --- edits of a log: the forger chains, hashes and assembles afterwards -------------------------------------


def place_of(log: Moments, kind: type[runlog.Event], nth: int = 0) -> int:
    return [place for place, moment in enumerate(log) if isinstance(moment.event, kind)][nth]


def val_after_its_pause(log: Moments) -> Moments:
    place = place_of(log, runlog.Val, 1)
    log[place : place + 2] = [log[place + 1], log[place]]
    return log


def pause_for_nothing(log: Moments) -> Moments:
    place = place_of(log, runlog.ClockPause, 1)
    return [*log[:place], log[place], log[place + 2], *log[place:]]


def compile_late(log: Moments) -> Moments:
    place = place_of(log, runlog.Step, 3)
    return [*log[:place], log[place]._replace(event=runlog.Compile("late", 0.1)), *log[place:]]


def stamps_of_one_moment(log: Moments) -> Moments:
    return [moment._replace(utc_ns=0) for moment in log]


def stamped_earlier(kind: type[runlog.Event], seconds: float) -> Edit:
    def edit(log: Moments) -> Moments:
        place = place_of(log, kind)
        log[place] = log[place]._replace(mono_ns=log[place].mono_ns - round(seconds * 1e9))
        return log

    return edit


def halved(kind: type[runlog.Event]) -> Edit:
    return change(kind, train_time_s=lambda event: event.train_time_s / 2)


TIMED = (runlog.Step, runlog.ClockPause, runlog.ClockResume, runlog.ClockStop, runlog.RunEnd)
FEWER_SCORED = change(
    runlog.Val, tokens=VAL_TOKENS // 2, nll_sum=lambda val: (float.fromhex(val.nll_sum) / 2).hex()
)


# --- edits of files ----------------------------------------------------------------------------------------


def edited(path: str, old: bytes, new: bytes) -> Build:
    """Replaces bytes in a file of an honest record."""

    def build(folder: Path) -> None:
        forge(folder)
        file = next(folder.glob(path))
        assert old in file.read_bytes()
        file.write_bytes(file.read_bytes().replace(old, new, 1))

    return build


def added(path: str, content: bytes) -> Build:
    """Appends to a file of an honest record, or makes one."""

    def build(folder: Path) -> None:
        forge(folder)
        (folder / path).parent.mkdir(exist_ok=True)
        with (folder / path).open("ab") as file:
            file.write(content)

    return build


def assembled(build: Build) -> Build:
    """Makes every hash right again."""

    def build_both(folder: Path) -> None:
        build(folder)
        assemble(folder)

    return build_both


def linked(folder: Path) -> None:
    forge(folder)
    (folder / "source.txt").rename(folder.parent / "elsewhere.txt")
    (folder / "source.txt").symlink_to(folder.parent / "elsewhere.txt")


def claimed(folder: Path) -> None:
    """Says that the target was not reached, in the summary and in the README."""
    edited("summary.json", b'"target_reached": true', b'"target_reached": false')(folder)
    readme = folder / "README.md"
    readme.write_text(readme.read_text().replace("3.28, reached", "3.28, not reached"))


def other_config_in_one_run(folder: Path) -> None:
    config = {**CONFIG, "stages": [11]}
    right = {"config": config, "config_sha256": config_sha256(config)}
    forge(folder)
    write_run(
        folder,
        Spec(
            seed=3,
            edit_log=change(runlog.RunStart, **right),
            edit_run=facts(config_sha256=right["config_sha256"]),
        ),
    )
    assemble(folder)


def made(**spec) -> Build:
    """Runs made from an edited spec."""
    return lambda folder: forge(folder, **spec)


def logged(*edits: Edit, **run_facts) -> Build:
    """Runs with an edited log and, if need be, edited facts."""
    return made(edit_log=both(*edits), edit_run=facts(**run_facts))


ONE, TWO, SCORED = (
    shard("t_train_1.bin", 0, 600),
    shard("t_train_2.bin", 0, 400),
    shard("t_val_0.bin", 0, VAL_TOKENS),
)
HASH = "0" * 64


def data(*ranges: ShardRange, val: ShardRange = SCORED) -> DataRead:
    return DataRead(shards=ranges, val_shard=val, val_sha256="a" * 64)


FORGERIES: list[tuple[str, str, Build]] = [
    ("V001", "unknown key", edited("runs/*1/run.json", b'"seed"', b'"speed"')),
    ("V001", "key twice", edited("runs/*1/metrics.jsonl", b'"i":1,', b'"i":1,"i":1,')),
    ("V001", "NaN", edited("runs/*1/metrics.jsonl", b'"lr_scale":1.0', b'"lr_scale":NaN')),
    ("V001", "torn", added("runs/tiny-1-00a1/metrics.jsonl", b'{"i":')),
    ("V001", "no summary", lambda folder: (forge(folder) / "summary.json").unlink()),
    ("V001", "a step is missing", edited("runs/*1/metrics.jsonl", b'"step":3,"tr', b'"step":4,"tr')),
    ("V002", "a line was edited", assembled(edited("runs/*1/metrics.jsonl", b'"lr_scale":1.0', b'"lr_scale":0.5'))),
    ("V003", "source was edited", edited("source.txt", b"SIZE = 1", b"SIZE = 2")),
    ("V003", "source has a stray line", added("source.txt", b"more = 1\n")),
    ("V003", "manifest was edited", edited("manifest.json", b'"forged"', b'"forget"')),
    ("V004", "mean was edited", edited("summary.json", b'"cold_wall_s_mean": 9', b'"cold_wall_s_mean": 8')),
    ("V004", "README was edited", edited("README.md", b"| 3.2500", b"| 3.1500")),
    ("V005", "config was edited", logged(change(runlog.RunStart, config={**CONFIG, "stages": [11]}))),
    ("V005", "runs differ", other_config_in_one_run),
    ("V006", "other digest", logged(change(runlog.RunStart, track_sha256=HASH), track_sha256=HASH)),
    ("V006", "no such version", logged(change(runlog.RunStart, track="forged@2"), track="forged@2")),
    ("V007", "text was edited", assembled(edited("runs/*1/log.txt", b"val 3.2500", b"val 3.1500"))),
    ("V007", "other seed", made(edit_run=facts(seed=9))),
    ("V008", "stray pickle", added("weights.pkl", b"\x80\x04.")),
    ("V008", "link", linked),
    ("V008", "too big", added("runs/tiny-1-00a1/log.txt", b" " * 2**20)),
    ("V008", "turned text", added("README.md", "\u202e".encode())),
    ("V008", "script", added("plots/loss.svg", b"<svg><script>alert(1)</script></svg>")),
    ("V008", "not an image", added("plots/loss.png", b"MZ")),
    ("V101", "other file", made(shards=(replace(ONE, sha256=HASH), TWO))),
    ("V102", "other order", made(shards=(shard("t_train_2.bin", 0, 600), shard("t_train_1.bin", 0, 400)))),
    ("V102", "one left out", made(shards=(shard("t_train_2.bin", 0, 1000),))),
    ("V103", "trained on it", made(shards=(ONE, shard("t_val_0.bin", 0, 400)))),
    ("V103", "listed", logged(change(runlog.DataReady, train_shards=["t_train_1.bin", "t_train_2.bin", "t_val_0.bin"]))),
    ("V104", "count was edited", logged(change(runlog.Step, at=4, tokens_seen=501))),
    ("V104", "cursor was edited", logged(change(runlog.Step, at=4, cursor=(0, 600)))),
    ("V104", "more read than trained on", made(edit_run=facts(data=data(ONE, replace(TWO, stop=500))))),
    ("V105", "fewer scored", logged(FEWER_SCORED)),
    ("V105", "from elsewhere", made(edit_run=facts(data=data(ONE, TWO, val=replace(SCORED, start=5, stop=1005))))),
    ("V106", "beyond the end", made(shards=(replace(ONE, tokens=599), TWO))),
    ("V107", "overlap", made(shards=(ONE, shard("t_train_1.bin", 500, 900)))),
    ("V201", "stamp goes back", logged(stamped_earlier(runlog.Plan, 0.3))),
    ("V201", "train time goes back", logged(change(runlog.Step, at=5, train_time_s=0.45))),
    ("V202", "half the time", logged(*map(halved, TIMED))),
    ("V202", "at the end only", logged(halved(runlog.RunEnd))),
    ("V203", "stamps in UTC", logged(stamps_of_one_moment)),
    ("V203", "cold wall", logged(change(runlog.RunEnd, cold_wall_s=0.5))),
    ("V204", "outside its pause", logged(val_after_its_pause)),
    ("V204", "a pause for nothing", logged(pause_for_nothing)),
    ("V204", "at other steps", logged(change(runlog.Val, at=1, step=5))),
    ("V205", "in no time", logged(change(runlog.Val, at=-1, seconds=1e-9))),
    ("V205", "longer than its pause", logged(change(runlog.Val, at=1, seconds=9.0))),
    ("V206", "compiled late", logged(compile_late)),
    ("V207", "state not rebuilt", logged(change(runlog.WarmupEnd, state_hash="d" * 16))),
    ("V207", "other state", made(edit_run=facts(init_hash="d" * 16))),
    ("V208", "two hours", logged(stamped_earlier(runlog.RunStart, 7200.0))),
    ("V209", "faster than the bench", logged(change(runlog.Preflight, matmul_gflops=5.0))),
    ("V210", "a slow step", made(step_s=(0.1,) * 5 + (3.0,) + (0.1,) * 4)),
    ("V309", "below the entropy rate", made(val_losses=(5.5, 4.0, 3.4, 2.9))),
    ("V309", "blew up", logged(change(runlog.RunEnd, status="non-finite", val_loss=None), outcome="non-finite")),
    ("V310", "loss was edited", logged(change(runlog.Val, at=-1, loss=3.1), change(runlog.RunEnd, val_loss=3.1))),
    ("V310", "verdict was edited", claimed),
    ("V404", "one device", logged(change(runlog.Preflight, num_devices=1), num_devices=1)),
    ("V404", "other platform", logged(change(runlog.Preflight, platform="gpu"), platform="gpu")),
]  # fmt: skip


@pytest.mark.parametrize(("id", "how", "build"), FORGERIES, ids=[f"{id}-{how}" for id, how, _ in FORGERIES])
def test_a_forgery_is_refused_by_its_check_alone(folder, id, how, build):
    build(folder)
    report = validate(folder)
    assert list(found(folder)) == [id], found(folder)
    assert report.exit_code == (0 if find_check(id).severity == "warning" else 1)
    assert validate(folder, strict=True).exit_code == 1


def test_every_check_has_a_forgery_and_one_id():
    ids = [check.id for check in CHECKS]
    assert sorted({id for id, _, _ in FORGERIES}) == sorted(ids)
    assert len(set(ids)) == len(ids)


# --- what cannot be read -----------------------------------------------------------------------------------


def test_checks_that_cannot_be_asked_say_so(folder):
    edited("runs/*1/metrics.jsonl", b'"i":1,', b'"i":1, ')(folder)
    results = {result.check.id: result for result in validate(folder).results}
    assert results["V202"].status == "skipped"
    assert "V001" in results["V202"].messages[0]
    assert results["V008"].status == "ok"


HOSTILE_JSON = [
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"NaN",
    b"1e999",
    b"9" * 10_000,
    b'"\xff\xfe"',
    b'"\\ud800"',
    b'"' + b"x" * 100_000 + b'"',
    b'"\\u001b[31m\\u202e"',
    b"null",
    b"",
]


@pytest.mark.parametrize("value", HOSTILE_JSON, ids=range(len(HOSTILE_JSON)))
@pytest.mark.parametrize(
    ("path", "old"),
    [
        ("runs/*1/metrics.jsonl", b'"tiny"'),
        ("runs/*1/metrics.jsonl", b'{"width":8,"lr":0.02}'),
        ("runs/*1/metrics.jsonl", b'"tokens":1000'),
        ("runs/*1/run.json", b'"tiny"'),
        ("manifest.json", b'"forged"'),
        ("summary.json", b"9.0"),
    ],
)
def test_hostile_values_end_in_a_report(folder, path, old, value):
    edited(path, old, (old.split(b":")[0] + b":" if old.startswith(b'"tokens') else b"") + value)(folder)
    report = validate(folder)
    assert report.exit_code == 1
    for result in report.results:
        assert all(message.isprintable() and len(message) < 1000 for message in result.messages)


@pytest.mark.parametrize(
    "text", ["\x1b]0;owned\x07", "\u202egnp.exe", "x" * 100_000, "a\nb", "| <b> [l](http://x)"]
)
def test_hostile_text_that_is_well_formed_stays_out_of_sight(folder, text):
    build = logged(change(runlog.RunStart, recipe=text), recipe=text)
    build(folder)
    assert found(folder) == {}
    shown = [
        (folder / "README.md").read_text(),
        *(file.read_text() for file in folder.glob("runs/*/log.txt")),
    ]
    for line in "\n".join(shown).splitlines():
        assert line.isprintable()
        assert len(line) < 2000
        assert "<b>" not in line or line.startswith("speedrun") or line.startswith("    ")


@pytest.mark.parametrize("number", [10**400, -1, 0])
def test_numbers_out_of_range_are_a_failure_not_a_crash(folder, number):
    logged(change(runlog.Plan, tokens_per_step=number, flops_per_token=1e308))(folder)
    assert validate(folder).exit_code == 1


@given(place=st.integers(0), byte=st.integers(0, 255), which=st.integers(0))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_byte_may_be_wrong(folder, place, byte, which):
    if folder.exists():
        shutil.rmtree(folder)
    forge(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file = files[which % len(files)]
    content = bytearray(file.read_bytes())
    content[place % len(content)] = byte
    changed = bytes(content) != file.read_bytes()
    file.write_bytes(content)
    # The head of README.md is generated too, so there is no byte that may change unseen.
    assert validate(folder).exit_code == int(changed)


def test_a_run_that_broke_off_is_no_forgery(folder):
    def broke(log: Moments) -> Moments:
        return log[: place_of(log, runlog.Step, 5)]

    forge(folder)
    write_run(folder, Spec(seed=3, edit_log=broke, edit_run=facts(outcome="aborted", final_hash="")))
    assemble(folder, declared_runs=3)
    assert found(folder) == {}
    assert "2 finished of 3 declared" in (folder / "README.md").read_text()


# --- assembling --------------------------------------------------------------------------------------------


def test_assembling_again_changes_nothing_and_keeps_what_people_wrote(folder):
    forge(folder)
    assemble(folder, title="warm <wet> | wild", changes=["one thing"], parent_record="none before")
    (folder / "README.md").write_text((folder / "README.md").read_text() + "\nWhy it works.\n")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assemble(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    readme = (folder / "README.md").read_text()
    assert readme.partition(HEAD_END)[2] == "\nWhy it works.\n"
    assert "- one thing" in readme
    assert "<wet>" not in readme
    assert found(folder) == {}


def test_the_summary_is_arithmetic(folder):
    forge(folder, val_losses=(5.5, 4.0, 3.4, 3.2))
    write_run(folder, Spec(seed=3, val_losses=(5.5, 4.0, 3.4, 3.3)))
    summary = assemble(folder)
    assert summary.val_loss_mean == pytest.approx((3.2 + 3.2 + 3.3) / 3)
    assert summary.val_loss_sd == pytest.approx(0.1 / 3**0.5)
    assert summary.target_reached
    assert summary.step_p50_ms == pytest.approx(100)
    assert summary.num_tokens == 1000


def test_a_folder_without_runs_cannot_be_assembled(folder):
    folder.mkdir()
    with pytest.raises(UsageError, match="no runs"):
        assemble(folder)


def test_files_have_one_spelling():
    raw = encode(ABOUT_NOTHING)
    assert decode(raw, Summary) == ABOUT_NOTHING
    for other in (
        raw.replace(b"\n", b""),
        raw.replace(b'"num_runs": 0', b'"num_runs": 0,\n  "num_runs": 0'),
        b"{}",
    ):
        with pytest.raises(FormatError):
            decode(other, Summary)


ABOUT_NOTHING = Summary(
    num_runs=0, num_finished=0, target_loss=3.28, target_reached=False, val_loss_mean=None, val_loss_sd=None,
    train_time_s_mean=None, train_time_s_sd=None, cold_wall_s_mean=None, compile_s_mean=None, num_steps=0,
    num_tokens=0, step_p50_ms=0.0, step_p95_ms=0.0, step_max_ms=0.0, data_wait_share=None,
)  # fmt: skip


# --- the command -------------------------------------------------------------------------------------------


def test_the_command_prints_and_exits(folder):
    forge(folder)
    good = CliRunner().invoke(command, [str(folder)])
    assert good.exit_code == 0, good.output
    assert f"{len(CHECKS)} ok" in good.output
    edited_readme = folder / "README.md"
    edited_readme.write_text(edited_readme.read_text().replace("3.2500", "3.1500"))
    bad = CliRunner().invoke(command, [str(folder)])
    assert bad.exit_code == 1
    assert "failed   V004" in bad.output
    assert "fix:" in bad.output


def test_the_command_speaks_json(folder):
    forge(folder, step_s=(0.1,) * 5 + (3.0,) + (0.1,) * 4)
    result = CliRunner().invoke(command, [str(folder), "--json", "--strict"])
    report = json.loads(result.output)
    assert report["exit_code"] == result.exit_code == 1
    assert [one["id"] for one in report["results"] if one["status"] == "warning"] == ["V210"]


def test_the_command_explains(folder):
    result = CliRunner().invoke(command, ["--explain", "v104"])
    assert result.exit_code == 0
    assert find_check("V104").hint in result.output
    assert isinstance(CliRunner().invoke(command, ["--explain", "V999"]).exception, UsageError)
    assert isinstance(CliRunner().invoke(command, []).exception, UsageError)
    assert isinstance(CliRunner().invoke(command, [str(folder)]).exception, UsageError)


def test_nothing_heavy_is_imported():
    code = "import speedrun.ledger.validate, speedrun.ledger.plot, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"jax", "numpy", "matplotlib", "rich"}.intersection(loaded)
