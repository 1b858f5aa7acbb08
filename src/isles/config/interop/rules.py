"""Where a DeepSpeed JSON file contradicts the run file that names it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from isles.config.interop.keys import (
    ELSEWHERE,
    OFFLOAD,
    OPTIMIZERS,
    PASSED,
    SCHEDULERS,
    ZERO,
    ZERO_ELSEWHERE,
    ZERO_NUMBERS,
    ZERO_SWITCHES,
)
from isles.config.interop.read import (
    AUTO,
    DeepSpeedFile,
    missing_deepspeed,
    read_deepspeed_file,
)
from isles.config.issue import Violation
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DeepSpeedStrategyConfig
from isles.errors import ConfigError

_FILE_KEY = "strategy.config_file"
_SECTIONS = ("optimizer", "scheduler", "bf16", "bfloat16", "fp16", "zero_optimization")
_HANDLED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    *_SECTIONS,
)


def deepspeed_faults(config: RunConfig) -> Iterator[Violation]:
    """What DeepSpeed cannot do at any stage, whatever its file says."""
    if config.training.optimizer == "muon":
        yield Violation(
            ("training.optimizer", "strategy.kind"),
            "muon works on whole matrices, and deepspeed cuts them into flat pieces",
            "use optimizer: adamw, or strategy: {kind: fsdp}",
        )
    if config.training.precision == "bf16-true":
        yield Violation(
            ("training.precision", "strategy.kind"),
            "bf16-true has no fp32 weights, and deepspeed's optimizer keeps them",
            "use bf16-mixed, with which deepspeed computes in bf16 and cuts the fp32 weights over "
            "the ranks; or strategy: {kind: fsdp}",
        )


def deepspeed_file_faults(path: Path, config: RunConfig) -> list[Violation]:
    """Every contradiction between a DeepSpeed JSON and the run file that names it.

    Args:
        path: the JSON, as the run file names it.
        config: the run file. What has its default in `strategy` is the JSON's to say.
    """
    try:
        file = read_deepspeed_file(path)
    except ConfigError as error:
        return [Violation((_FILE_KEY,), f"{error.where}: {error.what}", error.fix)]
    return _Comparison(file, config).faults()


def check_start(config: RunConfig, world_size: int) -> None:
    """Refuse a start under DeepSpeed that the first rank would refuse.

    Raises:
        MissingDependencyError: DeepSpeed is not installed.
        ConfigError: see `check_accumulation`.
    """
    if isinstance(config.strategy, DeepSpeedStrategyConfig):
        if fault := missing_deepspeed():
            raise fault
        check_accumulation(config, config.strategy, world_size)


def check_accumulation(config: RunConfig, strategy: object, world_size: int) -> None:
    """Refuse a file whose accumulation is not that of so many ranks.

    Args:
        config: the run file.
        strategy: the settled one; any other than DeepSpeed has no file.
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


