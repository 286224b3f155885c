"""A local hub: the part of the protocol that the real client uses, with faults."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CUT = 0.6
#: Faults that are a status alone, one with the seconds after which to ask again, below zero.
_STATUS = {"500": (500,), "401": (401,), "429": (429, -1)}


class FakeHub(ThreadingHTTPServer):
    """Serves the files of one repository; each GET of a file uses up one of its `faults`."""

    daemon_threads = True

    def __init__(self, repo: str, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repo, self.files, self.commit = repo, files, COMMIT
        self.faults: dict[str, list[str]] = {}
        self.always: dict[str, str] = {}  #: fault of every GET of a file
        self.gets: list[tuple[str, int]] = []  #: name and first byte of each transfer
        self.tokens: set[str | None] = set()
        self.stalled = threading.Event()  #: set when a transfer stalls or is held
        self.over = threading.Event()  #: ends stalls; a transfer that was held goes on

    def await_stall(self, why_not: Callable[[], object]) -> None:
        """Wait until a transfer stalls; fail at once if `why_not` tells what prevents it."""
        while not self.stalled.wait(0.01):
            assert (reason := why_not()) is None, reason

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore killed clients."""


@contextmanager
def serve(repo: str, files: dict[str, bytes]) -> Iterator[FakeHub]:
    with FakeHub(repo, files) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.over.set()
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> FakeHub:
        assert isinstance(self.server, FakeHub)
        return self.server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._file(head=True)

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if self.hub.repo in path:  # the client has other requests
            self.hub.tokens.add(self.headers.get("Authorization"))
        of_repo = (
            path.removeprefix("/api/datasets").removeprefix("/api/models").removeprefix(f"/{self.hub.repo}")
        )
        if of_repo.startswith("/revision/"):
            self._listing(path.rpartition("/")[2])
        elif of_repo == f"/tree/{self.hub.commit}":
            files = self.hub.files.items()
            tree = [{"type": "file", "path": name, "size": len(x), "oid": "0" * 40} for name, x in files]
            self._begin(200, len(raw := json.dumps(tree).encode()), Content_Type="application/json")
            self.wfile.write(raw)
        elif path.removeprefix("/datasets").startswith(f"/{self.hub.repo}/resolve/"):
            self._file(head=False)
        else:
            self._begin(404)

    def _begin(self, status: int, length: int = 0, **headers: str) -> None:
        self.send_response(status)
        if length < 0:
            self.send_header("Retry-After", str(-length))
            length = 0
        for key, value in {**headers, "Content_Length": str(length)}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()

    def _listing(self, revision: str) -> None:
        fault = self._next_fault("the listing")
        if fault in _STATUS:
            return self._begin(*_STATUS[fault])
        if fault == "stall":
            self.hub.stalled.set()
            self.hub.over.wait()
        if revision not in ("main", self.hub.commit):
            return self._begin(404)
        siblings = []
        for name, body in self.hub.files.items():
            lfs = {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 134}
            siblings.append({"rfilename": name, "size": len(body), "blobId": "0" * 40, "lfs": lfs})
        facts = {"id": self.hub.repo, "sha": self.hub.commit, "siblings": siblings, "tags": []}
        facts |= {"private": False, "disabled": False, "downloads": 0, "likes": 0}
        raw = (fault or json.dumps(facts)).encode()
        self._begin(200, len(raw), Content_Type="application/json")
        self.wfile.write(raw)
        return None

    def _next_fault(self, name: str) -> str | None:
        faults = self.hub.faults.get(name)
        return faults.pop(0) if faults else self.hub.always.get(name)

    def _file(self, *, head: bool) -> None:
        revision, name = urlsplit(self.path).path.split("/")[-2:]
        body = self.hub.files.get(name)
        if body is None or revision not in ("main", self.hub.commit):
            return self._begin(404)
        fault = None if head else self._next_fault(name)
        if fault in _STATUS:
            return self._begin(*_STATUS[fault])
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        start = 0 if fault in ("ignore range", "ignore range and cut") else start
        digest = f'"{hashlib.sha256(body).hexdigest()}"'
        headers = {"X_Repo_Commit": self.hub.commit, "X_Linked_Etag": digest, "ETag": digest}
        headers |= {"X_Linked_Size": str(len(body)), "Accept_Ranges": "bytes"}
        headers |= {"Content_Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if start else {}
        self._begin(206 if start else 200, len(body) - start, **headers)
        if not head:
            self.hub.gets.append((name, start))
            self._send(body, start, fault)
        return None

    def _send(self, body: bytes, start: int, fault: str | None) -> None:
        middle = start + int(CUT * (len(body) - start))
        if fault == "flip":
            at = (start + len(body)) // 4 * 2  # the low byte of a token: another id, but a possible one
            body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        if fault == "repeat":  # the start again, in place of the end
            body = body[:middle] + body[: len(body) - middle]
        if fault in ("cut", "ignore range and cut", "stall", "hold"):
            self.wfile.write(body[start:middle])
            self.wfile.flush()
            if fault in ("stall", "hold"):
                self.hub.stalled.set()
                self.hub.over.wait()
            if fault != "hold":
                self.close_connection = True
                return
            start = middle
        self.wfile.write(body[start:])
