"""A stand-in for the Hugging Face Hub on loopback, of which files are read."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from isles.facts.models import load_shape


@contextmanager
def model_hub() -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """Its URL, and the paths that are asked for, each with the token.

    The repository o/open holds a config.json, o/gated has a license, o/old is a former name
    of o/open, and it knows no other.
    """
    asked: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers.get("Authorization")))
            repo = "/".join(self.path.split("/")[1:3])
            codes = {"o/open": (200, ""), "o/gated": (401, "GatedRepo"), "o/old": (307, "")}
            code, error = codes.get(repo, (404, "RepoNotFound"))
            text = json.dumps(load_shape("llama-1b")).encode() if code == 200 else b""
            self.send_response(code)
            self.send_header("X-Error-Code", error)
            if code == 307:
                self.send_header("Location", self.path.replace("/old/", "/open/"))
            self.send_header("X-Repo-Commit", "a" * 40)
            self.send_header("ETag", '"b"')
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(text)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Not on the tests' stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
