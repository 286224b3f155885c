import io
import re
from itertools import pairwise
from queue import SimpleQueue

import forgeries
import pytest
from record_forge import Spec, chain, change, moments

from speedrun.base import progress, runlog
from speedrun.base.console import Printer, TextLog, clean, duration, quantiles_ms, quantity, render


@pytest.fixture
def spec_lines(forged):
    return lambda **spec: chain(moments(Spec(**spec)))


@pytest.fixture
def lines(spec_lines):
    return spec_lines()


def test_a_run_reads_from_top_to_bottom_with_its_numbers(lines):
    text = render(lines)
    words = ["speedrun", "hw", "data", "plan", "comp", "warm", "start", "train", "stop", "result", "p50"]
    places = [text.index(f"{word} ") for word in words]
    assert all(before < after for before, after in pairwise(places)), text
    for shown in (
        "100.0 ms/step",
        "1.00 ktok/s",
        "val 3.2500  (clock stopped",
        "result  finished | val 3.2500 | train 1.00 s | total wall 9.8 s",
        "wall 9.8 s = start 5.1, compile 0.5, warm-up 0.2, step 1.0, evaluation 3.0",
        "data wait 1.0%",
    ):
        assert shown in text


@pytest.mark.usefixtures("forged")
def test_a_log_is_printed_line_by_line_with_its_kernels():
    log = chain(change(runlog.Plan, kernels={"attention": "triton: the first that can run"})(moments(Spec())))
    printer = Printer(stream := io.StringIO())
    for line in log:
        printer(line)
    assert stream.getvalue() == render(log)
    assert "kern  attention triton\n" in stream.getvalue()
    assert not re.search(r"[\x1b\r]", stream.getvalue()), "it is no terminal"


def test_about_ten_step_lines_and_always_the_last(spec_lines):
    num_steps = 57
    shards = (runlog.ShardRange("t_train_1.bin", "0" * 64, 10**6, 0, num_steps * 100),)
    text = render(spec_lines(step_s=(0.1,) * num_steps, shards=shards, val_losses=(4.0,) * 20))
    shown = [int(number) for number in re.findall(r"(\d+)/57  train", text)]
    assert 9 <= len(shown) <= 12
    assert shown[-1] == num_steps


@pytest.mark.usefixtures("forged")
def test_steps_of_a_round_have_its_time_and_one_line():
    """Ten steps in rounds of four, of four seconds each: a step takes one, and the last two steps two."""
    log = moments(Spec(step_s=(4.0, 0, 0, 0, 4.0, 0, 0, 0, 4.0, 0)))
    log.insert(1, log[0]._replace(event=runlog.Islands(2, 4, 2, 9.0)))
    found = re.findall(r"step +(\d+)/10  train +(\S+) s +(\S+) ms/step .* eta (\S+)", render(chain(log)))
    assert found == [
        ("4", "4.00", "1000.0", "6s"),
        ("8", "8.00", "1000.0", "2s"),
        ("10", "12.00", "2000.0", "0s"),
    ]
    assert "p50 1000.0 ms" in render(chain(log))


@pytest.mark.usefixtures("forged")
def test_the_wall_of_a_resumed_run_has_its_own_training_only():
    log = forgeries.went_on(moments(Spec()))
    (start,) = (moment.event for moment in log if isinstance(moment.event, runlog.Resume))
    parts = re.search(
        r"train (\S+) s \| total wall (\S+) s \(compile (\S+), warm-up (\S+), val (\S+), other (\S+)\)",
        render(chain(log)),
    )
    assert parts
    train_s, wall_s, *rest_s = map(float, parts.groups())
    assert start.train_time_s == pytest.approx(0.4)
    assert sum(rest_s) == pytest.approx(wall_s - (train_s - start.train_time_s), abs=0.2)


def test_rates_are_means_since_the_line_before(spec_lines):
    text = render(spec_lines(step_s=(0.1,) * 9 + (0.4,)))
    (last,) = (line for line in text.splitlines() if re.match(r"step +10/10 +train", line))
    assert "400.0 ms/step" in last
    assert "max 400.0" in text


def test_a_state_that_was_not_restored_is_said(lines):
    log = change(runlog.WarmupEnd, state_hash="d" * 16)(moments(Spec()))
    assert "NOT restored" in render(chain(log))
    assert "NOT restored" not in render(lines)


def test_no_field_can_write_on_the_terminal():
    hostile = "\x1b[31mred\x07\r\n\u202egnp\u2066\u200b" + "x" * 100_000
    shown = clean(hostile)
    assert shown.isprintable()
    assert len(shown) < 1000
    assert clean("l'\u00e9t\u00e9 \u6625") == "l'\u00e9t\u00e9 \u6625"
    line = runlog.Line(0, 0, "", "", runlog.Warning(hostile))
    text = TextLog()(line)
    assert text is not None
    assert text.isprintable()


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0.5, "0.50 x"), (5.02e6, "5.02 Mx"), (999_600, "1.00 Mx"), (50_200, "50.2 kx"), (999, "999 x")],
)
def test_quantities_have_three_digits(number, shown):
    assert quantity(number, "x") == shown


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0s"), (59.4, "59s"), (125, "2m05s"), (3780, "1h03m")])
def test_durations(seconds, shown):
    assert duration(seconds) == shown


def test_quantiles_are_nearest_rank():
    assert quantiles_ms([number / 1e3 for number in range(100, 0, -1)]) == pytest.approx((50, 95, 100))
    assert quantiles_ms([]) == (0, 0, 0)


class Shade:
    legend = "ghost"

    def __call__(self, step: runlog.Step) -> str:
        return f"ghost +0.{step.step:03}" + "-" * 60


def test_on_a_terminal_the_newest_step_stands_below_the_lines(spec_lines, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    shards = (runlog.ShardRange("t_train_1.bin", "0" * 64, 10**6, 0, 4000),)
    lines = spec_lines(step_s=(0.1,) * 40, shards=shards, val_losses=(4.0,) * 20)
    with Printer(stream, Shade()) as printer:
        for line in lines:
            printer(line)
    below = [text.partition("\n")[0] for text in stream.getvalue().split("\r\x1b[K")[1:]]
    assert re.fullmatch(r"step  1/40  1\.00 ktok/s  loss 5\.\d{4}  eta 4s  ghost \+0\.000-+", below[0])
    assert len(below[0]) == 59
    printed = re.sub(r"\r\x1b\[Kstep  \d+/40  \d.*?(?=\r)", "", stream.getvalue()).replace("\r\x1b[K", "")
    assert re.sub(r"  ghost .*|^ghost\n", "", printed) == render(lines)


def test_what_takes_long_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_LINE_S", 0.0)
    assert list(progress.over("read", "abc", "files")) == ["a", "b", "c"]
    first, second = capsys.readouterr().err.splitlines()
    assert (first[:30], second[:30]) == ("read  33%  1.00 files of 3.00 ", "read  67%  2.00 files of 3.00 ")
    assert "files/s  eta " in second
    lines: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(progress.click, "echo", lambda line, **_: lines.put(line))
    with progress.working("speedrun export"):
        assert lines.get(timeout=60) == "speedrun export  0s so far"
