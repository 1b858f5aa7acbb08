"""`config.yaml`, as the guide writes it, turned into a run file of isles."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune_fsdp import read_fsdp_file

from isles.config.files import deepspeed_issues
from isles.config.interop.deepspeed import DeepSpeedFile, read_deepspeed_file
from isles.config.load import load_run_file
from isles.config.yaml import KeyPath, dotted, dump_yaml, parse_yaml, read_text
from isles.errors import ConfigError, ConfigErrors
from isles.launch.gpus import find_gpus

_DISTRIBUTED = {
    "use_deepspeed": bool,
    "deepspeed_config": str,
    "use_fsdp": bool,
    "fsdp_config": str,
    "gradient_accumulation_steps": int,
}
_PRECISIONS = {"no": "32-true", "fp16": "fp16-mixed", "bf16": "bf16-mixed"}
_CHECKPOINTING = {True: "full", False: "none"}
_TRACKERS = ("tensorboard", "wandb", "mlflow")
_MAKE_DEEPSPEED = "python scripts/distributed_setup.py deepspeed --zero_stage 2 --bf16 --output"
_MAKE_FSDP = "python scripts/distributed_setup.py fsdp --sharding_strategy FULL_SHARD --output"


@dataclass(slots=True)
class Mapped:
    """A run file, and where each of its keys was given.

    Args:
        data: what the run file says.
        origins: key of the run file, dotted -> where it was given instead.
        said: lines for the user.
    """

    data: dict[str, Any]
    origins: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The run file."""
        return dump_yaml(self.data)


def map_config(path: Path, deepspeed: Path | None, world_size: int | None) -> Mapped:
    """The run file that a config.yaml stands for.

    Keys of isles' own run files pass; those of the guide are translated.

    Args:
        path: the config.yaml.
        deepspeed: `--deepspeed`: a DeepSpeed JSON that wins over the one in the file.
        world_size: ranks, with which gradient accumulation counts; None: those that isles will
            start.

    Raises:
        ConfigErrors: every issue, at the line of the config.yaml where it stands.
    """
    mapping = _Mapping(path, deepspeed, world_size)
    mapping.map()
    mapped = mapping.mapped
    try:
        if issues := deepspeed_issues(load_run_file(path, text=mapped.text)):
            raise ConfigErrors(issues)
    except ConfigErrors as error:
        raise ConfigErrors([mapping.at_home(issue) for issue in error.issues]) from None
    return mapped


