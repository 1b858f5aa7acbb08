"""The whole of DeepSpeed's JSON for a run: from its own file, the run file, or both."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

from isles.config.interop.read import AUTO, Json, read_deepspeed_file
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DeepSpeedStrategyConfig

OURS = frozenset({"optimizer", "scheduler"})
"""Sections that say what the run file says too; isles makes both."""


def deepspeed_settings(config: RunConfig, strategy: DeepSpeedStrategyConfig) -> Json:
    """What DeepSpeed is started with, nothing left on `auto`.

    A file's own values stay; what it leaves out or on `auto` comes from the run file, and where
    that says nothing, from DeepSpeed's defaults. isles counts micro-batches, makes the optimizer
    and sets the learning rate itself, so batch sizes here are only what DeepSpeed's own log
    counts with.

    Raises:
        ConfigError: the file cannot be read.
    """
    given: Json = {}
    if strategy.config_file is not None:
        given = deepcopy(read_deepspeed_file(Path(strategy.config_file)).data)
    # An empty optimizer section and the like: what is not empty has been compared already.
    settings = {
        key: value for key, value in given.items() if key not in OURS and not _is_off(value)
    }
    micro = config.training.micro_batch_size
    settings["train_micro_batch_size_per_gpu"] = micro if isinstance(micro, int) else 1
    # DeepSpeed would divide by it; the loss is divided by the global number of tokens already.
    settings["gradient_accumulation_steps"] = 1
    settings.pop("train_batch_size", None)
    settings["gradient_clipping"] = config.training.max_grad_norm or 0.0
    settings["zero_allow_untested_optimizer"] = True  # of SGD it says so; the tests hold it
    settings["zero_force_ds_cpu_optimizer"] = False  # torch's fused AdamW runs on CPUs as well
    settings["zero_optimization"] = _zero(given.get("zero_optimization") or {}, strategy)
    _set_precision(settings, given, config.training.precision)
    return _without_auto(settings)


def stage_of(settings: Json) -> int:
    """The stage that settings ask for."""
    return int(settings["zero_optimization"]["stage"])


def settled_stage(strategy: DeepSpeedStrategyConfig) -> int:
    """The stage that a strategy, or its file, asks for."""
    given: Json = {}
    if strategy.config_file is not None:
        given = read_deepspeed_file(Path(strategy.config_file)).section("zero_optimization")
    return int(_zero(given, strategy)["stage"])


def _zero(given: Json, strategy: DeepSpeedStrategyConfig) -> Json:
    zero = dict(given)
    ours: Json = {
        "stage": strategy.zero_stage,
        "reduce_bucket_size": strategy.reduce_bucket_size,
        "allgather_bucket_size": strategy.allgather_bucket_size,
        "overlap_comm": strategy.overlap_comm,
    }
    for key, value in ours.items():
        if zero.get(key, AUTO) == AUTO:
            zero[key] = value
    # It must be even, as DeepSpeed sends bf16 in words of four bytes.
    zero["allgather_bucket_size"] = -(-int(zero["allgather_bucket_size"]) // 2) * 2
    for key in ("offload_optimizer", "offload_param"):
        device = getattr(strategy, key)
        section = dict(zero.get(key) or {})
        if section.get("device", AUTO) == AUTO:
            section["device"] = device
        if section["device"] == "nvme" and section.get("nvme_path", AUTO) == AUTO:
            section["nvme_path"] = strategy.nvme_path
        if section["device"] == "none":
            zero.pop(key, None)
        else:
            zero[key] = section
    return zero


def _set_precision(settings: Json, given: Json, precision: str) -> None:
    """bf16 and fp16 weights for computing, fp32 ones for the optimizer; see training.precision."""
    section = {"bf16-mixed": "bf16", "fp16-mixed": "fp16"}.get(precision)
    for key in ("bf16", "bfloat16", "fp16"):
        settings.pop(key, None)
    if section is None:
        return
    values = dict(given.get(section) or (given.get("bfloat16") if section == "bf16" else {}) or {})
    values["enabled"] = True
    settings[section] = values
    if not given:
        # Gradients are added in fp32, as the other strategies do; a file may choose otherwise.
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        settings["communication_data_type"] = "fp32"
        if section == "fp16":  # as torch's scaler does
            values |= {"loss_scale_window": 2000, "hysteresis": 1}


def _is_off(value: object) -> bool:
    return isinstance(value, dict) and value.get("enabled") is False


def _without_auto(value: Json) -> Json:
    """What is still on `auto` is left to DeepSpeed's default."""
    return {
        key: _without_auto(item) if isinstance(item, dict) else item
        for key, item in value.items()
        if item != AUTO
    }
