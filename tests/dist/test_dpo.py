"""DPO gives the same weights on any number of ranks, under every strategy, and after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from isles.run.checkpoints import list_checkpoints
from isles.run.records import read_rows
from tests.data import write_rows
from tests.dist.test_resume import same_bits
from tests.dist.test_same_mathematics import largest_difference
from tests.ranks import start_training, train_to_end


@pytest.fixture
def preference_file(run_file: Path, words: Path) -> Path:
    """The tiny run, on preferences made of the words."""
    texts = [json.loads(line)["text"] for line in words.read_text().splitlines()]
    rows = [
        {"prompt": one[:40], "chosen": two[:60], "rejected": three[:50].upper()}
        for one, two, three in zip(texts[0:240:3], texts[1:240:3], texts[2:240:3], strict=True)
        if min(len(one), len(two), len(three)) > 4
    ]
    path = write_rows(run_file.parent / "preferences.jsonl", rows)
    content = yaml.safe_load(run_file.read_text())
    content["data"]["sources"] = [{"path": str(path), "type": "preference"}]
    content["data"]["seq_length"] = 64
    content["tokenizer"]["chat_template"] = "chatml"
    content["training"] |= {"method": "dpo", "max_steps": 8, "global_batch_size": 6}
    content["training"] |= {"logging_steps": 1, "learning_rate": 0.003}
    run_file.write_text(yaml.safe_dump(content))
    return run_file


STRATEGIES = [
    ("strategy.kind=ddp", "training.micro_batch_size=1"),
    ("strategy.kind=fsdp", "training.micro_batch_size=3"),
    ("strategy={kind: deepspeed, zero_stage: 3}", "training.micro_batch_size=1"),
]


@pytest.mark.long
def test_every_strategy_learns_the_same(preference_file: Path) -> None:
    alone, code = train_to_end(preference_file, 1, "name=alone", "strategy.kind=ddp")
    assert code == 0
    rows = [row for row in read_rows(alone.metrics) if row["kind"] == "train"]
    assert rows[0]["loss"] == pytest.approx(0.6931472, abs=1e-4)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1, "capital letters are rejected"
    for number, options in enumerate(STRATEGIES):
        run_dir, code = train_to_end(preference_file, 2, f"name=many-{number}", *options)
        assert code == 0
        assert largest_difference(alone, run_dir) < 1e-5, options
        others = [row for row in read_rows(run_dir.metrics) if row["kind"] == "train"]
        for key in ("loss", "reward_margin", "reward_accuracy", "reward_chosen"):
            assert [r[key] for r in others] == pytest.approx([r[key] for r in rows], abs=1e-4)


def test_killed_and_resumed_equals_uninterrupted(preference_file: Path) -> None:
    """The reference is that of the first weights, also after the weights have moved."""
    options = ("checkpoint.every_steps=3", "strategy.kind=ddp", "training.micro_batch_size=3")
    whole, code = train_to_end(preference_file, 2, "name=whole", *options)
    assert code == 0
    run_dir, _, gang = start_training(preference_file, 2, "name=cut", *options)
    while not list_checkpoints(run_dir):
        assert not gang.wait_or_timeout(0.1) or list_checkpoints(run_dir)
    gang.kill()
    scored = run_dir.reference("training").read_bytes()
    again, code = train_to_end(preference_file, 2, "name=cut", *options)
    assert (again.path, code) == (run_dir.path, 0)
    assert run_dir.reference("training").read_bytes() == scored, "nothing was scored twice"
    assert same_bits(whole, again)


@pytest.mark.long
def test_scores_that_were_lost_are_made_again_from_the_first_weights(
    preference_file: Path,
) -> None:
    options = ("strategy.kind=ddp", "training.lr_scheduler_type=constant")
    whole, _ = train_to_end(preference_file, 1, "name=whole", *options)
    part, code = train_to_end(preference_file, 1, "name=part", *options, "training.max_steps=4")
    assert code == 0
    part.reference("training").write_bytes(b"not an archive")
    again, code = train_to_end(preference_file, 1, "name=part", *options, resume=str(part.path))
    assert (again.path, code) == (part.path, 0)
    assert same_bits(whole, again)
