"""Data over ranks: what lies on some machines only gets to the others once; what streams."""

from __future__ import annotations

import functools
import json
import logging
import os
import random
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.config.sections.data import DataConfig
from isles.data.chat.template import use_template
from isles.data.mix import build_datasets, build_validation
from isles.data.stream import segments
from isles.data.stream.samples import StreamSamples
from isles.data.tokens.tokenizer import load_tokenizer, train_tokenizer
from isles.dist import files
from isles.dist.world import is_communication_error, join_world, leave_world, work_together
from isles.errors import ExitCode, UserError
from isles.run.checkpoints import list_checkpoints
from isles.run.env import RankEnv
from isles.run.paths import RunDir
from isles.run.records import read_record, read_rows
from isles.train.parts import Parts
from tests.data import quiet, write_rows
from tests.dist.test_resume import same_bits, until_recorded
from tests.dist.test_same_mathematics import largest_difference
from tests.each import each
from tests.ranks import one_rank, run_ranks, start_ranks, start_training

LINES = [json.dumps({"text": " ".join(f"w{i * j % 97}" for j in range(40))}) for i in range(400)]
TEXT = "\n".join(LINES) + "\n"
STREAMED = {"streaming": True, "validation_fraction": 0}


def node_of(folder: Path, number: int, text: str = "") -> Path:
    """The disk of one node, where its processes run, with a cache of its own and this text."""
    node = folder / f"node-{number}"
    node.mkdir(exist_ok=True)
    if text:
        (node / "text.jsonl").write_text(text)
    return node


def build_on_node(env: RankEnv, folder: Path, ranks_per_node: int, keys: dict[str, Any]) -> Any:
    """What one rank gets: the data's hash and a batch, the error, and what was logged."""
    files.PIECE_BYTES = segments.SEGMENT_TOKENS = 4096  # so that there are many
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
    config, tokenizer = DataConfig.model_validate(data), load_tokenizer(str(folder / "tokenizer"))
    options = {"seed": 0, "progress": quiet, "world": world, "vocab_size": 300}
    try:
        training, _ = build_datasets(config, tokenizer, Path("cache"), **options)
    except UserError as error:
        return str(error)
    finally:
        leave_world()
    inputs = training.rows(np.arange(64))[0]
    held = sorted(path.name for path in Path("cache").iterdir())
    sent = [line for line in lines if line.startswith("data=")]
    return training.content, inputs.tolist(), sent, held


def build(folder: Path, nodes: int, ranks_per_node: int = 1, **keys: Any) -> list[Any]:
    """What all ranks get."""
    if not (folder / "tokenizer").exists():
        train_tokenizer(TEXT.splitlines(), 300).save_pretrained(folder / "tokenizer")
    return run_ranks(build_on_node, nodes * ranks_per_node, folder, ranks_per_node, keys)


