"""A stand-in for the Hugging Face hub on loopback: what an upload asks of it, and no more.

The endpoints are those that huggingface_hub calls without Xet; objects are kept in memory.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Account = dict[str, Any]
"""What whoami-v2 says of a token."""


class FakeHub(ThreadingHTTPServer):
    """Its address is `url`; `files` and `repos` are what has arrived."""

    daemon_threads = True

    def __init__(self, accounts: dict[str, Account]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.accounts = accounts
        self.repos: dict[str, dict[str, Any]] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.messages: list[str] = []
        self.objects: dict[str, bytes] = {}
        self.paths: list[str] = []
        self.refuses_commits = False
        self.is_silent = threading.Event()
        self.is_over = threading.Event()

    @property
    def url(self) -> str:
        """For HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        account = self._account()
        if self.path == "/api/whoami-v2":
            self._answer(200, account) if account else self._answer(401, {"error": "who?"})
        elif account and "/tree/" in self.path:
            repo = self._repo("/tree/")
            found = self.server.files.get(repo, {})
            files = [
                {"type": "file", "path": name, "size": len(content), "oid": _blob_id(content)}
                for name, content in found.items()
            ]
            self._answer(200, files)
        else:
            self._answer(404, {"error": "no such thing"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self._account():
            self._answer(401, {"error": "who?"})
        elif self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"warnings": [], "errors": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in files
            ]
            self._answer(200, {"files": modes})
        elif self.path.endswith("/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        elif "/commit/" in self.path:
            self._commit(self._repo("/commit/"), body)
        else:
            self._answer(404, {"error": "no such thing"})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == oid
        self.server.objects[oid] = content
        self._answer(200, {})

    def _create(self, asked: dict[str, Any]) -> None:
        repo = f"{asked['organization']}/{asked['name']}"
        if repo in self.server.repos:
            self._answer(409, {"url": f"{self.server.url}/{repo}", "error": "it is there"})
            return
        self.server.repos[repo] = asked
        self._answer(200, {"url": f"{self.server.url}/{repo}"})

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.server.url}/objects/{one['oid']}"}}}
            for one in asked["objects"]
        ]
        self._answer(200, {"objects": objects, "transfer": "basic"})

    def _commit(self, repo: str, body: bytes) -> None:
        if self.server.refuses_commits:
            self._answer(403, {"error": "no room left for private files"})
            return
        files = self.server.files.setdefault(repo, {})
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            match entry["key"]:
                case "header":
                    self.server.messages.append(value["summary"])
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.server.objects[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        oid = hashlib.sha1(body).hexdigest()
        url = f"{self.server.url}/{repo}/commit/{oid}"
        self._answer(200, {"commitUrl": url, "commitOid": oid})

    def _account(self) -> Account | None:
        self.server.paths.append(f"{self.command} {self.path}")
        if self.server.is_silent.is_set():
            self.server.is_over.wait()
        return self.server.accounts.get(self.headers.get("Authorization", "")[len("Bearer ") :])

    def _repo(self, verb: str) -> str:
        return self.path.partition(verb)[0].removeprefix("/api/models/")

    def _answer(self, status: int, content: Any) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        if status >= 400:
            self.send_header("X-Error-Message", content["error"])
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Not on the tests' stderr."""


@contextmanager
def fake_hub(accounts: dict[str, Account]) -> Iterator[FakeHub]:
    """The stand-in, served by a thread until the end."""
    hub = FakeHub(accounts)
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.is_over.set()
        hub.shutdown()
        hub.server_close()


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
