"""Honest records pass, and each forgery is refused by its check alone."""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forgeries
import pytest
import record_forge
from forgeries import FORGERIES, LOG, ONE, configured, edited, fixed, logged, place_of, promised, shifted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from record_forge import CONFIG, RECIPE, SOURCE, Spec, change, forge, rank, shard, write_run
from small_run import FIRST, files
from typed import git, invoke

from speedrun.base import console, runlog, track
from speedrun.base.errors import UsageError
from speedrun.record import git_history as history_module
from speedrun.record import prospect
from speedrun.record import reader as record_module
from speedrun.record.checks import CHECKS, v4_environment
from speedrun.record.checks.v3_batches import _nowhere_else, unfollowed
from speedrun.record.checks.v3_claims import CURVES
from speedrun.record.checks.v5_source import _inputs, leaves
from speedrun.record.logged_run import FormatError, Run
from speedrun.record.reader import About, decode, encode, load
from speedrun.record.summary import HEAD_END, assemble, summarize
from speedrun.record.validate import Report, find_check, validate
from speedrun.science.step import COMPILER_OPTIONS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(forged) -> Path:
    return forged / "record"


def found(record: Path) -> dict[str, tuple[str, ...]]:
    return problems(validate(record))


def problems(report: Report) -> dict[str, tuple[str, ...]]:
    return {r.check.id: r.messages for r in report.results if r.status in ("failed", "warning")}


TOUCHING = shard("t_train_1.bin", 0, 300), shard("t_train_1.bin", 300, 600), shard("t_train_2.bin", 0, 400)
HONEST = {
    "as many parameters as the track permits": forgeries.capped(1_000_000),
    "as it is": forge,
    "an optimiser that differs where the model is fixed":
        fixed(edit_source=forgeries.with_file("speedrun/science/optim/muon_and_adam.py", "Adam = abs\n")),
    "a stamp that is late once": forgeries.made(
        step_s=(0.1,) * 5 + (0.3,) + (0.1,) * 4, edit_log=change(runlog.Step, at=5, train_time_s=0.6)),
    "ranges that touch do not overlap": forgeries.made(shards=TOUCHING),
    # Ten steps of 100 tokens; the cursor lies between the tokens seen, and those seen or skipped.
    "tokens that are cut off from documents are not counted":
        forgeries.cutting(replace(shard("t_train_1.bin", 0, 640), skipped=40), shard("t_train_2.bin", 0, 400)),
    **{f"compiled as the harness does for {platform}": logged(change(runlog.Plan, compiler_options=options))
       for platform, options in COMPILER_OPTIONS.items()},
}  # fmt: skip


@pytest.mark.parametrize("build", HONEST.values(), ids=HONEST)
def test_an_honest_record_passes_every_check(folder, build):
    build(folder)
    report = validate(folder, strict=True)
    assert {result.status for result in report.results} == {"ok"}
    assert report.exit_code == 0


def test_a_step_has_a_batch_of_the_track(folder):
    fixed()(folder)
    record = load(folder)
    assert record.rules.fixed is not None
    rules = replace(record.rules.fixed, recipe={"stages": [{"num_sequences": 5, "seq_len": 10}]})
    assert list(_inputs(record.runs[0], rules)) == ["step 0: a batch of 100 tokens, the track has [50]"]


def test_the_validation_shard_is_known_under_another_name(folder):
    forgeries.any_shards()
    forge(folder, shards=(ONE, replace(forgeries.TWO, sha256=record_forge.digest("t_val_0.bin"))))
    assert list(found(folder)) == ["V103"]
    assert [result.check.id for result in validate(folder).having("skipped")] == ["V101"]


@pytest.mark.parametrize(("id", "how", "build"), FORGERIES, ids=[f"{id}-{how}" for id, how, _ in FORGERIES])
def test_a_forgery_is_refused_by_its_check_alone(folder, id, how, build):
    build(folder)
    report = validate(folder)  # once, as it takes most of the time of these tests
    named = [one for one in problems(report) if (id, one) != ("V210", "V311")]  # V210 needs a resumed run
    assert named == [id], problems(report)
    assert report.exit_code == (0 if find_check(id).severity == "warning" else 1)
    assert dataclasses.replace(report, strict=True).exit_code == 1


