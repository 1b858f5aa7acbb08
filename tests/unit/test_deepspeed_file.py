"""A DeepSpeed JSON beside a run file: what is taken over, and what contradicts."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from isles.config.interop import deepspeed
from isles.config.interop.deepspeed import check_accumulation, deepspeed_file_issues
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DeepSpeedStrategyConfig
from isles.errors import ConfigError
from tests.deadline import run_program
from tests.documents import ROOT, blocks
from tests.each import each

# The example of the document that asks for DeepSpeed, as it stands there.
S1 = ROOT / "tests" / "seeds" / "S1.md"
EXAMPLE = json.loads(next(block.text for block in blocks(S1) if block.language == "json"))
CPU = {"device": "cpu", "pin_memory": True}
NVME = {"device": "nvme"}


def run_config(
    path: Path | None, strategy: dict[str, Any] | None = None, **training: Any
) -> RunConfig:
    chosen = {"kind": "deepspeed", "config_file": path and str(path), **(strategy or {})}
    content = {"model": {"name_or_path": "llama-2m", "init": "scratch"}, "strategy": chosen}
    content["data"] = {"sources": [{"type": "fake"}]}
    return RunConfig.model_validate({**content, "training": {"max_steps": 100, **training}})


def write(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(content, indent=1))
    return path


def settings_of(config: RunConfig) -> dict[str, Any]:
    assert isinstance(config.strategy, DeepSpeedStrategyConfig)
    return deepspeed.deepspeed_settings(config, config.strategy)


def test_the_documents_example_loads_and_is_used_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path, EXAMPLE)
    rows = {"global_batch_size": 128, "micro_batch_size": 2, "max_grad_norm": 0.3}
    config = run_config(path, **rows)
    assert deepspeed_file_issues(path, config) == []
    check_accumulation(config, config.strategy, 4)
    settings = settings_of(config)
    assert settings["zero_optimization"] == EXAMPLE["zero_optimization"]
    assert settings["bf16"] == {"enabled": True}
    assert settings["gradient_clipping"] == 0.3
    assert settings["train_micro_batch_size_per_gpu"] == 2


def test_the_documents_offloading_of_both_loads_with_stage_3(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}
    path = write(tmp_path, {"zero_optimization": zero})
    config = run_config(path)
    assert deepspeed_file_issues(path, config) == []
    assert deepspeed.resolve_stage(config.strategy) == 3
    assert settings_of(config)["zero_optimization"]["offload_param"] == CPU


def test_all_that_is_auto_comes_from_the_run_file(tmp_path: Path) -> None:
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    rates = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    zero = ("stage", "overlap_comm", "reduce_bucket_size", "stage3_prefetch_bucket_size")

    def auto(*names: str) -> dict[str, Any]:
        return dict.fromkeys(names, "auto")

    content = {
        **auto(*batch, "gradient_clipping"),
        "bf16": auto("enabled"),
        "fp16": auto("enabled") | {"loss_scale_window": 500},
        "optimizer": {"type": "AdamW", "params": auto("lr", "betas", "eps", "weight_decay")},
        "scheduler": {"type": "WarmupDecayLR", "params": auto(*rates)},
        "zero_optimization": auto(*zero) | {"offload_optimizer": CPU | auto("device")},
    }
    path = write(tmp_path, content)
    strategy = {"zero_stage": 1, "reduce_bucket_size": 1000, "offload_optimizer": "cpu"}
    training = {"precision": "fp16-mixed", "lr_scheduler_type": "linear", "max_grad_norm": None}
    config = run_config(path, strategy, micro_batch_size=4, **training)
    assert deepspeed_file_issues(path, config) == []
    settings = settings_of(config)
    found = settings["zero_optimization"]
    assert found["stage"] == 1 and found["reduce_bucket_size"] == 1000 and found["overlap_comm"]
    assert found["offload_optimizer"] == CPU
    assert "stage3_prefetch_bucket_size" not in found, "DeepSpeed has its own default"
    assert settings["fp16"] == {"enabled": True, "loss_scale_window": 500}
    assert not {"bf16", "optimizer", "scheduler"} & settings.keys()
    assert settings["gradient_clipping"] == 0.0
    assert "auto" not in json.dumps(settings)


ADAM = {"type": "AdamW"}
SGD = {"type": "SGD"}
DOWN = {"type": "WarmupDecayLR", "params": {"warmup_type": "linear"}}
LINEAR = {"lr_scheduler_type": "linear"}
DECAY = {"type": "WarmupDecayLR", "params": {"warmup_type": "log"}}
FP16 = {"fp16": {"enabled": True, "loss_scale": 128}}


def adam(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "Adam", "params": {"torch_adam": True, **params}}}


def one_cycle(**params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": "OneCycle", "params": params}}


RANGE_TEST = {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-5}}
COMPRESSION = {"weight_quantization": {"shared_parameters": {"enabled": True}}}


@each(
    (one_cycle(cycle_min_lr=1e-5, cycle_max_lr=1e-3), {}, "isles has constant.*lr_scheduler_type"),
    ({"scheduler": RANGE_TEST}, {}, "isles has constant, linear, cosine, wsd: choose one"),
    ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 9}}}, {}, "isles has adamw"),
    ({"optimizer": {"type": "Lion", "params": {"lr": 1e-5}}}, {}, "isles has adamw"),
    ({"scheduler": {"type": "WarmupLR"}}, {}, "lr_scheduler_type: constant in the run file"),
    ({"bf16": {"enabled": False}}, {}, "precision: 32-true"),
    ({"gradient_clipping": 0}, {}, "max_grad_norm: null"),
    ({"activation_checkpointing": {"cpu_checkpointing": True}}, {}, "gradient_checkpointing: full"),
    ({"wandb": {"enabled": True}}, {}, "in the key track of the run file"),
    ({"compression_training": COMPRESSION}, {}, "delete it to train without it"),
    ({"zero3_init_flag": True}, {}, "delete it, as isles builds every sharded model"),
)
def test_a_fix_names_what_trains_as_the_file_says(content, training, words, *, tmp_path):
    """And nothing is called unknown to DeepSpeed that it knows."""
    path = write(tmp_path, content)
    (issue,) = deepspeed_file_issues(path, run_config(path, **training))
    assert re.search(words, issue.fix), issue.fix
    assert "no key" not in issue.what and "or delete the section" not in issue.fix


def test_what_is_off_or_has_its_default_is_not_refused(tmp_path: Path) -> None:
    off = {"partition_activations": False, "cpu_checkpointing": False}
    first = DOWN["params"] | {"last_batch_iteration": -1, "warmup_min_lr": 0}
    for content in (
        {"activation_checkpointing": off, "wandb": {"enabled": False}, "sparse_gradients": False},
        {"scheduler": DOWN | {"params": first}},
        adam(adam_w_mode=True, bias_correction=True, amsgrad=False),
    ):
        path = write(tmp_path, content)
        assert deepspeed_file_issues(path, run_config(path, **LINEAR)) == []


@each(
    ({"train_batch_size": 64}, {"global_batch_size": 32}, "train_batch_size is 64.* is 32"),
    ({"gradient_accumulation_steps": 5}, {}, "accumulation_steps is 5.*not a number"),
    ({"gradient_clipping": 0.3}, {}, "gradient_clipping is 0.3.*max_grad_norm is 1"),
    ({"bf16": {"enabled": True}}, {"precision": "32-true"}, "bf16.enabled is true.*32-true"),
    (FP16, {"precision": "fp16-mixed"}, "fp16.loss_scale is 128.*adapts the"),
    ({"optimizer": ADAM | {"params": {"lr": 1e-5}}}, {}, "params.lr is 1e-05.* is 0.0004"),
    ({"optimizer": {"type": "Lamb"}}, {}, "optimizer.type is Lamb.*adamw"),
    ({"scheduler": {"type": "WarmupLR", "params": {}}}, {}, "type is WarmupLR.*cosine"),
    ({"scheduler": DECAY}, {"lr_scheduler_type": "linear"}, "type is log.*linearly"),
    ({"zero_optimization": {"stage": 0}}, {}, "stage is 0"),
    ({"zero_optimization": {"stage": 2, "offload_param": CPU}}, {}, "needs ZeRO stage 3"),
    ({"zero_optimization": {"stage": 3, "offload_param": NVME}}, {}, "nvme needs a folder"),
    ({"zero_optimization": {"cpu_offload": True}}, {}, "cpu_offload is not supported"),
    ({"zero_optimization": {"stag": 2}}, {}, "stag is not a key of DeepSpeed"),
    ({"fp16": {"enabled": False, "loss_scal": 0}}, {}, "fp16.loss_scal is not a key of DeepSpeed"),
    ({"zero_optimization": True}, {}, "zero_optimization is true, not an object"),
    ({"zero_force_ds_cpu_optimizer": True}, {}, "zero_force_ds_cpu_optimizer is true"),
    (adam(bias_correction=False), {}, "bias_correction is false.*corrects the bias"),
    (adam(amsgrad=True), {}, "amsgrad is true.*without AMSGrad"),
    ({"optimizer": SGD | {"params": {"nesterov": True}}}, {"optimizer": "sgd"}, "nesterov is true"),
    ({"scheduler": DOWN}, LINEAR | {"min_lr_ratio": 0.1}, "falls to 0, and .*min_lr_ratio is 0.1"),
)
def test_a_contradiction_is_named_with_both_values(content, training, words, *, tmp_path):
    path = write(tmp_path, content)
    (issue,) = deepspeed_file_issues(path, run_config(path, **training))
    assert issue.what.startswith(f"{path}:"), "file and line"
    assert re.search(words, issue.what), issue.what
    assert issue.fix
    assert issue.keys[-1] == "strategy.config_file"


def test_what_a_file_leaves_out_is_said_where_deepspeed_takes_it_otherwise(tmp_path: Path) -> None:
    """Its warm-up is logarithmic unless the file says linear."""

    def said(content: dict[str, Any], **training: Any) -> str:
        path = write(tmp_path, content)
        kinds = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
        kind = kinds.get(content.get("scheduler", {}).get("type"), "linear")
        config = run_config(path, warmup_steps=10, lr_scheduler_type=kind, **training)
        assert deepspeed_file_issues(path, config) == []
        return "\n".join(deepspeed.deepspeed_notes(config))

    steps = {"warmup_num_steps": 10}
    for kind, rest in (("WarmupLR", "max_lr"), ("WarmupDecayLR", "max_lr"), ("WarmupCosineLR", "")):
        given = steps | ({"warmup_max_lr": "auto"} if rest else {"cos_min_ratio": 0})
        text = said({"scheduler": {"type": kind, "params": given}})
        assert " scheduler: the file omits " in text
        assert "warmup_type log in DeepSpeed. This run uses linear." in text
        linear = {"scheduler": {"type": kind, "params": given | {"warmup_type": "linear"}}}
        assert said(linear) == ""
    text = said({"scheduler": {"type": "WarmupDecayLR"}})
    assert "warmup_type log, warmup_num_steps 1000, warmup_max_lr 0.001" in text
    assert "linear, 10, 0.0004" in text
    text = said({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
    assert (
        "betas" in text
        and "weight_decay 0 in DeepSpeed. This run uses" in text
        and "eps" not in text
    )
    assert said({}) == said({"zero_optimization": {"stage": 2}}) == ""
    path = write(tmp_path, {"scheduler": DECAY})
    (issue,) = deepspeed_file_issues(path, run_config(path, lr_scheduler_type="linear"))
    assert issue.fix == "write linear", "without the key it is logarithmic again"


def test_a_share_that_warms_up_is_compared_in_steps(tmp_path: Path) -> None:
    path = write(tmp_path, {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}})
    training = {"lr_scheduler_type": "constant", "warmup_steps": 0.05}
    assert deepspeed_file_issues(path, run_config(path, **training)) == []
    (issue,) = deepspeed_file_issues(path, run_config(path, **training | {"warmup_steps": 0.1}))
    assert "warmup_num_steps is 5, and training.warmup_steps is 10" in issue.what


def test_every_contradiction_is_named_at_once_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, EXAMPLE | {"zero_optimisation": {}})
    strategy = {"zero_stage": 3, "offload_optimizer": "nvme", "nvme_path": "/fast"}
    issues = deepspeed_file_issues(path, run_config(path, strategy, precision="32-true"))
    lines = path.read_text().splitlines()
    found = []
    for issue in issues:
        where, key, *_ = issue.what.split(" ")
        line = lines[int(where.rpartition(":")[2]) - 1]
        assert json.dumps(key.rpartition(".")[2]) in line, issue
        found.append(key)
    zero = ["zero_optimization.stage", "zero_optimization.offload_optimizer.device"]
    rest = ["gradient_accumulation_steps", "bf16.enabled"]
    assert found == ["zero_optimisation", "gradient_clipping", *zero, *rest]


def test_accumulation_is_checked_against_the_ranks(tmp_path: Path) -> None:
    path = write(tmp_path, {"gradient_accumulation_steps": 4})
    config = run_config(path, global_batch_size=32, micro_batch_size=2)
    assert deepspeed_file_issues(path, config) == []
    check_accumulation(config, config.strategy, 4)
    with pytest.raises(ConfigError) as caught:
        check_accumulation(config, config.strategy, 2)
    assert "it is 4" in caught.value.what and "gives 8" in caught.value.what
    assert "global_batch_size: 16" in caught.value.fix


@each(
    ("{", "not a JSON"),
    ("[]", "not a JSON object"),
    ('{"fp16": {"a": 1, "a": 2}}', "a is given twice, here and on line 1"),
    (None, "does not exist"),
    # Lines are known between tabs, too.
    ('{\n\t"zero_optimization":\t{\n\t\t"stag":\t2\n\t}\n}\n', ":3 zero_optimization.stag"),
)
def test_what_is_no_deepspeed_file_is_refused(text: str | None, words: str, *, tmp_path):
    path = tmp_path / "ds_config.json"
    if text is not None:
        path.write_text(text)
    (issue,) = deepspeed_file_issues(path, run_config(path))
    assert str(path) in issue.what and words in issue.what


def test_settings_without_a_file_come_from_the_strategy() -> None:
    strategy = {"zero_stage": 3, "offload_param": "nvme", "nvme_path": "/fast"}
    settings = settings_of(run_config(None, {**strategy, "allgather_bucket_size": 999}))
    zero = settings["zero_optimization"]
    assert zero["stage"] == 3 and zero["allgather_bucket_size"] == 1000, "an even number"
    assert zero["offload_param"] == {"device": "nvme", "nvme_path": "/fast"}
    assert "offload_optimizer" not in zero
    assert settings["bf16"] == {"enabled": True}
    assert settings["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "bf16" not in settings_of(run_config(None, precision="32-true"))


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    issue = deepspeed.missing_deepspeed()
    assert issue is not None and "pip install 'isles[deepspeed]'" in issue.fix


@pytest.mark.long
def test_the_known_keys_are_those_of_the_installed_deepspeed() -> None:
    code = """
import json
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig as Zero
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig as Optimizer
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig as Param
zero = [n for name, f in Zero.model_fields.items() for n in (name, f.alias or name)]
print(json.dumps([zero, [*Optimizer.model_fields, *Param.model_fields]]))
"""
    result = run_program([sys.executable, "-c", code])
    assert result.returncode == 0, result.stderr
    zero, offload = json.loads(result.stdout.splitlines()[-1])
    table = deepspeed.deepspeed_keys()
    named = [*table["same"], *table["fixed"]]

    def known(section: str) -> set[str]:
        inside = {key.rpartition(".")[2] for key in named if key.rpartition(".")[0] == section}
        return inside | set(table["known"][section].split())

    passed = known("zero_optimization")
    refused = set(" ".join(table["elsewhere"]["zero_optimization"].values()).split())
    assert set(zero) <= passed | refused
    assert set(zero) >= passed
    for name in ("offload_optimizer", "offload_param"):
        assert set(offload) == known(f"zero_optimization.{name}")
