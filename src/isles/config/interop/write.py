"""The DeepSpeed JSON that says what a run file says, for scripts that use DeepSpeed themselves."""

from __future__ import annotations

from isles.config.interop.keys import SCHEDULERS
from isles.config.interop.read import AUTO, Json
from isles.config.interop.settings import deepspeed_settings
from isles.config.load import Loaded
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DeepSpeedStrategyConfig
from isles.config.sections.training import TrainingConfig
from isles.errors import ConfigError

_TYPES = {"adamw": "AdamW", "sgd": "SGD"}


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
    data = _batch(config, world_size, notes)
    data["optimizer"] = _optimizer(config.training)
    if scheduler := _scheduler(config.training, notes):
        data["scheduler"] = scheduler
    settings = deepspeed_settings(config, strategy)
    zero = settings["zero_optimization"]
    if zero["allgather_bucket_size"] == strategy.allgather_bucket_size + 1:
        # isles rounds it up to an even number each time it starts DeepSpeed.
        zero["allgather_bucket_size"] = strategy.allgather_bucket_size
    for key in (*data, "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        settings.pop(key, None)
    return {**data, **settings}, notes


def _batch(config: RunConfig, world_size: int, notes: list[str]) -> Json:
    training = config.training
    rows, micro = training.global_batch_size, training.micro_batch_size
    unit = micro * world_size if isinstance(micro, int) else 0
    if unit and rows % unit == 0:
        return {
            "train_batch_size": rows,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": rows // unit,
        }
    why = f"{rows} rows do not divide by {unit}" if unit else f"micro_batch_size is {micro}"
    notes.append(
        f'batch sizes are "auto", since {why}: isles and the Hugging Face Trainer fill them in; '
        "for DeepSpeed alone write numbers, "
        f"train_batch_size = micro-batch x accumulation x {world_size} ranks"
    )
    return {
        "train_batch_size": rows,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": AUTO,
    }


def _optimizer(training: TrainingConfig) -> Json:
    kind = _TYPES.get(training.optimizer)
    if kind is None:
        # The rules allow no other than these under DeepSpeed; adamw_8bit is the user's own to make.
        return {}
    params: Json = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
    if kind == "SGD":
        params["momentum"] = training.momentum
    else:
        params["betas"] = [training.adam_beta1, training.adam_beta2]
        params["eps"] = training.adam_epsilon
        params["torch_adam"] = True
    return {"type": kind, "params": params}


def _scheduler(training: TrainingConfig, notes: list[str]) -> Json:
    """The schedule, where DeepSpeed has the same one."""
    kind = SCHEDULERS.get(training.lr_scheduler_type)
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
    if kind != "WarmupCosineLR":
        params["warmup_type"] = "linear"
    if ends:
        params["total_num_steps"] = training.max_steps
    return {"type": kind, "params": params}