class _Comparison:
    """One file against one run file."""

    def __init__(self, file: DeepSpeedFile, config: RunConfig) -> None:
        self.file = file
        self.config = config
        self.training = config.training
        self._found: list[Violation] = []

    def faults(self) -> list[Violation]:
        """All of them, in the order of the rules."""
        self._names()
        self._batch()
        self._precision()
        self._optimizer()
        self._scheduler()
        assert isinstance(self.config.strategy, DeepSpeedStrategyConfig)
        self._zero(self.config.strategy)
        return self._found

    def _add(self, keys: tuple[str, ...], what: str, fix: str, *run_keys: str) -> None:
        where = self.file.where(*keys)
        self._found.append(Violation((*run_keys, _FILE_KEY), f"{where} {what}", fix))

    def _same(self, keys: tuple[str, ...], run_key: str, expected: object) -> None:
        """A value that must be `auto`, absent, or what the run file says."""
        value = self.file.section(*keys[:-1]).get(keys[-1], AUTO)
        if value == AUTO or (value == expected and isinstance(value, bool) == _is_bool(expected)):
            return
        shown = "null" if expected is None else _show(expected)
        self._add(
            keys,
            f"is {_show(value)}, and {run_key} is {shown}",
            f'write "auto" there, or {run_key.rpartition(".")[2]}: {_show(value)} in the run file',
            run_key,
        )

    def _names(self) -> None:
        known = {*_HANDLED, *PASSED, *ELSEWHERE}
        for key, value in self.file.data.items():
            if key in ELSEWHERE and not _is_off(value):
                self._add((key,), "is not DeepSpeed's to say here", ELSEWHERE[key])
            elif key not in known:
                self._add((key,), "is no key of DeepSpeed", _nearest(key, known))
        zero = {*ZERO, *ZERO_ELSEWHERE}
        for key, value in self.file.section("zero_optimization").items():
            at = ("zero_optimization", key)
            if key in ZERO_ELSEWHERE and not _is_off(value):
                self._add(at, "does not work here", ZERO_ELSEWHERE[key])
            elif key not in zero:
                self._add(at, "is no key of DeepSpeed", _nearest(key, zero))
            elif key in ZERO_NUMBERS and value != AUTO and not _is_number(value):
                self._add(at, f"is {_show(value)}, not a number", 'write a number, or "auto"')
            elif key in ZERO_SWITCHES and value != AUTO and not isinstance(value, bool):
                self._add(at, f"is {_show(value)}", 'write true, false or "auto"')
        for section in _SECTIONS:
            value = self.file.data.get(section)
            if value is not None and not isinstance(value, dict):
                self._add((section,), f"is {_show(value)}, not an object", "put its keys in { }")

    def _batch(self) -> None:
        training = self.training
        rows, micro = training.global_batch_size, training.micro_batch_size
        self._same(("train_batch_size",), "training.global_batch_size", rows)
        self._same(("train_micro_batch_size_per_gpu",), "training.micro_batch_size", micro)
        clip = training.max_grad_norm
        value = self.file.data.get("gradient_clipping", AUTO)
        if not (clip is None and value == 0):
            self._same(("gradient_clipping",), "training.max_grad_norm", clip)
        self._accumulation(rows, micro)
        if self.file.data.get("zero_force_ds_cpu_optimizer") is True:
            self._add(
                ("zero_force_ds_cpu_optimizer",),
                "is true, and isles uses torch's own fused optimizer on CPUs",
                "write false, or delete it",
            )

    def _accumulation(self, rows: int, micro: object) -> None:
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

    def _precision(self) -> None:
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
        for name in ("bf16_master_weights_and_grads", "fp16_master_weights_and_grads"):
            if self.file.section(name[:4]).get(name):
                self._add(
                    (name[:4], name),
                    "is true: the optimizer would lose its fp32 weights, which are what is saved",
                    "write false, or delete it",
                )

    def _optimizer(self) -> None:
        section, training = self.file.section("optimizer"), self.training
        if not section:
            return
        kind = section.get("type", AUTO)
        known = OPTIMIZERS.get(training.optimizer, ())
        if kind != AUTO and str(kind).lower() not in known:
            self._add(
                ("optimizer", "type"),
                f"is {_show(kind)}, and training.optimizer is {training.optimizer}",
                'write "auto" there, delete the section, or name another optimizer in the run file',
                "training.optimizer",
            )
            return
        params = section.get("params") or {}
        same = self._parameters()
        for key, value in params.items():
            if key in same:
                run_key, expected = same[key]
                self._same(("optimizer", "params", key), run_key, expected)
            elif key == "adam_w_mode" and value is False:
                self._add(
                    ("optimizer", "params", key),
                    "is false, and isles decouples weight decay from the gradient (AdamW)",
                    "write true, or delete it",
                )
            elif key not in ("torch_adam", "adam_w_mode", "fused", "foreach", "bias_correction"):
                self._add(("optimizer", "params", key), "is unknown", _nearest(key, set(same)))

    def _parameters(self) -> dict[str, tuple[str, object]]:
        training = self.training
        same: dict[str, tuple[str, object]] = {
            "lr": ("training.learning_rate", training.learning_rate),
            "weight_decay": ("training.weight_decay", training.weight_decay),
        }
        if training.optimizer == "sgd":
            return same | {"momentum": ("training.momentum", training.momentum)}
        betas = [training.adam_beta1, training.adam_beta2]
        return same | {
            "betas": ("training.adam_beta1", betas),
            "eps": ("training.adam_epsilon", training.adam_epsilon),
        }

    def _scheduler(self) -> None:
        section, training = self.file.section("scheduler"), self.training
        if not section:
            return
        kind = section.get("type", AUTO)
        if kind not in (AUTO, SCHEDULERS.get(training.lr_scheduler_type)):
            self._add(
                ("scheduler", "type"),
                f"is {_show(kind)}, and training.lr_scheduler_type is {training.lr_scheduler_type}",
                'write "auto" there, delete the section, or name another schedule in the run file',
                "training.lr_scheduler_type",
            )
            return
        same: dict[str, tuple[str, object]] = {
            "warmup_max_lr": ("training.learning_rate", training.learning_rate),
            "warmup_num_steps": ("training.warmup_steps", training.warmup_steps),
            "total_num_steps": ("training.max_steps", training.max_steps),
            "cos_min_ratio": ("training.min_lr_ratio", training.min_lr_ratio),
        }
        fixed: dict[str, object] = {"warmup_min_lr": 0, "warmup_type": "linear"}
        fixed["warmup_min_ratio"] = 0
        for key, value in (section.get("params") or {}).items():
            keys = ("scheduler", "params", key)
            if key in same:
                self._same(keys, *same[key])
            elif key not in fixed:
                self._add(keys, "is unknown", _nearest(key, {*same, *fixed}))
            elif value not in (AUTO, fixed[key]):
                shown = f"is {_show(value)}, and isles warms up from 0 in a straight line"
                self._add(keys, shown, f"write {_show(fixed[key])}, or delete it")

    def _zero(self, strategy: DeepSpeedStrategyConfig) -> None:
        zero = self.file.section("zero_optimization")
        for key in ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm"):
            if _is_said(strategy, key):
                self._same(("zero_optimization", key), f"strategy.{key}", getattr(strategy, key))
        if zero.get("compute_grad_norm") is False:
            at = ("zero_optimization", "compute_grad_norm")
            self._add(at, "is false, and isles records the norm of every step", "delete it")
        stage = zero.get("stage", AUTO)
        if stage == 0:
            self._add(("zero_optimization", "stage"), "is 0", "use strategy: {kind: ddp}")
        elif stage != AUTO and stage not in (1, 2, 3):
            self._add(("zero_optimization", "stage"), f"is {_show(stage)}", "write 1, 2 or 3")
        elif _is_said(strategy, "zero_stage"):
            self._same(("zero_optimization", "stage"), "strategy.zero_stage", strategy.zero_stage)
        settled = strategy.zero_stage if stage == AUTO else stage
        for key in ("offload_optimizer", "offload_param"):
            self._offload(key, strategy, zero.get(key), settled)

    def _offload(
        self, key: str, strategy: DeepSpeedStrategyConfig, section: object, stage: object
    ) -> None:
        at = ("zero_optimization", key)
        if section is None or section == AUTO:
            section = {}
        if not isinstance(section, dict):
            self._add(at, f"is {_show(section)}, not an object", 'write {"device": "cpu"}')
            return
        for name in section.keys() - OFFLOAD:
            self._add((*at, name), "is no key of DeepSpeed", _nearest(name, set(OFFLOAD)))
        device = section.get("device", AUTO)
        if device not in (AUTO, "none", "cpu", "nvme"):
            self._add((*at, "device"), f"is {_show(device)}", "write none, cpu or nvme")
        elif _is_said(strategy, key):
            self._same((*at, "device"), f"strategy.{key}", getattr(strategy, key))
        for name, usual in (("ratio", 1.0), ("super_offload", False)):
            if section.get(name, usual) not in (usual, AUTO):
                self._add((*at, name), "needs DeepSpeed's own optimizer", "delete it")
        if strategy.nvme_path is not None:
            self._same((*at, "nvme_path"), "strategy.nvme_path", strategy.nvme_path)
        settled = getattr(strategy, key) if device == AUTO else device
        needs_stage3 = settled == "nvme" or (key == "offload_param" and settled != "none")
        if needs_stage3 and stage != 3:
            self._add(
                (*at, "device"),
                f"is {settled}, which only ZeRO stage 3 can do, and the stage is {stage}",
                f"use stage 3, or {key}: none",
                f"strategy.{key}",
            )
        if settled == "nvme" and not section.get("nvme_path", strategy.nvme_path):
            self._add(at, "names no nvme_path", "add nvme_path: a folder on a fast disk")


def _nearest(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else "delete it"


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_said(strategy: DeepSpeedStrategyConfig, key: str) -> bool:
    """Whether the run file says it: a file that `isles config show` wrote names every default."""
    return bool(getattr(strategy, key) != type(strategy).model_fields[key].default)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_off(value: object) -> bool:
    return not value or value == AUTO or (isinstance(value, dict) and value.get("enabled") is False)