@pytest.mark.parametrize(
    ("before", "after", "edits", "problems", "ranked"),
    [
        (0.001, 0.0, [], {"V205", "V209"}, True),  # measured once, as in older runs
        (0.001, 0.0, [], {"V205", "V209"}, False),
        (0.001, 50.0, [], set(), True),
        (50.0, 50.0, [shifted(runlog.ClockResume, 20.0)], {"V205"}, True),
        (50.0, 5.0, [shifted(runlog.ClockResume, 20.0)], set(), True),
        (1e-9, 50.0, [shifted(runlog.ClockResume, 600.0)], {"V205"}, True),
    ],
)
def test_a_machine_whose_load_changed_spoils_no_run(folder, before, after, edits, problems, ranked):
    """The more generous of both rates counts; a track that does not rank only warns."""
    rank(ranked)
    rates = change(runlog.Preflight, matmul_gflops=before), change(runlog.RunEnd, matmul_gflops=after)
    logged(*rates, *edits)(folder)
    status = {result.check.id: result.status for result in validate(folder).results}
    for id in ("V205", "V209"):
        assert status[id] == ("ok" if id not in problems else "failed" if ranked else "warning")


def test_every_check_has_a_forgery_and_one_id():
    ids = [check.id for check in CHECKS]
    of_islands = {"V108", "V109"}  #: tests/islands/test_islands.py
    assert sorted({id for id, _, _ in FORGERIES} | of_islands) == sorted(ids)
    assert len(set(ids)) == len(ids)


#: By id, the forgery that is known before the clock.
BEFORE = {
    "V101": "other file", "V102": "a shard that was not in the folder", "V103": "trained on it",
    "V105": "from elsewhere",
    "V302": "too few", "V401": "in the program", "V402": "foreign code", "V403": "another lock",
    "V404": "other platform", "V405": "nobody looked", "V406": "not committed", "V407": "a tired device",
    "V501": "no recipe", "V503": "another clock", "V505": "a table beside the parameters",
    "V506": "more than the track permits", "V507": "another norm",
}  # fmt: skip


@pytest.mark.parametrize("check", [check for check in CHECKS if check.before], ids=lambda check: check.id)
def test_what_is_known_before_the_clock_is_refused_before_it(folder, check):
    (build,) = (build for id, how, build in FORGERIES if (id, how) == (check.id, BEFORE[check.id]))
    build(folder)
    record = load(folder)
    run, source = record.runs[0], record.raw["source.txt"].decode()
    first = [run.of(kind)[0] for kind in (runlog.RunStart, runlog.Preflight, runlog.DataReady, runlog.Plan)]
    log = [*first, prospect.end(run.data, run.end.throttled_s)]
    found = prospect.problems(record.rules, source, log, len(record.runs))
    assert [one.check.id for one in found] == [check.id]
    assert check.id in prospect.require(record.rules, found, "unranked")[0]
    if check.severity == "error" or check.before == "batch":
        with pytest.raises(UsageError, match=f"{check.id}: .*{re.escape(check.hint)}.* --unranked"):
            prospect.require(record.rules, found, "")
    else:
        assert prospect.require(record.rules, found, ""), "others only warn"


def test_checks_that_cannot_be_asked_say_so(folder):
    edited(LOG, b'"i":1,', b'"i":1, ')(folder)
    results = {result.check.id: result for result in validate(folder).results}
    assert results["V202"].status == "skipped"
    assert "V001" in results["V202"].messages[0]
    assert results["V008"].status == "ok"


HOSTILE_JSON = [
    b"[" * 100_000,
    b"NaN",
    b"1e999",
    b'"\xff\xfe"',
    b'"\\ud800"',
    b'"' + b"x" * 100_000 + b'"',
    b'"\\u001b[31m\\u202e"',
]


