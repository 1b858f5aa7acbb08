"""DeepSpeed's JSON: a user's own is read and compared with the run file, and one is written.

Which keys there are, and which of them say the same as a key of the run file: deepspeed.yaml.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from isles.config.issues import Issue, show_value
from isles.config.load import read_text
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DeepSpeedStrategyConfig, StrategyConfig
from isles.config.yaml import KeyPath, dotted, parse_yaml, scan_yaml
from isles.errors import ConfigError, ConfigErrors, MissingDependencyError

Json = dict[str, Any]
"""What a JSON file holds: DeepSpeed's own names and types."""

AUTO = "auto"
_FILE_KEY = "strategy.config_file"
_ZERO = "zero_optimization"


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
    lines: Mapping[KeyPath, int]

    def where(self, *keys: str) -> str:
        """File, line and key, for messages."""
        line = self.lines.get(keys)
        return f"{self.path}{f':{line}' if line else ''} {dotted(keys)}"

    def get(self, *keys: str) -> Any:
        """A value inside; None where it is absent."""
        value: Any = self.data
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def section(self, *keys: str) -> Json:
        """A mapping inside; empty where it is absent."""
        value = self.get(*keys)
        return value if isinstance(value, dict) else {}


def read_deepspeed_file(path: Path) -> DeepSpeedFile:
    """Read a DeepSpeed JSON.

    Raises:
        ConfigError: it cannot be read, or is no JSON object; with the line.
    """
    hint = "strategy.config_file names a DeepSpeed JSON, from where isles is called"
    text = read_text(path, "DeepSpeed file", hint)
    try:
        data = json.loads(text, object_pairs_hook=_without_doubles)
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


def deepspeed_file_issues(path: Path, config: RunConfig) -> list[Issue]:
    """Every contradiction between a DeepSpeed JSON and the run file that names it.

    Args:
        path: the JSON, as the run file names it.
        config: the run file. What has its default in `strategy` is the JSON's to say.
    """
    assert isinstance(config.strategy, DeepSpeedStrategyConfig)
    try:
        file = read_deepspeed_file(path)
    except ConfigError as error:
        return [Issue((_FILE_KEY,), f"{error.where}: {error.what}", error.fix)]
    return _Comparison(file, config, config.strategy).check()


