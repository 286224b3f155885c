"""What keeps the log of a run is a process of its own, which a recipe cannot reach."""

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from record_forge import forge
from small_run import SMALL, log_of, runs_of

from speedrun.base import budget, messages, runlog
from speedrun.base.budget import Budget, Purse, flops, purse_of
from speedrun.base.clock import now
from speedrun.base.console import Printer
from speedrun.base.errors import HANG, DataError, SpeedrunError, StorageError, UsageError
from speedrun.record.reader import read_files
from speedrun.record.summary import assemble
from speedrun.record.validate import validate
from speedrun.train import keeper
from speedrun.train.connect import Group
from speedrun.train.run_config import RunConfig


@pytest.fixture
def sent(forged) -> list[bytes]:
    """What a child sends of a whole run."""
    forge(out := forged / "record")
    told = [messages.Told(line.event) for line in runlog.read(sorted(out.glob("runs/*/metrics.jsonl"))[0])]
    ends = [replace(one, hold=True) for one in told[-3:-1]]  # the result and held-out text, held for the end
    sent = [*told[:-3], ends[0], messages.Asked(), ends[1], told[-1]]
    return [msgspec.json.encode(message) + b"\n" for message in sent]


@pytest.fixture(autouse=True)
def drawn(monkeypatch) -> str:
    nonce = f"{1:016x}"  # of the forged run
    monkeypatch.setattr(keeper.secrets, "token_hex", lambda _: nonce)
    return nonce


def without_question(sent: list[bytes]) -> list[runlog.AnyEvent]:
    told = map(messages.received, sent)
    return [message.event for message in told if isinstance(message, messages.Told)]


@pytest.fixture
def kept(sent, tmp_path) -> keeper.Kept:
    first = messages.received(sent[0]).event
    assert isinstance(first, runlog.RunStart)
    (tmp_path / "runs" / first.run_id).mkdir(parents=True)
    return keeper.Kept(keeper.Job(RunConfig("smoke-cpu", tmp_path)), lambda _: None)


def test_a_whole_log_is_stamped_and_chained(sent, kept, tmp_path):
    for message in sent:
        kept.take(message)
    kept.close(0)
    lines = [*runlog.read(log_of(tmp_path))]
    assert [line.event for line in lines] == without_question(sent)
    assert [line.t_mono_ns for line in lines] == sorted({line.t_mono_ns for line in lines})
    assert runs_of(tmp_path)[0].chain_break is None
    assert kept.error is None


def test_a_child_that_is_killed_leaves_a_log_with_the_reason_and_no_result(sent, kept, tmp_path):
    for message in sent[:-1]:
        kept.take(message)
    kept.close(-9)
    last = [*runlog.read(log_of(tmp_path))][-1].event
    assert last == runlog.Error("Killed", "the process of the run ended with exit code -9 (signal 9)")
    assert len([*runlog.read(log_of(tmp_path))]) == len(sent) - 3, "and not the result, which was held"


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda kept, path: kept.take(b"42\n"), "what is no event"),
        (
            lambda kept, path: kept.take(b'{"type":"told","event":{"ev":"warning","message":"\xff"}}'),
            "no event",
        ),
        (lambda kept, path: kept.take(b'{"type":"told","event":' + b"[" * 10**5), "no event"),
        (lambda kept, path: kept.take(b'{"event": {"ev": "val"}}\n'), "what is no event"),
        (
            lambda kept, path: path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:-1])),
            "else changed the log",
        ),
        (lambda kept, path: path.write_bytes(path.read_bytes() + b"{}\n"), "else changed the log"),
    ],
)
def test_a_child_that_sends_or_writes_anything_else_fails(sent, kept, tmp_path, harm, said):
    for message in sent:
        kept.take(message)
    harm(kept, log_of(tmp_path))
    kept.close(0)
    assert type(kept.error) is SpeedrunError
    assert said in str(kept.error)


def test_a_log_that_was_deleted_is_an_error_of_one_line(sent, kept, tmp_path):
    for message in sent:
        kept.take(message)
    log_of(tmp_path).unlink()
    kept.close(0)
    assert "else changed the log" in str(kept.error)


