"""A web server for our own pages: on this machine only, and read-only.

Any site open in the same browser can send requests to 127.0.0.1. So a request must name this host, or a foreign name
could be pointed at it; and replies forbid other origins to read or embed them, and our pages to load anything else.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from speedrun.ground.errors import UsageError

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

    body: bytes | Iterator[bytes]  #: parts are sent as they come
    content_type: str = "application/octet-stream"


Answer = Callable[[str, dict[str, str]], Reply | None]  #: (path, query) -> reply; None: not found


def content_type(path: str) -> str:
    """Return the type of a file by its name."""
    return CONTENT_TYPES.get(path.rpartition(".")[2], "application/octet-stream")


@contextlib.contextmanager
def serving(answer: Answer, port: int = 0) -> Iterator[str]:
    """Serve inside the block, on threads; give the address. Port 0: any that is free.

    Raises:
        UsageError: if the port cannot be used.
    """
    try:
        server = _Server((HOST, port), _handler(answer))
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

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that went away; anything else is a mistake of ours."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def _handler(answer: Answer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 60  # of a client that sends no request

        def do_GET(self) -> None:
            name, _, _ = self.headers.get("Host", "").partition(":")
            if name.lower() not in _NAMES:
                return self.send_error(403, "Only for this machine")
            parts = urlsplit(self.path)
            found = answer(parts.path, dict(parse_qsl(parts.query)))
            if found is None:
                return self.send_error(404)
            self.send_response(200)
            self.send_header("Content-Type", found.content_type)
            for header, value in _HEADERS.items():
                self.send_header(header, value)
            if isinstance(found.body, bytes):
                self.send_header("Content-Length", str(len(found.body)))
            self.end_headers()
            with contextlib.suppress(ConnectionError, TimeoutError):  # the browser went away
                for part in [found.body] if isinstance(found.body, bytes) else found.body:
                    self.wfile.write(part)
                    self.wfile.flush()
            return None

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing of each request."""

    return Handler
