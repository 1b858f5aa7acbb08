"""DeepSpeed's JSON: reads a user's file, compares it with the run file, and makes the settings.

deepspeed.yaml lists the keys, and the equal keys of the run file.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from isles.config.issues import Issue, show_value
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DeepSpeedStrategyConfig, StrategyConfig
from isles.config.sections.training import TrainingConfig, warmup_in_steps
from isles.config.yaml import KeyPath, parse_yaml, read_text, scan_yaml
from isles.errors import ConfigError, MissingDependencyError, not_installed

Json = dict[str, Any]
"""Content of a JSON file, with DeepSpeed's names and types."""

AUTO = "auto"
_FILE_KEY = "strategy.config_file"
_ZERO = "zero_optimization"
_OFFLOADS = ("offload_optimizer", "offload_param")
_ACCUMULATION = "gradient_accumulation_steps"


@cache
def deepspeed_keys() -> Json:
    """The content of deepspeed.yaml."""
    entry = resources.files("isles.config.interop") / "deepspeed.yaml"
    return parse_yaml(entry.read_text(encoding="utf-8"), entry.name).value


@dataclass(frozen=True, slots=True)
class DeepSpeedFile:
    """The content of a DeepSpeed JSON, with the line of every key."""

    path: Path
    data: Json
    lines: Mapping[KeyPath, int]

    def where(self, key: str) -> str:
        """File, line and dotted key, for messages."""
        line = self.lines.get(tuple(key.split(".")))
        return f"{self.path}{f':{line}' if line else ''} {key}"

    def get(self, key: str, default: object = None) -> Any:
        """The value of a dotted key."""
        value: Any = self.data
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value

    def section(self, key: str) -> Json:
        """The section of a dotted key, or the whole file for an empty key. Empty if it is not a
        section."""
        value = self.get(key) if key else self.data
        return value if isinstance(value, dict) else {}


def read_deepspeed_file(path: Path) -> DeepSpeedFile:
    """Read a DeepSpeed JSON.

    ConfigError: it is not readable, or not a JSON object. The error has the line.
    """
    hint = "set strategy.config_file to a DeepSpeed JSON, relative to the current folder"
    text = read_text(path, "DeepSpeed file", hint)
    try:
        # JSON is YAML except for tabs between tokens, and our YAML reader has line numbers.
        document, errors = scan_yaml(text.replace("\t", " "), str(path))
    except ConfigError as error:
        errors = [error]
    if errors:
        what = f"not a JSON object with DeepSpeed's keys: {errors[0].what}"
        raise ConfigError(what, where=errors[0].where, fix="correct the JSON file")
    return DeepSpeedFile(path, document.value, document.lines)


def missing_deepspeed() -> MissingDependencyError | None:
    """The error to raise if DeepSpeed is not installed. Imports nothing."""
    return not_installed("deepspeed", "strategy deepspeed", "strategy.kind", "deepspeed")


def check_start(config: RunConfig, world_size: int) -> None:
    """Refuse a start without DeepSpeed, or with a different accumulation, before a rank does."""
    if isinstance(config.strategy, DeepSpeedStrategyConfig):
        if error := missing_deepspeed():
            raise error
        check_accumulation(config, config.strategy, world_size)


