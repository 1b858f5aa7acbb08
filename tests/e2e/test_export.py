"""What a run leaves at its end: a model, and a card with its own figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from isles.config.resolve import load_resolved
from isles.data.tokens.tokenizer import load_tokenizer
from isles.run.records import read_record
from isles.train.finish import export_step
from tests.ranks import train_to_end
from tests.unit.test_export import front_matter, run_snippet


def test_a_run_leaves_a_model_with_a_card(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, code = train_to_end(
        run_file, 2, "checkpoint.export_on_finish=true", "training.max_steps=6"
    )
    assert code == 0
    card = (run_dir.model / "README.md").read_text()
    summary = read_record(run_dir.summary) or {}
    assert f"| last training loss | {summary['last_loss']:.4f} |" in card
    assert f"| validation loss | {summary['eval_loss']:.4f} |" in card
    assert (
        "| steps | 6 |" in card and "| devices | 2 x CPU |" in card and "| strategy | ddp |" in card
    )
    assert "`words.jsonl`, type text" in card and "base_model" not in front_matter(card)
    written = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert written["training"]["max_steps"] == 6
    assert run_snippet(run_dir.model, monkeypatch).strip()

    # The same from the checkpoint, which goes file by file.
    resolved = load_resolved(run_dir.resolved.read_text())
    small = resolved.config.checkpoint.model_copy(update={"max_shard_gb": 3e-5})
    config = resolved.config.model_copy(update={"checkpoint": small})
    object.__setattr__(resolved, "config", config)
    folder, tokenizer = tmp_path / "sharded", load_tokenizer(str(run_dir.tokenizer))
    export_step(run_dir, resolved, tokenizer, 6, folder, repo="me/tiny")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 3
    whole = AutoModelForCausalLM.from_pretrained(run_dir.model).state_dict()
    parts = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(parts[name], value) for name, value in whole.items())
    assert 'folder = "me/tiny"' in (folder / "README.md").read_text()
