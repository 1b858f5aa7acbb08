"""Rules about strategy, balance and the model's shape; and how they are told before a start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from isles.config.files import data_issues, shape_issues
from isles.config.load import Loaded, load_run_file
from isles.config.resolve import resolve
from isles.config.resume import changed_mathematics
from isles.config.rules.shape import check_shape
from isles.errors import ConfigError, ConfigErrors
from isles.facts.models import (
    CONTEXT_PARALLEL,
    ISOLATED,
    PIPELINE,
    REASONS,
    TENSOR_PARALLEL,
)
from isles.launch.base import resolve_here
from isles.run.env import hub_cache
from tests.each import each

GOOD = """\
model: {name_or_path: gpt2}
data: {sources: [{path: a/b}]}
training: {max_steps: 100}
"""
NOTHING = "means nothing to"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def load(tmp_path: Path, *overrides: str) -> Loaded:
    file = tmp_path / "run.yaml"
    file.write_text(GOOD, encoding="utf-8")
    return load_run_file(file, overrides)


@each(
    ("overrides", "what", "fix"),
    [
        (["strategy={kind: fsdp, shard_size: 2}"], f"shard_size 2 {NOTHING}", "HYBRID_SHARD"),
        (
            ["strategy={kind: ddp, tp_size: 2, static_graph: true}"],
            f"true {NOTHING} tp_",
            "tp_size",
        ),
        (
            ["strategy={kind: ddp, gradient_compression: fp16}", "training.precision=bf16-true"],
            f"gradient_compression fp16 {NOTHING}",
            "bf16-mixed",
        ),
        (
            ["strategy={kind: fsdp, cp_size: 3}"],
            "3 does not divide seq_length 1024",
            "1023 or 1026",
        ),
        (
            ["strategy={kind: fsdp, cp_size: 2}", "model.attn_implementation=eager"],
            "eager cannot be had with cp_size 2",
            "sdpa",
        ),
        (
            ["strategy={kind: fsdp, pp_size: 2}", "training.precision=fp16-mixed"],
            "fp16-mixed scales the loss",
            "bf16-mixed",
        ),
        (
            ["strategy={kind: deepspeed, offload_param: cpu}"],
            "with ZeRO stage 3 only",
            "zero_stage: 3",
        ),
        (
            ["strategy={kind: deepspeed, offload_optimizer: nvme, nvme_path: /x}"],
            "with ZeRO stage 3 only",
            "offload_optimizer: cpu",
        ),
        (
            ["strategy={kind: deepspeed, zero_stage: 3, offload_param: nvme}"],
            "offload_param nvme needs a folder",
            "nvme_path",
        ),
        (["strategy={kind: deepspeed, nvme_path: /x}"], f"nvme_path /x {NOTHING}", "nvme"),
        (["strategy={kind: deepspeed}", "training.optimizer=muon"], "whole matrices", "fsdp"),
        (["strategy={kind: ddp, zero_stage: 3}"], "unknown key zero_stage", "kind: deepspeed"),
        (["strategy=fsdp"], "not a section", "write strategy: {kind: fsdp}"),
        (["strategy=zero3"], "not a section", "{kind: deepspeed, zero_stage: 3}"),
        (["strategy=hsdp"], "not a section", "HYBRID_SHARD"),
        (["strategy={kind: fsdp, sharding_strategy: 4}"], "not one of", "mean HYBRID_SHARD?"),
        (["balance=3"], "balance is 3", "{big-box: 3}"),
        (["balance={}"], "balance is empty", "{big-box: 3}"),
        (["balance={big-box: -1}"], "big-box is -1: too small", "at least 0"),
        (["deepspeed=ds.json"], "unknown key deepspeed", "config_file"),
        (["nnodes=2"], "unknown key nnodes, a name from torchrun", "clusters.0.nodes"),
    ],
)
def test_a_broken_rule_is_one_fault(
    tmp_path: Path, overrides: list[str], what: str, fix: str
) -> None:
    with pytest.raises(ConfigErrors) as raised:
        load(tmp_path, *overrides)
    (issue,) = raised.value.issues
    assert what in issue.what
    assert fix in issue.fix
    assert issue.where.startswith("command line ")


@each(
    "strategy",
    [
        "{kind: fsdp, shard_size: null, cp_method: allgather, pp_schedule: 1f1b}",
        "{kind: fsdp, sharding_strategy: HYBRID_SHARD_ZERO2, shard_size: 2}",
        "{kind: ddp, tp_size: 2, bucket_cap_mb: 25.0, gradient_compression: none}",
        "{kind: fsdp, tp_size: 2, cp_size: 2, cp_method: ulysses, pp_size: 2, pp_schedule: zbv}",
        "{kind: deepspeed, zero_stage: 3, offload_param: nvme, nvme_path: /x}",
        "{kind: deepspeed, offload_optimizer: cpu}",
        "{kind: deepspeed, offload_param: nvme, config_file: says-stage-3-and-where.json}",
    ],
)
def test_a_default_that_is_written_out_is_no_fault(tmp_path: Path, strategy: str) -> None:
    loaded = load(tmp_path, f"strategy={strategy}").config.strategy.model_dump()
    for key, value in yaml.safe_load(strategy).items():
        assert loaded[key] == value


def test_a_host_of_balance_keeps_its_name_on_the_command_line(tmp_path: Path) -> None:
    loaded = load(tmp_path, "balance.big-box.local=3", "balance.0=2")
    assert loaded.config.balance == {"big-box.local": 3, "0": 2}


def test_shares_outlive_an_unknown_key_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors) as raised:
        load(tmp_path, "balance={a: 1}", "foo=1", "training.warmup_steps=100")
    assert len(raised.value.issues) == 2, "the rule was checked as well"


@each(
    ("balance", "what"),
    [("{'7': 1}", "balance names rank 7, and there are 2"), ("{'0': 0, '1': 0}", "a share of 0")],
)
def test_shares_of_ranks_are_compared_with_the_ranks(
    tmp_path: Path, balance: str, what: str
) -> None:
    loaded = load(tmp_path, f"balance={balance}", "clusters.0.gpus_per_node=2")
    with pytest.raises(ConfigError, match=what) as raised:
        resolve(loaded, num_gpus=0)
    assert raised.value.where.startswith("command line balance")


def shape_with(tmp_path: Path, strategy: str, **changes: Any) -> list[tuple[str, str]]:
    """What is said about a strategy with the Llama, some of whose values are changed."""
    loaded = load(tmp_path, f"strategy={strategy}")
    return [(v.what, v.fix) for v in check_shape(loaded.config, {**LLAMA, **changes})]


@each(
    ("strategy", "changes", "what", "fix"),
    [
        ("{kind: ddp, tp_size: 3}", {}, "heads 8, num_key_value_heads 4, inter", "use 2 or 4"),
        ("{kind: ddp, tp_size: 2}", {"model_type": "apertus"}, "activations", "kind: fsdp"),
        ("{kind: ddp, tp_size: 2}", {"residual_dropout": 0.1}, "residual_dropout is 0.1", "to 0"),
        (
            "{kind: ddp, tp_size: 2, cp_size: 4, cp_method: ulysses}",
            {},
            "num_key_value_heads 4 over tp_size 2 do not divide by cp_size 4",
            "allgather",
        ),
        ("{kind: ddp, cp_size: 2}", {"sliding_window": 512}, "window of 512 tokens", "cp_size: 1"),
        (
            "{kind: ddp, pp_size: 2}",
            {"layer_types": ["full_attention", "linear_attention"]},
            "linear_attention",
            "pp_size: 1",
        ),
        (
            "{kind: ddp, pp_size: 2}",
            {"tie_word_embeddings": True},
            "tie_word_embeddings",
            "pp_size",
        ),
        (
            "{kind: ddp, pp_size: 8}",
            {},
            "pp_size 8 needs 8 layers, and the model has 6",
            "6 or less",
        ),
        (
            "{kind: ddp, pp_size: 4, pp_schedule: zbv}",
            {},
            "pp_size 4 x 2 stages on each, by pp_schedule zbv, needs 8 layers",
            "pp_size: 3 or less, or pp_schedule: 1f1b",
        ),
        ("{kind: deepspeed}", {"max_position_embeddings": None, "n_positions": 9}, "1024", "9 or"),
    ],
)
def test_a_shape_that_does_not_fit_is_one_fault(
    tmp_path: Path, strategy: str, changes: dict[str, Any], what: str, fix: str
) -> None:
    ((found, mended),) = shape_with(tmp_path, strategy, **changes)
    assert what in found
    assert fix in mended


@each(
    ("strategy", "changes"),
    [
        ("{kind: ddp, tp_size: 4, cp_size: 2, pp_size: 3}", {}),
        ("{kind: ddp, cp_size: 2}", {"sliding_window": 512, "use_sliding_window": False}),
        ("{kind: fsdp}", {"model_type": "mamba2", "sliding_window": 3}),
        ("{kind: ddp, tp_size: 2}", {"model_type": "mistral", "sliding_window": 512}),
        ("{kind: ddp, pp_size: 2}", {"tie_word_embeddings": None}),
    ],
)
def test_a_shape_that_fits_is_accepted(
    tmp_path: Path, strategy: str, changes: dict[str, Any]
) -> None:
    assert shape_with(tmp_path, strategy, **changes) == []


def test_the_shape_is_found_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({**LLAMA, "max_position_embeddings": 8})
    snapshot = tmp_path / "hub" / "models--me--mine" / "snapshots" / "abc"
    for folder in (tmp_path / "folder", snapshot):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(text)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    for name in (tmp_path / "folder", tmp_path / "folder" / "config.json", "me/mine"):
        bpe = () if name == "me/mine" else ("tokenizer.name_or_path=x",)
        loaded = load(tmp_path, f"model.name_or_path={name}", *bpe)
        (issue,) = shape_issues(loaded, hub_cache())
        assert "longer than the model's max_position_embeddings, 8" in issue.what
        assert issue.where == "command line model.name_or_path"
    for name in ("me/other", "nothing", str(tmp_path)):
        assert shape_issues(load(tmp_path, f"model.name_or_path={name}"), hub_cache()) == []
    (tmp_path / "folder" / "config.json").write_text("[")
    unreadable = load(tmp_path, f"model.name_or_path={tmp_path / 'folder'}")
    assert shape_issues(unreadable, hub_cache()) == [], "the ranks say what is wrong with it"


def test_missing_data_is_found_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "folder").mkdir()
    paths = ("notes.txt", "folder", "*.txt", "python-docs", "me/data", "wikitext")
    here = load(tmp_path, "data.sources=[" + ", ".join(f"{{path: '{p}'}}" for p in paths) + "]")
    assert data_issues(here) == []
    for path, what, fix in (
        ("note.txt", "there is no such file", "did you mean notes.txt?"),
        ("folder/x", "there is no such file", "see ls"),
        ("/nowhere/else/x", "there is no such file", "the path ends at /"),
        ("*.jsonl", "matches no file", "try it with ls"),
    ):
        overrides = ("model.init=scratch", f"data.sources.0.path='{path}'")
        (issue,) = data_issues(load(tmp_path, *overrides))
        assert (what in issue.what, fix in issue.fix) == (True, True), str(issue)
        assert issue.where == "command line data.sources.0.path"


def test_all_that_is_known_before_the_start_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 8}))
    (tmp_path / "run.yaml").write_text(
        f"{GOOD.replace('gpt2', str(tmp_path)).replace('a/b', './nowhere.txt')}"
        "strategy: {kind: fsdp, tp_size: 3}\nclusters: [{gpus_per_node: 2}]\n"
    )
    with pytest.raises(ConfigErrors) as raised:
        resolve_here(load_run_file(tmp_path / "run.yaml"), lambda _: None, needs_data=True)
    words = ("max_position", "tp_size 3 does not divide", "no such file", "a multiple of 3 ranks")
    assert len(raised.value.issues) == len(words)
    for word, issue in zip(words, raised.value.issues, strict=True):
        assert word in issue.what
        assert issue.where.startswith(f"{tmp_path / 'run.yaml'}:")


@each(
    ("old", "new", "changed"),
    [
        ("{kind: ddp}", "{kind: deepspeed, zero_stage: 3}", []),
        ("{kind: fsdp, tp_size: 2}", "{kind: auto}", []),
        ("{kind: ddp, bucket_cap_mb: 1.0}", "{kind: ddp}", []),
        ("{kind: ddp}", "{kind: ddp, gradient_compression: bf16}", ["gradient_compression"]),
        ("{kind: ddp, gradient_compression: bf16}", "{kind: fsdp}", ["gradient_compression"]),
        ("{kind: ddp}", "{kind: fsdp, reduce_dtype: bf16}", ["reduce_dtype"]),
    ],
)
def test_a_strategy_may_change_on_a_resume_unless_gradients_are_rounded(
    tmp_path: Path, old: str, new: str, changed: list[str]
) -> None:
    before = load(tmp_path, f"strategy={old}", "balance=even").config
    after = load(tmp_path, f"strategy={new}", "balance={a: 1}", "clusters.0.max_restarts=0").config
    found = changed_mathematics(before, after)
    assert [change.key for change in found] == [f"strategy.{key}" for key in changed]
    assert all(change.old is not None and change.new is not None for change in found)


def test_what_is_known_to_be_exact_has_no_reason_against_it() -> None:
    known = {"tp_size": TENSOR_PARALLEL, "cp_size": CONTEXT_PARALLEL, "pp_size": PIPELINE}
    known["isolate_documents"] = ISOLATED
    for key, reasons in REASONS.items():
        assert not known[key] & set(reasons)
