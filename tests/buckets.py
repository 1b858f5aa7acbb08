"""A bucket on this machine: moto's S3 server, with faults that a test puts in front of it.

Run as a program: `python -m tests.buckets FOLDER`. It listens on a port of the loopback, which it
writes to FOLDER/port, and looks for FOLDER/fault (`{"kind": …}`) before each request. FOLDER/met is
there once a request has met the fault.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from isles.run.records import read_record, write_record
from tests.deadline import until

BUCKET = "isles-test"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "thisSecretMustNotLeak",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Faults:
    """An S3 with faults: an application of WSGI around moto's."""

    def __init__(self, folder: Path) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app

        self._moto, self._file = DomainDispatcherApplication(create_backend_app), folder / "fault"
        self._chance = random.Random(0)
        self._lists: dict[str, tuple[str, Any, bytes]] = {}
        self._lock = threading.Lock()

    def _app(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        # As at a provider, one of several conditional writes succeeds: moto looks whether the
        # object is there, and writes then.
        with self._lock if "HTTP_IF_NONE_MATCH" in environ else nullcontext():
            return self._moto(environ, start)

    def _fault(self) -> dict[str, Any]:
        return read_record(self._file) or {"kind": ""}

    def _is_meant(self, fault: dict[str, Any], environ: dict[str, Any]) -> bool:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] not in fault.get("methods", environ["REQUEST_METHOD"]):
            return False
        if after := fault.get("after"):
            if path.endswith(after):
                write_record(self._file, {**fault, "after": ""})
            return False
        return fault.get("path", "") in path

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        fault, method = self._fault(), environ["REQUEST_METHOD"]
        is_write = method in ("PUT", "POST")
        if not fault["kind"] or not self._is_meant(fault, environ):
            return self._app(environ, start)
        self._file.with_name("met").touch()
        match fault["kind"]:
            case "slow":
                time.sleep(fault["seconds"])
            case "away" | "hold" as kind:  # nobody answers, and at last the line breaks
                while self._fault()["kind"] == kind:
                    time.sleep(0.1)
                raise ConnectionError("away")
            case "forbidden":
                return _refuse(environ, start, 403, "AccessDenied", "Access Denied")
            case "full" if is_write:
                return _refuse(environ, start, 507, "QuotaExceeded", "The bucket is full")
            case "busy" if self._chance.random() < fault["share"]:
                # Half of them are done all the same, and nobody is told.
                if self._chance.random() < 0.5:
                    b"".join(self._app(environ, lambda *_: None))
                    environ["CONTENT_LENGTH"] = "0"  # the body is read
                return _refuse(environ, start, 503, "SlowDown", "Please reduce your request rate")
            case "stale" if method == "GET" and "list-type" in environ["QUERY_STRING"]:
                return self._list(environ, start)
            case "unconditional":
                environ.pop("HTTP_IF_NONE_MATCH", None)
        return self._app(environ, start)

    def _list(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        # What it answered when it was first asked.
        key = environ["PATH_INFO"] + environ["QUERY_STRING"]
        with self._lock:
            if key not in self._lists:
                head: list[Any] = []
                body = b"".join(self._app(environ, lambda *given: head.extend(given)))
                self._lists[key] = head[0], head[1], body
            status, headers, body = self._lists[key]
        start(status, headers)
        return [body]


def _refuse(
    environ: dict[str, Any], start: Callable[..., Any], status: int, code: str, text: str
) -> Iterable[bytes]:
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{text}</Message></Error>"
    start(f"{status} {code}", [("Content-Type", "application/xml")])
    return [body.encode()] if environ["REQUEST_METHOD"] != "HEAD" else []


def main(folder: Path) -> None:
    """Serve until killed."""
    import logging

    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, Faults(folder), threaded=True)
    write_record(folder / "port", {"port": server.server_port})
    server.serve_forever()


class Bucket:
    """A server with one empty bucket."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self.url = f"s3://{BUCKET}/runs"
        self.environ = {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}

    def have(self, kind: str, **more: Any) -> None:
        """Have a fault, until there is another; empty: none.

        Args:
            more: what the fault takes; and whom it meets: `methods`, `path` (a part of it), and
                `after`, once a request has come whose path ends so.
        """
        (self._folder / "met").unlink(missing_ok=True)
        write_record(self._folder / "fault", {"kind": kind, **more})

    def has_met(self) -> bool:
        """Whether a request has met the fault."""
        return (self._folder / "met").exists()

    @property
    def client(self) -> Any:
        """A client that is let in."""
        import boto3

        return boto3.Session().client("s3")

    def names(self) -> list[str]:
        """The names of all objects."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def read(self, name: str) -> bytes:
        """The bytes of an object."""
        return bytes(self.client.get_object(Bucket=BUCKET, Key=name)["Body"].read())

    def put(self, name: str, data: bytes) -> None:
        """Write an object."""
        self.client.put_object(Bucket=BUCKET, Key=name, Body=data)


@contextmanager
def bucket(folder: Path) -> Iterator[Bucket]:
    """A bucket, for as long as the test needs it; its credentials are in the environment."""
    folder.mkdir(parents=True, exist_ok=True)
    port, command = folder / "port", [sys.executable, "-m", "tests.buckets", str(folder)]
    with ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("wb"))
        server = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
        stack.callback(server.kill)
        until(lambda: port.exists() or server.poll() is not None, "moto's server")
        assert server.poll() is None, (folder / "log").read_text()
        found = Bucket(folder, (read_record(port) or {})["port"])
        stack.enter_context(patch.dict(os.environ, found.environ))
        os.environ.pop("AWS_PROFILE", None)
        found.client.create_bucket(Bucket=BUCKET)
        yield found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