@pytest.mark.parametrize("value", HOSTILE_JSON, ids=range(len(HOSTILE_JSON)))
@pytest.mark.parametrize(
    ("path", "old"), [(LOG, b'"tiny"'), (LOG, b'{"width":8,"lr":0.02}'), ("batch.json", b'"tiny"')]
)
def test_hostile_values_end_in_a_report(folder, path, old, value):
    edited(path, old, value)(folder)
    report = validate(folder)
    assert report.exit_code == 1
    for result in report.results:
        assert all(message.isprintable() and len(message) < 1000 for message in result.messages)


@pytest.mark.parametrize("text", ["\x1b]0;owned\n\u202e", "x" * 100_000, "| <b> [l](http://x)"])
def test_hostile_text_that_is_well_formed_stays_out_of_sight(folder, text):
    build = configured({"name": text}, change(runlog.RunStart, recipe=text))
    build(folder)
    assert list(found(folder)) == ["V501"], "no file can have such a name"
    shown = [(folder / "README.md").read_text(), *(console.render(run.lines) for run in load(folder).runs)]
    for line in "\n".join(shown).splitlines():
        assert line.isprintable()
        assert len(line) < 2000
        assert "<b>" not in line or line.startswith("speedrun") or line.startswith("    ")


def test_no_key_of_a_config_hides_another():
    hidden = {"": {"a": {"b": 1}}, "a": {"b": 2}, "a.b": 3, "a%2Eb": 4, "a%b": 5}
    assert sorted(leaves(hidden).values()) == [1, 2, 3, 4, 5]


@given(place=st.integers(0), byte=st.integers(0, 255), which=st.integers(0))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_byte_of_the_evidence_may_be_wrong(folder, place, byte, which):
    shutil.rmtree(folder, ignore_errors=True)
    forge(folder)
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".json", ".jsonl"))
    files.remove(folder / "about.json")
    file = files[which % len(files)]
    content = bytearray(file.read_bytes())
    content[place % len(content)] = byte
    changed = bytes(content) != file.read_bytes()
    file.write_bytes(content)
    assert validate(folder).exit_code == int(changed)


def test_a_run_that_broke_off_is_no_forgery_and_is_told(folder):
    forge(folder)
    write_run(folder, forgeries.BROKE[0])
    assemble(folder)
    assert found(folder) == {}
    readme = (folder / "README.md").read_text()
    assert "\n- tiny-2-00b2 crashed after 5 of 10 steps: OSError: no &#124; space\n" in readme


def test_a_record_in_which_no_run_finished_holds_no_result(folder):
    record_forge.alone(folder, forgeries.BROKE[0])
    assert "validation loss" not in (folder / "README.md").read_text()
    assert summarize(load(folder)).crashed == (
        "tiny-2-00b2 crashed after 5 of 10 steps: OSError: no | space",
    )
    results = {result.check.id: result.status for result in validate(folder).results}
    assert (results["V301"], results["V202"]) == ("failed", "skipped"), "a clock without an end is not judged"


def test_a_run_killed_before_its_clock_is_told_as_that(folder):
    record_forge.alone(folder, Spec(edit_log=lambda log: log[: place_of(log, runlog.Compile)]))
    assert found(folder)["V301"][1] == "tiny-1-00a1 crashed before the clock: its log just ends"


@pytest.fixture
def history(tmp_path, monkeypatch) -> Callable[[dict[str, str]], str]:
    """Makes commits of a harness in a repository that replaces ours."""
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "--quiet")

    def commit(files: dict[str, str]) -> str:
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        git(root, "add", ".")
        git(root, "commit", "--quiet", "--allow-empty", "--message", "a version")
        return git(root, "rev-parse", "HEAD")

    monkeypatch.setattr(history_module, "ROOT", root)
    record_forge._files_at.cache_clear()  # repositories of other tests can have the same commit
    return commit


