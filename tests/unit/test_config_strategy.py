"""What a strategy, a model's shape and the files of this machine ask; which one auto chooses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from isles.config.auto import Resources, choose_strategy, describe, fitting_strategies
from isles.config.files import data_issues, shape_issues
from isles.config.load import load_run_file
from isles.config.resolve import resolve
from isles.config.roofline import Chip, Links
from isles.config.rules.shape import check_shape
from isles.errors import ConfigError, ConfigErrors, UserError
from isles.facts import models
from isles.facts.gpus import named_gpu
from isles.facts.memory.architecture import Architecture
from isles.launch.base import resolve_checked, resolve_here
from isles.models.attention import check_attention
from isles.run.env import huggingface_cache
from tests.each import each
from tests.run_files import load

GOOD = """\
model: {name_or_path: gpt2}
data: {sources: [{path: a/b}]}
training: {max_steps: 100}
"""
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


@each(("{'7': 1}", "share for rank 7, and the 2 ranks"), ("{'0': 0, '1': 0}", "a share of 0"))
def test_shares_of_ranks_are_compared_with_the_ranks(balance: str, what: str, *, tmp_path):
    loaded = load(tmp_path, GOOD, f"balance={balance}", "clusters.0.gpus_per_node=2")
    with pytest.raises(ConfigError, match=what) as raised:
        resolve(loaded, num_gpus=0)
    assert raised.value.where.startswith("command line balance")


def shape_with(tmp_path: Path, strategy: str, **changes: Any) -> list[tuple[str, str]]:
    """What is said about a strategy with the Llama, some of whose values are changed."""
    loaded = load(tmp_path, GOOD, f"strategy={strategy}")
    return [(v.what, v.fix) for v in check_shape(loaded.config, {**LLAMA, **changes})]


ORIGINAL = "original_max_position_embeddings"
LONG = {"rope_type": "longrope", ORIGINAL: 512}


@each(
    ("tp_size: 3", {}, "heads 8, num_key_value_heads 4, inter", "use 2 or 4"),
    ("tp_size: 2", {"model_type": "apertus"}, "activations", "kind: fsdp"),
    ("tp_size: 2", {"residual_dropout": 0.1}, "residual_dropout is 0.1", "to 0"),
    ("tp_size: 2, cp_size: 4, cp_method: ulysses", {}, "over tp_size 2 do not", "allgather"),
    ("cp_size: 2", {"sliding_window": 512}, "window of 512 tokens", "cp_size: 1"),
    ("cp_size: 2", {"rope_parameters": LONG}, "(longrope) change beyond 512", "512 or less"),
    ("cp_size: 2", {"rope_scaling": {"type": "longrope"}, ORIGINAL: 512}, "longrope", "cp_size: 1"),
    ("pp_size: 2", {"layer_types": ["linear_attention"]}, "linear_attention", "pp_size: 1"),
    ("tp_size: 2, pp_size: 2", {"tie_word_embeddings": True}, "tie_word_embeddings", "tp_size"),
    ("pp_size: 8", {}, "pp_size 8 needs 8 layers, and the model has 6", "6 or less"),
    ("pp_size: 4, pp_schedule: zbv", {}, "by pp_schedule zbv, needs 8 layers", "3 or less"),
    ("cp_size: 1", {"max_position_embeddings": None, "n_positions": 9}, "1024", "9 or"),
)
def test_a_shape_that_does_not_fit_is_one_fault(strategy, changes, what, fix, *, tmp_path):
    ((found, mended),) = shape_with(tmp_path, f"{{kind: ddp, {strategy}}}", **changes)
    assert what in found
    assert fix in mended


@each(
    ("{kind: ddp, tp_size: 4, cp_size: 2, pp_size: 3}", {}),
    ("{kind: ddp, cp_size: 2}", {"sliding_window": 512, "use_sliding_window": False}),
    ("{kind: ddp}", {"rope_parameters": LONG}),
    ("{kind: fsdp, cp_size: 2}", {"rope_parameters": LONG | {ORIGINAL: 1024}}),
    ("{kind: fsdp, cp_size: 2}", {"rope_parameters": LONG | {"rope_type": "llama3"}}),
    ("{kind: fsdp}", {"model_type": "mamba2", "sliding_window": 3}),
    ("{kind: ddp, tp_size: 2}", {"model_type": "mistral", "sliding_window": 512}),
    ("{kind: ddp, tp_size: 2, pp_size: 2}", {"tie_word_embeddings": None}),
    ("{kind: ddp, pp_size: 2}", {"tie_word_embeddings": True}),
    ("{kind: ddp, pp_size: 2}", {"model_type": "mistral", "sliding_window": 512}),
    ("{kind: ddp, pp_size: 2}", {"layer_types": ["full_attention", "sliding_attention"]}),
)
def test_a_shape_that_fits_is_accepted(strategy: str, changes: dict[str, Any], *, tmp_path):
    assert shape_with(tmp_path, strategy, **changes) == []


def test_what_is_known_to_be_exact_has_no_reason_against_it() -> None:
    known = {"tp_size": models.TENSOR_PARALLEL, "cp_size": models.CONTEXT_PARALLEL}
    known |= {"pp_size": models.PIPELINE, "isolate_documents": models.ISOLATED}
    for key, reasons in models.REASONS.items():
        assert not known[key] & set(reasons)


EAGER = "model.attn_implementation=eager"
CHAT, TEXT = GOOD.replace("a/b", "a/b, type: chat"), "data.sources=[{path: a}]"


@each(
    ("mamba", [], "for model_type mamba: its layers carry a state from token to token"),
    (
        "bloom",
        ["model.attn_implementation=eager"],
        "for model_type bloom: it does not accept positions",
    ),
    ("their_own", [TEXT, "data.isolate_documents=true"], "for model_type their_own"),
    ("opt", ["model.attn_implementation=flex_attention"], "flex_attention does not isolate"),
    ("gptj", ["model.attn_implementation=flash_attention_2"], "flash_attention_2 does"),
    ("mamba", ["data.packing=false"], None),
    ("mamba", ["data.isolate_documents=false"], None),
    ("mamba", [TEXT], None),
    ("opt", [], None),
)
def test_models_that_do_not_heed_borders_are_refused(kind, overrides, what, *, tmp_path):
    found = check_shape(load(tmp_path, CHAT, *overrides).config, {"model_type": kind})
    assert len(found) == (what is not None)
    assert all(what in issue.what and "data.packing: false" in issue.fix for issue in found)


@each("num_experts", "num_local_experts", "n_routed_experts")
def test_fp8_of_a_mixture_of_experts_is_refused(key: str, *, tmp_path):
    fp8 = load(tmp_path, GOOD, "training.precision=fp8-mixed").config
    (issue,) = check_shape(fp8, {**LLAMA, key: 8})
    assert "never tried with mixtures" in issue.what and issue.fix == "use precision: bf16-mixed"
    assert not check_shape(fp8, LLAMA)
    assert not check_shape(load(tmp_path, GOOD).config, {**LLAMA, key: 8})


@each(("llama", 0.01, 1), ("llama", 0, 0), ("qwen3_moe", 0.01, 0), ("deepseek_v3", 0.01, 0))
def test_experts_of_a_model_without_experts_are_not_balanced(kind, coefficient, count, *, tmp_path):
    """Ranks decide for the other kinds, whose config in transformers isles does not know."""
    config = load(tmp_path, GOOD, f"model.router_aux_loss_coef={coefficient}").config
    found = check_shape(config, {**LLAMA, "model_type": kind})
    assert [issue.fix for issue in found] == ["delete the key"] * count
    assert all("llama has no loss that balances experts" in issue.what for issue in found)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "bloom", "mpt"])
def test_a_model_without_fused_attention_is_refused_before_the_start(kind, tmp_path):
    """By the same key as transformers' own error, which comes when the ranks build the model."""
    text = CHAT.replace("gpt2", str(tmp_path / "base"))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": kind}))
    packed = "data.packing=false"
    (issue,) = shape_issues(load(tmp_path, text, packed), tmp_path)
    assert f"model_type {kind} does not support attn_implementation sdpa" in issue.what
    ((key, value),) = re.findall(r"^set (\S+): (\w+)$", issue.fix)
    assert shape_issues(load(tmp_path, text, packed, f"{key}={value}"), tmp_path) == []
    config = AutoConfig.for_model(kind)
    with torch.device("meta"), pytest.raises(ValueError, match="scaled_dot_product_attention"):
        AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def test_models_without_fused_attention_are_those_of_transformers():
    known = models.ISOLATED | models.TENSOR_PARALLEL | models.CONTEXT_PARALLEL | models.EAGER
    names = {k: name for k, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if k in known}
    classes = {kind: getattr(transformers, name, None) for kind, name in names.items()}
    found = {kind for kind in names if not getattr(classes[kind], "_supports_sdpa", True)}
    assert found == models.EAGER & {*names}


