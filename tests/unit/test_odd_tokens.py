"""Token ids that a model does not have, and a pad token that is the end of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from isles.checkpoint.export import export_model
from isles.config.sections.model import ModelConfig
from isles.data.tokens.tokenizer import check_vocabulary, load_tokenizer
from isles.errors import DataError
from isles.models.build import build_empty_model, build_model
from tests.each import each
from tests.small_models import small_model
from tests.unit.test_exported_files import backend, write_folder
from tests.unit.test_text_ends import ids_of


def base_with(folder: Path, kind: str, **values: Any) -> ModelConfig:
    """A small model whose config.json says this of its tokens."""
    small_model(kind, vocab_size=340).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return ModelConfig(name_or_path=str(folder), init="pretrained")


@each(
    ("llama", {"pad_token_id": 340}),
    ("qwen2", {"pad_token_id": 151643, "eos_token_id": [2, 151645]}),
    ("gemma", {"pad_token_id": 999, "bos_token_id": 998}),
    ("olmo2", {"pad_token_id": 340}),
)
def test_a_base_whose_config_names_tokens_that_it_lacks_trains_and_is_exported(
    kind, values, *, tmp_path
):
    config = base_with(tmp_path / "base", kind, **values)
    options: dict[str, Any] = {"dtype": torch.float32, "vocab_size": None}
    for init in ("pretrained", "scratch"):
        known = config.model_copy(update={"init": init})
        build_empty_model(known, **options)
        model: Any = build_model(known, device=torch.device("cpu"), seed=0, **options)
        loss = model(input_ids=torch.arange(20)[None], labels=torch.arange(20)[None]).loss
        loss.backward()
    folder = tmp_path / "model"
    tokens = write_folder(tmp_path / "tokens", backend(), "PreTrainedTokenizerFast")
    export_model(
        *(model, load_tokenizer(str(tokens)), folder),
        max_shard_bytes=10**9,
        base=json.loads((tmp_path / "base" / "config.json").read_text()),
        verify=lambda *_: None,
    )
    AutoModelForCausalLM.from_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    for name in values:
        ids = written[name] if isinstance(written[name], list) else [written[name]]
        assert all(i is None or i < 340 for i in ids), name


def test_a_pad_token_that_ends_a_text_is_trained_and_kept(tmp_path):
    """Other trainers mask every pad token, and so never train the end."""
    settings = {"pad_token": "<eos>"}
    base = write_folder(tmp_path / "base", backend(), "PreTrainedTokenizerFast", **settings)
    tokenizer = load_tokenizer(str(base))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
    ids, trained = ids_of(tokenizer, "hello <eos> world", "text")
    assert ids.count(1) == 2 and all(trained)
    model = small_model(vocab_size=340, pad_token_id=1, eos_token_id=1)
    folder = tmp_path / "model"
    export_model(model, tokenizer, folder, max_shard_bytes=10**9, verify=lambda *_: None)
    read = AutoTokenizer.from_pretrained(folder)
    assert read.pad_token == read.eos_token == "<eos>"
    config = json.loads((folder / "config.json").read_text())
    assert config["pad_token_id"] == 1 and config["eos_token_id"] == 1


def test_a_vocabulary_larger_than_the_models_is_refused_and_its_fix_works(tmp_path):
    tokens = write_folder(tmp_path / "tokens", backend(), "PreTrainedTokenizerFast")
    tokenizer = load_tokenizer(str(tokens))
    with pytest.raises(DataError, match="has 340 tokens, the model knows 300") as caught:
        check_vocabulary(tokenizer, 300)
    assert "the tokenizer that belongs to the model" in caught.value.fix
    assert check_vocabulary(tokenizer, 340) == ""
