"""Data that lies on some machines only: its tokens get to the others, whole and once."""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.run.env import RankEnv
from tests.data import quiet
from tests.ranks import run_ranks, start_ranks, start_training

LINES = [json.dumps({"text": " ".join(f"w{i * j % 97}" for j in range(40))}) for i in range(400)]
TEXT = "\n".join(LINES) + "\n"


@pytest.fixture
def tokenizer(tmp_path: Path, words: Path) -> Path:
    """A byte-level BPE in a folder of its own."""
    from isles.data.tokens.tokenizer import train_tokenizer

    folder = tmp_path / "tokenizer"
    train_tokenizer(words.read_text().splitlines(), 300).save_pretrained(folder)
    return folder


def node_of(folder: Path, number: int, text: str = "") -> Path:
    """The disk of one node, where its processes run, with a cache of its own and this text."""
    node = folder / f"node-{number}"
    node.mkdir(exist_ok=True)
    if text:
        (node / "text.jsonl").write_text(text)
    return node


def build_on_node(
    env: RankEnv, folder: Path, ranks_per_node: int, tokenizer: Path, **keys: Any
) -> Any:
    """What one rank gets: the data's hash and a batch, the error, and what was logged."""
    from isles.config.sections.data import DataConfig
    from isles.data.mix import build_datasets
    from isles.data.tokens.tokenizer import load_tokenizer
    from isles.dist import files
    from isles.dist.world import join_world, leave_world
    from isles.errors import UserError

    files.PIECE_BYTES = 4096  # so that there are many
    node, local = divmod(env.rank, ranks_per_node)
    env = replace(env, local_rank=local, local_world_size=ranks_per_node)
    os.chdir(node_of(folder, node))
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("isles").addHandler(handler)
    logging.getLogger("isles").setLevel(logging.INFO)
    world = join_world(env, device="cpu", timeout_s=30)
    data = {"sources": [{"path": "text.jsonl"}], "seq_length": 32, "cache_dir": "cache"} | keys
    try:
        training, _ = build_datasets(
            DataConfig.model_validate(data),
            load_tokenizer(str(tokenizer)),
            Path("cache"),
            seed=0,
            progress=quiet,
            world=world,
            vocab_size=300,
        )
    except UserError as error:
        return str(error)
    finally:
        leave_world()
    inputs = training.rows(np.arange(64))[0]
    held = sorted(path.name for path in Path("cache").iterdir())
    sent = [line for line in lines if line.startswith("data=")]
    return training.content, inputs.tolist(), sent, held


