"""The page of runs has each line of a log once, the numbers of the log, and hostile text as text."""

import json
import os
import random
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsers import chromium, tab
from small_run import FIRST, SMALL
from typed import as_words, free_port, invoke

from speedrun.base import runlog, subprocesses
from speedrun.base.atomic_files import write_whole
from speedrun.base.serving import HOST
from speedrun.board import ghost
from speedrun.model import watch_server
from speedrun.model.watch_server import Feed, rules
from speedrun.record.reader import load

ROOT = Path(__file__).parents[2]
(LOG,) = FIRST.glob("runs/*/metrics.jsonl")
RAW = LOG.read_bytes()
LINES = RAW.decode().splitlines()
HOSTILE = "<img src=x onerror=window.struck=1>"


def parsed(events: Iterator[bytes]) -> list[tuple[str, Any]]:
    """Name and data of each event."""
    found = []
    for block in b"".join(events).decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields["event"], json.loads(fields["data"])))
    return found


def lines_of(events: list[tuple[str, Any]]) -> list[str]:
    return [line for name, data in events if name == "lines" for line in data["lines"]]


def log_in(folder: Path, raw: bytes = b"", run: str = "one") -> Path:
    path = folder / "runs" / run / "metrics.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


def line(event: dict[str, object]) -> str:
    return json.dumps(
        {"i": 0, "t_mono_ns": 0, "t_utc": "2026-11-22T11:14:00+00:00", "prev": "", "event": event}
    )


def warning(message: str) -> str:
    return line({"ev": "warning", "message": message})


def sample(step: int, text: str = "") -> str:
    return json.dumps({"step": step, "prompt": "", "text": text or f"text of step {step}"}) + "\n"


@pytest.mark.parametrize("is_copied", [False, True])
def test_each_line_comes_once_and_whole(tmp_path, is_copied):
    """However the log grows, and if rsync replaces it with copies."""
    draw = random.Random(0)
    for _ in range(20):
        path, page, got = log_in(tmp_path), Feed([tmp_path]), list[str]()
        for stop in [*sorted(draw.sample(range(len(RAW)), 6)), len(RAW)]:
            if is_copied:
                path.unlink()
            with path.open("ab") as file:
                file.write(RAW[0 if is_copied else file.tell() : stop])
            got += lines_of(parsed(page.news()))
        assert got == LINES


def test_another_log_in_its_place_begins_anew(tmp_path):
    path, page = log_in(tmp_path, RAW), Feed([tmp_path])
    parsed(page.news())
    other = RAW.replace(LOG.parent.name.encode(), b"smoke-0-ffff")
    for raw in (other, other[:5000], b"", RAW):
        path.write_bytes(raw)
        events = parsed(page.news())
        assert lines_of(events) == raw.decode().splitlines()[: raw.count(b"\n")]
        assert all(data["anew"] for name, data in events if name == "lines")


def test_runs_that_come_later_are_found(tmp_path):
    page = Feed([tmp_path / "later"])
    ((_, listing),) = parsed(page.news())
    assert listing == {"files": [], "folders": [{"name": str(tmp_path / "later"), "exists": False}]}
    log_in(tmp_path / "later", RAW, "a")
    assert lines_of(parsed(page.news())) == LINES
    log_in(tmp_path / "later", RAW, "b")
    (tmp_path / "later.samples.jsonl").write_text('{"step": 1, "prompt": "", "text": "hello"}\n')
    (_, listing), *rest = parsed(page.news())
    found = {(file["kind"], file["run"]) for file in listing["files"]}
    assert found == {("log", "a"), ("log", "b"), ("samples", "")}
    assert len(lines_of(rest)) == len(LINES) + 1


def test_a_file_that_is_replaced_by_a_longer_one_is_sent_once(tmp_path):
    """Each new sample rewrites the file."""
    log_in(tmp_path / "run", RAW)
    path, lines, page = subprocesses.samples_of(tmp_path / "run"), [], Feed([tmp_path / "run"])
    list(page.news())
    got: list[str] = []
    for step in (10, 40, 30, 20):
        lines.append(sample(step))
        write_whole(path, *(line.encode() for line in lines))
        got += lines_of(parsed(page.news()))
    assert got == [line.rstrip() for line in lines]


