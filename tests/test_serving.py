"""The local web server: only for this machine, read-only, an answer to whatever is sent, and bounded memory."""

import errno
import http.client
import os
import signal
import socket
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest
from typed import invoke

from speedrun.base import serving as module
from speedrun.base import signals
from speedrun.base.errors import UsageError
from speedrun.base.serving import CONTENT_TYPES, HOST, Reply, file_below, opened, serving
from speedrun.cli import use


def answer(path: str, query: dict[str, str]) -> Reply | None:
    def parts() -> Iterator[bytes]:
        yield b"one "
        yield query.get("name", "").encode()

    pages = {"/": Reply(b"<p>hello", CONTENT_TYPES["html"]), "/parts": Reply(parts())}
    return pages.get(path)


def asked(url: str, path: str, *, method: str = "GET", host: str = "") -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection(HOST, int(url.rstrip("/").rpartition(":")[2]), timeout=100)
    connection.request(method, path, headers={"Host": host} if host else {})
    response = connection.getresponse()
    return response.status, response.read(), dict(response.headers)


def test_pages_are_served_whole_and_in_parts_and_not_to_other_sites():
    with serving(answer) as url:
        status, body, headers = asked(url, "/")
        assert (status, body) == (200, b"<p>hello")
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert asked(url, "/parts?name=two")[:2] == (200, b"one two")
        assert asked(url, "/../etc/passwd")[0] == 404
        assert asked(url, "/", host="LOCALHOST")[0] == 200  # as browsers name a server on port 80
        assert asked(url, "/", host="evil.example:80")[0] == 403  # a name that was pointed at this machine
        assert asked(url, "/", method="POST")[0] == 501
        headers = asked(url, "/")[2]
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "default-src 'self'" in headers["Content-Security-Policy"]


HEADS: dict[str, tuple[bytes, int]] = {
    "whole": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
    "two in a row": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2, 200),
    "cut": (b"GET / HTTP/1.1\r\nHost: localhost\r\nX", 200),
    "cut in its line": (b"GET / HT", 400),
    "no version, no host": (b"GET /\r\n\r\n", 403),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 403),
    "not for urlsplit": (b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "no path": (b"GET * HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "no line": (b"\r\n", 400),
    "many words": (b"A " * 30_000 + b"\r\n\r\n", 400),
    "no text": (b"\xff\0\xfe\r\n\r\n", 400),
    "no version that is": (b"GET / HTTP/x\r\n\r\n", 400),
    "version": (b"GET / HTTP/9.9\r\n\r\n", 505),
    "method": (b"BREW / HTTP/1.1\r\n\r\n", 501),
    "long line": (b"GET /" + 10**6 * b"a", 414),
    "long header": (b"GET / HTTP/1.1\r\nX: " + 10**6 * b"a", 431),
    "many headers": (b"GET / HTTP/1.1\r\n" + 500 * b"X: a\r\n" + b"\r\n", 431),
    "long headers": (b"GET / HTTP/1.1\r\n" + 5 * (b"X: " + 60_000 * b"a" + b"\r\n") + b"\r\n", 431),
}


def sent(url: str, raw: bytes) -> socket.socket:
    one = socket.create_connection((HOST, int(url.rstrip("/").rpartition(":")[2])), timeout=100)
    one.sendall(raw)
    return one


def status(one: socket.socket) -> int:
    """Of the only reply: read to its end."""
    with one, one.makefile("rb") as file:
        version, code, _ = file.readline().split(b" ", 2)
        assert version == b"HTTP/1.0"
        assert b"HTTP/1.0 " not in file.read()
    return int(code)


def test_whatever_is_sent_is_answered_once(capfd):
    with serving(answer) as url:
        for name, (raw, code) in HEADS.items():
            one = sent(url, raw)
            one.shutdown(socket.SHUT_WR)
            assert (name, status(one)) == (name, code)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("limit", ["clients", "descriptors"])
def test_clients_are_few_and_quick(limit, monkeypatch, capfd):
    """One more is refused, until those that send nothing, or never end, are sent away."""
    if limit == "clients":
        monkeypatch.setattr(module, "_MOST_CLIENTS", 2)
    else:
        monkeypatch.setattr(os, "sysconf", {"SC_OPEN_MAX": module._SPARE_DESCRIPTORS + 6}.get)
    monkeypatch.setattr(module, "_REQUEST_S", float("inf"))
    with serving(answer) as url:
        silent, slow = (sent(url, raw) for raw in (b"", HEADS["cut"][0]))
        assert [asked(url, "/")[0] for _ in range(3)] == [503] * 3
        monkeypatch.setattr(module, "_REQUEST_S", 0.0)
        assert silent.recv(1) == b""
        assert status(slow) == 200
        monkeypatch.setattr(module, "_REQUEST_S", float("inf"))
        silent.close()
        while asked(url, "/")[0] != 200:  # their threads end
            pass
    assert capfd.readouterr() == ("", "")


def test_what_files_cost_is_bounded(tmp_path):
    """Clients that take none of it."""
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**25)
    tracemalloc.start()
    try:
        with serving(lambda path, _: file_below(tmp_path, path[1:])) as url:
            clients = [sent(url, b"GET /large HTTP/1.0\r\nHost: localhost\r\n\r\n") for _ in range(4)]
            assert all(one.recv(1) for one in clients)
            assert tracemalloc.get_traced_memory()[1] < 2**23
            for one in clients:
                one.close()
    finally:
        tracemalloc.stop()