CLOCK = "speedrun/base/clock.py"
RUN_LOCK = {"requirements/run.lock": record_forge.LOCK_RAW.decode()}


def test_an_older_record_is_compared_with_its_commit(folder, history):
    old = SOURCE[CLOCK] + "# as it was\n"
    older = history({**SOURCE, **RUN_LOCK, CLOCK: old})
    history({CLOCK: SOURCE[CLOCK]})
    edit_log = change(runlog.Preflight, commit=older)
    forge(folder, edit_log=edit_log, edit_source=forgeries.with_file(CLOCK, "# as it was\n"))
    assert found(folder) == {}
    forge(folder, edit_log=edit_log, edit_source=forgeries.with_file(CLOCK, "# as it never was\n"))
    assert list(found(folder)) == ["V503"]
    assert found(folder)["V503"] == (f"speedrun/base/clock.py differs from commit {older[:12]}",)
    forge(folder, edit_log=edit_log)
    assert found(folder) == {}, "a file of this version is nothing to refuse"


NORM = "speedrun/science/nn.py"


def test_fixed_science_is_that_of_a_version_before_the_racers_own(folder, history):
    def branched(files: dict[str, str]) -> str:
        """Commit on top of the older version, outside our history."""
        git(history_module.ROOT, "checkout", "--quiet", "--detach", older)
        commit = history(files)
        git(history_module.ROOT, "checkout", "--quiet", newer)
        return commit

    old, mine = SOURCE[NORM] + "# as it was\n", SOURCE[NORM] + "# as I like it\n"
    older = history({**SOURCE, **RUN_LOCK, NORM: old})
    newer = history({NORM: SOURCE[NORM]})
    for commit, text, failed in (
        (branched({"speedrun/science/optim/mine.py": "x = 1\n"}), old, []),
        (branched({NORM: mine}), mine, ["V507"]),
        (older, mine, ["V406", "V507"]),
    ):
        record_forge.install_track(track.TRACKS_DIR)
        claim = change(runlog.Preflight, commit=commit)
        fixed(claim, edit_source=lambda files, text=text: {**files, NORM: text})(folder)
        assert list(found(folder)) == failed


def test_science_that_is_not_that_of_its_commit_was_not_committed(folder, history):
    commit = history({**SOURCE, **RUN_LOCK, RECIPE: "SIZE = 2\n"})
    forge(folder, edit_log=change(runlog.Preflight, commit=commit))
    assert list(found(folder)) == ["V406"]
    commit = history({RECIPE: SOURCE[RECIPE]})
    forge(folder, edit_log=change(runlog.Preflight, commit=commit))
    assert found(folder) == {}