def test_hostile_names_and_bytes_stay_one_event(tmp_path):
    run = os.fsdecode(b"\xff<b>\nid: 7\n\nevent: end")
    first, second, *_ = RAW.splitlines(keepends=True)
    log_in(tmp_path, first + b'\xff\r\n{"x": "a\rb"}\n' + second, run)
    (_, listing), (name, data) = parsed(Feed([tmp_path]).news())
    assert listing["files"][0]["run"].endswith("<b>\nid: 7\n\nevent: end")
    assert (name, data["lines"]) == ("lines", [LINES[0], None, None, LINES[1]])


def test_a_pipe_in_the_place_of_a_log_stops_nobody(tmp_path):
    os.mkfifo(log_in(tmp_path, run="pipe").parent / "other")
    path = log_in(tmp_path, run="another")
    path.unlink()
    os.mkfifo(path)
    log_in(tmp_path, RAW)
    page = Feed([tmp_path])
    assert LINES[0] in lines_of(parsed(page.news()))
    (_, listing), *_ = parsed(page.news())
    assert {file["problem"] for file in listing["files"]} == {"", "not a regular file"}


def test_a_long_log_comes_in_pieces_and_a_line_without_end_is_said(tmp_path):
    long = [LINES[0], *(warning("x" * 999) for _ in range(3000)), warning("y" * 700_000), warning("z")]
    path, page = log_in(tmp_path, "\n".join([*long, ""]).encode()), Feed([tmp_path])
    events = parsed(page.news())
    assert lines_of(events) == long
    assert len(events) > 4
    with path.open("ab") as log:
        log.write(b"x" * 10**7)
    for _ in range(2):
        events = parsed(page.news())
    assert "longer than" in events[0][1]["files"][0]["problem"]


def test_only_samples_of_a_regular_file_are_shown(tmp_path):
    log_in(tmp_path / "run", RAW)
    path = subprocesses.samples_of(tmp_path / "run")
    path.write_text("root:x:0:0\n" + sample(1))
    page = Feed([tmp_path / "run"])
    assert lines_of(parsed(page.news()))[len(LINES) :] == [None, sample(1).rstrip()]
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert lines_of(parsed(Feed([tmp_path / "run"]).news())) == LINES


def test_the_rules_are_those_of_the_track_and_the_record(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = rules(str(FIRST), "smoke-cpu@2")
    (run,) = load(FIRST).runs
    assert found["target"] == 3.15
    assert found["ghost"]["record"] == FIRST.name
    for name, of in (("tokens", "tokens_seen"), ("time_s", "train_time_s"), ("loss", "loss")):
        np.testing.assert_allclose(found["ghost"][name], [getattr(step, of) for step in run.steps])
    assert ghost.best(Path("records"), "smoke-cpu@2") is not None
    assert rules("best", "smoke-cpu@2")["ghost"]["record"] == "2026-11-29-220-steps"
    assert rules(None, "smoke-cpu@2")["ghost"] is None
    for choice, track, problem in (
        ("best", "smoke-cpu@3", "whose target may differ"),
        ("docs", "smoke-cpu@2", "no ghost: docs"),
        (None, "../x", "no target: unknown track"),
    ):
        assert problem in " ".join(rules(choice, track)["problems"])


def got(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=100) as reply:
        return reply.read()


def test_the_feed_ends_with_the_server(tmp_path):
    """It still sends the last lines."""
    path, whole = log_in(tmp_path, RAW[:30_000]), []
    with watch_server.watching([tmp_path], 0, None) as url:
        assert b"watch.js" in got(url)
        for name in ("watch.js", "watch.css", "chart.js"):
            assert got(url + name) == (ROOT / "speedrun" / "model" / "watch_page" / name).read_bytes()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            got(url + "../server.py")
        reader = threading.Thread(target=lambda: whole.append(got(url + "feed")))
        reader.start()
        threading.Event().wait(0.5)
        path.write_bytes(RAW)
    reader.join(10)
    events = parsed(iter(whole))
    assert lines_of(events) == LINES
    assert events[-1][0] == "end"


def test_a_page_that_cannot_be_served_is_one_warning(tmp_path, monkeypatch):
    said, warnings = threading.Event(), []
    monkeypatch.setattr(subprocesses, "say", lambda line: (warnings.append(line), said.set()))
    with watch_server.watching([tmp_path], 0, None) as url:
        port = int(url.rstrip("/").rpartition(":")[2])
        with watch_server.watched(tmp_path / "run", port, None):
            assert said.wait(60)
    problem = f"port {port}: Address already in use; choose another with --watch-port"
    again = f"speedrun watch {tmp_path}/run --port 0"
    assert warnings == [f"warning: watch: {problem}; the run needs no page; for another: {again}"]


def test_mistakes_are_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").touch()
    with watch_server.watching([], 0, None) as url:
        port = url.rstrip("/").rpartition(":")[2]
        for words in (["x"], [], ["later", "--port", port]):
            done = invoke("watch", *words)
            assert (done.exit_code, len(done.output.splitlines())) == (2, 1)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser) -> Iterator[Any]:
    with tab(browser, viewport={"width": 1200, "height": 900}) as page:
        yield page


