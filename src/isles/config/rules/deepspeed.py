"""The rules between a run file and the DeepSpeed JSON that it names."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from isles.config.interop.deepspeed import AUTO, DeepSpeedFile, deepspeed_keys, read_deepspeed_file
from isles.config.issues import Issue, show_value
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DeepSpeedStrategyConfig
from isles.errors import ConfigError

_FILE_KEY = "strategy.config_file"
_UNCHECKED = ("torch_adam", "adam_w_mode", "fused", "foreach", "bias_correction")
"""Parameters of an optimizer that change nothing, or are compared by themselves."""


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
    comparison = _Comparison(file, config, config.strategy)
    comparison.names()
    comparison.batch()
    comparison.precision()
    comparison.optimizer()
    comparison.scheduler()
    comparison.zero()
    return comparison.issues


class _Comparison:
    """One DeepSpeed file beside one run file."""

    def __init__(
        self, file: DeepSpeedFile, config: RunConfig, strategy: DeepSpeedStrategyConfig
    ) -> None:
        self.file = file
        self.config = config
        self.strategy = strategy
        self.training = config.training
        self.issues: list[Issue] = []

    def _add(self, at: tuple[str, ...], what: str, fix: str, *run_keys: str) -> None:
        self.issues.append(Issue((*run_keys, _FILE_KEY), f"{self.file.where(*at)} {what}", fix))

    def _same(self, at: tuple[str, ...], run_keys: str) -> None:
        """A value that must be `auto`, absent, or what one or two keys of the run file say."""
        value = self.file.section(*at[:-1]).get(at[-1], AUTO)
        names = run_keys.split()
        said = [_value(self.config, name) for name in names]
        expected = said if len(said) > 1 else said[0]
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

    def _same_if_said(self, at: tuple[str, ...], key: str) -> None:
        """The same for a key of `strategy`; a file that `isles config show` wrote names every
        default, which so says nothing."""
        if getattr(self.strategy, key) != type(self.strategy).model_fields[key].default:
            self._same(at, f"strategy.{key}")

    def names(self) -> None:
        """Keys that DeepSpeed does not have, or that are not for it to say."""
        keys = deepspeed_keys()
        zero = keys["zero"]
        top = f"{keys['passed']} {keys['compared']} {keys['sections']}".split()
        inside = f"{zero['numbers']} {zero['switches']} {zero['others']}".split()
        numbers, switches = zero["numbers"].split(), zero["switches"].split()
        for at, known, elsewhere, why in (
            ((), top, keys["elsewhere"], "is not DeepSpeed's to say here"),
            (("zero_optimization",), inside, zero["elsewhere"], "does not work here"),
        ):
            fixes = {key: fix for fix, names in elsewhere.items() for key in names.split()}
            for key, value in self.file.section(*at).items():
                here = (*at, key)
                if key in fixes and not _is_off(value):
                    self._add(here, why, fixes[key])
                elif key not in known and key not in fixes:
                    self._add(here, "is no key of DeepSpeed", _nearest(key, {*known, *fixes}))
                elif at and key in numbers and not _is_number(value):
                    self._add(here, f"is {_show(value)}, not a number", 'write a number, or "auto"')
                elif at and key in switches and value != AUTO and not isinstance(value, bool):
                    self._add(here, f"is {_show(value)}", 'write true, false or "auto"')
        for section in keys["sections"].split():
            value = self.file.data.get(section)
            if value is not None and not isinstance(value, dict):
                self._add((section,), f"is {_show(value)}, not an object", "put its keys in { }")

    def batch(self) -> None:
        for key, run_key in deepspeed_keys()["same"].items():
            # No clipping is null here and 0 there.
            if self.file.data.get(key) != 0 or _value(self.config, run_key) is not None:
                self._same((key,), run_key)
        self._accumulation()
        if self.file.data.get("zero_force_ds_cpu_optimizer") is True:
            self._add(
                ("zero_force_ds_cpu_optimizer",),
                "is true, and isles uses torch's own fused optimizer on CPUs",
                "write false, or delete it",
            )

    def _accumulation(self) -> None:
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

    def precision(self) -> None:
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
        if self.file.section("fp16").get("loss_scale", 0) not in (0, AUTO):
            self._add(
                ("fp16", "loss_scale"),
                "is fixed, and isles adapts it to the gradients",
                "write 0, or delete it",
            )
        for name in ("bf16", "fp16"):
            key = f"{name}_master_weights_and_grads"
            if self.file.section(name).get(key):
                self._add(
                    (name, key),
                    "is true: the optimizer would lose its fp32 weights, which are what is saved",
                    "write false, or delete it",
                )

    def _is_type(self, section: str, known: list[str], kind: str, word: str) -> bool:
        """Whether the type of a section is that of the run file; it is added where it is not."""
        found = self.file.section(section).get("type", AUTO)
        if found == AUTO or (found if section == "scheduler" else str(found).lower()) in known:
            return True
        said = _value(self.config, kind)
        self._add(
            (section, "type"),
            f"is {_show(found)}, and {kind} is {said}",
            f'write "auto" there, delete the section, or name another {word} in the run file',
            kind,
        )
        return False

    def optimizer(self) -> None:
        keys, name = deepspeed_keys(), self.training.optimizer
        known = keys["optimizers"].get(name, "").split()
        if not self._is_type("optimizer", known, "training.optimizer", "optimizer"):
            return
        same = keys["same_sgd" if name == "sgd" else "same_adam"]
        for key, value in (self.file.section("optimizer").get("params") or {}).items():
            at = ("optimizer", "params", key)
            if key in same:
                self._same(at, same[key])
            elif key == "adam_w_mode" and value is False:
                self._add(
                    at,
                    "is false, and isles decouples weight decay from the gradient (AdamW)",
                    "write true, or delete it",
                )
            elif key not in _UNCHECKED:
                self._add(at, "is unknown", _nearest(key, set(same)))

    def scheduler(self) -> None:
        keys, name = deepspeed_keys(), self.training.lr_scheduler_type
        known = [keys["schedulers"].get(name)]
        if not self._is_type("scheduler", known, "training.lr_scheduler_type", "schedule"):
            return
        same = keys["same_scheduler"]
        fixed = {"warmup_min_lr": 0, "warmup_type": "linear", "warmup_min_ratio": 0}
        for key, value in (self.file.section("scheduler").get("params") or {}).items():
            at = ("scheduler", "params", key)
            if key in same:
                self._same(at, same[key])
            elif key not in fixed:
                self._add(at, "is unknown", _nearest(key, {*same, *fixed}))
            elif value not in (AUTO, fixed[key]):
                what = f"is {_show(value)}, and isles warms up from 0 in a straight line"
                self._add(at, what, f"write {_show(fixed[key])}, or delete it")

    def zero(self) -> None:
        zero = self.file.section("zero_optimization")
        for key in ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm"):
            self._same_if_said(("zero_optimization", key), key)
        if zero.get("compute_grad_norm") is False:
            at = ("zero_optimization", "compute_grad_norm")
            self._add(at, "is false, and isles records the norm of every step", "delete it")
        stage, at = zero.get("stage", AUTO), ("zero_optimization", "stage")
        if stage == 0:
            self._add(at, "is 0", "use strategy: {kind: ddp}")
        elif stage != AUTO and stage not in (1, 2, 3):
            self._add(at, f"is {_show(stage)}", "write 1, 2 or 3")
        else:
            self._same_if_said(at, "zero_stage")
        resolved = self.strategy.zero_stage if stage == AUTO else stage
        for key in ("offload_optimizer", "offload_param"):
            self._offload(key, zero.get(key), resolved)

    def _offload(self, key: str, section: object, stage: object) -> None:
        at = ("zero_optimization", key)
        if section is None or section == AUTO:
            section = {}
        if not isinstance(section, dict):
            self._add(at, f"is {_show(section)}, not an object", 'write {"device": "cpu"}')
            return
        known = set(deepspeed_keys()["offload"].split())
        for name in section.keys() - known:
            self._add((*at, name), "is no key of DeepSpeed", _nearest(name, known))
        device = section.get("device", AUTO)
        if device not in (AUTO, "none", "cpu", "nvme"):
            self._add((*at, "device"), f"is {_show(device)}", "write none, cpu or nvme")
        else:
            self._same_if_said((*at, "device"), key)
        for name, usual in (("ratio", 1.0), ("super_offload", False)):
            if section.get(name, usual) not in (usual, AUTO):
                self._add((*at, name), "needs DeepSpeed's own optimizer", "delete it")
        self._same_if_said((*at, "nvme_path"), "nvme_path")
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


def _value(config: RunConfig, dotted_key: str) -> Any:
    section, _, name = dotted_key.partition(".")
    return getattr(getattr(config, section), name)


def _nearest(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else "delete it"


def _show(value: object) -> str:
    return str(value) if isinstance(value, tuple) else show_value(value)


def _is_number(value: object) -> bool:
    return value == AUTO or (isinstance(value, int | float) and not isinstance(value, bool))


def _is_off(value: object) -> bool:
    return not value or value == AUTO or (isinstance(value, dict) and value.get("enabled") is False)
