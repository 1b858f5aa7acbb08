"""The rules between the keys of a run file that need nothing but the file."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from isles.config.issue import Violation
from isles.config.rules.cluster import cluster_rules
from isles.config.rules.data import data_rules
from isles.config.rules.finetune import finetune_rules
from isles.config.rules.outer import outer_rules, own_strategy_rules
from isles.config.rules.script import script_rules
from isles.config.rules.strategy import nearest_multiples, strategy_rules
from isles.config.sections.model import ModelConfig
from isles.config.sections.run import RunConfig
from isles.config.sections.training import TrainingConfig
from isles.facts.models import shape_names


def check_rules(config: RunConfig) -> list[Violation]:
    """Every rule between keys that `config` breaks, as far as they need no machine to check."""
    if config.training.script is not None:
        return [*script_rules(config), *cluster_rules(config), *outer_rules(config)]
    return [
        *script_rules(config),
        *_length_rules(config.training),
        *_schedule_rules(config.training),
        *_batch_rules(config.training),
        *_model_rules(config.model),
        *data_rules(config),
        *finetune_rules(config),
        *strategy_rules(config),
        *own_strategy_rules(config),
        *cluster_rules(config),
        *outer_rules(config),
    ]


def _length_rules(training: TrainingConfig) -> Iterator[Violation]:
    steps, epochs, time = training.max_steps, training.num_train_epochs, training.max_time
    if steps is not None and epochs is not None:
        yield Violation(
            ("training.num_train_epochs", "training.max_steps"),
            f"max_steps {steps} and num_train_epochs {epochs:g} both say how long the run is",
            "keep one of them",
        )
    if steps is None and epochs is None and time is None:
        yield Violation(
            ("training", "training.max_steps", "training.num_train_epochs", "training.max_time"),
            "the run has no length",
            "add max_steps, num_train_epochs or max_time",
        )
    if steps is None and epochs is None and time and training.lr_scheduler_type != "constant":
        yield Violation(
            (
                "training.max_time",
                "training.lr_scheduler_type",
                "training.max_steps",
                "training.num_train_epochs",
            ),
            f"max_time alone gives no last step, and {training.lr_scheduler_type} needs to know it",
            "add max_steps or num_train_epochs, or use lr_scheduler_type: constant",
        )


def _schedule_rules(training: TrainingConfig) -> Iterator[Violation]:
    steps, warmup, decay = training.max_steps, training.warmup_steps, training.decay_steps
    scheduler = training.lr_scheduler_type
    if steps is not None and warmup >= steps:
        yield Violation(
            ("training.warmup_steps", "training.max_steps"),
            f"warmup_steps {warmup} leaves no step of max_steps {steps} at the peak learning rate",
            f"use {steps // 20} or another number below {steps}",
        )
    elif steps is not None and decay is not None and scheduler == "wsd" and warmup + decay > steps:
        yield Violation(
            ("training.decay_steps", "training.warmup_steps", "training.max_steps"),
            f"warmup_steps {warmup} + decay_steps {decay} is more than max_steps {steps}",
            f"use at most {steps - warmup} decay_steps",
        )
    if decay is not None and scheduler != "wsd":
        yield Violation(
            ("training.decay_steps", "training.lr_scheduler_type"),
            f"decay_steps {decay} means nothing to lr_scheduler_type {scheduler}",
            "delete it, or use lr_scheduler_type: wsd",
        )
    if training.min_lr_ratio and scheduler == "constant":
        yield Violation(
            ("training.min_lr_ratio", "training.lr_scheduler_type"),
            f"min_lr_ratio {training.min_lr_ratio:g} means nothing to a constant learning rate",
            "delete it, or use lr_scheduler_type: linear, cosine or wsd",
        )


def _batch_rules(training: TrainingConfig) -> Iterator[Violation]:
    rows, micro = training.global_batch_size, training.micro_batch_size
    keys = ("training.global_batch_size", "training.micro_batch_size")
    if not isinstance(micro, int) or rows % micro == 0:
        return
    if micro > rows:
        yield Violation(
            keys[::-1],
            f"micro_batch_size {micro} is larger than global_batch_size {rows}",
            f"use at most {rows}, or auto",
        )
    else:
        yield Violation(
            keys,
            f"global_batch_size {rows} is not a multiple of micro_batch_size {micro}",
            f"use {nearest_multiples(rows, micro)}",
        )


def _model_rules(model: ModelConfig) -> Iterator[Violation]:
    name, shapes = model.name_or_path, shape_names()
    keys = ("model.name_or_path", "model.init")
    if name in shapes and model.init == "pretrained":
        yield Violation(
            keys[::-1],
            f"{name} is a shape shipped with isles: it has no weights to start from",
            "add init: scratch below model:, or name a model that has weights",
        )
    near = difflib.get_close_matches(name, shapes, n=1, cutoff=0.8)
    if name not in shapes and near and model.init == "scratch" and not _is_path(name):
        yield Violation(
            keys,
            f"{name} is no shape shipped with isles ({', '.join(shapes)})",
            f"did you mean {near[0]}? A folder of that name is written ./{name}",
        )


def _is_path(name: str) -> bool:
    return "/" in name or "\\" in name or name.startswith((".", "~")) or name.endswith(".json")