@contextmanager
def shown(page: Any, *folders: Path, choice: str | None = None) -> Iterator[str]:
    with watch_server.watching(folders, 0, choice) as url:
        page.goto(url)
        yield url


def says(page: Any, words: str, where: str = "body") -> None:
    page.wait_for_function(
        "([where, words]) => document.querySelector(where).innerText.includes(words)", arg=[where, words]
    )


def tiles(page: Any) -> dict[str, str]:
    pairs = page.evaluate(
        "[...document.querySelectorAll('#tiles > div')].map(one => [...one.children].map(c => c.innerText))"
    )
    return dict(pairs)


def events_of(raw: bytes) -> list[Any]:
    return [runlog.decode(one).event for one in raw.splitlines()]


def check_numbers(page: Any, raw: bytes) -> None:
    events = events_of(raw)
    steps = [event for event in events if isinstance(event, runlog.Step)]
    vals = [event for event in events if isinstance(event, runlog.Val)]
    plan = next(event for event in events if isinstance(event, runlog.Plan))
    machine = next(event for event in events if isinstance(event, runlog.Preflight))
    last = steps[-1].step + 1
    says(page, f"step\n{last}\n", "#tiles")
    found = tiles(page)
    assert found["validation loss"].startswith(f"{vals[-1].loss:.4f}\n")
    mean = np.mean([step.loss for step in steps[-7:]])
    assert found["training loss"] == f"{mean:.4f}\nmean of 7; last {steps[-1].loss:.4f}"
    assert found["training time"].startswith(f"{steps[-1].train_time_s:.1f} s")
    ms = sorted(np.diff([0.0, *(step.train_time_s for step in steps)]) * 1000)
    middle, slow = ms[len(ms) // 2], ms[int(len(ms) * 0.95)]
    assert found["step time"].startswith(f"{middle:.0f} ms\nmedian; 95 % below {slow:.0f} ms")
    then, now = steps[-51], steps[-1]
    rate = (now.tokens_seen - then.tokens_seen) / (now.train_time_s - then.train_time_s)
    assert found["tokens per second"].startswith(f"{rate / 1000:.3g} k")
    mfu = 100 * rate * plan.flops_per_token / (machine.matmul_gflops * 1e9)
    assert found["MFU"] == f"{mfu:.1f} %\nof the measured matmul rate"


def test_a_run_is_watched_from_start_to_end(page, tmp_path):
    path = log_in(tmp_path / "run")
    path.unlink()
    with shown(page, tmp_path / "run", choice=str(FIRST)):
        says(page, "Waiting for the first run")
        pieces = [RAW.index(LINES[count].encode()) for count in (0, 3, 8, 120, 200)]
        for start, stop in zip(pieces, [*pieces[1:], len(RAW)], strict=True):
            with path.open("ab") as log:
                log.write(RAW[start : start + (stop - start) // 2])
                log.flush()
                threading.Event().wait(0.3)
                log.write(RAW[start + (stop - start) // 2 : stop])
            if stop == pieces[2]:
                says(page, "Now: warming up", "#summary")
            if stop in pieces[3:]:
                check_numbers(page, RAW[:stop])
                says(page, "silent for", "#status")  # the log is of long ago
        check_numbers(page, RAW)
        says(page, "finished", "#status")
        log = events_of(RAW)
        at = next(i for i, one in enumerate(log) if isinstance(one, runlog.Val) and one.loss <= 3.15)
        time_s = [one.train_time_s for one in log[:at] if isinstance(one, runlog.Step)][-1]
        says(page, f"loss {log[at].loss:.4f} after {time_s:.1f} s", "#tiles")
        says(page, f"ghost: {FIRST.name}", "#key")
        events = page.inner_text("#events")
        first = next(one for one in log if isinstance(one, runlog.Val) and one.step)
        said = (
            "train/8x256",
            "s: validation",
            "window_blocks 3",
            f"step {first.step}: loss {first.loss:.4f}",
        )
        assert not [words for words in said if words not in events]


def test_hostile_text_stays_text(page, tmp_path):
    start = json.loads(LINES[0])
    start["event"] |= {"run_id": HOSTILE, "recipe": HOSTILE}
    bad = [
        line({"ev": "warning", "message": HOSTILE}),
        line({"ev": "error", "kind": HOSTILE, "message": HOSTILE}),
        line({"ev": HOSTILE}),
        *('{"i": 1', "[]", "null", line({"ev": "step", "step": HOSTILE}), line({"ev": "val", "loss": None})),
        *(line({"ev": "step", "step": 0, "train_time_s": 1e999, "tokens_seen": 1}), '"__proto__"'),
    ]
    raw = "\n".join([json.dumps(start), *LINES[1:40], *bad, ""]).encode()
    log_in(tmp_path / "run", raw, HOSTILE.replace("/", ""))
    said = json.dumps({"step": 3, "prompt": HOSTILE, "text": HOSTILE})
    subprocesses.samples_of(tmp_path / "run").write_text(f"{said}\n")
    with shown(page, tmp_path / "run"):
        says(page, "8 invalid lines", "#unread")
        for where in ("#title", "#events", "#texts"):
            says(page, HOSTILE, where)
        says(page, "crashed", "#status")
    assert page.evaluate("[document.images.length, window.struck ?? null]") == [0, None]


def test_the_newest_samples_of_the_run_in_focus_are_shown(page, tmp_path):
    """The records have the same name, and the newest step is not in the last line."""
    folders = [tmp_path / parent / "docs" for parent in "ab"]
    for folder, name in zip(folders, ("first", "second"), strict=True):
        log_in(folder, RAW)
        lines = [sample(1000, f"newest of the {name}"), *map(sample, range(1, 90))]
        subprocesses.samples_of(folder).write_text("".join(lines))
    with shown(page, *folders):
        says(page, "newest of the first", "#texts")
        page.locator("input[name=focus]").nth(1).check()
        says(page, "newest of the second", "#texts")
        assert page.inner_text("#texts").count("step") == 1


def test_the_page_keeps_what_it_has_and_continues(page, tmp_path):
    port = free_port()
    cut = RAW.index(LINES[150].encode())
    path = log_in(tmp_path, RAW[:cut])
    with watch_server.watching([tmp_path], port, None) as url:
        page.goto(url)
        check_numbers(page, RAW[:cut])
    says(page, "The server has ended", "#trouble")
    path.write_bytes(RAW)
    with watch_server.watching([tmp_path], port, None):
        check_numbers(page, RAW)
        page.wait_for_selector("#trouble", state="hidden")
        assert "another log" not in page.inner_text("#events")
        assert page.inner_text("#events").count("\nstarted") == 1
        path.write_bytes(RAW[:cut].replace(LOG.parent.name.encode(), b"smoke-0-ffff"))
        says(page, "smoke-0-ffff", "#title")
        check_numbers(page, RAW[:cut])
        says(page, "another log replaced it", "#events")


def test_a_real_run_is_watched_while_it_trains(browser, smoke_data, tmp_path):
    out, port, seen = tmp_path / "run", free_port(), {}

    def spectate() -> None:
        """In a thread, since a run handles signals in the first one."""
        with chromium() as own, tab(own) as page:
            while not port_is_served(port):
                threading.Event().wait(0.1)
            page.goto(f"http://127.0.0.1:{port}/")
            says(page, "running", "#status")
            says(page, "The server has ended", "#trouble")
            seen.update(tiles(page), status=page.inner_text("#status"), schedule=page.inner_text("#inputs"))

    watcher = threading.Thread(target=spectate)
    watcher.start()
    words = ["--data", smoke_data, "--out", out, "--watch", "--watch-port", port]
    done = invoke("run", "--track", "smoke-cpu", *words, *as_words(SMALL))
    watcher.join(60)
    assert done.exit_code == 1, done.output  # twelve steps miss the target
    assert f"watch   http://127.0.0.1:{port}/" in done.output
    assert "warning" not in done.output
    (log,) = out.glob("runs/*/metrics.jsonl")
    *_, end = events = events_of(log.read_bytes())
    steps = [event for event in events if isinstance(event, runlog.Step)]
    assert seen["status"] == "finished"
    assert seen["step"].startswith("12\nof 12")
    assert f"last {steps[-1].loss:.4f}" in seen["training loss"]
    assert seen["validation loss"].startswith(f"{end.val_loss:.4f}\n")
    assert set(steps[-1].inputs) <= set(seen["schedule"].split())


def port_is_served(port: int) -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex((HOST, port))
