"""A run file as other tools take it: DeepSpeed's JSON, and `fsdp_config=` of the Trainer."""

from __future__ import annotations

from isles.config.interop.deepspeed import AUTO, Json, deepspeed_keys, deepspeed_settings
from isles.config.load import Loaded
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DeepSpeedStrategyConfig, FSDPStrategyConfig
from isles.config.sections.training import TrainingConfig
from isles.errors import ConfigError

_DEEPSPEED_OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}


def deepspeed_json(loaded: Loaded, world_size: int) -> tuple[Json, list[str]]:
    """A DeepSpeed JSON that equals the run file; named as strategy.config_file it changes nothing.

    Args:
        loaded: the run file.
        world_size: ranks, which the batch sizes of the JSON divide by.

    Returns:
        The JSON, and notes on what it cannot say.

    Raises:
        ConfigError: the strategy is not deepspeed.
    """
    config = loaded.config
    strategy = config.strategy
    if not isinstance(strategy, DeepSpeedStrategyConfig):
        raise ConfigError(
            f"the strategy is {strategy.kind}, of which there is no DeepSpeed JSON",
            where=loaded.where("strategy.kind"),
            fix="use --to fsdp-json, or strategy.kind=deepspeed on the command line"
            if strategy.kind == "fsdp"
            else "add strategy.kind=deepspeed to the command line",
        )
    notes: list[str] = []
    data = _batch_json(config.training, world_size, notes)
    data["optimizer"] = _optimizer_json(config)
    if scheduler := _scheduler_json(config.training, notes):
        data["scheduler"] = scheduler
    settings = deepspeed_settings(config, strategy)
    zero = settings["zero_optimization"]
    if zero["allgather_bucket_size"] == strategy.allgather_bucket_size + 1:
        # isles rounds it up to an even number each time it starts DeepSpeed.
        zero["allgather_bucket_size"] = strategy.allgather_bucket_size
    for key in (*data, "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        settings.pop(key, None)
    return {**data, **settings}, notes


def _batch_json(training: TrainingConfig, world_size: int, notes: list[str]) -> Json:
    rows, micro = training.global_batch_size, training.micro_batch_size
    unit = micro * world_size if isinstance(micro, int) else 0
    is_even = unit > 0 and rows % unit == 0
    if not is_even:
        why = f"{rows} rows do not divide by {unit}" if unit else f"micro_batch_size is {micro}"
        notes.append(
            f'batch sizes are "auto", since {why}: isles and the Hugging Face Trainer fill them '
            "in; for DeepSpeed alone write numbers, "
            f"train_batch_size = micro-batch x accumulation x {world_size} ranks"
        )
    return {
        "train_batch_size": rows,
        "train_micro_batch_size_per_gpu": micro if is_even else AUTO,
        "gradient_accumulation_steps": rows // unit if is_even else AUTO,
    }


def _optimizer_json(config: RunConfig) -> Json:
    kind = _DEEPSPEED_OPTIMIZERS.get(config.training.optimizer)
    if kind is None:
        # The rules allow no other than these under DeepSpeed; adamw_8bit is the user's own to make.
        return {}
    params: Json = {}
    for key, run_keys in deepspeed_keys()["same_sgd" if kind == "SGD" else "same_adam"].items():
        values = [config.at(run_key) for run_key in run_keys.split()]
        params[key] = values if len(values) > 1 else values[0]
    if kind == "AdamW":
        params["torch_adam"] = True
    return {"type": kind, "params": params}


def _scheduler_json(training: TrainingConfig, notes: list[str]) -> Json:
    # The schedule, where DeepSpeed has the same one.
    kind = deepspeed_keys()["schedulers"].get(training.lr_scheduler_type)
    ends = training.lr_scheduler_type != "constant"
    if kind is None or (ends and training.max_steps is None):
        notes.append(
            f"there is no scheduler: DeepSpeed has none for {training.lr_scheduler_type}"
            + ("" if kind is None else ", while the number of steps is not known")
        )
        return {}
    if kind == "WarmupDecayLR" and training.min_lr_ratio:
        notes.append(
            f"there is no scheduler: DeepSpeed's linear decay ends at 0, and min_lr_ratio is "
            f"{training.min_lr_ratio:g}"
        )
        return {}
    params: Json = {"warmup_num_steps": training.warmup_steps}
    if kind == "WarmupCosineLR":
        params |= {"warmup_min_ratio": 0, "cos_min_ratio": training.min_lr_ratio}
    else:
        params |= {"warmup_min_lr": 0, "warmup_max_lr": training.learning_rate}
        params["warmup_type"] = "linear"
    if ends:
        params["total_num_steps"] = training.max_steps
    return {"type": kind, "params": params}


def fsdp_json(loaded: Loaded) -> tuple[Json, list[str]]:
    """What TrainingArguments(fsdp=True, fsdp_config=...) takes, as of transformers 5.

    Returns:
        The JSON, and notes on what it cannot say.

    Raises:
        ConfigError: the strategy is not fsdp, or one that these settings have no words for.
    """
    config = loaded.config
    strategy = config.strategy
    if not isinstance(strategy, FSDPStrategyConfig):
        raise ConfigError(
            f"the strategy is {strategy.kind}, of which there is no FSDP JSON",
            where=loaded.where("strategy.kind"),
            fix="use --to deepspeed-json"
            if strategy.kind == "deepspeed"
            else "add strategy.kind=fsdp to the command line",
        )
    _refuse_unspeakable(loaded, strategy)
    data: Json = {
        "version": 2,
        "reshard_after_forward": strategy.sharding_strategy == "FULL_SHARD",
        "cpu_offload": strategy.cpu_offload,
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
    if config.training.precision == "fp16-mixed":
        notes.append("training.precision fp16-mixed is TrainingArguments(fp16=True)")
    if config.training.gradient_checkpointing == "selective":
        notes.append("gradient_checkpointing selective becomes full: there is one kind only")
    if strategy.forward_prefetch or strategy.backward_prefetch:
        notes.append("prefetching is left out: these settings have no key for it under FSDP2")
    return data, notes


def _refuse_unspeakable(loaded: Loaded, strategy: FSDPStrategyConfig) -> None:
    """Refuse what would silently become another way to hold the model."""
    for key in ("tp_size", "cp_size", "pp_size"):
        if getattr(strategy, key) > 1:
            raise ConfigError(
                f"{key} {getattr(strategy, key)} has no place in an FSDP JSON",
                where=loaded.where(f"strategy.{key}"),
                fix=f"add strategy.{key}=1 to the command line, or use isles itself: --to torchrun",
            )
    if strategy.sharding_strategy not in ("FULL_SHARD", "SHARD_GRAD_OP"):
        raise ConfigError(
            f"sharding_strategy {strategy.sharding_strategy} has no word in an FSDP JSON",
            where=loaded.where("strategy.sharding_strategy"),
            fix="add strategy.sharding_strategy=FULL_SHARD to the command line, or use isles "
            "itself: --to torchrun",
        )