def test_what_is_no_event_is_the_last_line_of_the_log(sent, kept, tmp_path):
    kept._limits_s["start"] = 1e-9
    for message in (*sent[:3], b"42", *sent[3:]):
        kept.take(message)
    assert [kept.hangs(), kept.hangs()] == [True, False], (
        "who ignores that it is refused is killed at its deadline"
    )
    kept.close(1)
    *_, last = log_of(tmp_path).read_bytes().splitlines()
    event = runlog.decode(last).event
    assert isinstance(event, runlog.Error)
    assert event.message == str(kept.error)


#: Prints for nobody.
LOUD = """
import sys
from pathlib import Path
from speedrun.base import console
from speedrun.train import keeper, run_config
keeper._BLOCKED_S = 0.5
job = keeper.Job(run_config.RunConfig("webmini", Path(sys.argv[1])))
keeper.trained(job, console.Printer(sys.stdout), module="loud_child")
"""


def test_a_reader_that_takes_nothing_does_not_hold_the_command(tmp_path):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", LOUD, str(tmp_path / "out")]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stderr is not None
        assert run.wait(120) == StorageError.exit_code
        assert b"standard output takes nothing" in run.stderr.read()


def test_a_result_is_stamped_when_it_comes_though_it_counts_only_with_the_end(sent, kept, tmp_path):
    *before, end = sent
    for message in before:
        kept.take(message)
    came_ns = now().mono_ns
    kept.take(end)
    kept.close(0)
    *_, result, _, last = runlog.read(log_of(tmp_path))
    assert isinstance(result.event, runlog.Val)
    assert result.t_mono_ns < came_ns < last.t_mono_ns


def test_a_run_has_its_result_however_its_process_ends_afterwards(sent, kept):
    for message in sent:
        assert not kept.has_result
        kept.take(message)
    assert kept.has_result
    kept.close(-11)
    assert kept.error is None


def test_the_held_out_text_is_drawn_once_and_only_after_the_result(sent, kept, drawn):
    *before, result, asked, held, end = sent
    for message in (*before, result):
        assert kept.take(message) == ""
    assert kept.take(asked) == drawn
    other = held.replace(drawn.encode(), b"2" * 16)
    for wrong, said in ((other, "other held-out text"), (result, "validated again"), (asked, "asked")):
        kept.error, kept.is_over = None, False
        kept.take(wrong)
        assert said in str(kept.error)
    kept.error, kept.is_over = None, False
    for message in (held, end):
        kept.take(message)
    assert kept.has_result
    kept.close(0)


def test_without_a_result_nothing_is_drawn(sent, kept):
    for message in sent[:5]:
        kept.take(message)
    assert kept.take(msgspec.json.encode(messages.Asked())) == ""
    assert "without a result" in str(kept.error)
    kept.close(1)


def test_the_last_error_is_kept_back_and_a_crash_is_named(capsys):
    said = keeper.LastWords()
    for line in ("warning", "error: first", "error: last"):
        said(line)
    assert capsys.readouterr().err == "warning\nerror: first\n"
    assert said.error(2, None) == "last"
    assert (said.error(0, None), capsys.readouterr().err) == ("", "error: last\n")
    said("RuntimeError: mine")
    assert said.error(1, None) == "the process of the run crashed, as it says above"
    assert said.error(1, Group(2, 1)) == ""
    said("process 0: error: its own")
    assert (said.error(1, Group(2)), said.error(-6, Group(2))[-9:]) == ("", "was lost)")


def test_a_log_that_does_not_begin_with_its_run_is_refused(sent, kept, tmp_path):
    kept.take(sent[1])
    assert "began with a Preflight" in str(kept.error)
    assert not list(tmp_path.glob("runs/*/*"))


def test_a_full_disk_is_an_error_of_storage(sent, kept, monkeypatch):
    kept.take(sent[0])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert kept._log is not None
    with monkeypatch.context() as patch:
        patch.setattr(kept._log, "_file", SimpleNamespace(writelines=full))
        kept.take(sent[1])
    kept.close(0)
    assert type(kept.error) is StorageError


def test_a_child_that_hangs_is_ended_and_its_stacks_are_kept(tmp_path, monkeypatch, capsys):
    """The deadline counts from when the child says that a phase begins."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    config = RunConfig("webmini", tmp_path / "new" / "out", deadlines_s={"data": 0.5})
    code, error = keeper.trained(keeper.Job(config), Printer(io.StringIO()), module="hung_child")
    assert code == HANG
    assert error.startswith("data has taken 0.")
    stacks = (tmp_path / "new" / "out.stacks.txt").read_text()
    assert "hung_child.py" in stacks
    assert stacks in capsys.readouterr().err


#: Slows each step, so that half of its time is more than a check lets pass.
STEPS = """
import speedrun.train.run as _run
import time as _time

