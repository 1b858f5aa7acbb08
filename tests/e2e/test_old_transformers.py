"""Exports as transformers 4 and 5 read them, each in one process: equal ids and equal logits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM

from isles.checkpoint.export import export_adapter, export_model
from isles.checkpoint.reread import read_again, scores
from isles.checkpoint.tensors import TensorWriter
from isles.config.sections.model import AdapterConfig
from isles.data.tokens.tokenizer import load_tokenizer, train_tokenizer
from isles.errors import TrainingError
from isles.models.adapter import add_adapter
from isles.run.records import read_record
from tests import old_reader
from tests.deadline import run_program
from tests.ranks import train
from tests.small_models import small_model
from tests.unit.test_exported_files import LINEAR, LLAMA3, WORDS, backend, write_folder

OLD = Path(sys.prefix) / "old-transformers" / "bin" / "python"
TEXT = "Okay 2024, don't stop: 123456 caf\u00e9s\n\n  x += 1"
MARKS = ["<|im_start|>", "<|im_end|>"]
THETA: dict[str, Any] = {"rope_theta": 3e5, "rope_type": "default"}

# Type of model, what is unusual in its config, and the class of the tokenizer beside it; None: it
# is trained here.
KINDS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "llama": ("llama", {"rope_parameters": {**THETA, **LINEAR}}, "PreTrainedTokenizerFast"),
    "qwen2": ("qwen2", {"rope_parameters": THETA}, None),
    "distilled": ("qwen2", {"rope_parameters": THETA}, "LlamaTokenizerFast"),
    "qwen3": ("qwen3", {"rope_parameters": {**THETA, **LLAMA3}}, "Qwen2TokenizerFast"),
    "experts": ("qwen3_moe", {"rope_parameters": THETA}, "LlamaTokenizerFast"),
    "neox": (
        "gpt_neox",
        {"rope_parameters": {**THETA, "partial_rotary_factor": 0.5}},
        "GPTNeoXTokenizerFast",
    ),
    "gemma": (
        "gemma3_text",
        {
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
                "full_attention": {**THETA, **LINEAR},
            },
        },
        "PreTrainedTokenizerFast",
    ),
}


def make(name: str, folder: Path) -> Path:
    """Export a model of this kind with its tokenizer."""
    kind, changes, wanted = KINDS[name]
    tokenizer = train_tokenizer([WORDS], 340, model_type=kind)
    if wanted is not None:
        made = backend(splits=name in ("experts", "distilled"), begins=name == "gemma")
        base = write_folder(folder / f"{name}-base", made, wanted, additional_special_tokens=MARKS)
        tokenizer = load_tokenizer(str(base))
    model = small_model(kind, vocab_size=340, initializer_range=0.3, pad_token_id=None, **changes)
    dtype = torch.bfloat16 if name == "llama" else None
    export_model(
        model,
        tokenizer,
        folder / name,
        max_shard_bytes=10**9,
        dtype=dtype,
        verify=lambda *_: None,
    )
    return folder / name


def make_adapter(base: Path, folder: Path) -> Path:
    """Export an adapter beside an exported model, from a checkpoint."""
    model: Any = small_model(
        "llama", vocab_size=340, initializer_range=0.3, pad_token_id=None, **KINDS["llama"][1]
    )
    wanted = AdapterConfig(type="lora", r=4, target_modules=("q_proj", "down_proj"))
    add_adapter(model, wanted, dtype=torch.float32, name=str(base))
    for weight in (p for p in model.parameters() if p.requires_grad):
        torch.nn.init.normal_(weight, std=0.3)
    state = {f"model.{n}": p.data for n, p in model.named_parameters() if p.requires_grad}
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    save(state, storage_writer=TensorWriter(checkpoint), no_dist=True)
    tokenizer = load_tokenizer(str(base))
    export_adapter(checkpoint, model, tokenizer, folder / "adapter", base=str(base), card=None)
    return folder / "adapter"


def read_old(folders: list[Path]) -> dict[str, Any]:
    """What an old transformers reads of each folder, in one process."""
    done = run_program([str(OLD), old_reader.__file__, TEXT, *map(str, folders)])
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"] == "4.57.6"
    return dict(found["read"])


def test_old_and_new_transformers_read_the_same_of_every_export(tmp_path):
    assert OLD.is_file(), f"`make {OLD.parents[1].name}` is missing: `make test` makes it"
    folders = [make(name, tmp_path) for name in KINDS]
    folders.append(make_adapter(folders[0], tmp_path))
    old = read_old(folders)
    new = {str(folder): old_reader.read(folder, TEXT) for folder in folders}
    for folder in folders:
        before, now = old[str(folder)], new[str(folder)]
        assert "error" not in before, f"{folder.name}: {before['error']}"
        for key in ("ids", "end", "type"):
            assert before[key] == now[key], f"{folder.name} {key}"
        marks = set(() if folder.name == "qwen2" else MARKS)
        assert marks <= {*before["special"]} and marks <= {*now["special"]}, folder.name
        ids = load_tokenizer(str(folder))(TEXT)["input_ids"]
        assert before["ids"] == ids, folder.name
        logits, wanted = torch.tensor(before["logits"]), torch.tensor(now["logits"])
        assert float(wanted.std()) > 1e-3, f"{folder.name}: nothing to compare"
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-4, msg=folder.name)
    assert new[str(folders[0])]["type"] == "torch.bfloat16"
    adapted, base = (torch.tensor(new[str(f)]["logits"]) for f in (folders[-1], folders[0]))
    assert float((adapted - base).abs().max()) > 1e-2, "the adapter is read"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_neox"])
def test_what_two_ranks_train_in_parts_loads_everywhere(kind, run_file):
    """The files have the names of the hub, as those of the base model that transformers wrote."""
    base = run_file.parent / "tiny"
    small_model(kind, vocab_size=512, initializer_range=0.3).save_pretrained(base)
    options = ("data={sources: [{type: fake}], seq_length: 32, validation_fraction: 0}",)
    options += ("tokenizer={}", "model.init=pretrained", "strategy={kind: fsdp}")
    options += ("training.max_steps=2", "training.warmup_steps=0", "training.learning_rate=0.01")
    run_dir = train(run_file, 2, *options, "checkpoint.export_on_finish=true")
    assert "export_error" not in (read_record(run_dir.summary) or {})
    names = [load_file(f / "model.safetensors").keys() for f in (run_dir.model, base)]
    assert names[0] == names[1]
    old = read_old([run_dir.model])[str(run_dir.model)]
    logits, before, now = (
        torch.tensor(read["logits"])
        for read in (old, old_reader.read(base, TEXT), old_reader.read(run_dir.model, TEXT))
    )
    torch.testing.assert_close(logits, now, rtol=0, atol=1e-4)
    assert float((now - before).abs().max()) > 1e-3, "it was trained"


def test_an_export_that_answers_otherwise_is_named(tmp_path):
    """What a fresh process finds, which the process that has trained does not see."""
    folder = make("qwen2", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    other = {**config, "rope_theta": 10.0, "rope_parameters": {**THETA, "rope_theta": 10.0}}
    (folder / "config.json").write_text(json.dumps(other))
    with pytest.raises(TrainingError, match=r"log-probabilities of a probe differ by"):
        read_again(folder, scores(model.eval()))
