"""The page of `isles dashboard`, served on loopback to the owner of its link, or saved as a file.

The link has a random token, and every request carries the token, also for scripts and events. The
page uses no cookie: cookies ignore ports, so the browser would send a cookie to any other server on
this machine. A page of another site gets no answer: its name does not match `Host`, it has no
token, and the browser does not let it read an answer. The server supports only GET and HEAD, and
neither changes anything.
"""

from __future__ import annotations

import getpass
import hmac
import json
import logging
import secrets
import socket
import threading
import time
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from isles.errors import ExitCode, UserError
from isles.monitor.live.model import Snapshot
from isles.run.records import explain_write_errors, write_secret

if TYPE_CHECKING:
    from isles.monitor.live.source import Watch

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
ASK_S = 5.0
"""Timeout in seconds for a new connection that sends nothing."""
SILENT_S = 10.0
"""Timeout in seconds for a client that does not read its answer."""
KEEP_ALIVE_S = 5.0
_PAGE = Path(__file__).with_name("page")
_SAVED = "<!doctype html>\n<!-- saved by isles dashboard -->\n"
"""Beginning of a saved page; only such a file is replaced."""
_STYLE = '<link rel="stylesheet" href="page.css">'
_SCRIPTS = '<script src="view.js"></script>\n<script src="page.js"></script>'
_POLICY = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
_HEADERS = {
    "Content-Security-Policy": _POLICY
    + "script-src 'self'; style-src 'self'; connect-src 'self'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def serve(watches: Sequence[Watch], *, port: int, print_line: Callable[[str], None]) -> int:
    """Serve the page until Ctrl+C.

    Args:
        watches: runs to show. The page shows the first in full, and compares the others.
        port: port on 127.0.0.1. 0 picks a free port.
        print_line: prints the link.

    Raises:
        UserError: the port cannot be had.
    """
    with Dashboard(watches, port) as server, suppress(KeyboardInterrupt):
        here, port = f"{getpass.getuser()}@{socket.gethostname()}", server.server_address[1]
        print_line(f"open {server.link}")
        print_line(
            f"from elsewhere: ssh -L {port}:127.0.0.1:{port} {here}, and the same link there"
        )
        print_line("Ctrl+C closes the page, and the run continues")
        server.serve_forever(poll_interval=0.2)
    return ExitCode.OK


def export(snapshots: Sequence[Snapshot], path: Path) -> None:
    """Save the page with its data as one self-contained file.

    Args:
        snapshots: runs to show. The page shows the first in full, and compares the others.
        path: the file. Only this user may read it. An older saved page is replaced.

    Raises:
        UserError: the file cannot be written, or is not a saved page.
    """
    runs = [json.loads(snapshots[0].model_dump_json()), *map(_compared, snapshots[1:])]
    data = _json({"exported_at": time.time(), "runs": runs})
    style, scripts = _text("page.css"), [_text("view.js"), _text("page.js")]
    hashes = f"script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}"
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}{hashes}">'
    # The data comes last, so that nothing in it is taken for a place to fill; and it has no `<`,
    # which alone ends an element of HTML.
    head = ("<!doctype html>\n", _SAVED, "<head>", f"<head>\n{policy}")
    page = _filled("index.html", *head, _STYLE, f"<style>{style}</style>")
    element = f'<script type="application/json" id="data">{data.replace("<", chr(92) + "u003c")}'
    code = "".join(f"<script>{script}</script>" for script in scripts)
    before, _, behind = page.partition(_SCRIPTS)
    page = f"{before}{element}</script>{code}{behind}"
    with explain_write_errors(path, "name another file: --export run.html"):
        if path.exists() and not (path.is_file() and _is_saved(path)):
            raise UserError(
                "the file exists, and is not a page that isles has saved",
                where=str(path),
                fix="give another name to --export, or remove it",
                id="file.exists",
            )
        write_secret(path, page)