def check_accumulation(config: RunConfig, strategy: StrategyConfig, world_size: int) -> None:
    """Refuse a DeepSpeed file with a wrong accumulation for `world_size` ranks. ConfigError.

    A resolved strategy other than DeepSpeed has no file.
    """
    if not isinstance(strategy, DeepSpeedStrategyConfig) or strategy.config_file is None:
        return
    file = read_deepspeed_file(Path(strategy.config_file))
    wanted = file.get(_ACCUMULATION, AUTO)
    micro, rows = config.training.micro_batch_size, config.training.global_batch_size
    if wanted == AUTO or not isinstance(micro, int):
        return
    steps = -(-rows // (world_size * micro))
    if steps != wanted:
        raise ConfigError(
            f"it is {wanted}, and global_batch_size {rows} over {world_size} "
            f"rank{'s' if world_size > 1 else ''} of micro_batch_size {micro} gives {steps}",
            where=file.where(_ACCUMULATION),
            fix=f'write "auto" in the JSON file, or set global_batch_size: '
            f"{wanted * micro * world_size} in the run file",
            id="config.batch",
        )


def deepspeed_file_issues(path: Path, config: RunConfig) -> list[Issue]:
    """Every contradiction between a run file and its DeepSpeed JSON.

    The JSON may set keys with default values in `strategy`.
    """
    assert isinstance(config.strategy, DeepSpeedStrategyConfig)
    try:
        file = read_deepspeed_file(path)
    except ConfigError as error:
        return [Issue((_FILE_KEY,), f"{error.where}: {error.what}", error.fix)]
    found = [*_unknown_keys(file), *_other_values(file, config), *_other_kinds(file, config)]
    stage = file.get(f"{_ZERO}.stage", AUTO)
    if stage not in (AUTO, 1, 2, 3):
        fix = "use strategy: {kind: ddp}" if stage == 0 else "write 1, 2 or 3"
        found.append((f"{_ZERO}.stage", f"is {show_value(stage)}", fix, ""))
    issues = [
        Issue((*run_key.split(), _FILE_KEY), f"{file.where(key)} {what}", fix)
        for key, what, fix, run_key in found
    ]
    return issues + list(offload_issues(config.strategy, file))


_Found = Iterator[tuple[str, str, str, str]]
"""Key in the JSON, the problem, the fix, and the key of the run file, or empty."""


def _unknown_keys(file: DeepSpeedFile) -> _Found:
    # Keys that DeepSpeed does not have, or that belong in the run file.
    table = deepspeed_keys()
    for section, names in table["known"].items():
        value = file.get(section) if section else file.data
        if section in _foreign_params(file):
            continue
        if not isinstance(value, dict):
            if value not in (None, AUTO):
                yield section, f"is {show_value(value)}, not an object", "put its keys in { }", ""
            continue
        known = set(names.split())
        known |= {
            key.rpartition(".")[2]
            for key in (*table["same"], *table["fixed"])
            if key.rpartition(".")[0] == section
        }
        elsewhere = table["elsewhere"].get(section, {})
        fixes = {key: fix for fix, keys in elsewhere.items() for key in keys.split()}
        for name, inner in value.items():
            key = f"{section}.{name}" if section else name
            if name in fixes and not _is_off(inner):
                yield key, "is not supported by isles", fixes[name], ""
            elif name not in known and name not in fixes:
                what, fix = "is not a key of DeepSpeed", _nearest(name, {*known, *fixes})
                if section.endswith(".params"):  # types of other versions have other keys
                    what, other = "is not a key that isles uses", fix
                    fix = "delete it to train without it" if other == "delete it" else other
                yield key, what, fix, ""


def _is_off(value: object) -> bool:
    if isinstance(value, dict):
        return value.get("enabled") is False or all(map(_is_off, value.values()))
    return not value or value == AUTO


def _kind_of(file: DeepSpeedFile, section: str) -> str:
    # The kind of the run file for the type of an optimizer or scheduler, or empty.
    given = str(file.get(f"{section}.type", AUTO)).lower()
    kinds: dict[str, str] = deepspeed_keys()[f"{section}s"]
    return next((kind for kind, types in kinds.items() if given in types.lower().split()), "")


def _foreign_params(file: DeepSpeedFile) -> list[str]:
    # Sections with parameters of an optimizer or scheduler that isles does not have.
    return [
        f"{section}.params"
        for section in deepspeed_keys()["types"]
        if file.get(f"{section}.type", AUTO) != AUTO and not _kind_of(file, section)
    ]


def _other_values(file: DeepSpeedFile, config: RunConfig) -> _Found:
    # Values that are neither `auto`, nor absent, nor equal to the run file.
    table, strategy = deepspeed_keys(), config.strategy
    for key, run_keys in table["same"].items():
        value, names = file.get(key, AUTO), run_keys.split()
        section, _, name = names[0].rpartition(".")
        if section == "strategy" and strategy.is_default(name):
            continue  # a file that `isles config show` wrote names every default
        if key.rpartition(".")[0] in _foreign_params(file):
            continue
        expected = _run_value(config, names)
        same_type = isinstance(value, bool) == isinstance(expected, bool)
        if value == AUTO or (value == expected and same_type) or (value == 0 and expected is None):
            continue
        # In DeepSpeed, 0 disables clipping.
        meant = None if (key, value) == ("gradient_clipping", 0) else value
        fix = f'write "auto" in the JSON file, or {name}: {show_value(meant)} in the run file'
        yield (
            key,
            f"is {show_value(value)}, and {names[0]} is {show_value(expected)}",
            fix,
            names[0],
        )
    for key, (wanted, why) in table["fixed"].items():
        if key.rpartition(".")[0] in _foreign_params(file):
            continue
        if (value := file.get(key, AUTO)) not in (AUTO, wanted):
            fix = f"write {show_value(wanted)}"
            if not _is_other_if_absent(key, wanted):
                fix += ", or delete it"
            yield key, f"is {show_value(value)}, and {why}", fix, ""
    # If both are numbers, the check needs the number of ranks: see `check_accumulation`.
    steps, run_key = file.get(_ACCUMULATION, AUTO), "training.micro_batch_size"
    if steps != AUTO and not isinstance(config.at(run_key), int):
        what = f"is {show_value(steps)}, and depends on {run_key}, which is not a number"
        fix = 'write "auto" in the JSON file, or a number for micro_batch_size in the run file'
        yield _ACCUMULATION, what, fix, run_key


def _run_value(config: RunConfig, names: Sequence[str]) -> object:
    # The value of the run file for equal keys of a DeepSpeed JSON.
    training = config.training
    if names[0] == "training.warmup_steps" and training.max_steps is not None:
        return warmup_in_steps(training, training.max_steps)
    given = [config.at(name) for name in names]
    return given if len(given) > 1 else given[0]


def _is_other_if_absent(key: str, wanted: object) -> bool:
    section, _, name = key.rpartition(".")
    kinds = deepspeed_keys()["absent"].get(section.partition(".")[0], {})
    return any(name in values and values[name] != wanted for values in kinds.values())


def deepspeed_notes(config: RunConfig) -> list[str]:
    """Lines for the user about keys that a DeepSpeed file omits, if DeepSpeed's default differs
    from the value of this run. For example, DeepSpeed's default warm-up is logarithmic."""
    strategy, table = config.strategy, deepspeed_keys()
    if not isinstance(strategy, DeepSpeedStrategyConfig) or strategy.config_file is None:
        return []
    file, notes = read_deepspeed_file(Path(strategy.config_file)), []
    for section, kinds in table["absent"].items():
        kind = str(file.get(f"{section}.type", AUTO)).lower()
        defaults: Json = next((v for name, v in kinds.items() if name.lower() == kind), {})
        theirs, ours = [], []
        for name, default in defaults.items():
            key = f"{section}.params.{name}"
            fixed = table["fixed"].get(key)
            value = fixed[0] if fixed else _run_value(config, table["same"][key].split())
            is_unused = name == "warmup_type" and config.training.warmup_steps == 0
            if file.get(key) is None and value != default and not is_unused:
                theirs.append(f"{name} {show_value(default)}")
                ours.append(show_value(value))
        if theirs:
            notes.append(
                f"{file.where(section)}: the file omits keys with the defaults "
                f"{', '.join(theirs)} in DeepSpeed. This run uses {', '.join(ours)}. Add these "
                "keys to the file, or delete the section"
            )
    return notes


def _other_kinds(file: DeepSpeedFile, config: RunConfig) -> _Found:
    # A precision, optimizer or scheduler that differs from the run file's.
    table, precision = deepspeed_keys(), config.training.precision
    for name in ("bf16", "bfloat16", "fp16"):
        mixed = "fp16-mixed" if name == "fp16" else "bf16-mixed"
        enabled = file.get(f"{name}.enabled", AUTO)
        if enabled != AUTO and enabled is not (precision == mixed):
            what = f"is {show_value(enabled)}, and training.precision is {precision}"
            fix = 'write "auto" in the JSON file, or '
            fix += f"precision: {mixed if enabled else '32-true'} in the run file"
            yield f"{name}.enabled", what, fix, "training.precision"
    for section, run_key in table["types"].items():
        kind, wanted, ours = file.get(f"{section}.type", AUTO), config.at(run_key), ""
        if kind != AUTO and (ours := _kind_of(file, section)) != wanted:
            name = run_key.rpartition(".")[2]
            if ours:
                fix = f'write "auto" in the JSON file, or {name}: {ours} in the run file'
            else:
                kinds = ", ".join(get_args(TrainingConfig.model_fields[name].annotation))
                fix = (
                    f"isles has {kinds}: choose one with {run_key} in the run file, and delete the "
                )
                fix += "section to train with it"
            what = f"is {show_value(kind)}, and {run_key} is {wanted}"
            yield f"{section}.type", what, fix, run_key
        low = config.training.min_lr_ratio
        if section == "scheduler" and ours == wanted == "linear" and low:
            what = f"is {kind}, which falls to 0, and training.min_lr_ratio is {show_value(low)}"
            fix = 'write "auto" in the JSON file, or min_lr_ratio: 0 in the run file'
            yield f"{section}.type", what, fix, "training.min_lr_ratio"


def offload_issues(
    strategy: DeepSpeedStrategyConfig, file: DeepSpeedFile | None = None
) -> Iterator[Issue]:
    """Impossible offloads of a strategy and its file."""
    zero = _zero(file.section(_ZERO) if file else {}, strategy)
    keys = (_FILE_KEY,) if file else ()
    for name in _OFFLOADS:
        device = zero.get(name, {}).get("device", "none")
        at = f"{file.where(f'{_ZERO}.{name}.device')}: " if file else ""
        if device not in ("none", "cpu", "nvme"):
            yield Issue(keys, f"{at}it is {show_value(device)}", "write none, cpu or nvme")
        needs_stage_3 = device == "nvme" or (name == "offload_param" and device != "none")
        if needs_stage_3 and zero["stage"] != 3:
            yield Issue(
                (f"strategy.{name}", "strategy.zero_stage", *keys),
                f"{at}{name} {device} needs ZeRO stage 3, and zero_stage is {zero['stage']}",
                f"use zero_stage: 3, or {name}: {'cpu' if name == 'offload_optimizer' else 'none'}",
            )
        if device == "nvme" and not zero[name].get("nvme_path"):
            yield Issue(
                (f"strategy.{name}", *keys),
                f"{at}{name} nvme needs a folder on an NVMe disk",
                "set nvme_path to a folder on a fast disk of every node",
            )


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else "delete it"


def deepspeed_settings(config: RunConfig, strategy: DeepSpeedStrategyConfig) -> Json:
    """DeepSpeed's settings, without `auto`.

    The values of a file stay. Missing and `auto` values come from the run file, or else from
    DeepSpeed's defaults. isles counts micro-batches, makes the optimizer and sets the learning rate
    itself, so DeepSpeed uses these batch sizes only for its own log.
    """
    given: Json = {}
    if strategy.config_file is not None:
        given = deepcopy(read_deepspeed_file(Path(strategy.config_file)).data)
    settings = {
        key: value
        for key, value in given.items()
        # The run file equals these sections, and isles makes both itself.
        if key not in ("optimizer", "scheduler")
        and not (isinstance(value, dict) and value.get("enabled") is False)
    }
    micro = config.training.micro_batch_size
    settings["train_micro_batch_size_per_gpu"] = micro if isinstance(micro, int) else 1
    # DeepSpeed would divide by it, but the loss is already divided by the global number of tokens.
    settings["gradient_accumulation_steps"] = 1
    settings.pop("train_batch_size", None)
    settings["gradient_clipping"] = config.training.max_grad_norm or 0.0
    settings["zero_allow_untested_optimizer"] = True  # for SGD, which isles tests
    settings["zero_force_ds_cpu_optimizer"] = False  # torch's fused AdamW runs on CPUs as well
    zero = settings[_ZERO] = _zero(given.get(_ZERO) or {}, strategy)
    # The size must be even, as DeepSpeed sends bf16 in words of four bytes.
    zero["allgather_bucket_size"] = -(-int(zero["allgather_bucket_size"]) // 2) * 2
    section = {"bf16-mixed": "bf16", "fp16-mixed": "fp16"}.get(config.training.precision)
    for key in ("bf16", "bfloat16", "fp16"):
        settings.pop(key, None)
    if section is not None:
        # 16-bit weights for computing, fp32 ones for the optimizer; see training.precision.
        old_name = given.get("bfloat16") if section == "bf16" else None
        settings[section] = {**(given.get(section) or old_name or {}), "enabled": True}
        if not given:
            # Add gradients in fp32, like the other strategies. A file may choose another type.
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
            settings["communication_data_type"] = "fp32"
            if section == "fp16":  # as torch's scaler does
                settings[section] |= {"loss_scale_window": 2000, "hysteresis": 1}
    return _without_auto(settings)


def stage_of(settings: Json) -> int:
    """The ZeRO stage of settings."""
    return int(settings[_ZERO]["stage"])


def resolve_stage(strategy: DeepSpeedStrategyConfig) -> int:
    """The ZeRO stage of a strategy or its file."""
    path = strategy.config_file
    given = {} if path is None else read_deepspeed_file(Path(path)).section(_ZERO)
    return int(_zero(given, strategy)["stage"])


def _zero(given: Json, strategy: DeepSpeedStrategyConfig) -> Json:
    zero = {key: value for key, value in given.items() if value != AUTO}
    keys = ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm")
    ours = {"stage": strategy.zero_stage, **{key: getattr(strategy, key) for key in keys}}
    for key in _OFFLOADS:
        section = zero.pop(key, None)
        section = dict(section) if isinstance(section, dict) else {}
        if section.get("device", AUTO) == AUTO:
            section["device"] = getattr(strategy, key)
        if section["device"] == "nvme" and section.get("nvme_path", AUTO) == AUTO:
            section["nvme_path"] = strategy.nvme_path
        if section["device"] != "none":
            zero[key] = section
    return {**ours, **zero}


def _without_auto(value: Json) -> Json:
    # What is still on `auto` is left to DeepSpeed's default.
    return {
        key: _without_auto(item) if isinstance(item, dict) else item
        for key, item in value.items()
        if item != AUTO
    }