_honest, _begun = _run.report, []


def _report(*args):
    _cheat()
    _time.sleep(0.05)
    return _honest(*args)


_run.report = _report
"""
#: What then runs at half speed, from the first step on: the time of Python; the harness's own clock.
SLOW = {
    "time": """
_now = _time.monotonic_ns


def _slow():
    return _begun[0] + (_now() - _begun[0]) // 2


def _cheat():
    _begun[:] = _begun or [_now()]
    _time.monotonic_ns = _slow
""",
    "module": """
from speedrun.base.clock import Clock as _Clock

_seconds = _Clock.seconds.fget


def _cheat():
    _Clock.seconds = property(lambda clock: _seconds(clock) / 2)
""",
}


@pytest.fixture
def hostile(smoke_data, tmp_path, monkeypatch) -> Callable[[str], tuple[RunConfig, keeper.Ended]]:
    """Trains the smoke recipe with more source."""

    def trained(more: str) -> tuple[RunConfig, keeper.Ended]:
        source = (Path(keeper.__file__).parent.parent / "recipes" / "smoke.py").read_text()
        (tmp_path / "hostile.py").write_text(source.replace('"smoke"', '"hostile"') + more)
        monkeypatch.setenv("SPEEDRUN_RECIPES", str(tmp_path))
        config = RunConfig("smoke-cpu", tmp_path / "out", recipe="hostile", overrides=SMALL, data=smoke_data)
        return config, keeper.trained(keeper.Job(config), Printer(io.StringIO()))

    return trained


@pytest.mark.parametrize("what", [pytest.param("time", marks=pytest.mark.compile), "module"])
def test_a_recipe_that_slows_its_clock_does_not_reach_the_one_that_stamps(hostile, what):
    config, (code, said) = hostile(STEPS + SLOW[what])
    assert code == 0, said
    assemble(config.out)
    failed = {one.check.id: one.messages for one in validate(config.out).having("failed")}
    assert "by its stamp" in failed["V202"][0]


#: Ends the process with success at the first step.
LEAVES = """
import os as _os
import speedrun.train.run as _run

_run.report = lambda *_: _os._exit(0)
"""


def test_a_recipe_that_leaves_with_success_has_none(hostile):
    config, (code, said) = hostile(LEAVES)
    assert (code, "ended without a result" in said) == (1, True)
    assert [*runlog.read(log_of(config.out))][-1].event == runlog.Error(
        "Killed", "the process of the run ended with exit code 0 (done)"
    )


def test_a_budget_ends_a_run_as_a_signal_does_and_counts_what_was_before(sent, tmp_path):
    """Operations of the run's steps, at the rate of its plan: two runs take just their budget."""
    told, out = without_question(sent), tmp_path / "out"
    start: Any = told[0]
    run_flop = flops({type(event): event for event in told})
    steps = [event for event in told if isinstance(event, runlog.Step)]
    plan = next(event for event in told if isinstance(event, runlog.Plan))
    assert run_flop == sum(step.batch_tokens for step in steps) * plan.flops_per_token > 0

    def keep(name: str, budget: Budget, *last: runlog.AnyEvent) -> keeper.Kept:
        (out / "runs" / name).mkdir(parents=True)
        kept = keeper.Kept(keeper.Job(RunConfig("smoke-cpu", out), budget=budget), lambda _: None)
        ended = []
        for event in (replace(start, run_id=name), *told[1:-3], *last):
            kept.take(msgspec.json.encode(messages.Told(event)))
            ended.append(kept.overspends())
        assert ended.count(signal.SIGTERM) == (budget.spent + run_flop > budget.limit), (
            "it is told to end once"
        )
        kept.close(0)
        return kept

    budget = Budget(run_flop - 1, "flop")
    first = keep(
        "first", budget, runlog.Error("Terminated", "by SIGTERM"), replace(told[-1], status="aborted")
    )
    assert (first.error and first.error.exit_code, str(first.error)[:13]) == (75, "budget: spent")
    (run,) = runs_of(out)
    assert isinstance(run.lines[1].event, runlog.Budget)
    assert (run.outcome, "was ended by its budget after" in run.crashed) == ("aborted", True)
    with pytest.raises(SpeedrunError, match="with a larger --budget goes on") as error:
        (purse_of(out, None) or Purse(out, budget)).left(2)
    assert error.value.exit_code == 2
    assert (purse := purse_of(out, f"{2 * run_flop}flop", "1s")) is not None
    assert keep("second", purse.left(), told[-1]).error is None, "both together take just that"
    with pytest.raises(SpeedrunError, match="another run takes"):
        Purse(out, Budget(2.9 * run_flop, "flop")).left()
    assert "not its own" in str(keep("third", budget, runlog.Budget("1000d", 0.0)).error)