def test_tokens_get_to_the_nodes_that_lack_the_data_once(tmp_path):
    node_of(tmp_path, 1, TEXT)
    first = build(tmp_path, 2, 2)
    assert all(isinstance(result, tuple) for result in first), first
    assert all(result[:2] == first[0][:2] for result in first)
    (line,) = first[0][2]
    assert "(rank 2) to=" in line and "(rank 0)" in line and "text.jsonl" in line
    (key,) = [name for name in first[0][3] if name.startswith("tokens-")]
    one, other = (tmp_path / f"node-{k}" / "cache" / key for k in (0, 1))
    files = sorted(file.name for file in one.iterdir())
    assert [(one / f).read_bytes() for f in files] == [(other / f).read_bytes() for f in files]
    assert not [name for name in first[0][3] if name.startswith(".tmp")]
    os.utime(one, (0, 0))
    second = build(tmp_path, 2, 2)
    assert second[0][:2] == first[0][:2]
    assert second[0][2] == [], "it lies in that node's cache already"
    assert one.stat().st_mtime > 0, "its use is noted, for `isles data prune`"
    # Damaged at its source, it is sent and refused.
    damaged = bytearray((other / "tokens.bin").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (other / "tokens.bin").write_bytes(damaged)
    shutil.rmtree(one)
    errors = build(tmp_path, 2, 2)
    assert all(error == errors[0] for error in errors)
    assert "tokens.bin was damaged: its SHA-256 changed" in errors[0]
    assert "rank 0 on" in errors[0] and "on the disk of rank 2" in errors[0]
    assert not one.exists() and not list(one.parent.glob(".partial-*"))


def test_tokens_are_not_sent_through_a_link_of_another_user(tmp_path, give):
    node_of(tmp_path, 1, TEXT)
    (key,) = [name for name in build(tmp_path, 2)[0][3] if name.startswith("tokens-")]
    cache, outside = tmp_path / "node-0" / "cache", tmp_path / "outside"
    shutil.rmtree(cache / key)
    outside.mkdir()
    planted = cache / f".partial-{key}-{os.geteuid()}-0"
    planted.symlink_to(outside)
    give(planted)
    errors = build(tmp_path, 2)
    assert errors[0] == errors[1] and planted.name in errors[0], errors
    assert "data.cache_dir" in errors[0] and not list(outside.iterdir())


@pytest.mark.long
@each(
    ("", "", {}, ["file not found", "(rank 0)", "(rank 1)"]),
    (TEXT, TEXT.replace("w0", "w00"), {}, ["hold different data", "text.jsonl: "]),
    (TEXT, TEXT + "{broken\n", {}, ["text.jsonl:401", "not JSON"]),
    ("", TEXT, STREAMED, ["file not found", "; other machines have it", "rank 0"]),
    (TEXT + TEXT, TEXT, STREAMED, ["hold different data: rows: files: text.jsonl: "]),
)
def test_data_that_differs_or_is_nowhere_is_named(one, other, keys, words, *, tmp_path):
    node_of(tmp_path, 0, one), node_of(tmp_path, 1, other)
    errors = build(tmp_path, 2, **keys)
    assert errors[0] == errors[1]
    assert all(word in errors[0] for word in words), errors[0]


@pytest.mark.long
def test_a_stream_is_read_on_every_node(tmp_path):
    node_of(tmp_path, 0, TEXT), node_of(tmp_path, 1, TEXT)
    one, other = build(tmp_path, 2, **STREAMED)
    assert one[:2] == other[:2] and len(one[1]) == 64


def train_on_node(env: RankEnv, run: Path, attempt: int, resume_from: Path | None) -> Any:
    """A rank of a run, alone on its node: its exit code and what its cache holds."""
    node = node_of(run.parent.parent, env.rank)
    os.chdir(node)
    os.environ["XDG_CACHE_HOME"] = str(node / "cache")
    env = replace(env, local_rank=0, local_world_size=1)
    code = one_rank(env, run, attempt, resume_from)
    return code, len(list((node / "cache").glob("isles/data/tokens-*/tokens.bin")))


def test_a_run_trains_where_one_node_alone_has_the_data(run_file, words):
    """The tokenizer is trained there as well."""
    node_of(run_file.parent, 0)
    words.rename(node_of(run_file.parent, 1) / "words.jsonl")
    options = ("data.sources=[{path: words.jsonl}]", "training.max_steps=4")
    run_dir, attempt, gang = start_training(run_file, 2, *options, rank=train_on_node)
    assert gang.wait() == [(0, 1), (0, 1)], gang.said()
    assert run_dir.tokenizer.is_dir()
    log = gang.log.read_text()
    assert "data=words.jsonl from=" in log and not list(attempt.path.glob("*.error.json"))


def hang_on_rank_one(env: RankEnv, does: str) -> Any:
    """What the ranks hear when the one that works for them hangs, fails or dies."""

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
        assert is_communication and "reported nothing new" in text and "1 ('begun')" in text
    for is_communication, text in run_ranks(hang_on_rank_one, 2, "fail"):
        assert not is_communication and "ValueError: a fault of ours" in text
    gang = start_ranks(hang_on_rank_one, 2, "die")
    assert gang.pipes[0].poll(60)
    is_communication, _ = gang.pipes[0].recv()
    assert is_communication
    gang.kill()


# Data that streams: bounded on disk, exact over kills and changes of ranks, clear in faults.

SEGMENT_TOKENS = 1500

STREAM = ("data.streaming=true", "data.packing=true", "training.logging_steps=1")


def cache() -> Path:
    return Path(os.environ["XDG_CACHE_HOME"], "isles", "data")


def rank_of_a_stream(env: RankEnv, *arguments: Any) -> tuple[int, int]:
    """A rank with segments so small that a short run has many; how much its cache has held."""
    segments.SEGMENT_TOKENS = SEGMENT_TOKENS
    held = [0]
    follow = StreamSamples.num_targets

    def counted(self: Any, samples: Any) -> Any:
        held.append(len(list(cache().glob(".tmp-stream-*/source-0/segment-*[0-9]"))))
        return follow(self, samples)

    StreamSamples.num_targets = counted  # type: ignore[method-assign]
    return one_rank(env, *arguments), max(held)


start = functools.partial(start_training, rank=rank_of_a_stream)


def to_end(run_file: Path, world_size: int, *overrides: str, **how: Any) -> tuple[RunDir, int]:
    """Train to the end; the run directory, and the most segments that lay in the cache."""
    run_dir, _, gang = start(run_file, world_size, *STREAM, *overrides, **how)
    codes, held = zip(*gang.wait(), strict=True)
    assert not any(codes), gang.said()
    return run_dir, max(held)


@pytest.fixture
def parts(run_file: Path, words: Path) -> Path:
    """The folder of the words in eight files, which the run file streams."""
    folder = run_file.parent / "parts"
    folder.mkdir()
    rng = random.Random(2)
    lines = words.read_text().splitlines()
    for part in range(8):
        (folder / f"{part}.jsonl").write_text("\n".join(rng.choices(lines, k=300)) + "\n")
    text = run_file.read_text().replace(str(words), f"{folder}/*.jsonl")
    run_file.write_text(text)
    return folder


def test_a_killed_stream_goes_on_bit_for_bit_and_stays_small(parts: Path, run_file: Path) -> None:
    length = ("training.max_steps=90", "data.validation_fraction=0.05")
    saves = ("checkpoint.every_steps=7", "checkpoint.keep=2")
    uninterrupted, held = to_end(run_file, 2, *length, "checkpoint.every_steps=null")
    (before,) = list_checkpoints(uninterrupted)[-1].manifest["stream"]
    assert before["number"] > 15
    assert 1 <= held <= 6, "a few segments at a time, whatever the number of steps"
    runs = f"output_dir={parts.parent / 'killed'}"
    for kill in range(2):
        run_dir, _, gang = start(run_file, 2, *STREAM, *length, *saves, runs)
        until_recorded(run_dir, gang, len(list(read_rows(run_dir.metrics))) + 20 + kill)
        gang.kill()
    run_dir, _ = to_end(run_file, 2, *length, *saves, runs)
    assert len(run_dir.attempts()) == 3
    assert same_bits(uninterrupted, run_dir)
    assert not list(cache().glob(".tmp-stream-*")), "what the killed ones left is gone, too"


@pytest.mark.long
def test_other_numbers_of_ranks_read_the_same_stream(parts: Path, run_file: Path) -> None:
    constant = ("training.lr_scheduler_type=constant", "data.validation_fraction=0")
    one, _ = to_end(run_file, 1, *constant, "training.max_steps=16")
    changing = (*constant, f"output_dir={parts.parent / 'changing'}")
    first, _ = to_end(run_file, 2, *changing, "training.max_steps=7")
    last, _ = to_end(run_file, 3, *changing, "training.max_steps=16", resume=str(first.path))
    assert len(last.attempts()) == 2
    assert list_checkpoints(last)[-1].manifest["samples"] == 16 * 12
    assert largest_difference(one, last) < 1e-5


@pytest.mark.long
def test_a_bad_row_in_the_middle_leaves_the_last_checkpoint(parts, run_file, words):
    # One that is trained for the run would read all of so little data before.
    tokenizer = parts.parent / "tokenizer"
    train_tokenizer(words.read_text().splitlines(), 300).save_pretrained(tokenizer)
    broken = parts / "2.jsonl"
    lines = broken.read_text().splitlines()
    lines[70] = lines[70][:-3]
    broken.write_text("\n".join(lines))
    steps = ("training.max_steps=400", "checkpoint.every_steps=20", "data.validation_fraction=0")
    named = f"tokenizer={{name_or_path: {tokenizer}}}"
    run_dir, attempt, gang = start(run_file, 2, *STREAM, *steps, named)
    assert ExitCode.TRAINING in {code for code, _ in gang.wait()}
    errors = [read_record(attempt.rank_error(rank)) or {} for rank in range(2)]
    causes = [error for error in errors if error["exit_code"] == ExitCode.TRAINING]
    assert causes and all(f"{broken}:71" in error["where"] for error in causes), errors
    assert all("not JSON" in error["what"] for error in causes)
    assert list_checkpoints(run_dir)[-1].step >= 20


def rank_that_looks_seldom(env: RankEnv, *arguments: Any) -> tuple[int, int]:
    """As on a GPU, it is only looked whether steps were finite where one is recorded."""
    Parts.checks_every_step = False  # type: ignore[assignment,method-assign]
    return rank_of_a_stream(env, *arguments)


def test_a_step_that_was_not_finite_some_segments_ago_leaves_a_checkpoint_to_go_on_from(
    parts: Path, run_file: Path
) -> None:
    hell = ("training.learning_rate=100.0", "training.optimizer=sgd", "training.max_steps=200")
    hell += ("training.max_grad_norm=null", "data.validation_fraction=0", *STREAM)
    seldom = "training.logging_steps=20"
    how: Any = {"rank": rank_that_looks_seldom}
    run_dir, attempt, gang = start_training(run_file, 2, *hell, seldom, **how)
    assert {code for code, _ in gang.wait()} == {ExitCode.TRAINING}, gang.said()
    error, (saved,) = read_record(attempt.rank_error(0)) or {}, list_checkpoints(run_dir)
    assert 0 < saved.step < 10
    assert f"gradient of step {saved.step + 1} is not finite (samples " in error["what"]
    assert (saved.manifest["stream"] or [None]) == [None], "still in the first segment"
    # Who goes on from there reads that step again, and knows more of it, as it looks at every one.
    _, attempt, gang = start(run_file, 1, *hell)
    assert gang.wait()[0][0] == ExitCode.TRAINING, gang.said()
    error = read_record(attempt.rank_error(0)) or {}
    assert f"step {saved.step + 1} is not finite, although" in error["what"]


@pytest.mark.long
def test_a_mixture_of_text_and_chats_streams_from_any_sample(words, tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_TOKENS", SEGMENT_TOKENS)
    lines, rng = words.read_text().splitlines(), random.Random(4)
    tokenizer = train_tokenizer(lines, 300)
    use_template(tokenizer, "chatml")
    said = [rng.choice(lines)[10 : rng.randint(15, 60)] for _ in range(400)]
    talks = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        for asked, answer in zip(said[::2], said[1::2], strict=True)
    ]
    chats = write_rows(tmp_path / "chats.jsonl", [{"messages": talk} for talk in talks])
    sources = [{"path": str(words), "weight": 3}]
    sources += [{"path": str(chats), "type": "chat", "weight": 1}]
    data = {"sources": sources, "seq_length": 160, "streaming": True, "validation_fraction": 0.1}
    config, sizes = DataConfig.model_validate(data), {"vocab_size": 512, "progress": quiet}

    def read(first: int, steps: int, state: Any = None) -> Any:
        """What is read from this sample on, states on the way, and which data it is."""
        given = {**sizes, "seed": 3, "stream_state": state}
        training, validation = build_datasets(config, tokenizer, tmp_path / "cache", **given)
        assert validation.num_samples > 0 and training.vocab_size_needed <= 512
        rows, states = [], []
        for start in range(first, first + 12 * steps, 12):
            ids = np.arange(start, start + 12)
            lengths = training.lengths(ids)
            inputs, targets, positions = training.rows(ids)
            assert lengths.max() <= inputs.shape[1]
            assert training.num_targets(ids) == (targets >= 0).sum() > 0
            rows.append((inputs.tolist(), targets.tolist(), positions.tolist()))
            states.append(json.loads(json.dumps(training.state())))
        training.close()
        return rows, states, training.content

    alone = build_validation(config, tokenizer, tmp_path / "cache", seed=3, **sizes)
    assert alone is not None and alone.num_samples > 0
    assert not list((tmp_path / "cache").glob(".tmp-*")), "no segment is prepared for it"
    rows, states, content = read(0, 40)
    trained = [row for _, targets, _ in rows for row in targets]
    assert 0.15 < sum(min(row) < 0 for row in trained) / len(trained) < 0.35, "a fourth are chats"
    assert all(segment["number"] > 0 for segment in states[24])
    # Without what is known of the way there, it is read again.
    for state in (states[24], None):
        again, _, same = read(12 * 25, 15, state)
        assert (again, same) == (rows[25:], content)
    with words.open("a") as stream:
        stream.write('{"text": "one more"}\n')
    assert read(0, 1)[2] != content, "a start from a checkpoint would notice it"
    assert not list((tmp_path / "cache").glob(".tmp-stream-*")), "nothing is left"
