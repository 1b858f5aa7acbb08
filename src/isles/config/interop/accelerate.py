"""The FSDP settings of a run file as the Hugging Face Trainer takes them: `fsdp_config=`."""

from __future__ import annotations

from isles.config.interop.deepspeed import Json
from isles.config.load import Loaded
from isles.config.sections.strategy import FSDPStrategyConfig
from isles.errors import ConfigError


def fsdp_json(loaded: Loaded) -> tuple[Json, list[str]]:
    """What TrainingArguments(fsdp=True, fsdp_config=...) takes, as of transformers 5.

    Args:
        loaded: the run file.

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
