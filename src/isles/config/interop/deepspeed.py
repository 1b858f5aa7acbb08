"""DeepSpeed's JSON: a user's own is read, and the whole of it for a run is written.

Where it contradicts the run file says rules/deepspeed.py; which keys there are, deepspeed.yaml.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from isles.config.load import Loaded
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DeepSpeedStrategyConfig, StrategyConfig
from isles.config.sections.training import TrainingConfig
from isles.config.yaml import KeyPath, dotted, parse_yaml, scan_yaml
from isles.errors import ConfigError, ConfigErrors, MissingDependencyError

Json = dict[str, Any]
"""What a JSON file holds: DeepSpeed's own names and types."""

AUTO = "auto"
_MAX_BYTES = 1 << 20
_WRITTEN_OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}


@cache
def deepspeed_keys() -> Json:
    """deepspeed.yaml as it is."""
    entry = resources.files("isles.config.interop") / "deepspeed.yaml"
    value = parse_yaml(entry.read_text(encoding="utf-8"), entry.name).value
    assert isinstance(value, dict)
    return value


@dataclass(frozen=True, slots=True)
class DeepSpeedFile:
    """A DeepSpeed JSON as it is.

    Args:
        path: as the run file names it.
        data: all of it.
        lines: the line of every key; empty where they could not be told.
    """

    path: Path
    data: Json
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def where(self, *keys: str) -> str:
        """File, line and key, for messages."""
        line = self.lines.get(keys)
        return f"{self.path}{f':{line}' if line else ''} {dotted(keys)}"

    def section(self, *keys: str) -> Json:
        """A mapping inside; empty where it is absent."""
        value: object = self.data
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value if isinstance(value, dict) else {}


def read_deepspeed_file(path: Path) -> DeepSpeedFile:
    """Read a DeepSpeed JSON.

    Raises:
        ConfigError: it cannot be read, or is no JSON object; with the line.
    """
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
        if len(content) > _MAX_BYTES:
            raise ConfigError("larger than 1 MiB: this is no DeepSpeed file", where=str(path))
        data = json.loads(text, object_pairs_hook=_without_doubles)
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror or error}",
            where=str(path),
            fix="strategy.config_file names a DeepSpeed JSON, from where isles is called",
        ) from None
    except UnicodeDecodeError:
        raise ConfigError("not UTF-8 text", where=str(path), fix="save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"no JSON: {error.msg}", where=f"{path}:{error.lineno}:{error.colno}", fix="mend it"
        ) from None
    except (_DoubledKeyError, RecursionError) as error:
        raise ConfigError(f"{error}", where=str(path), fix="keep one of them") from None
    if not isinstance(data, dict):
        raise ConfigError(
            "the file holds no object with DeepSpeed's keys", where=f"{path}:1", fix="begin with {"
        )
    try:
        # JSON is YAML, save for tabs between tokens, and our YAML knows its lines.
        lines = scan_yaml(text.replace("\t", " "), "")[0].lines
    except (ConfigError, ConfigErrors):
        lines = {}
    return DeepSpeedFile(path, data, lines)


class _DoubledKeyError(Exception):
    """An object names a key twice."""


def _without_doubles(pairs: list[tuple[str, object]]) -> Json:
    names = [name for name, _ in pairs]
    if doubled := [name for name in names if names.count(name) > 1]:
        raise _DoubledKeyError(f"{doubled[0]} stands in one object {names.count(doubled[0])} times")
    return dict(pairs)


def missing_deepspeed() -> MissingDependencyError | None:
    """The error to raise where DeepSpeed is not installed; imports nothing."""
    if importlib.util.find_spec("deepspeed") is not None:
        return None
    return MissingDependencyError(
        "strategy deepspeed needs the package deepspeed, which is not installed",
        where="strategy.kind",
        fix="pip install 'isles[deepspeed]'; fsdp shards in the same way and needs nothing more",
    )


def check_start(config: RunConfig, world_size: int) -> None:
    """Refuse a start under DeepSpeed that the first rank would refuse.

    Raises:
        MissingDependencyError: DeepSpeed is not installed.
        ConfigError: see `check_accumulation`.
    """
    if isinstance(config.strategy, DeepSpeedStrategyConfig):
        if error := missing_deepspeed():
            raise error
        check_accumulation(config, config.strategy, world_size)


def check_accumulation(config: RunConfig, strategy: StrategyConfig, world_size: int) -> None:
    """Refuse a DeepSpeed file whose accumulation is not that of so many ranks.

    Args:
        config: the run file.
        strategy: the resolved one; any other than DeepSpeed has no file.
        world_size: ranks.

    Raises:
        ConfigError: with both numbers.
    """
    if not isinstance(strategy, DeepSpeedStrategyConfig) or strategy.config_file is None:
        return
    file = read_deepspeed_file(Path(strategy.config_file))
    wanted = file.data.get("gradient_accumulation_steps", AUTO)
    micro, rows = config.training.micro_batch_size, config.training.global_batch_size
    if wanted == AUTO or not isinstance(micro, int):
        return
    rows_per_rank = -(-rows // world_size)
    steps = -(-rows_per_rank // micro)
    if steps != wanted:
        raise ConfigError(
            f"it is {wanted}, and global_batch_size {rows} over {world_size} "
            f"rank{'s' if world_size > 1 else ''} of micro_batch_size {micro} makes {steps}",
            where=file.where("gradient_accumulation_steps"),
            fix=f'write "auto" there, or global_batch_size: {wanted * micro * world_size} in the '
            "run file",
            id="config.batch",
        )


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
    settings = {
        key: value
        for key, value in given.items()
        # The run file says the same of both as these sections; isles makes them.
        if key not in ("optimizer", "scheduler")
        and not (isinstance(value, dict) and value.get("enabled") is False)
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
    """The ZeRO stage that settings ask for."""
    return int(settings["zero_optimization"]["stage"])


def settled_stage(strategy: DeepSpeedStrategyConfig) -> int:
    """The ZeRO stage that a strategy, or its file, asks for."""
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
        section = dict(zero.get(key) or {})
        if section.get("device", AUTO) == AUTO:
            section["device"] = getattr(strategy, key)
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


def _without_auto(value: Json) -> Json:
    """What is still on `auto` is left to DeepSpeed's default."""
    return {
        key: _without_auto(item) if isinstance(item, dict) else item
        for key, item in value.items()
        if item != AUTO
    }


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
    data["optimizer"] = _optimizer_json(config.training)
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


def _optimizer_json(training: TrainingConfig) -> Json:
    kind = _WRITTEN_OPTIMIZERS.get(training.optimizer)
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


def _scheduler_json(training: TrainingConfig, notes: list[str]) -> Json:
    """The schedule, where DeepSpeed has the same one."""
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
