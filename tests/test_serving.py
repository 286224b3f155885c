"""The local web server: only for this machine, read-only, and one line for a port in use."""

import http.client
from collections.abc import Iterator

import pytest

from speedrun.ground.errors import UsageError
from speedrun.ground.serving import HOST, Reply, content_type, serving


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


def test_other_sites_can_neither_ask_nor_read() -> None:
    with serving(answer) as url:
        assert asked(url, "/", host="evil.example:80")[0] == 403  # a name that was pointed at this machine
        assert asked(url, "/", method="POST")[0] == 501
        headers = asked(url, "/")[2]
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "default-src 'self'" in headers["Content-Security-Policy"]


def test_a_port_in_use_is_one_line() -> None:
    with serving(answer) as url:
        port = int(url.rstrip("/").rpartition(":")[2])
        with pytest.raises(UsageError, match="choose another with --port"), serving(answer, port):
            pass
    with pytest.raises(UsageError, match="port 70000"), serving(answer, 70_000):
        pass
