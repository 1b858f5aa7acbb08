"""Exports that go to the hub: checked before the start, whole when they arrive, never lost."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask, request
from werkzeug.serving import make_server

from isles.run.records import read_record
from tests.deadline import DEADLINE_S, run_program
from tests.e2e.typed import isles, the_run
from tests.runs import files_with

TOKEN = "hf_thisTokenMustNotLeak0123456789"
PUSH = ("checkpoint.export_on_finish=true", "checkpoint.push_to_hub=me/tiny")


def refusal(status: int, error: str) -> Any:
    return {"error": error}, status, {"X-Error-Message": error}


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class FakeHub:
    """A stand-in for the Hugging Face Hub on loopback: what an upload asks of it, and no more.

    The endpoints are those that huggingface_hub calls without Xet; objects are kept in memory. Its
    address is `url`, for HF_ENDPOINT; `files` and `repos` are what has arrived.
    """

    def __init__(self, accounts: dict[str, Any]) -> None:
        self.accounts = accounts
        self.url = ""
        self.repos: dict[str, dict[str, Any]] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.messages: list[str] = []
        self.objects: dict[str, bytes] = {}
        self.refuses_commits = False
        self.is_silent = threading.Event()
        self.is_over = threading.Event()

    def account(self) -> Any:
        return self.accounts.get(request.headers.get("Authorization", "").removeprefix("Bearer "))

    def before(self) -> Any:
        """What every request is told instead of an answer, if it is."""
        if self.is_silent.is_set():
            self.is_over.wait()
        is_known = self.account() or request.method == "PUT"
        return None if is_known else refusal(401, "who?")

    def tree(self, repo: str) -> Any:
        return [
            {"type": "file", "path": name, "size": len(content), "oid": blob_id(content)}
            for name, content in self.files.get(repo, {}).items()
        ]

    def create(self) -> Any:
        asked = request.get_json()
        repo = f"{asked['organization']}/{asked['name']}"
        if repo in self.repos:
            return {"url": f"{self.url}/{repo}"}, 409
        self.repos[repo] = asked
        return {"url": f"{self.url}/{repo}"}

    def preupload(self, repo: str) -> Any:
        found = []
        for file in request.get_json()["files"]:
            mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
            found.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
        return {"files": found}

    def batch(self, repo: str) -> Any:
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.url}/objects/{one['oid']}"}}}
            for one in request.get_json(force=True)["objects"]
        ]
        return {"objects": objects, "transfer": "basic"}

    def keep(self, oid: str) -> Any:
        self.objects[oid] = request.get_data()
        assert hashlib.sha256(self.objects[oid]).hexdigest() == oid
        return {}

    def commit(self, repo: str) -> Any:
        if self.refuses_commits:
            return refusal(403, "no room left for private files")
        files = self.files.setdefault(repo, {})
        for line in request.get_data().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            match entry["key"]:
                case "header":
                    self.messages.append(value["summary"])
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.objects[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        oid = hashlib.sha1(request.get_data()).hexdigest()
        return {"commitUrl": f"{self.url}/{repo}/commit/{oid}", "commitOid": oid}


def account(role: str = "write", **more: Any) -> dict[str, Any]:
    token = {"role": role, "displayName": "a token", **more}
    orgs = [{"name": "lab", "roleInOrg": "write"}, {"name": "museum", "roleInOrg": "read"}]
    return {"name": "me", "orgs": orgs, "auth": {"accessToken": token}}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    scoped = [{"entity": {"name": "lab"}, "permissions": ["repo.write"]}]
    accounts = {
        TOKEN: account(),
        "hf_reader": account("read"),
        "hf_fine": account("fineGrained", fineGrained={"scoped": scoped}),
    }
    hub, app = FakeHub(accounts), Flask("hub")
    app.before_request(hub.before)
    app.get("/api/whoami-v2")(hub.account)
    app.get("/api/models/<path:repo>/tree/main")(hub.tree)
    app.post("/api/repos/create")(hub.create)
    app.post("/api/validate-yaml", endpoint="fine")(lambda: {"warnings": [], "errors": []})
    app.post("/api/models/<path:repo>/preupload/main")(hub.preupload)
    app.post("/<path:repo>.git/info/lfs/objects/batch")(hub.batch)
    app.put("/objects/<oid>")(hub.keep)
    app.post("/api/models/<path:repo>/commit/main")(hub.commit)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.is_over.set()
        server.shutdown()
        server.server_close()


def environment(hub: FakeHub, home: Path, token: str = TOKEN) -> dict[str, str]:
    """Of a user whose hub is the stand-in. Without Xet, which has its own servers."""
    names = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
    return names | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": token}


@pytest.mark.long
def test_a_model_arrives_whole_and_an_upload_that_fails_loses_nothing(run_file, tmp_path, hub):
    run_dir = the_run(run_file)
    env, without = (environment(hub, tmp_path / "home", token) for token in (TOKEN, ""))
    # What could not be uploaded is not begun.
    early = ("train", run_file, *PUSH, "name=early")
    refused = isles(*early, env=without, cwd=tmp_path, expected=1).text
    assert "no Hugging Face token found" in refused and "hf auth login" in refused
    assert "Traceback" not in refused
    assert not (tmp_path / "runs" / "early-1" / "metrics.jsonl").exists()

    shards = "checkpoint.max_shard_gb=0.0001"
    said = isles("train", run_file, *PUSH, shards, env=env, cwd=tmp_path).text
    assert hub.repos["me/tiny"]["visibility"] == "private"
    arrived = hub.files["me/tiny"]
    assert arrived == {path.name: path.read_bytes() for path in run_dir.model.iterdir()}
    assert "model.safetensors.index.json" in arrived
    assert b'folder = "me/tiny"' in arrived["README.md"]
    assert hub.messages == ["tiny-1, step 20"]
    assert (read_record(run_dir.summary) or {})["huggingface"]["url"].endswith("/me/tiny")

    # With checkpoints, a token that has run out is no reason not to go on.
    longer = (*PUSH, "training.max_steps=22", "--resume", str(run_dir.path))
    went_on = isles("train", run_file, *longer, env=without, cwd=tmp_path).text
    assert "no Hugging Face token found; the upload at the end may fail" in went_on
    assert "step 22/22" in went_on and "is finished" in went_on
    repeat = "isles checkpoint export tiny-1 --push-to-hub me/tiny"
    assert went_on.count(repeat) == 1
    assert (read_record(run_dir.summary) or {})["huggingface"]["error"]
    assert (run_dir.model / "model.safetensors").is_file()

    wrong = ("checkpoint", "export", "tiny", "--push-to-hub", "http://hf.co/me")
    assert "owner/name" in isles(*wrong, env=without, cwd=tmp_path, expected=1).text
    hub.refuses_commits = True
    words = repeat.split()[1:]
    refused = isles(*words, env=env, cwd=tmp_path, expected=1).text
    assert "no room left" in refused and "Traceback" not in refused
    hub.refuses_commits = False
    said += isles(*words, env=env, cwd=tmp_path).text
    assert "uploaded to" in said
    # In one file now: the files of before must not be loaded beside it.
    weights = [name for name in hub.files["me/tiny"] if "safetensors" in name]
    assert weights == ["model.safetensors"]
    assert TOKEN not in said + refused
    assert files_with(TOKEN, tmp_path) == []


REFUSED = [
    ("me/x", "hf_unknown", "refuses the token"),
    ("me/x", "hf_reader", "the token of me is read-only"),
    ("you/x", TOKEN, "the token belongs to me (member of lab, museum), not to you"),
    ("museum/x", TOKEN, "me has only read access to museum"),
    ("me/x", "hf_fine", "the fine-grained token of me may not write to repositories of me"),
]
LET_IN = [("me/x", TOKEN), ("Lab/x", TOKEN), ("lab/x", "hf_fine")]
_ASK = """
import os, sys
from isles.checkpoint.upload import check_push
from isles.errors import UserError
for line in sys.stdin:
    repo, os.environ["HF_TOKEN"], limit = line.split()
    try:
        check_push(repo, timeout_s=float(limit))
        print("let in")
    except UserError as error:
        print(str(error).replace(chr(10), " "))
"""


def ask(hub: FakeHub, home: Path, questions: list[tuple[str, str]], limit: float) -> list[str]:
    """What check_push says, in a process whose hub is the stand-in."""
    lines = "".join(f"{repo} {token} {limit}\n" for repo, token in questions)
    env = {**os.environ, **environment(hub, home)}
    done = run_program([sys.executable, "-c", _ASK], env=env, input=lines)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_the_hub_says_of_a_token_decides_and_a_silent_one_is_named(
    hub: FakeHub, tmp_path: Path
) -> None:
    questions = [(repo, token) for repo, token, _ in REFUSED] + LET_IN
    answers = ask(hub, tmp_path, questions, limit=DEADLINE_S)
    for (repo, token, what), answer in zip(REFUSED, answers, strict=False):
        assert what in answer and f"push_to_hub: {repo}" in answer and token not in answer
    assert answers[len(REFUSED) :] == ["let in"] * len(LET_IN)
    assert not hub.repos, "asking makes nothing"
    hub.is_silent.set()
    (answer,) = ask(hub, tmp_path, [("me/x", TOKEN)], limit=1.0)
    assert f"waited 1s for {hub.url}" in answer
