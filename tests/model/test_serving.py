"""The local web server: only for this machine, and read-only."""

import http.client
import os
from collections.abc import Iterator

import click
import pytest
from typed import invoke

from speedrun.base import signals
from speedrun.base.errors import UsageError
from speedrun.base.serving import CONTENT_TYPES, HOST, Reply, file_below, serving


def answer(path: str, query: dict[str, str]) -> Reply | None:
    def parts() -> Iterator[bytes]:
        yield b"one "
        yield query.get("name", "").encode()

    pages = {"/": Reply([b"<p>hello"], CONTENT_TYPES["html"]), "/parts": Reply(parts())}
    return pages.get(path)


def asked(
    url: str, path: str, *, method: str = "GET", hosts: tuple[str, ...] = ("localhost",)
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection(HOST, int(url.rstrip("/").rpartition(":")[2]), timeout=100)
    connection.putrequest(method, path, skip_host=True)
    for host in hosts:
        connection.putheader("Host", host)
    connection.endheaders()
    response = connection.getresponse()
    return response.status, response.read(), dict(response.headers)


def test_pages_are_served_whole_and_in_parts_and_not_to_other_sites(capfd):
    with serving(answer) as url:
        status, body, headers = asked(url, "/")
        assert (status, body) == (200, b"<p>hello")
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "default-src 'self'" in headers["Content-Security-Policy"]
        assert asked(url, "/parts?name=two")[:2] == (200, b"one two")
        assert asked(url, "/../etc/passwd")[0] == 404
        assert asked(url, "/", hosts=("LOCALHOST",))[0] == 200  # as browsers name a server on port 80
        # A name that was pointed at this machine.
        for hosts in (("evil.example:80",), ("localhost", "evil.example"), ()):
            assert asked(url, "/", hosts=hosts)[0] == 403
        assert asked(url, "/", method="POST")[0] == 501
        for port in (int(url.rstrip("/").rpartition(":")[2]), 70_000):
            with pytest.raises(UsageError, match="choose another with --port"), serving(answer, port):
                pass
    assert capfd.readouterr() == ("", "")


def test_only_files_below_a_folder_are_opened(tmp_path):
    (tmp_path / "secret").write_text("no")
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("yes")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "away").symlink_to(tmp_path)
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    assert (found := file_below(folder, "inner", "file"))
    assert b"".join(found.body) == b"yes"
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


@pytest.mark.parametrize("number", signals.STOPS)
def test_a_signal_ends_a_server_with_success(number, tmp_path, monkeypatch):
    """As soon as its address is printed; a second signal changes nothing."""

    def printed(_: object) -> None:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)

    (tmp_path / "models.json").write_text("[]")
    monkeypatch.setattr(click, "echo", printed)
    with signals.handled_by(lambda *_: pytest.fail("it is not handled")):
        for words in (["watch", tmp_path / "later"], ["play", tmp_path]):
            assert invoke(*words, "--port", 0).exit_code == 0


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.write_text('{"a": 1}')]
)
def test_a_folder_that_cannot_be_played_is_one_line(make, tmp_path):
    make(tmp_path / "models.json")
    found = invoke("play", tmp_path, "--port", "0")
    assert found.exit_code == 2
    (said,) = found.output.splitlines()
    assert said.endswith("need a folder that 'speedrun export RUN --to web' made")
