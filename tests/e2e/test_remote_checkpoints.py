"""`checkpoint.remote` with a real S3 server on loopback, and machines that really vanish."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from isles.run.paths import RunDir
from tests.buckets import BUCKET, Bucket, bucket
from tests.e2e.typed import Command, isles, the_run
from tests.runs import files_with, kill_all, losses_of, nothing_left, rows_of

pytestmark = pytest.mark.long

REMOTE = (f"checkpoint.remote=s3://{BUCKET}/runs", "checkpoint.every_steps=5")
EXPORT = "checkpoint.export_on_finish=true"


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
    assert f"resuming tiny-1, which is not on this machine, from step {step}" in again.text
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

    verify = ("checkpoint", "verify", "tiny", "--remote")
    assert isles(*verify, cwd=cwd, env=env).out.count("whole") == 3
    (name,) = (n for n in names if "/step-00000200/tensors-0" in n)
    server.put(name, bytes([server.read(name)[0] ^ 1]) + server.read(name)[1:])
    assert "NOT whole" in isles(*verify, cwd=cwd, env=env, expected=3).out


def test_a_bucket_that_refuses_is_named_and_sent_to_later(run_file, server):
    cwd, run_dir, env = run_file.parent, the_run(run_file), server.environ
    refusals = {"forbidden": "refuses this machine", "full": "has no space left"}
    for kind, words in refusals.items():
        server.have(kind, methods=["PUT"], path="/checkpoints/")
        exact = "checkpoint.async_save=false"
        done = isles("train", str(run_file), *REMOTE, EXPORT, exact, cwd=cwd, env=env)
        assert f"s3://{BUCKET}/runs/{run_dir.name} {words}" in done.text
        assert "raining continues" in done.text
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
