"""`checkpoint.remote` with a real S3 server on loopback, and machines that really vanish."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from isles.run.checkpoints import list_checkpoints
from isles.run.paths import RunDir
from isles.run.records import read_record
from tests.buckets import BUCKET, Bucket, bucket
from tests.e2e.typed import Command, isles, the_run
from tests.runs import assert_ended, files_with, kill_all, losses_of, nothing_left, rows_of

pytestmark = pytest.mark.long

REMOTE = (f"checkpoint.remote=s3://{BUCKET}/runs", "checkpoint.every_steps=5")
LONG = ("training.max_steps=100000", "training.logging_steps=1", "checkpoint.every_steps=20")
STEP = "runs/tiny-1/checkpoints/step-{:08d}"
EXPORT = "checkpoint.export_on_finish=true"
RESUME = ("--resume", f"s3://{BUCKET}/runs/tiny-1")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Bucket]:
    """With the runs of this test ended before it."""
    with bucket(tmp_path / "s3") as made, nothing_left(tmp_path / "runs"):
        yield made


def vanish(run_dir: RunDir) -> None:
    """Kill whatever trains, and take its disk away."""
    kill_all(run_dir.path)
    shutil.rmtree(run_dir.path.parent)


def test_a_machine_that_vanishes_in_mid_upload_is_followed_by_a_fresh_one(run_file, server):
    cwd, run_dir, env = run_file.parent, the_run(run_file), server.environ
    alone = ("train", str(run_file), EXPORT, "training.max_steps=200", "training.logging_steps=1")
    server.have("hold", methods=["PUT"], path="/checkpoints/", after="/manifest.json")
    lost = Command(*alone, *REMOTE, cwd=cwd, env=env)
    lost.until(server.has_met)
    (whole,) = (name for name in server.names() if name.endswith("/manifest.json"))
    step = int(whole.split("/")[3].removeprefix("step-"))
    vanish(run_dir)
    lost.end()
    server.have("")
    again = isles(*alone, *REMOTE, cwd=cwd, env=env)
    assert step < 200
    assert f"going on with tiny-1, which is not here, from step {step}" in again.text
    assert [row["step"] for row in rows_of(run_dir)] == [*range(1, 201)]
    names = server.names()
    there = {name.split("/")[3] for name in names if "/checkpoints/" in name}
    here = {path.name for path in run_dir.checkpoints.iterdir()}
    assert len(there) == 3 and there <= here, "keep: 3"
    assert not any("join" in name or "attempts" in name for name in names)
    model = run_dir.model / "model.safetensors"
    assert server.read("runs/tiny-1/model/model.safetensors") == model.read_bytes()
    isles(*alone, "output_dir=alone", cwd=cwd)
    undisturbed = RunDir(cwd / "alone" / "tiny-1")
    assert (undisturbed.model / "model.safetensors").read_bytes() == model.read_bytes()
    assert losses_of(undisturbed) == losses_of(run_dir)
    secret = env["AWS_SECRET_ACCESS_KEY"]
    assert files_with(secret, run_dir.path) == []
    assert not [name for name in names if secret.encode() in server.read(name)]


def test_a_second_machine_is_refused_while_the_first_one_lives(run_file, server):
    cwd, run_dir, env = run_file.parent, the_run(run_file), server.environ
    words = ("train", str(run_file), *REMOTE, *LONG)
    first = Command(*words, cwd=cwd, env=env)
    first.until(lambda: f"{STEP.format(20)}/manifest.json" in server.names())
    second = isles(*words, "output_dir=other", cwd=cwd, env=env, expected=1)
    assert "trains tiny-1 now" in second.text and "isles stop" in second.text
    assert not list_checkpoints(RunDir(cwd / "other" / "tiny-1"))
    os.kill(first.process.pid, signal.SIGINT)
    assert first.end() == 130
    assert_ended(cwd / "runs")
    saved = list_checkpoints(run_dir)[-1].step
    assert f"{STEP.format(saved)}/manifest.json" in server.names(), "waited for"
    assert f"step {saved}" in isles("checkpoint", "list", "tiny", cwd=cwd, env=env).out
    more = (f"training.max_steps={saved + 20}", "output_dir=other", *RESUME)
    third = isles(*words, *more, cwd=cwd, env=env)
    assert f"from step {saved}" in third.text and "waiting" not in third.text


def test_a_bucket_that_refuses_is_named_and_sent_to_later(run_file, server):
    cwd, run_dir, env = run_file.parent, the_run(run_file), server.environ
    refusals = {"forbidden": "does not let this machine in", "full": "has no space left"}
    for kind, words in refusals.items():
        server.have(kind, methods=["PUT"], path="/checkpoints/")
        done = isles("train", str(run_file), *REMOTE, EXPORT, cwd=cwd, env=env)
        assert f"s3://{BUCKET}/runs/{run_dir.name} {words}" in done.text
        assert "training goes on" in done.text
        assert "step 10, step 15, step 20, model, loss.png, summary.json" in done.text
        push = ("checkpoint", "push", str(run_dir.path))
        assert "isles checkpoint push" in isles(*push, cwd=cwd, env=env, expected=5).text
        server.have("busy", share=1, methods=["PUT"], path="/checkpoints/")
        command = Command(*push, cwd=cwd, env=env)
        command.until(server.has_met)
        server.have("slow", seconds=0.3)
        assert command.end() == 0, command.text
        assert "has everything" in command.out
        for name in ("model/model.safetensors", "summary.json"):
            assert f"runs/{run_dir.name}/{name}" in server.names()
        server.have("")
        run_dir = RunDir(run_dir.path.with_name("tiny-2"))


def test_a_broken_checkpoint_there_is_left_out_and_verify_says_so(run_file, server):
    cwd, run_dir, env = run_file.parent, the_run(run_file), server.environ
    isles("train", str(run_file), *REMOTE, cwd=cwd, env=env)
    verify = ("checkpoint", "verify", "tiny", "--remote")
    assert isles(*verify, cwd=cwd, env=env).out.count("whole") == 3
    (name,) = (n for n in server.names() if n.startswith(f"{STEP.format(20)}/__0"))
    data = bytearray(server.read(name))
    data[len(data) // 2] ^= 1
    server.put(name, bytes(data))
    assert "NOT whole" in isles(*verify, cwd=cwd, env=env, expected=3).out
    vanish(run_dir)
    more = ("training.max_steps=25", *RESUME)
    again = isles("train", str(run_file), *REMOTE, *more, cwd=cwd, env=env)
    assert f"step 20 at s3://{BUCKET}/runs/tiny-1 is broken and left out" in again.text
    assert (read_record(run_dir.summary) or {})["steps"] == 25
    assert rows_of(run_dir)[-1]["step"] == 25