def test_attention_for_gpus_is_refused_without_one() -> None:
    for name in ("flash_attention_2", "flex_attention"):
        with pytest.raises(UserError, match=f"{name} trains only on a GPU") as caught:
            check_attention(name, torch.device("cpu"))
        assert "attn_implementation: sdpa" in caught.value.fix
    check_attention("sdpa", torch.device("cpu"))
    check_attention("eager", torch.device("cpu"))


LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
SHAPES = {"1b": models.load_shape("llama-1b"), "8b": models.load_shape("llama-8b")}
SHAPES["70b"] = SHAPES["8b"] | LARGE | {"num_attention_heads": 64}


@each(
    ("1b", 8, 8, 80, 200e9, "ddp", "no other strategy that fits is faster"),
    ("1b", 2, 1, 80, 125e6, "SHARD_GRAD_OP", "% of the time of ddp"),
    ("1b", 1, 1, 80, 200e9, "ddp", "a single rank"),
    ("8b", 1, 1, 80, 200e9, "offload", "nothing else fits"),
    ("8b", 8, 8, 80, 200e9, "FULL_SHARD", "no other strategy that fits is faster"),
    ("8b", 8, 8, 80, 1e9, "SHARD_GRAD_OP", "weights are gathered once per step"),
    ("8b", 16, 8, 80, 1e9, "HYBRID_SHARD", "8 ranks of a node"),
    ("8b", 16, 8, 24, 1e9, "FULL_SHARD", "sharded over 16 ranks it needs"),
    ("70b", 8, 8, 80, 200e9, "offload", "nothing else fits"),
)
def test_the_choice_and_its_reason(size, ranks, per_node, gib, link, chosen, why, *, tmp_path):
    more = ("data.seq_length=2048", "training.gradient_checkpointing=full")
    config = load(tmp_path, GOOD, *more).config
    links = Links(per_node, ranks // per_node, link if ranks == per_node else 300e9, link)
    chip = Chip.of(named_gpu("h100"), "16-bit")
    machine = Resources(ranks, per_node, gib * 2**30, links, chip)
    strategy, reason = choose_strategy(Architecture.of(SHAPES[size]), config, machine)
    assert describe(strategy).split()[-1] == chosen
    assert why in reason and "\n" not in reason


@each((24, "ddp"), (7, "FULL_SHARD"))
def test_four_bits_are_sharded_if_the_model_does_not_fit_whole(gib, chosen, *, tmp_path):
    """ddp sends the least, so its speed is not compared with others."""
    more = ("adapter.type=qlora", "training.gradient_checkpointing=full")
    config = load(tmp_path, GOOD, *more).config
    chip = Chip.of(named_gpu("h100"), "16-bit")
    machine = Resources(8, 8, gib * 2**30, Links(8, 1, 200e9, 0.0), chip)
    [(strategy, _)] = fitting_strategies(Architecture.of(SHAPES["8b"]), config, machine)
    assert describe(strategy).split()[-1] == chosen


@each("training.precision=fp8-mixed", "adapter.type=qlora", "data.seq_length=500")
def test_rules_of_sizes_are_for_sizes_that_are_known(setting, *, tmp_path):
    """The other rules of these settings hold."""
    automatic = "strategy={kind: auto, pp_size: auto}"
    try:
        load(tmp_path, GOOD, automatic, setting)
    except ConfigErrors as errors:
        assert "pp_size" not in str(errors)


SHORT = json.dumps({**LLAMA, "max_position_embeddings": 8})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a file, a saved dataset and a model in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    for name in ("folder", "base"):
        (tmp_path / name).mkdir()
    (tmp_path / "base" / "config.json").write_text(SHORT)
    (tmp_path / "folder" / "state.json").write_text("{}")
    return tmp_path


@each(
    ("data.sources.0.path", "note.txt", "file not found", "did you mean notes.txt?"),
    ("data.sources.0.path", "/nowhere/x", "file not found", "last existing folder is /"),
    ("data.sources.0.path", "*.jsonl", "matches the glob", "try the glob with ls"),
    ("data.sources.0.path", "base", "is a folder", "such as base/**/*.json"),
    ("model.name_or_path", "./bse", "folder not found", "did you mean base?"),
    ("tokenizer.chat_template", "chatlm", "chat template not found", "use chatml"),
)
def test_what_is_not_there_is_named(key: str, value: str, what: str, fix: str, *, here):
    chat = "data.sources.0.type=chat"
    (issue,) = data_issues(load(here, GOOD, chat, f"{key}='{value}'"))
    assert what in issue.what
    assert fix in issue.fix
    assert issue.where == f"command line {key}"


def test_what_is_there_or_may_be_on_the_hub_is_no_fault(here: Path) -> None:
    paths = ("notes.txt", "folder", "*.txt", "python-docs", "me/data", "wikitext")
    sources = ", ".join(f"{{path: '{path}'}}" for path in paths)
    for model in (f"{here}/base", "me/model", "gpt2"):
        found = load(here, GOOD, f"data.sources=[{sources}]", f"model.name_or_path={model}")
        assert data_issues(found) == []


def test_the_shape_is_found_wherever_it_lies(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = here / "hub" / "models--me--mine" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(SHORT)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc\n")
    monkeypatch.setenv("HF_HOME", str(here))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    for name in (here / "base", here / "base" / "config.json", "me/mine"):
        loaded = load(here, GOOD, f"model.name_or_path={name}", "tokenizer.name_or_path=x")
        (issue,) = shape_issues(loaded, huggingface_cache())
        assert "longer than the model's max_position_embeddings, 8" in issue.what
        assert issue.where == "command line model.name_or_path"
    (here / "base" / "config.json").write_text("[")
    (issue,) = shape_issues(
        load(here, GOOD, f"model.name_or_path={here}/base"), huggingface_cache()
    )
    assert "cannot use" in issue.what and issue.where == f"{here}/base/config.json"
    # If it is not here, the ranks look for it again.
    for name in ("me/other", "nothing", str(here)):
        assert (
            shape_issues(load(here, GOOD, f"model.name_or_path={name}"), huggingface_cache()) == []
        )


def test_fp8_is_refused_before_the_start_where_no_gpu_is_found(here, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shipped = "model={name_or_path: llama-2m, init: scratch}"
    given = (shipped, "tokenizer.train_vocab_size=300", "training.precision=fp8-mixed")
    loaded = load(here, GOOD, *given)
    with pytest.raises(ConfigErrors) as raised:
        resolve_here(loaded, lambda _: None, needs_data=False)
    (issue,) = raised.value.issues
    assert issue.where == "command line training.precision" and issue.id == "gpu.precision"
    assert "fp8, which is missing on the CPUs of this run." in issue.what
    assert issue.fix == "use training.precision: bf16-mixed"
    assert resolve_checked(loaded, needs_data=False, num_gpus=1).device == "cuda"


def test_all_that_is_known_before_the_start_is_told_at_once(here: Path) -> None:
    (here / "run.yaml").write_text(
        f"{GOOD.replace('gpt2', './base').replace('a/b', './nowhere.txt')}"
        "strategy: {kind: fsdp, tp_size: 3}\nclusters: [{gpus_per_node: 2}]\n"
    )
    with pytest.raises(ConfigErrors) as raised:
        resolve_here(load_run_file(here / "run.yaml"), lambda _: None, needs_data=True)
    words = ("max_position", "tp_size 3 does not divide", "file not found", "a multiple of 3 ranks")
    for word, issue in zip(words, raised.value.issues, strict=True):
        assert word in issue.what
        assert issue.where.startswith(f"{here / 'run.yaml'}:")
