"""A web server for our own pages: on this machine only, and read-only.

Any site open in the same browser can send requests to 127.0.0.1. So a request must name this host, or a foreign name
could be pointed at it; and replies forbid other origins to read or embed them, and our pages to load anything else.

Whatever clients send, the memory they cost is bounded: there are at most 64, each request is short, and each file is
sent in pieces. Every request is answered; a client that stalls is not waited for.
"""

import contextlib
import errno
import os
import queue
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from speedrun.base.clock import Stopwatch
from speedrun.base.errors import UsageError
from speedrun.base.signals import handled_by

_MOST_CLIENTS = 64
_REQUEST_S = 10.0  #: to send a request
_STALLED_S = 60.0  #: to take a piece of a reply
_LEAVE_S = 1.0  #: to stop sending after a reply
_REQUEST_BYTES = 2**17  #: line and headers; Python's own limits are 64 KiB for each line, and 100 headers
_PIECE_BYTES = 2**16
_SPARE_DESCRIPTORS = 16  #: for the process itself
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
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
#: By the end of a name.
CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
}


class Reply(NamedTuple):
    """What a request gets."""

    body: bytes | FileIO | Iterator[bytes]  #: a file as long as it is now, or parts as they come
    content_type: str = "application/octet-stream"


Answer = Callable[[str, dict[str, str]], Reply | None]  #: (path, query) -> reply; None: not found


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
        file = opened(folder, *names)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        return None
    return Reply(file, CONTENT_TYPES.get(names[-1].rpartition(".")[2], "application/octet-stream"))


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[], object]]:
    """Yield a function that waits for SIGINT or SIGTERM. Inside the block they have no other effect."""
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
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], answer: Answer) -> None:
        super().__init__(address, _Handler)
        self.answer = answer
        #: Connections, with the time since they began; None once their request is here.
        self.clients: dict[Any, Stopwatch | None] = {}
        #: A client has three descriptors at most: its connection, and two while a file is looked for.
        self._most = min(_MOST_CLIENTS, max(1, (os.sysconf("SC_OPEN_MAX") - _SPARE_DESCRIPTORS) // 3))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread, unless there are too many."""
        if len(self.clients) < self._most:
            self.clients[request] = Stopwatch()
            with contextlib.suppress(RuntimeError):  # no thread is left
                return super().process_request(request, client_address)
            del self.clients[request]
        with contextlib.suppress(OSError):  # it went away
            request.sendall(_BUSY)
        return self._close(request, wait_s=0)

    def service_actions(self) -> None:
        """End the requests of clients that send them too slowly: what is here is answered."""
        for request, since in list(self.clients.items()):
            if since is not None and since.seconds > _REQUEST_S:
                with contextlib.suppress(OSError):  # it went away
                    request.shutdown(socket.SHUT_RD)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection after its reply."""
        self._close(request, _LEAVE_S)
        self.clients.pop(request, None)

    def _close(self, request: Any, wait_s: float) -> None:
        """Close, but read before what is on its way: to close a connection with unread bytes takes the reply back."""
        with contextlib.suppress(OSError):  # it went away, or has no end
            request.shutdown(socket.SHUT_WR)
            request.settimeout(wait_s)
            for _ in range(16):
                if not request.recv(_PIECE_BYTES):
                    break
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that went away; anything else is a mistake of ours."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Head:
    """The lines of a request, of limited length together."""

    def __init__(self, file: Any) -> None:
        self._file, self._left, self.close = file, _REQUEST_BYTES, file.close

    def readline(self, most: int) -> bytes:
        line = self._file.readline(most)
        self._left -= len(line)
        if self._left < 0:
            raise LineTooLong("head")
        return line


def _pieces(file: FileIO, size: int) -> Iterator[bytes]:
    """Yield a file of that size. What is appended meanwhile is left out; of one that was cut, the reply is short."""
    while size and (piece := file.read(min(size, _PIECE_BYTES))):
        size -= len(piece)
        yield piece


class _Handler(BaseHTTPRequestHandler):
    timeout = _STALLED_S
    default_request_version = "HTTP/1.0"  # so that errors have a status, whatever the line says
    server: Any  #: a _Server

    def setup(self) -> None:
        """Limit what is read."""
        super().setup()
        self.rfile: Any = _Head(self.rfile)

    def parse_request(self) -> bool:
        """Read a request; answer one that is none."""
        is_good = super().parse_request()
        self.server.clients[self.request] = None
        if not is_good and not self.requestline.strip():
            self.send_error(400)
        return is_good

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
                parts = _pieces(parts, size)
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
