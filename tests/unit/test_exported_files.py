"""The files of an export: what old and new readers take from them, and what the base had."""

from __future__ import annotations

import copy
import json
import sys
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, processors, trainers
from tokenizers import pre_tokenizers as pre
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from isles.checkpoint.export import export_checkpoint, export_model
from isles.checkpoint.readable import save_config, save_tokenizer
from isles.checkpoint.reread import read_again, scores
from isles.checkpoint.tensors import TensorWriter
from isles.data.tokens.tokenizer import add_nothing, affixes, load_tokenizer, train_tokenizer
from isles.errors import TrainingError
from isles.run import limits
from tests.each import each
from tests.small_models import small_config, small_model

TEXT = "Okay 2024, don't stop: 123456 caf\u00e9s\n\n  x += 1"
WORDS = "the cat saw 2024 dogs; it's 123456 o'clock and don't stop x += 1\n" * 40
WORDS += topics["lambda"] + topics["while"] + topics["for"]
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@cache
def backend(*, splits: bool = False, begins: bool = False, ends: bool = False) -> str:
    """A small tokenizer.json: `splits` as Llama 3 does, `begins` and `ends` a text as some do."""
    made = Tokenizer(models.BPE())
    digits = [pre.Split(Regex(r"\p{N}{1,3}"), "isolated"), pre.Split(Regex(r"[\r\n]"), "isolated")]
    plain = pre.ByteLevel(add_prefix_space=False, use_regex=not splits)
    made.pre_tokenizer = pre.Sequence([*digits, plain]) if splits else plain
    made.decoder = decoders.ByteLevel()
    special = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
    letters = pre.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    made.train_from_iterator([WORDS, TEXT], trainer)
    if begins or ends:
        single = f"{'<bos> ' * begins}$A{' <eos>' * ends}"
        made.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<bos>", 0), ("<eos>", 1)]
        )
    return made.to_str()


def write_folder(
    folder: Path, tokenizer: str, name: str | None, model_type: str | None = None, **settings: Any
) -> Path:
    """A folder with a tokenizer of that class, beside a config.json of that type of model."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer)
    known = {"bos_token": "<bos>", "eos_token": "<eos>", "tokenizer_class": name, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(known))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def ids_of_file(folder: Path, text: str = TEXT) -> list[int]:
    """What tokenizer.json itself makes of a text."""
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return list(own.encode(text, add_special_tokens=False).ids)


def bare_ids(tokenizer: Any, text: str = TEXT) -> list[int]:
    """The ids of a text without what the tokenizer puts around it."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@each(
    ("LlamaTokenizerFast", "qwen2"),
    ("GPT2Tokenizer", "olmo2"),
    ("GPT2Tokenizer", None),
    ("Qwen2Tokenizer", "qwen3"),
    ("Qwen2TokenizerFast", "llama"),
    ("PreTrainedTokenizerFast", "qwen2"),
    ("GPTNeoXTokenizerFast", None),
    (None, "qwen3_5_text"),
)
def test_ids_are_those_of_the_tokenizers_own_file(case, *, tmp_path):
    name, model_type = case
    base = write_folder(tmp_path / "base", backend(splits=True), name, model_type)
    tokenizer = load_tokenizer(str(base))
    assert bare_ids(tokenizer) == ids_of_file(base)
    assert len(tokenizer) == 340, "no token that the file does not have"
    assert tokenizer.eos_token_id == 1
    (kept := tmp_path / "kept").mkdir()
    save_tokenizer(tokenizer, kept)
    again = load_tokenizer(str(kept))
    assert bare_ids(again) == ids_of_file(base) == ids_of_file(kept)
    assert bare_ids(AutoTokenizer.from_pretrained(kept)) == ids_of_file(base)


