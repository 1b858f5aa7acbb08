"""Exports that go to the hub: checked before the start, whole when they arrive, never lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isles.run.paths import RunDir
from isles.run.records import read_record
from tests.deadline import DEADLINE_S, run_program
from tests.e2e.typed import isles
from tests.fake_hub import FakeHub, fake_hub

TOKEN = "hf_thisTokenMustNotLeak0123456789"
PUSH = ("checkpoint.export_on_finish=true", "checkpoint.push_to_hub=me/tiny")


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
    with fake_hub(accounts) as running:
        yield running


def environment(hub: FakeHub, home: Path, token: str = TOKEN) -> dict[str, str]:
    """Of a user whose hub is the stand-in. Without Xet, which has its own servers."""
    names = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
    return names | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": token}


@pytest.mark.long
def test_a_model_arrives_whole_and_an_upload_that_fails_loses_nothing(
    run_file: Path, tmp_path: Path, hub: FakeHub
) -> None:
    env = environment(hub, tmp_path / "home")
    shards = "checkpoint.max_shard_gb=0.0001"
    said = isles("train", str(run_file), *PUSH, shards, env=env, cwd=tmp_path).text
    run_dir = RunDir(tmp_path / "runs" / "tiny-1")
    assert hub.repos["me/tiny"]["visibility"] == "private"
    arrived = hub.files["me/tiny"]
    assert arrived == {path.name: path.read_bytes() for path in run_dir.model.iterdir()}
    assert "model.safetensors.index.json" in arrived
    assert b'folder = "me/tiny"' in arrived["README.md"]
    assert hub.messages == ["tiny-1, step 20"]
    assert (read_record(run_dir.summary) or {})["hub"]["url"].endswith("/me/tiny")

    # With checkpoints, a token that has run out is no reason not to go on.
    longer = (*PUSH, "training.max_steps=22", "--resume", str(run_dir.path))
    without = environment(hub, tmp_path / "home", token="")
    went_on = isles("train", str(run_file), *longer, env=without, cwd=tmp_path).text
    assert "there is no token for the hub; the upload at the end may fail" in went_on
    assert "step 22/22" in went_on and "is finished" in went_on
    repeat = "isles checkpoint export tiny-1 --push-to-hub me/tiny"
    assert went_on.count(repeat) == 1
    assert (read_record(run_dir.summary) or {})["hub"]["error"]
    assert (run_dir.model / "model.safetensors").is_file()

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
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path


@pytest.mark.long
def test_a_run_that_could_not_upload_does_not_start(
    run_file: Path, tmp_path: Path, hub: FakeHub
) -> None:
    env = environment(hub, tmp_path / "home", token="")
    said = isles("train", str(run_file), *PUSH, env=env, cwd=tmp_path, expected=1).text
    assert "there is no token for the hub" in said and "hf auth login" in said
    assert "Traceback" not in said
    assert not (tmp_path / "runs" / "tiny-1" / "metrics.jsonl").exists()
    words = ("checkpoint", "export", "tiny", "--push-to-hub", "http://hf.co/me")
    assert "owner/name" in isles(*words, env=env, cwd=tmp_path, expected=1).text


REFUSED = [
    ("me/x", "hf_unknown", "does not take the token"),
    ("me/x", "hf_reader", "the token of me may read only"),
    ("you/x", TOKEN, "the token is that of me, a member of lab, museum; you is neither"),
    ("museum/x", TOKEN, "me may only read in museum"),
    ("me/x", "hf_fine", "the fine-grained token of me may not write to repositories of me"),
]
LET_IN = [("me/x", TOKEN), ("Lab/x", TOKEN), ("lab/x", "hf_fine")]
_ASK = """
import os, sys
from isles.checkpoint.hub import check_push
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


def test_what_the_hub_says_of_a_token_decides(hub: FakeHub, tmp_path: Path) -> None:
    questions = [(repo, token) for repo, token, _ in REFUSED] + LET_IN
    answers = ask(hub, tmp_path, questions, limit=DEADLINE_S)
    for (repo, token, what), answer in zip(REFUSED, answers, strict=False):
        assert what in answer and f"push_to_hub: {repo}" in answer and token not in answer
    assert answers[len(REFUSED) :] == ["let in"] * len(LET_IN)
    assert not hub.repos, "asking makes nothing"


def test_a_hub_that_never_answers_is_named_within_the_deadline(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.is_silent.set()
    (answer,) = ask(hub, tmp_path, [("me/x", TOKEN)], limit=1.0)
    assert f"waited 1s for {hub.url}" in answer
