"""A checkpoint that somebody has tampered with, and one of isles 0.1.0, through every command."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from isles.checkpoint.load import latest_good
from isles.run.bring import bring_records
from isles.run.bucket import RunStore
from isles.run.checkpoints import list_checkpoints
from isles.run.objects import open_store
from isles.run.paths import RunDir
from tests.buckets import BUCKET, bucket
from tests.e2e.typed import isles, the_run
from tests.old_checkpoints import hash_again, make_old, run_code, tensors_of

pytestmark = pytest.mark.long

SAVES = ("checkpoint.every_steps=10", "training.max_steps=20")


def test_a_checkpoint_that_names_code_runs_nothing_by_any_command(run_file: Path) -> None:
    cwd, run_dir, mark = run_file.parent, the_run(run_file), run_file.parent / "it-ran"
    isles("train", str(run_file), *SAVES, cwd=cwd)
    for info in list_checkpoints(run_dir):
        make_old(info.path)
    assert isles("checkpoint", "verify", "tiny", cwd=cwd).out.count(": whole") == 2
    for info, victim in zip(
        list_checkpoints(run_dir), ("model.model.norm.weight", "model.lm_head.weight"), strict=True
    ):
        run_code(info.path, victim, os.system, f"id > {mark}")
        hash_again(info.path)
    verified = isles("checkpoint", "verify", "tiny", cwd=cwd, expected=3)
    assert verified.out.count("NOT whole") == 2 and "is not a tensor" in verified.out
    for words in (
        ("train", str(run_file), *SAVES, "training.max_steps=30", "--resume", str(run_dir.path)),
        ("generate", "tiny", "--prompt", "Once", "--max-new-tokens", "2"),
        ("checkpoint", "export", "tiny", "--output", "exported"),
        ("eval", "tiny"),
    ):
        done = isles(*words, cwd=cwd, expected=None)
        assert done.process.returncode, done.text
        assert "broken" in done.text and "Traceback" not in done.text, done.text
    assert not mark.exists() and not (cwd / "exported").exists()


def test_a_checkpoint_of_0_1_0_is_gone_on_with_bit_for_bit(run_file: Path) -> None:
    cwd, run_dir = run_file.parent, the_run(run_file)
    isles("train", str(run_file), *SAVES, cwd=cwd)
    other = RunDir(cwd / "other" / "tiny-1")
    shutil.copytree(run_dir.path, other.path)
    make_old(list_checkpoints(other)[-1].path)
    for each in (run_dir, other):
        more = (
            "training.max_steps=30",
            f"output_dir={each.path.parent}",
            "checkpoint.every_steps=10",
        )
        isles("train", str(run_file), *more, "--resume", str(each.path), cwd=cwd)
    found = [latest_good(each) for each in (run_dir, other)]
    assert [info.step for info in found if info] == [30, 30]
    left, right = (tensors_of(info.path) for info in found if info)
    assert left.keys() == right.keys()
    assert [name for name, value in left.items() if not torch.equal(value, right[name])] == []


def test_objects_of_s3_with_odd_names_are_not_fetched(tmp_path: Path, monkeypatch) -> None:
    url, home, data = f"s3://{BUCKET}/runs", tmp_path / "home", b"planted"
    home.mkdir()
    run_dir = RunDir(tmp_path / "site" / "runs" / "bk-1")
    run_dir.checkpoints.mkdir(parents=True)
    facts = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    with bucket(tmp_path / "s3") as server:
        for key, value in server.environ.items():
            monkeypatch.setenv(key, value)
        store = open_store(url, "test")
        store.write("empty", b"")
        assert (store.read("empty"), store.read("none")) == (b"", None)
        copy, place = RunStore(url, "bk-1"), "runs/bk-1/checkpoints/step-00000010"
        for name in (f"{home}/.bashrc", "../" * 5 + "home/.profile", "x/../../../../home/.zshrc"):
            manifest = {"version": 2, "step": 10, "files": {name: facts}}
            server.put(f"{place}/{name}", data)
            server.put(f"{place}/manifest.json", json.dumps(manifest).encode())
            assert "which is not a plain name" in copy.bring(10, run_dir, print)[0]
        for name in (
            "tokenizer/..",
            "tokenizer/a b",
            "track/../x.json",
            "tokenizer//x",
            "run.yaml",
        ):
            server.put(f"runs/bk-1/{name}", b"{}")
        bring_records(copy, run_dir)
    found = {path.relative_to(tmp_path / "site").as_posix() for path in tmp_path.rglob("site/**/*")}
    assert found == {"runs", "runs/bk-1", "runs/bk-1/checkpoints", "runs/bk-1/run.yaml"}
    assert list(home.iterdir()) == []
