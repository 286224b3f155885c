"""A web server for our own pages: on this machine only, and read-only.

Any site open in the same browser can send requests to 127.0.0.1. So a request must name this host, or a foreign name
could be pointed at it. Headers forbid other origins to read or embed a reply, and forbid our pages to load anything
from elsewhere.
"""

import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import parse_qsl

from speedrun.base.atomic_files import open_regular
from speedrun.base.errors import UsageError
from speedrun.base.signals import handled_by

_STALLED_S = 60.0  #: limit for a client that neither sends nor receives
_PIECE_BYTES = 2**16
HOST = "127.0.0.1"
_NAMES = {HOST, "localhost"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self' blob:; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    # With these two, a page may share memory between threads.
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
#: By suffix.
CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
}


class Reply(NamedTuple):
    """The body of a response, in parts, and its type."""

    body: Iterable[bytes]
    content_type: str = "application/octet-stream"


Answer = Callable[[str, dict[str, str]], Reply | None]  #: (path, query) -> reply; None: not found


def file_below(folder: Path, *names: str) -> Reply | None:
    """Return a file below a folder, a real path, as a reply; None if there is none, or a link on the way to it."""
    path = folder.joinpath(*names)
    try:
        is_below = path.is_relative_to(folder) and os.path.realpath(path) == str(path)
        file = open_regular(path, os.O_NOFOLLOW) if is_below else None  # a link may come meanwhile
    except (OSError, ValueError):
        return None
    return file and Reply(_pieces(file), CONTENT_TYPES.get(path.suffix[1:], "application/octet-stream"))


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


@contextmanager
def stoppable() -> Iterator[Callable[[], object]]:
    """Yield a function that waits for SIGINT or SIGTERM. Inside the block they have no other effect."""
    came = queue.SimpleQueue[int]()  # reentrant, so a signal handler may use it
    with handled_by(lambda number, _: came.put(number)):
        yield came.get


@contextmanager
def serving(answer: Answer, port: int = 0) -> Iterator[str]:
    """Serve on threads inside the block; yield the address. Port 0 chooses a free one."""
    try:
        server = _Server((HOST, port), answer)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"port {port}: {reason}; choose another with --port, or 0 for any") from None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a page may hold a stream of events open

    def __init__(self, address: tuple[str, int], answer: Answer) -> None:
        super().__init__(address, _Handler)
        self.answer = answer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay silent if the browser went away or a file cannot be read; print the traceback of a bug."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = _STALLED_S
    server: Any  #: a _Server

    def end_headers(self) -> None:
        """Add the headers of every reply."""
        for header, value in _HEADERS.items():
            self.send_header(header, value)
        super().end_headers()

    def do_GET(self) -> None:
        """Send what `answer` returns."""
        if not {host.partition(":")[0].lower() for host in self.headers.get_all("Host", [""])} <= _NAMES:
            return self.send_error(403, explain="Only for this machine")
        path, _, query = self.path.partition("?")
        found = self.server.answer(path, dict(parse_qsl(query)))
        if found is None:
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Type", found.content_type)
        self.end_headers()
        for part in found.body:
            self.wfile.write(part)
        return None

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