class Dashboard(ThreadingHTTPServer):
    """The server of one page; `link` opens it."""

    daemon_threads = True
    # Where it is full, the kernel drops a connection, which is tried again after 1, 3 and 7 s.
    request_queue_size = 1024

    def __init__(self, watches: Sequence[Watch], port: int) -> None:
        if not 0 <= port <= 65535:
            raise UserError(
                f"{port} is not between 0 and 65535",
                where="--port",
                fix="name another one, or 0 for any that is free",
            )
        self.watches = watches
        self.token = secrets.token_urlsafe(24)
        self._lock = threading.Lock()
        # The oldest first; whether it has asked for something with the token.
        self._connections: dict[Any, bool] = {}
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise UserError(
                f"port {port} of 127.0.0.1 cannot be had: {error.strerror}",
                fix="name another one with --port, or 0 for any that is free",
            ) from None

    @property
    def link(self) -> str:
        """Address of the page, with its token."""
        return f"http://127.0.0.1:{self.server_address[1]}/?token={self.token}"

    def server_bind(self) -> None:
        """Bind without asking a name server for the name of loopback, as HTTPServer does."""
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection; above the limit the one goes that has been silent longest."""
        with self._lock:
            if len(self._connections) >= MAX_CONNECTIONS:
                silent = (one for one, has_asked in self._connections.items() if not has_asked)
                dropped = next(silent, request)
                self._connections.pop(dropped, None)
                with suppress(OSError):  # its thread reads the end, and closes it
                    dropped.shutdown(socket.SHUT_RDWR)
            else:
                dropped = None
            if dropped is not request:
                self._connections[request] = False
        if dropped is request:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def has_asked(self, request: Any) -> None:
        """Whoever is on this connection has the token."""
        with self._lock:
            if request in self._connections:
                self._connections[request] = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep it off the terminal, which anybody on this machine could fill with requests."""
        log.debug("a request to the page has failed", exc_info=True)

    def server_close(self) -> None:
        """Stop listening, and end the streams."""
        super().server_close()
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """A request. HTTP/1.0: one for each connection."""

    timeout = ASK_S
    server: Dashboard
    server_version, sys_version = "isles", ""

    def do_GET(self) -> None:
        """Answer a request of the page's own user."""
        try:
            url = urlsplit(self.path)
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST, "not a valid address")
            return
        if why := self._refusal(url):
            self.send_error(HTTPStatus.FORBIDDEN, why)
            return
        self.server.has_asked(self.connection)
        self.connection.settimeout(SILENT_S)
        match url.path:
            case "/":
                query = f'?token={self.server.token}">'
                style, scripts = (tags.replace('">', query) for tags in (_STYLE, _SCRIPTS))
                self._send("text/html", _filled("index.html", _STYLE, style, _SCRIPTS, scripts))
            case "/view.js" | "/page.js" as path:
                self._send("text/javascript", _text(path[1:]))
            case "/page.css":
                self._send("text/css", _text("page.css"))
            case "/state.json":
                latest = self.server.watches[0].latest
                self._send("application/json", latest.model_dump_json() if latest else "null")
            case "/events":
                self._stream()
            case _:
                self.send_error(HTTPStatus.NOT_FOUND, "there is no such page")

    do_HEAD = do_GET

    def _refusal(self, url: SplitResult) -> str:
        """Why this request is refused, or empty."""
        host = self.headers.get("Host", "")
        with suppress(ValueError):
            # A name that only leads here is how a foreign page would ask from within a browser.
            if urlsplit(f"//{host}").hostname not in ("127.0.0.1", "localhost", "::1"):
                return "wrong host name: use the printed link"
            given = parse_qs(url.query).get("token", [""])[0].encode()
            if not hmac.compare_digest(given, self.server.token.encode()):
                return "the link has no token, or an old one: isles dashboard prints a new one"
            origin = self.headers.get("Origin")
            asks, mode = self.headers.get("Sec-Fetch-Site"), self.headers.get("Sec-Fetch-Mode")
            is_opened = url.path == "/" and mode == "navigate"
            if origin not in (None, f"http://{host}") or not (
                asks in (None, "none", "same-origin") or is_opened
            ):
                return "another page has asked"
            return ""
        return "not a valid host name"

    def _send(self, kind: str, text: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        body = text.encode()
        self._begin(kind, status, {"Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _begin(self, kind: str, status: HTTPStatus, more: dict[str, str]) -> None:
        # The base class leaves the status line and headers out where it has read HTTP/0.9, which
        # it also takes a malformed line for.
        self.request_version = self.protocol_version
        self.send_response(status)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Connection": "close"}
        for name, value in {**headers, **_HEADERS, **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def _stream(self) -> None:
        """Server-sent events until the other side goes, compressed as one stream."""
        is_gzip = "gzip" in self.headers.get("Accept-Encoding", "")
        encoding = {"Content-Encoding": "gzip"} if is_gzip else {}
        self._begin("text/event-stream", HTTPStatus.OK, encoding)
        if self.command == "HEAD":
            return
        packer = zlib.compressobj(wbits=31)
        for text in self._events():
            data = text.encode()
            if is_gzip:
                data = packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH)
            self.wfile.write(data)

    def _events(self) -> Iterator[str]:
        first, *others = self.server.watches
        at, compared, trouble = 0.0, list[dict[str, Any]](), ""
        yield "retry: 2000\n\n"
        while True:
            newer = first.wait(at, KEEP_ALIVE_S)
            if newer is not None:
                at = newer.at
                yield f"event: run\ndata: {newer.model_dump_json(exclude_none=True)}\n\n"
            now = [_compared(other.latest) for other in others if other.latest]
            if now != compared:
                compared = now
                yield _event("others", compared)
            if first.error != trouble:
                trouble = first.error
                yield _event("trouble", trouble)
            if newer is None:
                yield ": nothing new\n\n"  # and whether anybody is there

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send a line of text. The base class would send an HTML page."""
        status = HTTPStatus(code)
        if status is HTTPStatus.NOT_IMPLEMENTED:
            status = HTTPStatus.METHOD_NOT_ALLOWED
        self.close_connection = True
        text = f"isles: {message or status.phrase}\n"
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            text = "isles: the page can only be looked at\n"
        self._send("text/plain", text, status)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing. The base class prints a line per request."""


def _event(name: str, data: object) -> str:
    return f"event: {name}\ndata: {_json(data)}\n\n"


def _compared(snapshot: Snapshot) -> dict[str, Any]:
    """Data of a run for the comparison with another run."""
    # By way of JSON, in which pydantic writes null for NaN: the browser's JSON has no NaN.
    text = snapshot.model_dump_json(include={"run", "curve"}, exclude_none=True)
    found: dict[str, Any] = json.loads(text)
    return found


def _json(data: object) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False)


def _is_saved(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(_SAVED)) == _SAVED.encode()


def _text(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _filled(name: str, *pairs: str) -> str:
    """A file of the page with texts replaced. The file has each text once."""
    text = _text(name)
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert text.count(old) == 1, f"{name}: {old}"
        text = text.replace(old, new)
    return text


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