def test_only_files_below_a_folder_are_opened(tmp_path):
    """Whatever is asked for, and whatever was put there."""
    (tmp_path / "secret").write_text("no")
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("yes")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "away").symlink_to(tmp_path)
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    with opened(folder, "inner", "file") as file:
        assert file.read() == b"yes"
    for names in (
        *(("..", "secret"), ("inner", "..", "..", "secret"), ("../secret",), ("link",), ("away", "secret")),
        *(("loop",), ("loop", "x"), ("pipe",), ("pipe", "x"), ("inner",), (), ("",), ("inner", ".")),
        *(("x" * 300,), ("\0",), ("inner", "file", "x"), (str(tmp_path / "secret"),), ("x",) * 5000),
    ):
        assert file_below(folder, *names) is None
    (folder / "inner").rename(folder / "other")
    (folder / "inner").symlink_to(tmp_path)  # under a server that has served from it
    assert file_below(folder, "inner", "secret") is None
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path)
    assert file_below(folder, "secret") is None
    assert file_below(tmp_path / "gone", "file") is None


def served(tmp_path: Path) -> list[list[str]]:
    (tmp_path / "models.json").write_text("[]")
    return [["watch", str(tmp_path / "later"), "--port", "0"], ["play", str(tmp_path), "--port", "0"]]


@pytest.mark.parametrize("number", signals.STOPS)
def test_a_signal_ends_a_server_with_success(number, tmp_path, monkeypatch):
    """From the moment at which its address is printed; a second one changes nothing."""

    def printed(_: object) -> None:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(click, "echo", printed)
    with signals.handled_by(lambda *_: pytest.fail("it is not handled")):
        for words in served(tmp_path):
            assert invoke(*words).exit_code == 0


def test_a_signal_while_a_page_is_made_leaves_nothing(tmp_path, monkeypatch):
    def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(use, "_trainable", killed)
    with signals.handled_by(lambda *_: pytest.fail("it is not handled")):
        found = invoke("play", "--recipe", "smoke")
    assert (found.exit_code, found.output) == (75, "error: stopped by SIGTERM\n")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("kind", ["pipe", "endless", "form", "gone"])
def test_a_folder_that_cannot_be_played_is_one_line(kind, tmp_path):
    at = tmp_path / "models.json"
    makes = {
        "pipe": lambda: os.mkfifo(at),
        "endless": lambda: at.symlink_to("/dev/zero"),
        "form": lambda: at.write_bytes(msgspec.json.encode({"a": 1})),
        "gone": lambda: None,
    }
    makes[kind]()
    found = invoke("play", tmp_path, "--port", "0")
    assert found.exit_code == 2
    (said,) = found.output.splitlines()
    assert said.endswith("need a folder that 'speedrun export RUN --to web' made")


def test_what_the_machine_cannot_give_is_said(monkeypatch, capfd):
    def failing(path: str, query: dict[str, str]) -> Reply | None:
        raise OSError(errno.EMFILE, "Too many open files")

    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with serving(failing) as url:
        assert asked(url, "/")[0] == 503
    with serving(answer) as url:
        with monkeypatch.context() as patch:
            patch.setattr(module.threading.Thread, "start", start)
            assert asked(url, "/")[0] == 503
        assert asked(url, "/")[0] == 200
        for port in (int(url.rstrip("/").rpartition(":")[2]), 70_000):
            with pytest.raises(UsageError, match="choose another with --port"), serving(answer, port):
                pass
    assert capfd.readouterr() == ("", "")
