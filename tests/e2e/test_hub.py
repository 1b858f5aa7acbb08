"""Exports that go to the hub: checked before the start, whole when they arrive, never lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isles.run.paths import RunDir
from isles.run.records import read_record
from tests.deadline import DEADLINE_S
from tests.fake_hub import FakeHub, fake_hub

TOKEN = "hf_thisTokenMustNotLeak0123456789"


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


def environment(hub: FakeHub, home: Path, token: str | None = TOKEN) -> dict[str, str]:
    """Of a user whose hub is the stand-in. Without Xet, which has its own servers."""
    names = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    names |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return names | {"OMP_NUM_THREADS": "1", **({"HF_TOKEN": token} if token else {})}


def isles(*words: str, env: dict[str, str], cwd: Path, expected: int = 0) -> str:
    """Run one command; all that it printed."""
    command = [sys.executable, "-m", "isles", *words]
    result = subprocess.run(
        command, env=env, cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert result.returncode == expected, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.mark.long
def test_a_model_arrives_whole_and_a_later_export_takes_its_place(
    run_file: Path, tmp_path: Path, hub: FakeHub
) -> None:
    env = environment(hub, tmp_path / "home")
    push = ("checkpoint.export_on_finish=true", "checkpoint.push_to_hub=me/tiny")
    shards = "checkpoint.max_shard_gb=0.0001"
    said = isles("train", str(run_file), *push, shards, env=env, cwd=tmp_path)
    run_dir = RunDir(tmp_path / "runs" / "tiny-1")
    assert hub.repos["me/tiny"]["visibility"] == "private"
    arrived = hub.files["me/tiny"]
    assert arrived == {path.name: path.read_bytes() for path in run_dir.model.iterdir()}
    assert (
        "model.safetensors.index.json" in arrived and b'folder = "me/tiny"' in arrived["README.md"]
    )
    assert hub.messages == ["tiny-1, step 20"]
    assert (read_record(run_dir.summary) or {})["hub"]["url"].endswith("/me/tiny")

    # In one file now: the files of before must not be loaded beside it.
    resolved = run_dir.resolved.read_text()
    run_dir.resolved.write_text(resolved.replace("max_shard_gb: 0.0001", "max_shard_gb: 5.0"))
    words = ("checkpoint", "export", "tiny", "--push-to-hub", "me/tiny", "--output", "again")
    said += isles(*words, env=env, cwd=tmp_path)
    assert "uploaded to" in said
    weights = [name for name in hub.files["me/tiny"] if "safetensors" in name]
    assert weights == ["model.safetensors"]
    assert TOKEN not in said
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path


@pytest.mark.long
def test_an_upload_that_fails_loses_nothing_and_says_how_to_repeat_it(
    run_file: Path, tmp_path: Path, hub: FakeHub
) -> None:
    env = environment(hub, tmp_path / "home")
    hub.refuses_commits = True
    push = ("checkpoint.export_on_finish=true", "checkpoint.push_to_hub=lab/tiny")
    said = isles("train", str(run_file), *push, env=env, cwd=tmp_path)
    run_dir = RunDir(tmp_path / "runs" / "tiny-1")
    assert "no room left" in said and "is finished" in said
    repeat = "isles checkpoint export tiny-1 --push-to-hub lab/tiny"
    assert said.count(repeat) == 1
    assert (run_dir.model / "model.safetensors").is_file()
    assert "no room left" in (read_record(run_dir.summary) or {})["hub"]["error"]
    hub.refuses_commits = False
    isles(*repeat.split()[1:], env=env, cwd=tmp_path)
    assert "model.safetensors" in hub.files["lab/tiny"]

    # With checkpoints, a token that has run out is no reason not to go on.
    longer = ("training.max_steps=22", "--resume", str(run_dir.path))
    without = environment(hub, tmp_path / "home", token=None)
    said = isles("train", str(run_file), *push, *longer, env=without, cwd=tmp_path)
    assert "there is no token for the hub; the upload at the end may fail" in said
    assert "step 22/22" in said and (run_dir.model / "model.safetensors").is_file()


@pytest.mark.long
def test_a_run_that_could_not_upload_does_not_start(
    run_file: Path, tmp_path: Path, hub: FakeHub
) -> None:
    env = environment(hub, tmp_path / "home", token=None)
    push = ("checkpoint.export_on_finish=true", "checkpoint.push_to_hub=me/tiny")
    said = isles("train", str(run_file), *push, env=env, cwd=tmp_path, expected=1)
    assert "there is no token for the hub" in said and "hf auth login" in said
    assert "Traceback" not in said
    assert not (tmp_path / "runs" / "tiny-1" / "metrics.jsonl").exists()
    words = ("checkpoint", "export", "tiny", "--push-to-hub", "http://hf.co/me")
    assert "owner/name" in isles(*words, env=env, cwd=tmp_path, expected=1)


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
    result = subprocess.run(
        [sys.executable, "-c", _ASK],
        input=lines,
        env=environment(hub, home),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    return result.stdout.splitlines()


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