@pytest.mark.parametrize("merged", [True, False])
def test_a_copy_that_claims_to_be_older_is_the_copy(history, forged, monkeypatch, merged):
    root = history_module.ROOT
    original, copy = (root / "records" / "forged" / name for name in ("original", "copy"))
    for folder, days in ((original, 0), (copy, 1)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(record_forge, "EPOCH", record_forge.EPOCH - timedelta(days=days))
        forge(folder, seeds=(1,))
        if folder == original or merged:
            history({})
    assert list(_nowhere_else.find(load(original))) == []
    (told,) = _nowhere_else.find(load(copy))
    assert "same name as tiny-1-00a1 of forged/original" in told


def test_without_history_nothing_tells_whether_a_commit_is_known(folder, history, tmp_path, monkeypatch):
    older, _ = history({**SOURCE, **RUN_LOCK}), history({"a": "b"})
    root = history_module.ROOT
    git(root, "clone", "--quiet", "--depth", "1", root.as_uri(), str(tmp_path / "shallow"))
    monkeypatch.setattr(history_module, "ROOT", tmp_path / "shallow")
    assert not history_module.is_complete()
    report = validate(forge(folder, edit_log=change(runlog.Preflight, commit=older)))
    assert [result.status for result in report.results if result.check.id == "V406"] == ["skipped"]
    git(root, "worktree", "add", "--quiet", str(tmp_path / "tree"))
    monkeypatch.setattr(history_module, "ROOT", tmp_path / "tree")
    assert history_module.is_complete()


@pytest.mark.parametrize("ranked", [True, False])
def test_a_recipe_from_outside_the_repository_needs_a_commit_for_a_rank(folder, history, ranked):
    """On every track, all other science must be the commit's."""
    rank(ranked)
    model = "speedrun/science/models/tiny.py"
    commit = history({path: text for path, text in SOURCE.items() if path != RECIPE} | RUN_LOCK)
    forge(folder, edit_log=change(runlog.Preflight, commit=commit))
    assert list(found(folder)) == ["V406"] * ranked
    assert ("V406" in {result.check.id for result in validate(folder).having("skipped")}) is not ranked
    edit_source = forgeries.with_file(model, "SIZE = 1\n")
    forge(folder, edit_log=change(runlog.Preflight, commit=commit), edit_source=edit_source)
    assert any(line.endswith(f"which has no {model}") for line in found(folder)["V406"])


def test_the_lock_of_an_older_commit_is_known(folder, history):
    older = history({**SOURCE, **RUN_LOCK})
    history({"requirements/run.lock": "# Others.\n"})
    forge(folder, edit_log=change(runlog.Preflight, commit=older))
    assert found(folder) == {}
    forge(folder)
    assert list(found(folder)) == ["V403"]


def test_tracks_that_do_not_rank_skip_what_is_not_known_but_no_problem_of_another_run(folder):
    rank(False)
    unknown = change(runlog.Preflight, commit="", dirty=None, lock="", lock_sha256="")
    edit_log = record_forge.both(unknown, change(runlog.RunEnd, throttled_s=None))
    forge(folder, edit_log=edit_log, edit_source=forgeries.with_file(CLOCK, "#\n"))
    assert found(folder) == {}
    skipped = {result.check.id for result in validate(folder).having("skipped")}
    assert {"V403", "V405", "V406", "V503"} <= skipped
    hot = Spec(seed=3, edit_log=change(runlog.RunEnd, throttled_s=9.0))
    forge(folder, declared=(1, 2, 3), edit_log=change(runlog.RunEnd, throttled_s=None))
    write_run(folder, hot)
    assemble(folder)
    assert list(found(folder)) == ["V405"]


def test_a_file_of_git_is_found_by_its_commit_only(history):
    commit = history({"speedrun/a.py": "A = 1\n", "speedrun/b.py": ""})
    paths = ("speedrun/a.py", "speedrun/b.py", "speedrun/c.py", "speedrun")
    assert history_module.files_at(commit, paths[:3]) == {"speedrun/a.py": b"A = 1\n", "speedrun/b.py": b""}
    tree = git(history_module.ROOT, "rev-parse", "HEAD:speedrun")
    for other in ("", "HEAD", "c" * 40, commit[:12], f"{commit}\n", tree):
        assert history_module.files_at(other, paths) is None


def test_the_reference_of_the_smoke_track_is_the_committed_record():
    run = load(FIRST).runs[0]
    seen = {0: 0, **{step.step + 1: step.tokens_seen for step in run.steps}}
    assert CURVES["smoke-cpu@2"] == pytest.approx({seen[val.step]: val.loss for val in run.vals}, abs=1e-4)


def test_a_record_of_an_unknown_version_is_not_described_by_the_rules_of_today(folder):
    with pytest.raises(UsageError, match="has no track 'forged@2'"):
        forge(folder, edit_log=change(runlog.RunStart, track="forged@2"))


def test_assembling_again_changes_nothing_and_keeps_what_people_wrote(folder):
    forge(folder)
    assemble(folder, title="warm <wet> | wild", changes=["one thing"], parent_record="none before")
    (folder / "README.md").write_text((folder / "README.md").read_text() + "\nWhy it works.\n")
    before = files(folder)
    assemble(folder)
    assert files(folder) == before
    readme = (folder / "README.md").read_text()
    assert readme.partition(HEAD_END)[2] == "\nWhy it works.\n"
    assert "- one thing" in readme
    assert "<wet>" not in readme
    assert found(folder) == {}


def test_the_summary_is_arithmetic_also_of_a_run_that_was_resumed_at_its_end(folder):
    forge(folder, val_losses=(5.5, 4.0, 3.4, 3.2))
    write_run(folder, Spec(seed=3, val_losses=(5.5, 4.0, 3.4, 3.3)))
    summary = assemble(folder)
    assert summary.val_loss_mean == pytest.approx((3.2 + 3.2 + 3.3) / 3)
    assert summary.val_loss_sd == pytest.approx(0.1 / 3**0.5)
    assert summary.target_reached
    assert summary.step_p50_ms == pytest.approx(100)
    assert summary.num_tokens == 1000

    def rest(log):
        resume = runlog.Resume("tiny-1-0000", 10, "e" * 16, 1.0, 1000, (1, 400))
        start, stop = (place_of(log, kind) for kind in (runlog.ClockStart, runlog.ClockStop))
        return [*log[:start], log[start]._replace(event=resume), log[start], *log[stop:]]

    forge(folder, seeds=(1,), edit_log=rest)
    summary = summarize(load(folder))
    assert (summary.num_steps, summary.num_tokens) == (10, 1000)


def test_hardware_is_that_of_the_config(folder):
    told = found(forge(folder, edit_log=forgeries.other_config({**CONFIG, "num_devices": 1})))["V404"][0]
    assert told == "tiny-1-00a1: number of devices in its config: got 1, need 8"


def test_a_track_for_one_kind_of_device_refuses_others(folder):
    """An H200 has more memory bandwidth, so its times belong to another board."""
    record = load(forge(folder))
    assert record.track is not None
    for kind in ("cpu", "NVIDIA H100 80GB HBM3"):
        rules = replace(record.track, rules=replace(record.track.rules, device_kind=kind))
        told = [*v4_environment._hardware.find(dataclasses.replace(record, track=rules))]
        assert [kind in line for line in told] == [True] * 2 * (kind != "cpu")


def test_a_folder_without_runs_cannot_be_assembled(folder):
    folder.mkdir()
    (folder / "source.txt").write_text(record_forge.source_text())
    with pytest.raises(UsageError, match="no runs"):
        assemble(folder)
    log = write_run(folder, Spec()) / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    with pytest.raises(UsageError, match="the last line is torn"):
        assemble(folder)


def test_files_have_one_spelling():
    raw = encode(About())
    assert decode(raw, About) == About()
    twice = raw.replace(b'"authors": []', b'"authors": [],\n  "authors": []')
    for other in (raw.replace(b"\n", b""), twice, b"{}"):
        with pytest.raises(FormatError):
            decode(other, About)


def test_the_command_answers_each_record_by_itself(folder):
    forgeries.resumed()(folder)
    report = json.loads(invoke("validate", folder, "--json", "--strict").output)
    assert [one["id"] for one in report["results"] if one["status"] == "warning"] == ["V311"]
    good, bad = forge(folder), forge(folder.with_name("bad"))
    (bad / "about.json").write_text("{}")
    result = invoke("validate", good, bad, "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["exit_code"]) == (1, 1)
    assert {path: one["exit_code"] for path, one in report["records"].items()} == {str(good): 0, str(bad): 1}
    shown = invoke("validate", good, bad, "-v").stdout
    assert shown.index(str(good)) < shown.index("good: ") < shown.index(str(bad)) < shown.index("refused: ")
    assert shown.rindex("ok       V005") < shown.rindex("failed   V001"), "problems come last"
    for words in (["--explain", "V999"], [], [folder.parent]):
        assert invoke("validate", *words).exit_code == UsageError.exit_code


def test_what_may_not_be_read_is_told_and_the_rest_is_judged(folder, monkeypatch):
    forge(folder)

    def read(path: Path, max_bytes: int) -> bytes:
        if path.name == "about.json":
            raise PermissionError(13, "Permission denied", str(path))
        return path.read_bytes()

    monkeypatch.setattr(record_module, "read_regular", read)
    assert found(folder)["V008"] == ("about.json: cannot be read: Permission denied",)
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda at: real(at if "runs/" not in str(at) else "/proc/none"))
    assert "runs/tiny-1-00a1/: cannot be read: No such file or directory" in found(folder)["V008"]


def test_files_behind_the_most_that_are_read_are_refused(folder, monkeypatch):
    forge(folder)
    monkeypatch.setattr("speedrun.record.reader.MAX_FILES", 4)
    assert "a record holds at most 4 files" in found(folder)["V008"][-1]


def attempts(text: str) -> list[Any]:
    """Runs in order, as letters: its name, the run that it resumes, and its end.

    That is f(inished), a(borted), ! (its result was known), or 0 (before the clock).
    """
    runs = []
    for hour, (name, *resumed, end) in enumerate(text.split()):
        run: Any = SimpleNamespace(begun=hour, folder=name, outcome="finished" if end == "f" else "aborted")
        run.resumed, run.origin = bool(resumed), SimpleNamespace(run_id="".join(resumed))
        run.lines, run.began_after = [SimpleNamespace(t_mono_ns=hour)], partial(Run.began_after, run)
        run.start, run.vals = SimpleNamespace(num_steps=12), [SimpleNamespace(step=12 if end == "!" else 0)]
        run.of = lambda kind, end=end: [] if end == "0" else [kind]
        runs.append(run)
    return runs


@pytest.mark.parametrize(
    ("runs", "left"),
    [
        ("af", "a"),
        ("aa baa caf", "c"),  # twice from one checkpoint
        ("aa b0 caf", "c"),  # killed before it says what it resumes
        ("aa bf", "ab"),  # begun twice
        ("aa baa ca0 df", "bd"),  # a start that trained nothing takes no place
        ("aa baa ca0 daf", "d"),
        ("aa ba0 cf", "ac"),  # begun twice, and killed before the clock in between
        ("aa baf caf", "bc"),  # best of two
        ("aa ba! caf", "bc"),  # broken off by its result
        ("aa baf caa", "bc"),  # tried again
    ],
)
def test_runs_that_go_on_from_one_checkpoint_are_one_until_a_result_is_known(runs, left):
    assert "".join(run.folder for run in unfollowed(attempts(runs))) == left


def test_a_wall_clock_that_was_set_back_spoils_neither_a_batch_nor_a_resumed_run(folder):
    back = forge(
        folder, seeds=(1, 2), declared=(1, 2), promise=promised(created_utc="2027-01-01T00:00:00+00:00")
    )
    assert "V306" not in found(back)
    runs = attempts("aa baa caf")
    for run in runs:
        run.begun *= -1
    assert "".join(run.folder for run in unfollowed(runs)) == "c"


RECORDS = sorted(path.parent for path in (ROOT / "records").glob("*/*/about.json"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_committed_record_is_valid(record):
    report = validate(record, strict=True)
    assert report.exit_code == 0, {r.check.id: r.messages for r in report.results if r.status == "failed"}


@pytest.mark.parametrize(("spread", "status"), [(0.03, "failed"), (0.06, "ok")])
def test_losses_far_closer_than_seeds_are_are_refused(folder, spread, status):
    """By chance, four losses lie within 0.04 sigma once in 10,000 batches: the quantile of chi-squared, 3 degrees."""
    sigma = track.load("forged").target.sigma
    losses = [3.25 + z * spread * sigma * 1.5**0.5 for z in (-1, 0, 0, 1)]
    runs = [Spec(seed=seed, val_losses=(5.5, 4.0, 3.4, loss)) for seed, loss in enumerate(losses)]
    record_forge.declare(folder, record_forge.declaration(runs[0], range(4)), runs[0])
    for run in runs:
        write_run(folder, run)
    assemble(folder)
    (result,) = (r for r in validate(folder).results if r.check.id == "V307")
    assert result.status == status
