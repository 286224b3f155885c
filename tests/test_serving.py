"""The local web server: only for this machine, read-only, and an answer to whatever is sent."""

import errno
import http.client
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from speedrun import cli
from speedrun.cli import play
from speedrun.ground import signals
from speedrun.ground.errors import Terminated, UsageError
from speedrun.ground.serving import HOST, Reply, content_type, file_below, opened, serving
from speedrun.watch import server


def answer(path: str, query: dict[str, str]) -> Reply | None:
    def parts() -> Iterator[bytes]:
        yield b"one "
        yield query.get("name", "").encode()

    pages = {"/": Reply(b"<p>hello", content_type("index.html")), "/parts": Reply(parts())}
    return pages.get(path)


def asked(url: str, path: str, *, method: str = "GET", host: str = "") -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection(HOST, int(url.rstrip("/").rpartition(":")[2]), timeout=10)
    connection.request(method, path, headers={"Host": host} if host else {})
    response = connection.getresponse()
    return response.status, response.read(), dict(response.headers)


def test_pages_are_served_whole_and_in_parts() -> None:
    with serving(answer) as url:
        status, body, headers = asked(url, "/")
        assert (status, body) == (200, b"<p>hello")
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert asked(url, "/parts?name=two")[:2] == (200, b"one two")
        assert asked(url, "/../etc/passwd")[0] == 404
        assert asked(url, "/", host="LOCALHOST")[0] == 200  # as browsers name a server on port 80


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 403),
        (b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET * HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"BREW / HTTP/1.1\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\n" + 500 * b"X: a\r\n" + b"\r\n", 431),
    ],
)
def test_whatever_is_sent_is_answered(head: bytes, code: int, capfd) -> None:
    with serving(answer) as url:
        port = int(url.rstrip("/").rpartition(":")[2])
        with socket.create_connection((HOST, port), timeout=20) as one, one.makefile("rb") as reply:
            one.sendall(head)
            assert reply.readline().split(b" ", 2)[:2] == [b"HTTP/1.0", str(code).encode()]
    assert capfd.readouterr() == ("", "")


def test_only_files_below_a_folder_are_opened(tmp_path) -> None:
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
def test_a_signal_ends_a_server_with_success(number: int, tmp_path, monkeypatch) -> None:
    """From the moment at which its address is printed; a second one changes nothing."""

    def printed(_: object) -> None:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(click, "echo", printed)
    with signals.handled_by(lambda *_: pytest.fail("it is not handled")):
        for words in served(tmp_path):
            assert CliRunner().invoke(cli.command, words).exit_code == 0


def test_a_signal_while_a_page_is_made_leaves_nothing(tmp_path, monkeypatch) -> None:
    def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(play, "_trainable", killed)
    with signals.handled_by(lambda *_: pytest.fail("it is not handled")):
        found = CliRunner().invoke(cli.command, ["play", "--recipe", "smoke"])
    assert (found.exit_code, found.output) == (75, "error: stopped by SIGTERM\n")
    assert not [*tmp_path.iterdir()]


def test_a_signal_ends_the_server_beside_a_run(tmp_path, monkeypatch) -> None:
    class Input:
        buffer = property(lambda self: self)

        def read(self) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("sys.stdin", Input())
    with signals.handled_by(lambda *_: pytest.fail("it is not handled")), pytest.raises(Terminated):
        server.main(str(tmp_path), "0")


@pytest.mark.parametrize("kind", ["pipe", "endless", "form", "gone"])
def test_a_folder_that_cannot_be_played_is_one_line(kind: str, tmp_path) -> None:
    at = tmp_path / "models.json"
    makes = {
        "pipe": lambda: os.mkfifo(at),
        "endless": lambda: at.symlink_to("/dev/zero"),
        "form": lambda: at.write_bytes(msgspec.json.encode({"a": 1})),
        "gone": lambda: None,
    }
    makes[kind]()
    found = CliRunner().invoke(cli.command, ["play", str(tmp_path), "--port", "0"])
    assert found.exit_code == 2
    (said,) = found.output.splitlines()
    assert said.endswith("need a folder that 'speedrun export RUN --to web' made")


def test_what_the_machine_cannot_give_is_said(capfd) -> None:
    def failing(path: str, query: dict[str, str]) -> Reply | None:
        raise OSError(errno.EMFILE, "Too many open files")

    with serving(failing) as url:
        assert asked(url, "/")[0] == 503
    with serving(answer) as url:
        for port in (int(url.rstrip("/").rpartition(":")[2]), 70_000):
            with pytest.raises(UsageError, match="choose another with --port"), serving(answer, port):
                pass
    assert capfd.readouterr() == ("", "")


def test_other_sites_can_neither_ask_nor_read() -> None:
    with serving(answer) as url:
        assert asked(url, "/", host="evil.example:80")[0] == 403  # a name that was pointed at this machine
        assert asked(url, "/", method="POST")[0] == 501
        headers = asked(url, "/")[2]
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "default-src 'self'" in headers["Content-Security-Policy"]