class _Mapping:
    """One config.yaml on its way."""

    def __init__(self, path: Path, deepspeed: Path | None, world_size: int | None) -> None:
        document = parse_yaml(read_text(path), str(path))
        self.path = path
        self.lines = document.lines
        self.data: dict[str, Any] = deepcopy(document.value)
        self.flag = deepspeed
        self.world_size = world_size
        self.issues: list[ConfigError] = []
        self.mapped = Mapped(self.data)
        self.distributed = self._section("distributed")
        self.data.pop("distributed", None)
        self.training = self._section("training")
        self.data["training"] = self.training

    def map(self) -> None:
        """Translate what is the guide's, or raise every issue."""
        self._check_distributed()
        if not self.issues:
            self._precision()
            self._checkpointing()
            self._report_to()
            deepspeed = self._deepspeed()
            self._fsdp(deepspeed is not None)
            self._batch(deepspeed)
        if self.issues:
            raise ConfigErrors(self.issues)

    def at_home(self, issue: ConfigError) -> ConfigError:
        """An issue that isles has found in the run file, where the user has written it."""
        _, is_key, key = issue.where.rpartition(" ")
        where = self.mapped.origins.get(key) or (self.where(*_path(key)) if is_key else "")
        return ConfigError(issue.what, where=where or issue.where, fix=issue.fix)

    def where(self, *keys: str | int) -> str:
        """File, line and key; the line of the section where the key itself is not there."""
        for length in range(len(keys), 0, -1):
            if line := self.lines.get(keys[:length]):
                return f"{self.path}:{line} {dotted(keys)}"
        return f"{self.path}:1 {dotted(keys)}"

    def _issue(self, keys: KeyPath, what: str, fix: str) -> None:
        self.issues.append(ConfigError(what, where=self.where(*keys), fix=fix))

    def _section(self, name: str) -> dict[str, Any]:
        value = self.data.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self._issue((name,), f"{name} is {value}, not a section", "put its keys below it")
            return {}
        return value

    def _check_distributed(self) -> None:
        for key, value in self.distributed.items():
            at = ("distributed", key)
            kind = _DISTRIBUTED.get(key)
            least = 1 if kind is int else 0
            if kind is None:
                near = difflib.get_close_matches(key, _DISTRIBUTED, n=1)
                fix = f"did you mean {near[0]}?" if near else f"use {', '.join(_DISTRIBUTED)}"
                self._issue(at, f"distributed has no key {key}", fix)
            elif (
                type(value) is not kind or value == "" or (isinstance(value, int) and value < least)
            ):
                words = {bool: "true or false", str: "the path of a file", int: "a number from 1"}
                self._issue(at, f"{key} is {value!r}", f"write {words[kind]}")
        if self.distributed.get("use_deepspeed") and self.distributed.get("use_fsdp"):
            self._issue(
                ("distributed", "use_fsdp"),
                "use_fsdp and use_deepspeed are both true, and a model is cut in one way only",
                "make one of them false",
            )
        for key in ("use_deepspeed", "use_fsdp"):
            if self.distributed.get(key) and "strategy" in self.data:
                self._issue(
                    ("strategy",), f"strategy says what {key} says too", "delete one of them"
                )

    def _set(self, run_key: str, value: object, origin: str) -> None:
        """Write a value of `training` into the run file, unless the config.yaml says otherwise."""
        key = run_key.removeprefix("training.")
        own = self.training.get(key, value)
        if own != value:
            self.issues.append(
                ConfigError(
                    f"{run_key} is {own}, and {origin} makes it {value}",
                    where=self.where("training", key),
                    fix="delete one of them, or let them agree",
                )
            )
            return
        if key not in self.training:
            self.training[key] = value
            self.mapped.origins[run_key] = origin

    def _precision(self) -> None:
        if "mixed_precision" not in self.training:
            return
        value = self.training.pop("mixed_precision")
        at = ("training", "mixed_precision")
        if not isinstance(value, str) or value not in _PRECISIONS:
            self._issue(at, f"mixed_precision is {value!r}", 'write "no", "fp16" or "bf16"')
            return
        self._set("training.precision", _PRECISIONS[value], self.where(*at))

    def _checkpointing(self) -> None:
        value = self.training.get("gradient_checkpointing")
        if isinstance(value, bool):
            self.training["gradient_checkpointing"] = _CHECKPOINTING[value]

    def _report_to(self) -> None:
        for section, at in (
            (self.data, ("report_to",)),
            (self.training, ("training", "report_to")),
        ):
            if "report_to" not in section:
                continue
            value = section.pop("report_to")
            names = [value] if isinstance(value, str) else value
            known = {"none": ["jsonl"], "all": ["jsonl", *_TRACKERS]}
            if not isinstance(names, list) or not names or not isinstance(names[0], str):
                names = [repr(value)]
            if len(names) == 1 and names[0] in known:
                track = known[names[0]]
            elif all(name in _TRACKERS for name in names):
                track = ["jsonl", *names]
            else:
                fix = f"write one or more of {', '.join(_TRACKERS)}, or none, or all"
                self._issue(at, f"report_to is {value!r}", fix)
                continue
            if self.data.setdefault("track", track) != track:
                self._issue(("track",), "track and report_to say different things", "keep track")
            self.mapped.origins.setdefault("track", self.where(*at))

    def _deepspeed(self) -> DeepSpeedFile | None:
        """The DeepSpeed JSON that the ranks use; None: they do without DeepSpeed."""
        named = self.distributed.get("deepspeed_config")
        use = self.distributed.get("use_deepspeed")
        if self.flag is not None and use is False:
            self._issue(
                ("distributed", "use_deepspeed"),
                f"use_deepspeed is false, and the command line says --deepspeed {self.flag}",
                "make it true, or leave --deepspeed out (--use_deepspeed of the scripts' maker)",
            )
        elif self.flag is not None and self.distributed.get("use_fsdp"):
            self._issue(
                ("distributed", "use_fsdp"),
                f"use_fsdp is true, and the command line says --deepspeed {self.flag}",
                "make it false, or leave --deepspeed out (--use_deepspeed of the scripts' maker)",
            )
        if self.issues or not (use or self.flag):
            if named and not use:
                self._log(f"{self.where('distributed', 'deepspeed_config')} is not used")
            return None
        if self.flag is not None and named is not None and Path(named) != self.flag:
            self._log(f"--deepspeed {self.flag} is used, not deepspeed_config {named}")
        path = self.flag or (Path(named) if named else None)
        if path is None:
            self._issue(
                ("distributed", "use_deepspeed"),
                "use_deepspeed is true, and no deepspeed_config is named",
                f"name one; to write it: {_MAKE_DEEPSPEED} config/ds_config.json",
            )
            return None
        if not path.exists():
            at = "deepspeed_config" if named else "use_deepspeed"
            what = f"there is no DeepSpeed file {path.absolute()}"
            self._issue(("distributed", at), what, f"write it: {_MAKE_DEEPSPEED} {path}")
            return None
        self.data["strategy"] = {"kind": "deepspeed", "config_file": str(path)}
        self.mapped.origins |= dict.fromkeys(("strategy", "strategy.config_file"), f"{path}")
        file = read_deepspeed_file(path)
        self._take_from(file)
        return file

    def _take_from(self, file: DeepSpeedFile) -> None:
        """What only the JSON says is said to the trainer as well; it refuses contradictions."""
        clip = file.data.get("gradient_clipping")
        if isinstance(clip, int | float) and "max_grad_norm" not in self.training:
            self.training["max_grad_norm"] = float(clip) or None
            self.mapped.origins["training.max_grad_norm"] = file.where("gradient_clipping")
        for name in ("bf16", "fp16"):
            if file.section(name).get("enabled") is True and "precision" not in self.training:
                self.training["precision"] = f"{name}-mixed"
                self.mapped.origins["training.precision"] = file.where(f"{name}.enabled")

    def _fsdp(self, has_deepspeed: bool) -> None:
        named = self.distributed.get("fsdp_config")
        if not self.distributed.get("use_fsdp"):
            if named:
                self._log(f"{self.where('distributed', 'fsdp_config')} is not used")
            return
        assert not has_deepspeed, "refused before"
        self.data["strategy"] = {"kind": "fsdp"}
        if named is None:
            return
        path = Path(named)
        if not path.exists():
            what = f"there is no FSDP file {path.absolute()}"
            self._issue(("distributed", "fsdp_config"), what, f"write it: {_MAKE_FSDP} {path}")
            return
        found = read_fsdp_file(path)
        self.mapped.said += [f"{path}: {line}" for line in found.lines()]
        self.data["strategy"] |= found.strategy
        self.mapped.origins["strategy"] = str(path)
        self.mapped.origins |= {f"strategy.{key}": str(path) for key in found.strategy}
        for key, value in found.training.items():
            self._set(f"training.{key}", value, str(path))

    def _batch(self, file: DeepSpeedFile | None) -> None:
        """Rows of a step: micro-batch x accumulation x ranks, as the guide counts."""
        steps, micro = self.distributed.get("gradient_accumulation_steps"), None
        origin = self.where("distributed", "gradient_accumulation_steps")
        if file is not None:
            theirs = file.data.get("gradient_accumulation_steps")
            micro = file.data.get("train_micro_batch_size_per_gpu")
            if isinstance(theirs, int) and steps is not None and steps != theirs:
                self._issue(
                    ("distributed", "gradient_accumulation_steps"),
                    f"it is {steps}, and {file.where('gradient_accumulation_steps')} is {theirs}",
                    'let them agree, or write "auto" in the JSON',
                )
                return
            if isinstance(theirs, int) and steps is None:
                steps, origin = theirs, file.where("gradient_accumulation_steps")
        if isinstance(micro, int):
            assert file is not None
            self._set(
                "training.micro_batch_size", micro, file.where("train_micro_batch_size_per_gpu")
            )
        if steps is None or self.issues:
            return
        if "micro_batch_size" not in self.training:
            self._set("training.micro_batch_size", 1, origin)
            self._log("training.micro_batch_size is not given: 1 row on each rank at a time")
        size = self.training["micro_batch_size"]
        if not isinstance(size, int):
            self._issue(
                ("training", "micro_batch_size"),
                f"micro_batch_size is {size}, and gradient_accumulation_steps {steps} needs to "
                "know how many rows it repeats",
                "write a number, or global_batch_size instead of gradient_accumulation_steps",
            )
            return
        self._set("training.global_batch_size", size * steps * self._copies(), origin)

    def _copies(self) -> int:
        """Ranks that read rows of their own; the others share them (tensor parallel, …)."""
        strategy = self.data.get("strategy")
        sizes = strategy if isinstance(strategy, Mapping) else {}
        ranks = self.world_size or self._planned()
        for key in ("tp_size", "cp_size", "pp_size"):
            size = sizes.get(key, 1)
            ranks //= size if isinstance(size, int) and size > 0 else 1
        return max(1, ranks)

    def _planned(self) -> int:
        """Ranks that isles will start; with issues in the file any number, as they are told."""
        try:
            cluster = load_run_file(self.path, text=self.mapped.text).config.clusters[0]
        except ConfigErrors:
            return 1
        each = cluster.gpus_per_node
        if each == "auto" and cluster.launcher.kind == "local":
            return len(find_gpus().gpus) or 1
        counts = [host.gpus or each for host in cluster.hosts] or [each] * cluster.max_nodes
        if "auto" in counts:
            self._issue(
                ("clusters", 0, "gpus_per_node"),
                "gpus_per_node is auto, and gradient_accumulation_steps needs the number of ranks",
                "write a number, or global_batch_size instead of gradient_accumulation_steps",
            )
            return 1
        return sum(int(count) for count in counts)

    def _log(self, line: str) -> None:
        self.mapped.said.append(line)


def _path(key: str) -> Sequence[str | int]:
    return [int(part) if part.isdigit() else part for part in key.split(".")]
