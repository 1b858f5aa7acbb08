"""A run file in the formats of other tools: DeepSpeed's JSON, and `fsdp_config=` of the Trainer."""

from __future__ import annotations

from isles.config.interop.deepspeed import AUTO, Json, deepspeed_keys, deepspeed_settings
from isles.config.load import Loaded
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DeepSpeedStrategyConfig, FSDPStrategyConfig
from isles.config.sections.training import TrainingConfig, warmup_in_steps
from isles.errors import ConfigError

_PARAMS = {"AdamW": "lr weight_decay betas eps", "SGD": "lr weight_decay momentum"}


def deepspeed_json(loaded: Loaded, world_size: int) -> tuple[Json, list[str]]:
    """A DeepSpeed JSON that equals the run file, for `world_size` ranks, and notes on its limits.

    As strategy.config_file it changes nothing. ConfigError: the strategy is not deepspeed.
    """
    config = loaded.config
    strategy = config.strategy
    if not isinstance(strategy, DeepSpeedStrategyConfig):
        raise ConfigError(
            f"the strategy {strategy.kind} has no DeepSpeed JSON",
            where=loaded.where("strategy.kind"),
            fix="use --to fsdp-json, or strategy.kind=deepspeed on the command line"
            if strategy.kind == "fsdp"
            else "add strategy.kind=deepspeed to the command line",
        )
    training, notes = config.training, list[str]()
    rows, micro = training.global_batch_size, training.micro_batch_size
    unit = micro * world_size if isinstance(micro, int) else 0
    is_even = unit > 0 and rows % unit == 0
    if not is_even:
        why = f"{rows} rows do not divide by {unit}" if unit else f"micro_batch_size is {micro}"
        notes.append(
            f'batch sizes are "auto", because {why}. isles and the Hugging Face Trainer fill them '
            "in. For DeepSpeed alone, write numbers: "
            f"train_batch_size = micro-batch x accumulation x {world_size} ranks"
        )
    settings = deepspeed_settings(config, strategy)
    data = {
        "train_batch_size": rows,
        "train_micro_batch_size_per_gpu": micro if is_even else AUTO,
        "gradient_accumulation_steps": rows // unit if is_even else AUTO,
        "optimizer": _optimizer_json(config),
    }
    if scheduler := _scheduler_json(training, notes):
        data["scheduler"] = scheduler
    zero = settings["zero_optimization"]
    if zero["allgather_bucket_size"] == strategy.allgather_bucket_size + 1:
        # isles rounds it up to an even number each time it starts DeepSpeed.
        zero["allgather_bucket_size"] = strategy.allgather_bucket_size
    return data | {key: value for key, value in settings.items() if key not in data}, notes


def _optimizer_json(config: RunConfig) -> Json:
    table = deepspeed_keys()
    kind = table["optimizers"].get(config.training.optimizer, "").partition(" ")[0]
    if kind not in _PARAMS:
        # The rules allow no other optimizer with DeepSpeed. Users make adamw_8bit themselves.
        return {}
    params: Json = {}
    for key in _PARAMS[kind].split():
        values = [config.at(name) for name in table["same"][f"optimizer.params.{key}"].split()]
        params[key] = values if len(values) > 1 else values[0]
    if kind == "AdamW":
        params["torch_adam"] = True
    return {"type": kind, "params": params}


def _scheduler_json(training: TrainingConfig, notes: list[str]) -> Json:
    # The schedule, if DeepSpeed has an equal schedule.
    name, steps = training.lr_scheduler_type, training.max_steps
    kind = deepspeed_keys()["schedulers"].get(name)
    ends, why = name != "constant", ""
    if kind is None:
        why = f"DeepSpeed has no scheduler for {name}"
    elif ends and steps is None:
        why = "the number of steps is unknown"
    elif kind == "WarmupDecayLR" and training.min_lr_ratio:
        ratio = training.min_lr_ratio
        why = f"DeepSpeed's linear decay ends at 0, and min_lr_ratio is {ratio:g}"
    if why:
        notes.append(f"the JSON has no scheduler: {why}")
        return {}
    params: Json = {"warmup_num_steps": warmup_in_steps(training, steps)}
    if kind == "WarmupCosineLR":
        params |= {"warmup_min_ratio": 0, "cos_min_ratio": training.min_lr_ratio}
    else:
        params |= {"warmup_min_lr": 0, "warmup_max_lr": training.learning_rate}
        params["warmup_type"] = "linear"
    return {"type": kind, "params": {**params, "total_num_steps": steps} if ends else params}


def fsdp_json(loaded: Loaded) -> tuple[Json, list[str]]:
    """The fsdp_config of TrainingArguments(fsdp=True, ...), and notes on its limits.

    For transformers 5. ConfigError: the strategy is not fsdp, or has no equivalent in the JSON.
    """
    config = loaded.config
    strategy = config.strategy
    if not isinstance(strategy, FSDPStrategyConfig):
        raise ConfigError(
            f"the strategy {strategy.kind} has no FSDP JSON",
            where=loaded.where("strategy.kind"),
            fix="use --to deepspeed-json"
            if strategy.kind == "deepspeed"
            else "add strategy.kind=fsdp to the command line",
        )
    # Refuse keys whose omission would silently change the sharding of the model.
    key, value = next(
        (
            (key, size)
            for key in ("tp_size", "cp_size", "pp_size")
            if (size := getattr(strategy, key)) > 1
        ),
        ("sharding_strategy", strategy.sharding_strategy),
    )
    if value not in ("FULL_SHARD", "SHARD_GRAD_OP"):
        other = "FULL_SHARD" if key == "sharding_strategy" else 1
        raise ConfigError(
            f"{key} {value} has no equivalent in an FSDP JSON",
            where=loaded.where(f"strategy.{key}"),
            fix=f"add strategy.{key}={other} to the command line, or use isles itself: "
            "--to torchrun",
        )
    data: Json = {
        "version": 2,
        "reshard_after_forward": strategy.sharding_strategy == "FULL_SHARD",
        "cpu_offload": bool(strategy.cpu_offload),
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "activation_checkpointing": config.training.gradient_checkpointing != "none",
        "cpu_ram_efficient_loading": config.model.init == "pretrained",
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    if strategy.transformer_layer_cls_to_wrap:
        data["transformer_layer_cls_to_wrap"] = list(strategy.transformer_layer_cls_to_wrap)
    notes = ["for the Trainer: TrainingArguments(fsdp=True, fsdp_config=FILE, ...)"]
    if config.training.precision == "bf16-mixed":
        notes.append("training.precision bf16-mixed is TrainingArguments(bf16=True)")
    if config.training.precision == "fp8-mixed":
        notes.append("training.precision fp8-mixed is mixed_precision: fp8 of Accelerate")
    if config.training.precision == "fp16-mixed":
        notes.append("training.precision fp16-mixed is TrainingArguments(fp16=True)")
    if (kind := config.training.gradient_checkpointing) in ("selective", "offload"):
        notes.append(f"gradient_checkpointing {kind} becomes full, the only kind of the Trainer")
    if strategy.forward_prefetch or strategy.backward_prefetch:
        notes.append("isles omits prefetching, as the FSDP2 settings have no key for it")
    return data, notes
