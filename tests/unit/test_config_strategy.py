"""Rules about strategy, balance and the model's shape; and how they are told before a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from isles.config.load import Loaded, load_run_file
from isles.config.resolve import resolve
from isles.config.rules.shape import check_shape
from isles.errors import ConfigError, ConfigErrors
from isles.facts.models import (
    CONTEXT_PARALLEL,
    ISOLATED,
    PIPELINE,
    REASONS,
    TENSOR_PARALLEL,
)
from tests.each import each

GOOD = """\
model: {name_or_path: gpt2}
data: {sources: [{path: a/b}]}
training: {max_steps: 100}
"""
NOTHING = "means nothing to"
BF16, FP16 = "training.precision=bf16-true", "training.precision=fp16-mixed"
EAGER = "model.attn_implementation=eager"
NVME = "{kind: deepspeed, offload_optimizer: nvme"
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
    "row",
    [
        (f"shard_size 2 {NOTHING}", "HYBRID_SHARD", "{kind: fsdp, shard_size: 2}"),
        (f"true {NOTHING} tp_size", "tp_size", "{kind: ddp, tp_size: 2, static_graph: true}"),
        (f"fp16 {NOTHING}", "bf16-mixed", "{kind: ddp, gradient_compression: fp16}", BF16),
        ("3 does not divide seq_length 1024", "1023 or 1026", "{kind: fsdp, cp_size: 3}"),
        ("eager cannot be had with cp_size 2", "sdpa", "{kind: fsdp, cp_size: 2}", EAGER),
        ("fp16-mixed scales the loss", "bf16-mixed", "{kind: fsdp, pp_size: 2}", FP16),
        ("with ZeRO stage 3 only", "zero_stage: 3", "{kind: deepspeed, offload_param: cpu}"),
        ("with ZeRO stage 3 only", "offload_optimizer: cpu", f"{NVME}, nvme_path: /x}}"),
        ("offload_optimizer nvme needs a folder", "nvme_path", f"{NVME}, zero_stage: 3}}"),
        (f"nvme_path /x {NOTHING}", "nvme", "{kind: deepspeed, nvme_path: /x}"),
        ("whole matrices", "fsdp", "{kind: deepspeed}", "training.optimizer=muon"),
        ("no fp32 weights", "bf16-mixed", "{kind: deepspeed}", BF16),
        ("unknown key zero_stage", "kind: deepspeed", "{kind: ddp, zero_stage: 3}"),
        ("not a section", "{kind: deepspeed, zero_stage: 3}", "zero3"),
        ("not one of its values", "HYBRID_SHARD?", "{kind: fsdp, sharding_strategy: 4}"),
        ("balance is 3", "{big-box: 3}", "{kind: auto}", "balance=3"),
        ("balance is empty", "{big-box: 3}", "{kind: auto}", "balance={}"),
        ("big-box is -1: too small", "at least 0", "{kind: auto}", "balance={big-box: -1}"),
    ],
)
def test_a_broken_rule_is_one_fault(tmp_path: Path, row: tuple[str, ...]) -> None:
    what, fix, strategy, *others = row
    with pytest.raises(ConfigErrors) as raised:
        load(tmp_path, f"strategy={strategy}", *others)
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
        ("tp_size: 3", {}, "heads 8, num_key_value_heads 4, inter", "use 2 or 4"),
        ("tp_size: 2", {"model_type": "apertus"}, "activations", "kind: fsdp"),
        ("tp_size: 2", {"residual_dropout": 0.1}, "residual_dropout is 0.1", "to 0"),
        ("tp_size: 2, cp_size: 4, cp_method: ulysses", {}, "over tp_size 2 do not", "allgather"),
        ("cp_size: 2", {"sliding_window": 512}, "window of 512 tokens", "cp_size: 1"),
        ("pp_size: 2", {"layer_types": ["linear_attention"]}, "linear_attention", "pp_size: 1"),
        ("pp_size: 2", {"tie_word_embeddings": True}, "tie_word_embeddings", "pp_size"),
        ("pp_size: 8", {}, "pp_size 8 needs 8 layers, and the model has 6", "6 or less"),
        ("pp_size: 4, pp_schedule: zbv", {}, "by pp_schedule zbv, needs 8 layers", "3 or less"),
        ("cp_size: 1", {"max_position_embeddings": None, "n_positions": 9}, "1024", "9 or"),
    ],
)
def test_a_shape_that_does_not_fit_is_one_fault(
    tmp_path: Path, strategy: str, changes: dict[str, Any], what: str, fix: str
) -> None:
    ((found, mended),) = shape_with(tmp_path, f"{{kind: ddp, {strategy}}}", **changes)
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


def test_what_is_known_to_be_exact_has_no_reason_against_it() -> None:
    known = {"tp_size": TENSOR_PARALLEL, "cp_size": CONTEXT_PARALLEL, "pp_size": PIPELINE}
    known["isolate_documents"] = ISOLATED
    for key, reasons in REASONS.items():
        assert not known[key] & set(reasons)
