"""An S3 server on loopback: moto's, behind a door that can be slow, refuse, be full, or hold.

`python -m tests.s3_server FOLDER` writes FOLDER/port. What the door does is in FOLDER/door.json:
`{"do": "hold", "method": "PUT", "path": "/checkpoints/", "after": "manifest.json"}`; FOLDER/met is
there once it has done so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.buckets import s3
from tests.deadline import DEADLINE_S, until

_REFUSALS = {
    "forbid": ("403 Forbidden", "AccessDenied", "Access Denied"),
    "slow-down": ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
    "full": ("507 Insufficient Storage", "XMinioStorageFull", "Storage backend has reached its"),
}
_SLOW_S = 0.3


@dataclass(frozen=True)
class Server:
    """A running server with one bucket."""

    folder: Path
    port: int

    @property
    def url(self) -> str:
        """Where the bucket is."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        """What leads the usual chain of credentials here."""
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "thisSecretMustNotLeak",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def door(self, do: str, *, method: str = "", path: str = "", after: str = "") -> None:
        """From now on, do this to requests of a method whose path has these words; `after`: once
        one has been let in whose path ends with these."""
        (self.folder / "met").unlink(missing_ok=True)
        partial = self.folder / "door.new"
        words = {"do": do, "method": method, "path": path, "after": after}
        partial.write_text(json.dumps(words))
        partial.replace(self.folder / "door.json")

    def has_met(self) -> bool:
        """Whether a request has come that the door was told of."""
        return (self.folder / "met").exists()

    @property
    def client(self) -> Any:
        """A client that is let in."""
        import boto3

        env = self.env
        keys = env["AWS_ACCESS_KEY_ID"], env["AWS_SECRET_ACCESS_KEY"]
        return boto3.Session(*keys, region_name="us-east-1").client("s3", endpoint_url=self.url)

    def names(self) -> list[str]:
        """The names of all objects."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket="bucket")
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def read(self, name: str) -> bytes:
        """The bytes of an object."""
        return bytes(self.client.get_object(Bucket="bucket", Key=name)["Body"].read())

    def put(self, name: str, data: bytes) -> None:
        """Write an object."""
        self.client.put_object(Bucket="bucket", Key=name, Body=data)


@contextmanager
def s3_server(folder: Path) -> Iterator[Server]:
    """A server on a free port, ended at the end."""
    folder.mkdir()
    log = (folder / "log").open("wb")
    command = (sys.executable, "-m", "tests.s3_server", str(folder))
    process = subprocess.Popen(command, stdout=log, stderr=log, cwd=Path(__file__).parents[1])
    try:
        until(lambda: (folder / "port").exists() or process.poll() is not None)
        server = Server(folder, int((folder / "port").read_text()))
        server.client.create_bucket(Bucket="bucket")
        yield server
    finally:
        process.kill()
        process.wait()
        log.close()


def main(folder: Path) -> None:
    """Serve until killed."""
    from werkzeug.serving import make_server

    moto = s3()

    def answer(environ: dict[str, Any], begin: Callable[..., Any]) -> Iterable[bytes]:
        door: dict[str, str] = {}
        with suppress(OSError, ValueError):
            door = json.loads((folder / "door.json").read_text())
        is_meant = door.get("method", "") in ("", environ["REQUEST_METHOD"])
        if is_meant and door.get("after") and environ["PATH_INFO"].endswith(door["after"]):
            with suppress(FileNotFoundError):
                door["after"] = ""
                (folder / "door.next").write_text(json.dumps(door))
                (folder / "door.next").replace(folder / "door.json")
            return moto(environ, begin)
        if not door or not is_meant or door["after"] or door["path"] not in environ["PATH_INFO"]:
            return moto(environ, begin)
        (folder / "met").touch()
        if door["do"] == "hold":
            time.sleep(DEADLINE_S)
        if door["do"] == "slow":
            time.sleep(_SLOW_S)
        if door["do"] in _REFUSALS:
            status, code, text = _REFUSALS[door["do"]]
            with suppress(OSError):
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            begin(status, [("Content-Type", "application/xml")])
            if environ["REQUEST_METHOD"] == "HEAD":
                return []
            return [f"<Error><Code>{code}</Code><Message>{text}</Message></Error>".encode()]
        return moto(environ, begin)  # type: ignore[no-any-return]

    server = make_server("127.0.0.1", 0, answer, threaded=True)
    partial = folder / f"port.{os.getpid()}"
    partial.write_text(str(server.server_port))
    partial.replace(folder / "port")
    server.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