def later(kept: keeper.Kept, seconds: float) -> None:
    for watch in (kept._meter.watch, kept._meter._since):
        watch._start_ns -= int(seconds * 1e9)


def test_starts_without_a_log_are_paid_for_and_a_copied_log_once(sent, kept, tmp_path):
    for message in sent:
        kept.take(message)
    kept.close(0)
    purse = Purse(tmp_path, Budget(1e6, "s"))
    logged_s = purse.costs()[0]
    shutil.copytree(log_of(tmp_path).parent, tmp_path / "copied")
    assert purse.costs()[0] == logged_s > 0
    for count in (1, 2):
        start = keeper.Kept(replace(kept._job, budget=purse.left()), lambda _: None)
        later(start, 100)
        start.overspends()
        assert purse.costs()[0] - logged_s == pytest.approx(100 * count, abs=1), "also if it is killed now"
        start.close(1)
    assert not any(name.startswith("unlogged-") for name in read_files(tmp_path)[1]), "files of a record"
    with pytest.raises(SpeedrunError, match="spent"):
        Purse(tmp_path, Budget(199, "s")).left()
    logged = keeper.Kept(replace(kept._job, budget=purse.left()), lambda _: None)
    later(logged, 100)
    logged.overspends()
    first: Any = messages.received(sent[0])
    (tmp_path / "runs" / "next").mkdir()
    logged.take(msgspec.json.encode(messages.Told(replace(first.event, run_id="next"))))
    assert len([*tmp_path.glob("unlogged-*.txt")]) == 2, "the log has the third one"
    assert purse.costs()[0] - logged_s == pytest.approx(300, abs=1)
    later(logged, 30)  # as if it compiled, without a line
    logged.overspends()
    assert purse.costs()[0] - logged_s == pytest.approx(330, abs=1), "also if it is killed now"
    logged.close(1)
    assert len([*tmp_path.glob("unlogged-*.txt")]) == 2
    (tmp_path / "unlogged-1.txt").write_text("ten")
    with pytest.raises(DataError, match="take it out of the folder"):
        purse.costs()


def test_a_result_is_scored_to_its_end_though_the_budget_is_spent(sent, kept):
    late = keeper.Kept(replace(kept._job, budget=Budget(100, "s")), lambda _: None)
    for message in sent[:-3]:
        late.take(message)
    later(late, 1000)
    assert late.overspends() == 0
    for message in sent[-3:]:
        late.take(message)
    late.close(0)
    assert (late.error, late.has_result) == (None, True)


def test_a_run_that_takes_no_signal_is_killed_when_its_budget_is_spent(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setattr("speedrun.base.budget.GRACE_S", 0.5)
    sends, sent = budget.Meter.signal, list[int]()
    monkeypatch.setattr(budget.Meter, "signal", lambda *a, **b: sent.append(found := sends(*a, **b)) or found)
    config = RunConfig("webmini", tmp_path / "out", deadlines_s={"data": 60.0})
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a child inherits it
    try:
        job = keeper.Job(config, budget=Budget(0.1, "s"))
        code, error = keeper.trained(job, Printer(io.StringIO()), module="hung_child")
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert (code, error[:13], {*sent} - {0}) == (75, "budget: spent", {signal.SIGTERM, signal.SIGKILL})


@pytest.mark.parametrize(
    ("text", "shown", "hour"),
    [("1.5h", "5400s", 3600), ("$5 at $20/h", "$5 at $20/h", 20), ("2e15flop", "2e+15flop", 7)],
)
def test_a_budget_has_one_form(text, shown, hour):
    budget = Budget.parse(text)
    assert (str(budget), Budget.parse(shown), budget.charge(3600, 7)) == (shown, budget, hour)
    for wrong in (text[:-1] + "x", f"-{text}", "0s"):
        with pytest.raises(UsageError, match="need 90s"):
            Budget.parse(wrong)