def test_tokens_get_to_the_nodes_that_lack_the_data_once(tmp_path: Path, tokenizer: Path):
    node_of(tmp_path, 1, TEXT)
    first = run_ranks(build_on_node, 4, tmp_path, 2, tokenizer)
    assert all(isinstance(result, tuple) for result in first), first
    assert all(result[:2] == first[0][:2] for result in first)
    (line,) = first[0][2]
    assert "(rank 2) to=" in line and "(rank 0)" in line and "text.jsonl" in line
    (key,) = [name for name in first[0][3] if name.startswith("tokens-")]
    one, other = (tmp_path / f"node-{k}" / "cache" / key for k in (0, 1))
    files = sorted(file.name for file in one.iterdir())
    assert [(one / f).read_bytes() for f in files] == [(other / f).read_bytes() for f in files]
    assert not [name for name in first[0][3] if name.startswith(".tmp")]
    second = run_ranks(build_on_node, 4, tmp_path, 2, tokenizer)
    assert second[0][:2] == first[0][:2]
    assert second[0][2] == [], "it lies in that node's cache already"
    # Damaged at its source, it is sent and refused.
    damaged = bytearray((other / "tokens.bin").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (other / "tokens.bin").write_bytes(damaged)
    shutil.rmtree(one)
    errors = run_ranks(build_on_node, 4, tmp_path, 2, tokenizer)
    assert all(error == errors[0] for error in errors)
    assert "tokens.bin is not what was to be sent: its SHA-256 has changed" in errors[0]
    assert "rank 0 on" in errors[0] and "on the disk of rank 2" in errors[0]
    assert not one.exists() and not list(one.parent.glob(".partial-*"))


@pytest.mark.long
def test_different_data_under_one_name_and_data_that_is_nowhere(tmp_path: Path, tokenizer: Path):
    missing = run_ranks(build_on_node, 2, tmp_path, 1, tokenizer)
    assert missing[0] == missing[1]
    assert "there is no such file" in missing[0]
    assert "(rank 0)" in missing[0] and "(rank 1)" in missing[0]
    node_of(tmp_path, 0, TEXT)
    node_of(tmp_path, 1, TEXT.replace("w0", "w00"))
    errors = run_ranks(build_on_node, 2, tmp_path, 1, tokenizer)
    assert errors[0] == errors[1]
    assert "hold different data" in errors[0] and "text.jsonl: " in errors[0]
    node_of(tmp_path, 1, TEXT + "{broken\n")
    errors = run_ranks(build_on_node, 2, tmp_path, 1, tokenizer)
    assert errors[0] == errors[1]
    assert "text.jsonl:401" in errors[0] and "not JSON" in errors[0]


def stream_on_node(env: RankEnv, folder: Path, tokenizer: Path) -> Any:
    from isles.data.stream import segments

    segments.SEGMENT_TOKENS = 4096
    return build_on_node(env, folder, 1, tokenizer, streaming=True, validation_fraction=0)


@pytest.mark.long
def test_a_stream_is_read_on_every_node(tmp_path: Path, tokenizer: Path):
    node_of(tmp_path, 1, TEXT)
    errors = run_ranks(stream_on_node, 2, tmp_path, tokenizer)
    assert errors[0] == errors[1]
    assert "there is no such file; other machines have it" in errors[0] and "rank 0" in errors[0]
    node_of(tmp_path, 0, TEXT + TEXT)
    errors = run_ranks(stream_on_node, 2, tmp_path, tokenizer)
    assert errors[0] == errors[1] and "hold different data: rows: files: text.jsonl: " in errors[0]
    node_of(tmp_path, 0, TEXT)
    one, other = run_ranks(stream_on_node, 2, tmp_path, tokenizer)
    assert one[:2] == other[:2] and len(one[1]) == 64


def train_on_node(env: RankEnv, run: Path, attempt: int, resume_from: Path | None) -> Any:
    """A rank of a run, alone on its node: its exit code and what its cache holds."""
    from isles.run.paths import RunDir
    from isles.train.worker import run_rank

    node = node_of(run.parent.parent, env.rank)
    os.chdir(node)
    os.environ["XDG_CACHE_HOME"] = str(node / "cache")
    env = replace(env, local_rank=0, local_world_size=1)
    run_dir = RunDir(run)
    code = run_rank(run_dir, run_dir.attempt(attempt), env, resume_from)
    return code, len(list((node / "cache").glob("isles/data/tokens-*/tokens.bin")))


def test_a_run_trains_where_one_node_alone_has_the_data(run_file: Path, words: Path):
    """The tokenizer is trained there as well."""
    node_of(run_file.parent, 0)
    words.rename(node_of(run_file.parent, 1) / "words.jsonl")
    where = "data.sources=[{path: words.jsonl}]"
    run_dir, attempt, gang = start_training(
        run_file, 2, where, "training.max_steps=4", rank=train_on_node
    )
    assert gang.wait() == [(0, 1), (0, 1)], gang.log.read_text()[-3000:]
    assert run_dir.tokenizer.is_dir()
    log = gang.log.read_text()
    assert "data=words.jsonl from=" in log and not list(attempt.path.glob("*.error.json"))


def hang_on_rank_one(env: RankEnv, does: str) -> Any:
    """What the ranks hear when the one that works for them hangs, fails or dies."""
    import threading

    from isles.dist.world import is_communication_error, join_world, work_together

    def work(print_line: Any) -> None:
        print_line("begun")
        if does == "die":
            os._exit(9)
        if does == "fail":
            raise ValueError("a fault of ours")
        threading.Event().wait()

    world = join_world(replace(env, local_rank=0, local_world_size=1), device="cpu", timeout_s=30)
    try:
        works = work if env.rank == 1 else None
        work_together(works, world, progress=quiet, no_progress_s=0.5)
    except Exception as error:
        return is_communication_error(error), str(error)
    return None


def test_those_who_wait_hear_of_a_node_that_hangs_or_fails():
    for is_communication, text in run_ranks(hang_on_rank_one, 2, "hang"):
        assert is_communication and "said nothing new" in text and "1 ('begun')" in text
    for is_communication, text in run_ranks(hang_on_rank_one, 2, "fail"):
        assert not is_communication and "ValueError: a fault of ours" in text
    gang = start_ranks(hang_on_rank_one, 2, "die")
    assert gang.pipes[0].poll(60)
    is_communication, _ = gang.pipes[0].recv()
    assert is_communication
    gang.kill()
