"""A web server for our own pages: on this machine only, and read-only.

Any site open in the same browser can send requests to 127.0.0.1. So a request must name this host, or a foreign name
could be pointed at it; and replies forbid other origins to read or embed them, and our pages to load anything else.
"""

import contextlib
import errno
import os
import queue
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from speedrun.ground.errors import UsageError
from speedrun.ground.signals import handled_by

_STALLED_S = 60.0  #: to send a request, or to take a piece of a reply
_PIECE_BYTES = 2**16
#: Whatever a request can name: too long, a loop of links, no folder.
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.ENXIO)
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
#: By the end of a path.
CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
}


class Reply(NamedTuple):
    """What a request gets."""

    body: bytes | FileIO | Iterator[bytes]  #: an open file, or parts as they come
    content_type: str = "application/octet-stream"


Answer = Callable[[str, dict[str, str]], Reply | None]  #: (path, query) -> reply; None: not found


def content_type(path: str) -> str:
    """Return the type of a file by its name."""
    return CONTENT_TYPES.get(path.rpartition(".")[2], "application/octet-stream")


def opened(folder: Path, *names: str) -> FileIO:
    """Open a regular file below a folder for reading. No name leads upwards or through a link, not even a sudden one.

    The folder itself is no link either: give its real path.

    Raises:
        OSError: if there is none that can be read.
    """
    if not {"", ".", ".."}.isdisjoint(names) or any("/" in name or "\0" in name for name in names):
        raise FileNotFoundError(errno.ENOENT, "not the name of a file")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe that blocks would never open
    at = os.open(folder, flags | os.O_DIRECTORY)
    for name in names:
        above = at
        try:
            at = os.open(name, flags, dir_fd=above)
        finally:
            os.close(above)
    if not stat.S_ISREG(os.fstat(at).st_mode):
        os.close(at)
        raise OSError(errno.ENXIO, "it is no file")
    return FileIO(at)


def file_below(folder: Path, *names: str) -> Reply | None:
    """Return the reply with a file below a folder; None if there is no such file."""
    try:
        return Reply(opened(folder, *names), content_type(names[-1]))
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        return None


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[], object]]:
    """Give a function that waits for SIGINT or SIGTERM. Inside the block they have no other effect."""
    came = queue.SimpleQueue[int]()  # a handler may put into it, whatever it interrupts
    with handled_by(lambda number, _: came.put(number)):
        yield came.get


@contextlib.contextmanager
def serving(answer: Answer, port: int = 0) -> Iterator[str]:
    """Serve inside the block, on threads; give the address. Port 0: any that is free.

    An OSError of `answer` is told to the client: the machine cannot now.

    Raises:
        UsageError: if the port cannot be used.
    """
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
        """Say nothing of a browser that went away; anything else is a mistake of ours."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = _STALLED_S
    server: Any  #: a _Server

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Leave the message out, which may quote the request."""
        super().send_error(code, None, explain)

    def end_headers(self) -> None:
        """Add what every reply says."""
        for header, value in _HEADERS.items():
            self.send_header(header, value)
        super().end_headers()

    def do_GET(self) -> None:
        """Answer."""
        if not {host.partition(":")[0].lower() for host in self.headers.get_all("Host", [""])} <= _NAMES:
            return self.send_error(403, explain="Only for this machine")
        path, _, query = self.path.partition("?")
        if not path.startswith("/"):
            return self.send_error(400)
        try:
            found = self.server.answer(path, dict(parse_qsl(query)))
        except OSError:  # it has no descriptor left, or its disk fails
            return self.send_error(503)
        return self.send_error(404) if found is None else self._send(found)

    def _send(self, found: Reply) -> None:
        with contextlib.ExitStack() as stack:
            size, parts = None, found.body
            if isinstance(parts, bytes):
                size, parts = len(parts), iter([parts])
            elif isinstance(parts, FileIO):
                size = os.fstat(stack.enter_context(parts).fileno()).st_size
                parts = iter(partial(parts.read, _PIECE_BYTES), b"")
            self.send_response(200)
            self.send_header("Content-Type", found.content_type)
            if size is not None:
                self.send_header("Content-Length", str(size))
            self.end_headers()
            # The browser went away, or the disk fails: the client sees that the reply is short.
            stack.enter_context(contextlib.suppress(OSError))
            for part in parts:
                self.wfile.write(part)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of each request."""
