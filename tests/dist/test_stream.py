"""Data that streams: bounded on disk, exact over kills and changes of ranks, clear in faults."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from isles.errors import ExitCode
from isles.run.checkpoints import list_checkpoints
from isles.run.env import RankEnv
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, read_rows
from tests.data import quiet, write_rows
from tests.dist.test_resume import rows_after_start, same_bits
from tests.dist.test_same_mathematics import largest_difference
from tests.ranks import Gang, run_ranks, start_training

SEGMENT_TOKENS = 1500

STREAM = ("data.streaming=true", "data.packing=true", "training.logging_steps=1")


def _rank(env: RankEnv, run: Path, attempt: int, resume_from: Path | None) -> Any:
    """A rank with segments so small that a short run has many; how much its cache has held."""
    from isles.data.stream import samples as stream_samples
    from isles.data.stream import segments
    from isles.train.worker import run_rank

    segments.SEGMENT_TOKENS = SEGMENT_TOKENS
    held = [0]
    follow = stream_samples.StreamSamples.num_targets

    def counted(self: Any, samples: Any) -> Any:
        cache = Path(os.environ["XDG_CACHE_HOME"], "isles", "data")
        held[0] = max(held[0], len(list(cache.glob(".tmp-stream-*/source-0/segment-*[0-9]"))))
        return follow(self, samples)

    stream_samples.StreamSamples.num_targets = counted  # type: ignore[method-assign]
    run_dir = RunDir(run)
    return run_rank(run_dir, run_dir.attempt(attempt), env, resume_from), held[0]


def start(
    run_file: Path, world_size: int, *overrides: str, resume: str = "auto"
) -> tuple[RunDir, Attempt, Gang]:
    return start_training(run_file, world_size, *STREAM, *overrides, resume=resume, rank=_rank)


def to_end(
    run_file: Path, world_size: int, *overrides: str, resume: str = "auto"
) -> tuple[RunDir, int]:
    """Train to the end; the run directory, and the most segments that lay in the cache."""
    run_dir, _, gang = start(run_file, world_size, *overrides, resume=resume)
    results = gang.wait()
    assert [code for code, _ in results] == [0] * world_size, gang.log.read_text()[-3000:]
    return run_dir, max(held for _, held in results)


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
        run_dir, _, gang = start(run_file, 2, *length, *saves, runs)
        began = len(read_rows(run_dir.metrics))
        assert rows_after_start(run_dir, gang, began + 20 + kill), gang.log.read_text()[-2000:]
        gang.kill()
    run_dir, _ = to_end(run_file, 2, *length, *saves, runs)
    assert len(run_dir.attempts()) == 3
    assert same_bits(uninterrupted, run_dir)
    cache = Path(os.environ["XDG_CACHE_HOME"], "isles", "data")
    assert not list(cache.glob(".tmp-stream-*")), "what the killed ones left is gone, too"


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
def test_a_bad_row_in_the_middle_leaves_the_last_checkpoint(
    parts: Path, run_file: Path, words: Path
) -> None:
    from isles.data.tokens.tokenizer import train_tokenizer

    # One that is trained for the run would read all of so little data before.
    tokenizer = parts.parent / "tokenizer"
    train_tokenizer(words.read_text().splitlines(), 300).save_pretrained(tokenizer)
    broken = parts / "2.jsonl"
    lines = broken.read_text().splitlines()
    lines[70] = lines[70][:-3]
    broken.write_text("\n".join(lines))
    steps = ("training.max_steps=400", "checkpoint.every_steps=20", "data.validation_fraction=0")
    named = f"tokenizer={{name_or_path: {tokenizer}}}"
    run_dir, attempt, gang = start(run_file, 2, *steps, named)
    assert ExitCode.TRAINING in {code for code, _ in gang.wait()}
    errors = [read_record(attempt.rank_error(rank)) or {} for rank in range(2)]
    causes = [error for error in errors if error["exit_code"] == ExitCode.TRAINING]
    assert causes and all(f"{broken}:71" in error["where"] for error in causes), errors
    assert all("not JSON" in error["what"] for error in causes)
    assert list_checkpoints(run_dir)[-1].step >= 20


@pytest.mark.long
def test_data_that_changed_between_starts_is_noticed(parts: Path, run_file: Path) -> None:
    steps = ("checkpoint.every_steps=5", "data.validation_fraction=0")
    run_dir, _ = to_end(run_file, 1, *steps, "training.max_steps=10")
    with (parts / "3.jsonl").open("a") as stream:
        stream.write('{"text": "one more"}\n')
    again = str(run_dir.path)
    _, attempt, gang = start(run_file, 1, *steps, "training.max_steps=12", resume=again)
    assert gang.wait()[0][0] == ExitCode.USER
    error = read_record(attempt.rank_error(0)) or {}
    assert "the training data has changed since step 10 was saved" in error["what"]


def read_mixture(env: RankEnv, folder: Path, first: int, steps: int, state: Any = None) -> Any:
    """What a loader reads of two weighted streams from this sample on, and states on the way."""
    import numpy as np

    from isles.config.sections.data import DataConfig
    from isles.data.mix import build_datasets
    from isles.data.stream import segments
    from isles.data.tokens.tokenizer import load_tokenizer

    segments.SEGMENT_TOKENS = SEGMENT_TOKENS
    data = {
        "sources": [
            {"path": str(folder / "words.jsonl"), "weight": 3},
            {"path": str(folder / "chats.jsonl"), "type": "chat", "weight": 1},
        ],
        "seq_length": 160,
        "streaming": True,
        "validation_fraction": 0.1,
    }
    training, validation = build_datasets(
        DataConfig.model_validate(data),
        load_tokenizer(str(folder / "tokenizer")),
        folder / "cache",
        seed=3,
        vocab_size=512,
        progress=quiet,
        stream_state=state,
    )
    assert validation is not None and training.vocab_size_needed <= 512
    rows, states = [], []
    for step in range(steps):
        ids = np.arange(first + 12 * step, first + 12 * step + 12)
        lengths = training.lengths(ids)
        inputs, targets, positions = training.rows(ids)
        num_targets = training.num_targets(ids)
        assert lengths.max() <= inputs.shape[1] and positions is not None
        assert num_targets == (targets >= 0).sum() > 0
        rows.append((inputs.tolist(), targets.tolist(), positions.tolist()))
        states.append(json.loads(json.dumps(training.state())))
    training.close()
    return rows, states, training.content, validation.num_samples


@pytest.mark.long
def test_a_mixture_of_text_and_chats_streams_from_any_sample(words: Path, tmp_path: Path) -> None:
    from isles.data.chat.template import use_template
    from isles.data.tokens.tokenizer import train_tokenizer

    lines = words.read_text().splitlines()
    tokenizer = train_tokenizer(lines, 300)
    use_template(tokenizer, "chatml")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rng = random.Random(4)
    talks = [
        [
            {"role": role, "content": rng.choice(lines)[10 : rng.randint(15, 60)]}
            for role in ("user", "assistant")
        ]
        for _ in range(200)
    ]
    write_rows(tmp_path / "chats.jsonl", [{"messages": talk} for talk in talks])
    ((rows, states, content, held_out),) = run_ranks(read_mixture, 1, tmp_path, 0, 40)
    assert held_out > 0
    trained = [row for _, targets, _ in rows for row in targets]
    assert 0.15 < sum(min(row) < 0 for row in trained) / len(trained) < 0.35, "a fourth are chats"
    assert all(segment["number"] > 0 for segment in states[24])
    # Without what is known of the way there, it is read again.
    for state in (states[24], None):
        ((again, _, same, _),) = run_ranks(read_mixture, 1, tmp_path, 12 * 25, 15, state)
        assert (again, same) == (rows[25:], content)
    assert not list((tmp_path / "cache").glob(".tmp-stream-*")), "nothing is left"