class _Comparison:
    """One DeepSpeed file beside one run file, by the tables of deepspeed.yaml."""

    def __init__(
        self, file: DeepSpeedFile, config: RunConfig, strategy: DeepSpeedStrategyConfig
    ) -> None:
        self.file = file
        self.config = config
        self.strategy = strategy
        self.training = config.training
        self.issues: list[Issue] = []

    def check(self) -> list[Issue]:
        table = deepspeed_keys()
        self._check_names()
        for key, run_key in table["same"].items():
            # No clipping is null here and 0 there.
            if self.file.data.get(key) != 0 or self.config.at(run_key) is not None:
                self._must_equal((key,), run_key)
        self._check_accumulation()
        self._check_precision()
        optimizer, scheduler = self.training.optimizer, self.training.lr_scheduler_type
        types = table["optimizers"].get(optimizer, "").split()
        params = table["same_sgd" if optimizer == "sgd" else "same_adam"]
        self._check_kind("optimizer", "training.optimizer", types, params)
        types = [table["schedulers"].get(scheduler)]
        self._check_kind("scheduler", "training.lr_scheduler_type", types, table["same_scheduler"])
        self._check_zero()
        for key in table["fixed"]:
            if ".params." not in key:  # those count where the type is the run file's
                self._must_be_fixed(tuple(key.split(".")))
        return self.issues

    def _add(self, at: tuple[str, ...], what: str, fix: str, *run_keys: str) -> None:
        self.issues.append(Issue((*run_keys, _FILE_KEY), f"{self.file.where(*at)} {what}", fix))

    def _must_equal(self, at: tuple[str, ...], run_keys: str) -> None:
        # A value that must be `auto`, absent, or what one or two keys of the run file say.
        value = self.file.section(*at[:-1]).get(at[-1], AUTO)
        names = run_keys.split()
        given = [self.config.at(name) for name in names]
        expected = given if len(given) > 1 else given[0]
        if value == AUTO or (
            value == expected and isinstance(value, bool) == isinstance(expected, bool)
        ):
            return
        shown = "null" if expected is None else _show(expected)
        self._add(
            at,
            f"is {_show(value)}, and {names[0]} is {shown}",
            f'write "auto" there, or {names[0].rpartition(".")[2]}: {_show(value)} in the run file',
            names[0],
        )

    def _must_be_fixed(self, at: tuple[str, ...]) -> None:
        wanted, why = deepspeed_keys()["fixed"][dotted(at)]
        if (value := self.file.section(*at[:-1]).get(at[-1], AUTO)) not in (AUTO, wanted):
            fix = f"write {_show(wanted)}, or delete it"
            self._add(at, f"is {_show(value)}, and {why}", fix)

    def _check_names(self) -> None:
        # Keys that DeepSpeed does not have, or that are not for it to say.
        table = deepspeed_keys()
        zero = table["zero"]
        top = f"{table['passed']} {table['compared']} {table['sections']}".split()
        inside = f"{zero['numbers']} {zero['switches']} {zero['others']}".split()
        numbers, switches = zero["numbers"].split(), zero["switches"].split()
        for at, known, elsewhere, why in (
            ((), top, table["elsewhere"], "is not DeepSpeed's to say here"),
            ((_ZERO,), inside, zero["elsewhere"], "does not work here"),
        ):
            fixes = {key: fix for fix, names in elsewhere.items() for key in names.split()}
            for key, value in self.file.section(*at).items():
                here = (*at, key)
                is_off = not value or value == AUTO
                is_off = is_off or (isinstance(value, dict) and value.get("enabled") is False)
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if key in fixes and not is_off:
                    self._add(here, why, fixes[key])
                elif key not in known and key not in fixes:
                    self._add(here, "is no key of DeepSpeed", _nearest(key, {*known, *fixes}))
                elif at and key in numbers and not is_number and value != AUTO:
                    self._add(here, f"is {_show(value)}, not a number", 'write a number, or "auto"')
                elif at and key in switches and value != AUTO and not isinstance(value, bool):
                    self._add(here, f"is {_show(value)}", 'write true, false or "auto"')
        for section in table["sections"].split():
            value = self.file.data.get(section)
            if value is not None and not isinstance(value, dict):
                self._add((section,), f"is {_show(value)}, not an object", "put its keys in { }")

    def _check_accumulation(self) -> None:
        rows, micro = self.training.global_batch_size, self.training.micro_batch_size
        key = ("gradient_accumulation_steps",)
        steps = self.file.data.get(key[0], AUTO)
        if steps == AUTO:
            return
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            self._add(key, f"is {_show(steps)}", 'write a number of 1 or more, or "auto"')
        elif not isinstance(micro, int):
            self._add(
                key,
                f"is {steps}, and training.micro_batch_size, from which it follows, is no number",
                'write "auto" there, or a number for micro_batch_size in the run file',
                "training.micro_batch_size",
            )
        elif rows % (steps * micro):
            self._add(
                key,
                f"is {steps}, and training.global_batch_size {rows} is no multiple of {steps} x "
                f"micro_batch_size {micro} = {steps * micro}",
                'write "auto" there, or make global_batch_size ranks x '
                f"{steps * micro} in the run file",
                "training.global_batch_size",
            )

    def _check_precision(self) -> None:
        precision = self.training.precision
        for name in ("bf16", "bfloat16", "fp16"):
            mixed = "fp16-mixed" if name == "fp16" else "bf16-mixed"
            section = self.file.section(name)
            enabled = section.get("enabled", AUTO if section else None)
            if enabled in (None, AUTO) or enabled is (precision == mixed):
                continue
            fix = f"precision: {mixed} in the run file" if enabled else "delete the section"
            self._add(
                (name, "enabled"),
                f"is {_show(enabled)}, and training.precision is {precision}",
                f'write "auto" there, or {fix}',
                "training.precision",
            )

    def _check_kind(
        self, section: str, run_key: str, types: list[str], same: Mapping[str, str]
    ) -> None:
        # The type of the section optimizer or scheduler, and its parameters.
        kind = self.file.section(section).get("type", AUTO)
        known = str(kind).lower() if section == "optimizer" else kind
        if kind != AUTO and known not in types:
            self._add(
                (section, "type"),
                f"is {_show(kind)}, and {run_key} is {self.config.at(run_key)}",
                f'write "auto" there, delete the section, or name another {section} in the run '
                "file",
                run_key,
            )
            return
        table = deepspeed_keys()
        for key in self.file.section(section, "params"):
            at = (section, "params", key)
            if key in same:
                self._must_equal(at, same[key])
            elif dotted(at) in table["fixed"]:
                self._must_be_fixed(at)
            elif key not in table["unchecked"].split():
                self._add(at, "is unknown", _nearest(key, set(same)))

    def _check_zero(self) -> None:
        for key in ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm"):
            self._must_equal_if_given((_ZERO, key), key)
        at = (_ZERO, "stage")
        stage = self.file.section(_ZERO).get("stage", AUTO)
        if stage == 0:
            self._add(at, "is 0", "use strategy: {kind: ddp}")
        elif stage not in (AUTO, 1, 2, 3):
            self._add(at, f"is {_show(stage)}", "write 1, 2 or 3")
        else:
            self._must_equal_if_given(at, "zero_stage")
        stage = self.strategy.zero_stage if stage == AUTO else stage
        for key in ("offload_optimizer", "offload_param"):
            self._check_offload(key, stage)

    def _must_equal_if_given(self, at: tuple[str, ...], key: str) -> None:
        # A file that `isles config show` wrote names every default, which so says nothing.
        if getattr(self.strategy, key) != type(self.strategy).model_fields[key].default:
            self._must_equal(at, f"strategy.{key}")

    def _check_offload(self, key: str, stage: object) -> None:
        at = (_ZERO, key)
        section = self.file.get(*at)
        if section is not None and section != AUTO and not isinstance(section, dict):
            self._add(at, f"is {_show(section)}, not an object", 'write {"device": "cpu"}')
            return
        section, known = self.file.section(*at), set(deepspeed_keys()["offload"].split())
        for name in section.keys() - known:
            self._add((*at, name), "is no key of DeepSpeed", _nearest(name, known))
        device = section.get("device", AUTO)
        if device not in (AUTO, "none", "cpu", "nvme"):
            self._add((*at, "device"), f"is {_show(device)}", "write none, cpu or nvme")
        else:
            self._must_equal_if_given((*at, "device"), key)
        self._must_equal_if_given((*at, "nvme_path"), "nvme_path")
        resolved = getattr(self.strategy, key) if device == AUTO else device
        needs_stage3 = resolved == "nvme" or (key == "offload_param" and resolved != "none")
        if needs_stage3 and stage != 3:
            self._add(
                (*at, "device"),
                f"is {resolved}, which only ZeRO stage 3 can do, and the stage is {stage}",
                f"use stage 3, or {key}: none",
                f"strategy.{key}",
            )
        if resolved == "nvme" and not section.get("nvme_path", self.strategy.nvme_path):
            self._add(at, "names no nvme_path", "add nvme_path: a folder on a fast disk")