@each(
    ("LlamaTokenizerFast", "qwen2", False),
    ("PreTrainedTokenizerFast", "qwen3_5", True),
    ("GPT2Tokenizer", "qwen3_5_moe", False),
    ("Qwen2Tokenizer", "qwen2", False),
)
def test_rules_that_a_type_of_model_makes_transformers_ignore_are_read(case, *, tmp_path, caplog):
    """By AutoTokenizer, without running the code beside them; see also the old reader."""
    name, model_type, begins = case
    made = backend(splits=True, begins=begins)
    base = write_folder(tmp_path / "base", made, name, model_type)
    tokenizer = load_tokenizer(str(base))
    (out := tmp_path / "out").mkdir()
    (out / "config.json").write_text(json.dumps({"model_type": model_type}))
    save_tokenizer(tokenizer, out)
    assert not [r for r in caplog.records if r.name.startswith("isles.checkpoint")], "no warning"
    for trust in (None, False):
        read = AutoTokenizer.from_pretrained(out, trust_remote_code=trust)
        assert read(TEXT)["input_ids"] == [0] * begins + ids_of_file(base)
    # Another run that begins with this export keeps no reference to the code.
    (kept := tmp_path / "kept").mkdir()
    save_tokenizer(load_tokenizer(str(out)), kept)
    assert "auto_map" not in json.loads((kept / "tokenizer_config.json").read_text())
    assert not list(kept.glob("*.py"))


def test_a_token_that_the_settings_ask_for_is_added_and_one_of_a_class_is_not(tmp_path):
    base = write_folder(tmp_path / "base", backend(), "Qwen2Tokenizer", "qwen2", pad_token="<pad>")
    tokenizer = load_tokenizer(str(base))
    assert tokenizer.pad_token_id == 340 and "<|endoftext|>" not in tokenizer.get_vocab()
    assert len(tokenizer) == 341


@each("qwen2", "qwen3_5_text", "llama", "gpt2")
def test_a_tokenizer_trained_here_is_read_as_it_was_trained(model_type, *, tmp_path, caplog):
    tokenizer = train_tokenizer([WORDS], 330, model_type=model_type)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    save_tokenizer(tokenizer, tmp_path)
    assert not [r for r in caplog.records if r.name.startswith("isles.checkpoint")], "no warning"
    assert bare_ids(AutoTokenizer.from_pretrained(tmp_path)) == ids_of_file(tmp_path)
    assert bare_ids(tokenizer) == ids_of_file(tmp_path)


@each("PreTrainedTokenizerFast", "GPT2Tokenizer", "LlamaTokenizerFast", "CodeGenTokenizer", None)
def test_a_class_and_special_tokens_are_written_as_all_versions_take_them(name, *, tmp_path):
    marks = ["<|im_start|>", "<|im_end|>"]
    base = write_folder(tmp_path / "base", backend(), name, additional_special_tokens=marks)
    tokenizer = load_tokenizer(str(base))
    tokenizer.eos_token = "<|im_end|>"
    for folder in (tmp_path / "kept", tmp_path / "exported"):  # as a run does it
        folder.mkdir()
        save_tokenizer(tokenizer, folder)
        written = json.loads((folder / "tokenizer_config.json").read_text())
        assert written["tokenizer_class"] in ("PreTrainedTokenizerFast", name)
        assert written["eos_token"] == "<|im_end|>"
        assert not isinstance(written.get("extra_special_tokens"), list)
        assert written.get("additional_special_tokens", marks) == marks
        assert not written.keys() & {"is_local", "local_files_only"}
        tokenizer = load_tokenizer(str(folder))
        assert set(marks) <= set(tokenizer.all_special_tokens)
        assert bare_ids(tokenizer) == ids_of_file(base)


@each((True, False), (True, True), (False, True), (False, False))
def test_what_a_tokenizer_puts_around_a_text_is_known_and_can_be_turned_off(case, *, tmp_path):
    begins, ends = case
    made = backend(begins=begins, ends=ends)
    base = write_folder(tmp_path / "base", made, "PreTrainedTokenizerFast", "llama")
    tokenizer = load_tokenizer(str(base))
    assert affixes(tokenizer) == ([0] if begins else [], []), (
        "an end is no affix: each text has one"
    )
    add_nothing(tokenizer)
    save_tokenizer(tokenizer, tmp_path)
    for read in (load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)):
        assert read(TEXT)["input_ids"] == ids_of_file(base)


ROPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "old": ("llama", {"rope_theta": 1e6, "rope_scaling": None}, {}),
    "linear": ("llama", {"rope_theta": 1e6, "rope_scaling": LINEAR}, {}),
    "llama3": ("qwen3", {"rope_theta": 5e5, "rope_scaling": LLAMA3}, {}),
    "partial": ("phi", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, {}),
    "neox": ("gpt_neox", {"rotary_emb_base": 5000, "rotary_pct": 0.5}, {}),
    "new": (
        "llama",
        {"rope_parameters": {"rope_theta": 1e6, **LINEAR}},
        {"rope_theta": 1e6, "rope_scaling": LINEAR},
    ),
    "experts": ("qwen3_moe", {"num_experts": 4, "torch_dtype": "bfloat16"}, {}),
    "local": (
        "gemma3_text",
        {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "sliding_window": 16},
        {},
    ),
}


@each(*ROPES)
def test_no_key_of_the_base_is_lost_and_old_readers_find_their_names(name, *, tmp_path):
    kind, keys, more = ROPES[name]
    base = {**small_config(kind, sliding_window=16).to_dict(), "my_own_key": {"a": 1}}
    for renamed in ("rope_parameters", "num_local_experts", "rope_theta", "partial_rotary_factor"):
        base.pop(renamed, None)
    base = {**base, **keys, "bos_token_id": 999, "auto_map": {"AutoConfig": "code.Config"}}
    config = type(small_config(kind, sliding_window=16)).from_dict(copy.deepcopy(base))
    config.bos_token_id, config.dtype = None, torch.float16
    save_config(config, tmp_path, base)
    written = json.loads((tmp_path / "config.json").read_text())
    lost = base.keys() - written.keys() - {"transformers_version", "_name_or_path", "auto_map"}
    assert not lost
    assert "auto_map" not in written, "its code is not in the export"
    expected = {k: v for k, v in {**keys, **more}.items() if k != "torch_dtype"}
    assert {key: written[key] for key in expected} == expected
    assert written["torch_dtype"] == written["dtype"] == "float16"
    assert written["bos_token_id"] is None, "what the model has now"
    again = type(config).from_pretrained(tmp_path)
    assert again.to_dict().get("rope_parameters") == config.to_dict().get("rope_parameters")


def exported(model: Any, tokenizer: Any, folder: Path, **options: Any) -> dict[str, Any]:
    """Export a model without reading it in a process; its config.json."""
    verify = options.pop("verify", lambda *_: None)
    export_model(model, tokenizer, folder, max_shard_bytes=10**9, verify=verify, **options)
    AutoModelForCausalLM.from_pretrained(folder)
    return dict(json.loads((folder / "config.json").read_text()))


@each("pad_token", "bos_token", "eos_token")
def test_no_id_is_exported_that_the_model_does_not_have(name, *, tmp_path):
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(backend()), bos_token="<bos>", eos_token="<eos>"
    )
    made.add_special_tokens({name: "<new>"})
    model = small_model(vocab_size=340, pad_token_id=None)
    model.generation_config.eos_token_id = [2, 999]
    written = exported(model, made, tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    ids = [each for c in (written, settings) for k, each in c.items() if k.endswith("_token_id")]
    flat = [
        i for each in ids for i in (each if isinstance(each, list) else [each]) if i is not None
    ]
    assert flat and max(flat) < 340
    assert written["pad_token_id"] is None, "as in the base"
    if name == "pad_token":
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
        padded = tokenizer(["Hi", "Hello there, all"], padding=True)["input_ids"]
        assert max(map(max, padded)) < 340 and made.pad_token == "<new>"


def test_weights_are_exported_in_the_type_that_is_asked_for(tmp_path):
    for number, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32, None)):
        written = exported(small_model(), None, tmp_path / str(number), dtype=dtype)
        wanted = str(dtype or torch.float32).removeprefix("torch.")
        assert written["dtype"] == written["torch_dtype"] == wanted
        read = AutoModelForCausalLM.from_pretrained(tmp_path / str(number), dtype="auto")
        assert {str(p.dtype) for p in read.parameters()} == {f"torch.{wanted}"}
    large = small_model()
    large.lm_head.weight.data[0, 0] = 1e6
    with pytest.raises(TrainingError, match="too large for float16"):
        exported(large, None, tmp_path / "large", dtype=torch.float16)
    assert not (tmp_path / "large").exists()


LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
LATENT |= {"v_head_dim": 8, "n_routed_experts": 4, "num_key_value_heads": 4}
CONVERTED: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (".block_sparse_moe.experts.3.w1.weight", {}),
    "phimoe": (".block_sparse_moe.experts.3.w1.weight", {}),
    "qwen2_moe": (".mlp.experts.3.up_proj.weight", {}),
    "qwen3_moe": (".mlp.experts.3.up_proj.weight", {}),
    "olmoe": (".mlp.experts.3.up_proj.weight", {}),
    "jamba": (".feed_forward.experts.3.up_proj.weight", {"layer_types": ["mamba", "attention"]}),
    "deepseek_v3": (
        ".mlp.experts.3.up_proj.weight",
        {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **LATENT},
    ),
    "gpt_neox": ("embed_out.weight", {}),
    "gpt_oss": (".mlp.experts.gate_up_proj", {}),
}


@each(*CONVERTED)
def test_weights_from_a_checkpoint_have_the_names_of_the_hub(kind, *, tmp_path):
    """As transformers writes them, whatever it joins or renames while it loads."""
    name, changes = CONVERTED[kind]
    model = small_model(kind, **changes)
    model.save_pretrained(tmp_path / "whole")
    wanted = load_file(tmp_path / "whole" / "model.safetensors")
    assert any(own.endswith(name) for own in wanted)
    (tmp_path / "checkpoint").mkdir()
    state = {f"model.{own}": value for own, value in model.state_dict().items()}
    save(state, storage_writer=TensorWriter(tmp_path / "checkpoint"), no_dist=True)
    export_checkpoint(
        tmp_path / "checkpoint",
        model.to("meta"),
        None,
        tmp_path / "model",
        max_shard_bytes=50_000,
        verify=lambda *_: None,
    )
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    files = {file: load_file(tmp_path / "model" / file) for file in {*index["weight_map"].values()}}
    assert len(files) > 1 and index["weight_map"].keys() == wanted.keys()
    for own, file in index["weight_map"].items():
        torch.testing.assert_close(files[file][own], wanted[own], rtol=0, atol=0)


def test_an_export_that_does_not_read_back_is_no_export(tmp_path):
    def refuse(folder: Path, wanted: torch.Tensor | None) -> None:
        assert (folder / "model.safetensors").is_file() and wanted is not None
        raise TrainingError("it answers otherwise", where=str(folder), fix="")

    with pytest.raises(TrainingError, match="answers otherwise"):
        exported(small_model(), None, tmp_path / "model", verify=refuse)
    assert not list(tmp_path.iterdir())
    for export in (export_checkpoint, export_model):
        assert export.__kwdefaults__["verify"] is read_again


def test_a_model_with_flash_attention_answers_in_fp32_and_on_a_cpu():
    model = small_model().eval()
    wanted = scores(model)
    model.config._attn_implementation = "flash_attention_2"
    torch.testing.assert_close(scores(model), wanted)


def a_folder_to_read(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


@each(("kill -9 $$", 600, "signal 9"), ("exec sleep 1000", 0.5, "loading took more than"))
def test_an_export_that_a_machine_cannot_read_stays(
    line, least_s, words, *, tmp_path, monkeypatch, caplog
):
    """The system kills the process that reads it, or the process is too slow."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{line}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    read_again(a_folder_to_read(tmp_path), None, least_s=least_s)
    assert f"the export was not checked: {words}" in caplog.text


def test_an_export_is_read_within_the_memory_of_the_job(tmp_path, monkeypatch, caplog):
    for name, text in {"own": "0::/", "memory.max": "1000", "memory.current": "0"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(limits, "CGROUPS", tmp_path)
    monkeypatch.setattr(limits, "OWN", tmp_path / "own")
    read_again(a_folder_to_read(tmp_path), None)
    assert "1000 B of memory is free" in caplog.text
