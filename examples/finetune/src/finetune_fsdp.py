"""The guide's FSDP settings, key by key: what isles makes of each."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from isles.config.yaml import scalar_text
from isles.errors import ConfigError, ConfigErrors

Judgment = tuple[Literal["mapped", "no longer needed", "unsupported"], str]
"""What becomes of a key, and how or why."""

_PRECISIONS = {
    "BFLOAT16": "bf16-mixed",
    "FLOAT16": "fp16-mixed",
    "FLOAT32": "32-true",
    "NO": "32-true",
}
_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "NO_SHARD")


@dataclass(slots=True)
class FsdpSettings:
    """What a JSON says to isles.

    Args:
        strategy: keys of the section `strategy`.
        training: keys of the section `training`.
        decisions: key -> what becomes of it, and why.
    """

    strategy: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    decisions: dict[str, Judgment] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """One line for each key of the JSON."""
        return [f"{key}: {decision}: {why}" for key, (decision, why) in self.decisions.items()]


def fsdp_precisions() -> tuple[str, ...]:
    """What fsdp_mixed_precision may be."""
    return tuple(_PRECISIONS)


def fsdp_sharding() -> tuple[str, ...]:
    """What fsdp_sharding_strategy may be."""
    return _SHARDING


def make_fsdp_file(sharding: str, precision: str, classes: list[str]) -> dict[str, Any]:
    """The settings that the guide shows, for these choices."""
    return {
        "fsdp_transformer_layer_cls_to_wrap": classes,
        "fsdp_sharding_strategy": sharding,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cuda_graphs": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_sync_module_states": True,
        "fsdp_use_orig_params": False,
        "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
        "fsdp_forward_prefetch": False,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_mixed_precision": precision,
    }


def read_fsdp_file(path: Path) -> FsdpSettings:
    """What isles makes of a JSON of FSDP settings.

    Raises:
        ConfigError: it cannot be read, or is no JSON object.
        ConfigErrors: every key that is unknown, and every value that a key cannot have.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise ConfigError(what, where=str(path), fix="check the path") from None
    except UnicodeDecodeError:
        raise ConfigError("not UTF-8 text", where=str(path), fix="save it as UTF-8") from None
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise ConfigError(f"no JSON: {error.msg}", where=where, fix="mend it") from None
    if not isinstance(data, dict):
        raise ConfigError("it holds no object", where=f"{path}:1", fix="begin with {")
    return judge_fsdp(data, str(path))


def judge_fsdp(data: dict[str, Any], name: str) -> FsdpSettings:
    """What isles makes of FSDP settings.

    Args:
        data: key -> value.
        name: of the file, for messages.

    Raises:
        ConfigErrors: every key that is unknown, and every value that a key cannot have.
    """
    found, issues = FsdpSettings(), []
    for key, value in data.items():
        allowed = _ALLOWED.get(key)
        if allowed is None:
            near = difflib.get_close_matches(key, _ALLOWED, n=1)
            fix = f"did you mean {near[0]}?" if near else "delete it"
            issues.append(
                ConfigError("is no key of these settings", where=f"{name} {key}", fix=fix)
            )
        elif not _fits(value, allowed):
            fix = f"write {_shown(allowed)}"
            issues.append(ConfigError(f"is {json.dumps(value)}", where=f"{name} {key}", fix=fix))
        else:
            found.decisions[key] = _judge(key, value, found)
    if issues:
        raise ConfigErrors(issues)
    return found


_BOOL = (True, False)
_ALLOWED: dict[str, tuple[object, ...] | type] = {
    "fsdp_transformer_layer_cls_to_wrap": list,
    "fsdp_sharding_strategy": _SHARDING,
    "fsdp_state_dict_type": ("SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"),
    "fsdp_cuda_graphs": _BOOL,
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "fsdp_sync_module_states": _BOOL,
    "fsdp_use_orig_params": _BOOL,
    "fsdp_backward_prefetch_policy": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    "fsdp_forward_prefetch": _BOOL,
    "fsdp_cpu_ram_efficient_loading": _BOOL,
    "fsdp_mixed_precision": tuple(_PRECISIONS),
    "fsdp_offload_params": _BOOL,
    "fsdp_activation_checkpointing": _BOOL,
}
"""The keys that the guide shows, and the two that others write beside them."""


_ALWAYS: dict[str, Judgment] = {
    "fsdp_state_dict_type": (
        "no longer needed",
        "isles saves and loads shard by shard, and exports the model whole at the end",
    ),
    "fsdp_cuda_graphs": ("no longer needed", "there are no CUDA graphs"),
    "fsdp_auto_wrap_policy": ("mapped", "isles cuts block by block"),
    "fsdp_sync_module_states": (
        "no longer needed",
        "every rank has the same weights from the start: from the seed, or from the files",
    ),
    "fsdp_use_orig_params": (
        "no longer needed",
        "FSDP2 has no flat parameters: each keeps its name and shape",
    ),
    "fsdp_backward_prefetch_policy": (
        "mapped",
        "FSDP2 gathers the next block before it computes this one's gradients",
    ),
    "fsdp_cpu_ram_efficient_loading": (
        "no longer needed",
        "no rank ever holds more than its shards and one module",
    ),
}
"""What FSDP2, or isles, does in one way only."""

_OTHERWISE: dict[str, tuple[object, str]] = {
    "fsdp_cuda_graphs": (False, "the run goes on without CUDA graphs"),
    "fsdp_auto_wrap_policy": (
        "TRANSFORMER_BASED_WRAP",
        "isles cuts block by block, whatever their size; it does so here",
    ),
    "fsdp_backward_prefetch_policy": (
        "BACKWARD_PRE",
        "FSDP2 always prefetches as BACKWARD_PRE does; it does so here",
    ),
}
"""The one value that is possible, and what becomes of another."""


def _judge(key: str, value: Any, found: FsdpSettings) -> Judgment:
    """What becomes of one key; its value goes where isles has the same thing."""
    if key in _ALWAYS:
        possible, instead = _OTHERWISE.get(key, (value, ""))
        return _ALWAYS[key] if value == possible else ("unsupported", instead)
    section, target, note = found.strategy, key.removeprefix("fsdp_"), ""
    match key:
        case "fsdp_transformer_layer_cls_to_wrap":
            note = ", those that the model has"
        case "fsdp_sharding_strategy":
            pass
        case "fsdp_forward_prefetch":
            value = int(value)
        case "fsdp_offload_params":
            target = "cpu_offload"
        case "fsdp_mixed_precision":
            section, target, value = found.training, "precision", _PRECISIONS[value]
        case "fsdp_activation_checkpointing":
            section, target = found.training, "gradient_checkpointing"
            value = "full" if value else "none"
        case _:
            raise AssertionError(f"{key} is allowed, and nobody has judged it")
    section[target] = value
    name = "strategy" if section is found.strategy else "training"
    return "mapped", f"{name}.{target}: {scalar_text(value)}{note}"


def _fits(value: object, allowed: tuple[object, ...] | type) -> bool:
    if isinstance(allowed, type):
        return isinstance(value, list) and all(isinstance(v, str) and v for v in value)
    return any(value == one and type(value) is type(one) for one in allowed)


def _shown(allowed: tuple[object, ...] | type) -> str:
    if isinstance(allowed, type):
        return "a list of class names"
    return " or ".join(json.dumps(one) for one in allowed)