def _nearest(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else "delete it"


def _show(value: object) -> str:
    return str(value) if isinstance(value, tuple) else show_value(value)


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
    settings[_ZERO] = _zero(given.get(_ZERO) or {}, strategy)
    section = {"bf16-mixed": "bf16", "fp16-mixed": "fp16"}.get(config.training.precision)
    for key in ("bf16", "bfloat16", "fp16"):
        settings.pop(key, None)
    if section is not None:
        # 16-bit weights for computing, fp32 ones for the optimizer; see training.precision.
        old_name = given.get("bfloat16") if section == "bf16" else None
        settings[section] = {**(given.get(section) or old_name or {}), "enabled": True}
        if not given:
            # Gradients are added in fp32, as the other strategies do; a file may choose otherwise.
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
            settings["communication_data_type"] = "fp32"
            if section == "fp16":  # as torch's scaler does
                settings[section] |= {"loss_scale_window": 2000, "hysteresis": 1}
    return _without_auto(settings)


def stage_of(settings: Json) -> int:
    """The ZeRO stage that settings ask for."""
    return int(settings[_ZERO]["stage"])


def resolve_stage(strategy: DeepSpeedStrategyConfig) -> int:
    """The ZeRO stage that a strategy, or its file, asks for."""
    given: Json = {}
    if strategy.config_file is not None:
        given = read_deepspeed_file(Path(strategy.config_file)).section(_ZERO)
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


def _without_auto(value: Json) -> Json:
    # What is still on `auto` is left to DeepSpeed's default.
    return {
        key: _without_auto(item) if isinstance(item, dict) else item
        for key, item in value.items()
        if item != AUTO
    }
