"""Exports: files with a right index, a card that says what is known, a snippet that works."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from isles.checkpoint.card import card_text
from isles.checkpoint.export import export_model
from isles.config.load import load_run_file
from isles.config.resolve import resolve
from isles.errors import DataError, UserError
from isles.run.checkpoints import CheckpointInfo
from isles.run.paths import RunDir
from isles.train import verbs
from tests.deadline import DEADLINE_S
from tests.each import each
from tests.small_models import small_model

TEMPLATE = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}assistant :"
RUN = """\
name: tiny
model: {name_or_path: org/base}
data: {sources: [{path: org/data}], seq_length: 32}
training: {max_steps: 20, global_batch_size: 4}
"""


def card_of(folder: Path, tokenizer: Any, *overrides: str, **options: Any) -> str:
    """The card of a run that has trained 20 steps and evaluated."""
    run_dir = RunDir(folder / "tiny-1")
    run_dir.path.mkdir(exist_ok=True)
    row = {"kind": "eval", "step": 20, "loss": 5.2}
    run_dir.metrics.write_text(json.dumps(row) + "\n")
    (folder / "run.yaml").write_text(RUN)
    resolved = resolve(load_run_file(folder / "run.yaml", overrides), num_gpus=0, world_size=1)
    manifest = {"tokens": 6441, "samples": 80, "elapsed_s": 3.0, "world_size": 1, "versions": {}}
    checkpoint = CheckpointInfo(folder, 20, manifest)
    return card_text(run_dir, resolved, checkpoint, tokenizer, **options)


def tiny_tokenizer(template: str | None = None) -> Any:
    words = ["<unk>", "<end>", "user", "assistant", "Hello", "Once", "upon", "a", "time", ":"]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="<end>", pad_token="<end>"
    )
    tokenizer.chat_template = template
    return tokenizer


def front_matter(card: str) -> dict[str, Any]:
    head = yaml.safe_load(card.split("---")[1])
    assert isinstance(head, dict)
    return head


def run_snippet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the README's Python prints, run in its folder."""
    found = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert found
    monkeypatch.chdir(folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(found[1], "README.md", "exec"), {})
    return printed.getvalue()


def test_a_prompt_that_the_model_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(60)])
    monkeypatch.setattr(verbs, "_tokenizer", lambda *_: tokenizer)
    monkeypatch.setattr(verbs, "_load", lambda *_: (small_model(), 1))
    config = SimpleNamespace(adapter=SimpleNamespace(type="none"), data=None)
    options = SimpleNamespace(step=None, seed=0, prompt="Once upon <59>", chat=False)
    with pytest.raises(DataError, match=r"holds '<59>' \(token 69\), the model knows 64"):
        verbs._generate(options, RunDir(tmp_path), SimpleNamespace(config=config))  # type: ignore[arg-type]


@each(
    ("tied", "limit", "least"),
    [
        (False, 9000, 4),  # embeddings have 8192 bytes, and the largest matrix 6144
        (True, 9000, 4),
        (False, 1000, 15),  # a larger tensor has a file of its own
        (False, 10**9, 1),
    ],
)
def test_weights_in_several_files_load_to_the_same_model(
    tmp_path: Path, tied: bool, limit: int, least: int
) -> None:
    model, folder = small_model(tie_word_embeddings=tied).eval(), tmp_path / "model"
    export_model(model, tiny_tokenizer(), folder, max_shard_bytes=limit)
    files = {file.name: file for file in folder.glob("*.safetensors")}
    assert len(files) >= least
    if limit == 9000:
        assert all(file.stat().st_size < limit + 2000 for file in files.values()), "with its names"
    index = folder / "model.safetensors.index.json"
    if least == 1:
        assert list(files) == ["model.safetensors"] and not index.exists()
    else:
        assert set(json.loads(index.read_text())["weight_map"].values()) == set(files)
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(20)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.long
def test_an_export_does_not_import_deepspeed(tmp_path: Path) -> None:
    """Which takes seconds, and brings MLflow with it where that is installed."""
    program = f"""
import sys
from pathlib import Path
from isles.checkpoint.export import export_model
from tests.small_models import small_model

export_model(small_model(), None, Path({str(tmp_path)!r}) / "model", max_shard_bytes=10**9)
print([name for name in ("deepspeed", "mlflow") if name in sys.modules])
"""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr


@each(
    ("tokenizer", "printed"),
    [(tiny_tokenizer(), "Once upon a time"), (tiny_tokenizer(TEMPLATE), "\n"), (None, "64")],
    ids=["text", "chat", "no tokenizer"],
)
def test_the_snippet_of_the_card_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any, printed: str
) -> None:
    folder, model = tmp_path / "model", small_model()
    model.generation_config.max_length = 40
    card = card_of(tmp_path, tokenizer)
    export_model(model, tokenizer, folder, max_shard_bytes=10**9, card=card)
    assert printed in run_snippet(folder, monkeypatch)
    if tokenizer is not None:
        template = tokenizer.chat_template
        assert ("apply_chat_template" in card) == (template is not None)
        assert AutoTokenizer.from_pretrained(folder).chat_template == template
        generation = json.loads((folder / "generation_config.json").read_text())
        # 2 is the default of the class, and no end to this tokenizer; 1 is.
        assert generation["max_length"] == 40 and generation["eos_token_id"] == 1


def test_the_snippet_of_an_adapter_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import LoraConfig, get_peft_model

    base, folder = tmp_path / "base", tmp_path / "adapter"
    small_model().save_pretrained(base)
    loaded = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(loaded, LoraConfig(task_type="CAUSAL_LM", r=2)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    card = card_of(tmp_path, tiny_tokenizer(), "adapter.type=lora", kind="adapter")
    (folder / "README.md").write_text(card)
    assert run_snippet(folder, monkeypatch).strip()
    head = front_matter(card)
    assert head["library_name"] == "peft" and "lora" in head["tags"]
    assert "adapter alone" in card


def test_a_card_says_what_is_known_and_nothing_else(tmp_path: Path) -> None:
    card = card_of(tmp_path, tiny_tokenizer())
    head = front_matter(card)
    assert head["library_name"] == "transformers" and head["pipeline_tag"] == "text-generation"
    assert head["base_model"] == "org/base" and head["datasets"] == ["org/data"]
    assert "license" not in head and "language" not in head
    assert "| validation loss | 5.2000 |" in card and "perplexity" not in card
    assert "| tokens | 6.4k |" in card and "name: tiny" in card
    shape = ("model.name_or_path=llama-2m", "model.init=scratch", "data.sources=[{type: fake}]")
    fresh = card_of(tmp_path, None, *shape)
    assert "base_model" not in front_matter(fresh) and "datasets" not in front_matter(fresh)
    assert "fresh weights" in fresh
    method = ("training.method=dpo", "adapter.type=qlora", "data.sources.0.type=preference")
    dpo = card_of(tmp_path, tiny_tokenizer(TEMPLATE), *method, repo="me/x")
    assert {"dpo", "qlora", "conversational"} <= set(front_matter(dpo)["tags"])
    assert 'folder = "me/x"' in dpo and "# x" in dpo and "2305.18290" in dpo


def test_what_is_no_export_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not a model"):
        export_model(small_model(), None, tmp_path / "notes", max_shard_bytes=10**9)
    assert (tmp_path / "notes" / "thesis.txt").read_text() == "years of work"
    assert not list(tmp_path.glob(".partial*"))
