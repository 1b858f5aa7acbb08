"""The rules of `training`, `track` and `checkpoint`, and the rules of a user's script."""

from __future__ import annotations

from collections.abc import Iterator

from isles.config.issues import Issue, nearest_multiples
from isles.config.rules.idle import idle_keys
from isles.config.sections.output import MLflowConfig, tracker_sections
from isles.config.sections.run import NO_DATA, NO_MODEL, USED, USED_IN_TRAINING, RunConfig
from isles.config.sections.strategy import MeshSection
from isles.config.sections.training import TrainingConfig, warmup_in_steps
from isles.facts.gpus import lacking


def training_rules(config: RunConfig) -> Iterator[Issue]:
    """Every broken rule of the built-in trainer."""
    yield from idle_keys(config, "training")
    yield from _length(config.training)
    yield from schedule_rules(config.training, config.training.max_steps)
    yield from _batch(config.training)
    yield from _optimizer(config)
    yield from _compile(config.training)
    yield from _fp8(config)
    yield from _dpo(config)
    yield from _trackers(config)
    checkpoint = config.checkpoint
    if checkpoint.push_to_hub is not None and not checkpoint.export_on_finish:
        yield Issue(
            ("checkpoint.push_to_hub", "checkpoint.export_on_finish"),
            "push_to_hub uploads the export, and export_on_finish is false",
            "delete one of the two lines",
        )
    if checkpoint.remote is not None:
        yield from _remote(checkpoint.remote)


def _remote(place: str) -> Iterator[Issue]:
    # The error does not repeat a value that may hold a secret.
    protocol, is_url, rest = place.partition("://")
    if is_url and "@" in rest.partition("/")[0]:
        yield Issue(
            ("checkpoint.remote",),
            f"the {protocol} URL contains a user, a key or a password, and isles shows and copies "
            "run files",
            f"write {protocol}://{rest.partition('/')[0].rpartition('@')[2]}/…. isles finds "
            "credentials like the bucket's own tools (AWS_PROFILE, ~/.aws/credentials …)",
        )
    elif any(mark in place for mark in ("?", "#", "::")):
        yield Issue(
            ("checkpoint.remote",),
            "isles does not support options after ? or #, or chained URLs",
            "write only the URL of the folder, such as s3://bucket/prefix",
        )
    elif not is_url and not place.startswith(("/", "~/")):
        yield Issue(
            ("checkpoint.remote",),
            f"{place} is neither a URL nor an absolute path",
            "write s3://bucket/prefix, or a folder that begins with / or ~/",
        )


def _length(training: TrainingConfig) -> Iterator[Issue]:
    steps, epochs = training.max_steps, training.num_train_epochs
    if steps is not None and epochs is not None:
        yield Issue(
            ("training.num_train_epochs", "training.max_steps"),
            f"max_steps {steps} and num_train_epochs {epochs:g} both set the length of the run",
            "keep one of them",
        )
    if steps is not None or epochs is not None:
        return
    keys = ("training.max_steps", "training.num_train_epochs")
    if training.max_time is None:
        yield Issue(
            ("training", *keys, "training.max_time"),
            "the run has no length",
            "add max_steps, num_train_epochs or max_time",
        )
    elif (scheduler := training.lr_scheduler_type) != "constant":
        yield Issue(
            ("training.max_time", "training.lr_scheduler_type", *keys),
            f"max_time alone gives no last step, and {scheduler} needs the last step",
            "add max_steps or num_train_epochs, or use lr_scheduler_type: constant",
        )
    elif isinstance(share := training.warmup_steps, float):
        yield Issue(
            ("training.warmup_steps", "training.max_time", *keys),
            f"warmup_steps {share:g} is a share of the run, and max_time alone gives no last step",
            "give warmup_steps as a number of steps, or add max_steps or num_train_epochs",
        )


def schedule_rules(training: TrainingConfig, steps: int | None) -> Iterator[Issue]:
    """A warm-up or decay that is longer than a run of this many steps. None is unknown."""
    if steps is None:
        return
    warmup, decay = warmup_in_steps(training, steps), training.decay_steps
    keys = ("training.max_steps", "training.num_train_epochs")
    length, longer = f"max_steps {steps}", ""
    if training.max_steps is None:
        length = f"the {steps} step{'s' * (steps > 1)} of num_train_epochs "
        length += f"{training.num_train_epochs:g}"
        longer = ", or more steps: a smaller global_batch_size, or more num_train_epochs"
    if warmup >= steps and isinstance(training.warmup_steps, int):
        yield Issue(
            ("training.warmup_steps", *keys),
            f"warmup_steps {warmup} leaves no step of {length} at the peak learning rate",
            f"use {steps // 20} or another number below {steps}{longer}",
        )
    elif decay is not None and training.lr_scheduler_type == "wsd" and warmup + decay > steps:
        yield Issue(
            ("training.decay_steps", "training.warmup_steps", *keys),
            f"warmup_steps {warmup} + decay_steps {decay} is more than {length}",
            f"use at most {steps - warmup} decay_steps{longer}",
        )


def _batch(training: TrainingConfig) -> Iterator[Issue]:
    rows, micro = training.global_batch_size, training.micro_batch_size
    keys = ("training.global_batch_size", "training.micro_batch_size")
    if not isinstance(micro, int) or rows % micro == 0:
        return
    yield Issue(
        keys,
        f"global_batch_size {rows} is not a multiple of micro_batch_size {micro}",
        f"use {nearest_multiples(rows, micro)}, or micro_batch_size: auto",
    )


def _optimizer(config: RunConfig) -> Iterator[Issue]:
    training = config.training
    if training.stochastic_rounding and training.precision != "bf16-true":
        yield Issue(
            ("training.stochastic_rounding", "training.precision"),
            f"stochastic_rounding is for bf16 weights, and precision {training.precision} keeps "
            "fp32 weights",
            "delete it, or use precision: bf16-true",
        )
    if training.stochastic_rounding and training.optimizer not in ("adamw", "adamw_8bit"):
        yield Issue(
            ("training.stochastic_rounding", "training.optimizer"),
            f"optimizer {training.optimizer} does not round stochastically",
            "delete it, or use optimizer: adamw or adamw_8bit",
        )
    if training.optimizer == "adamw_8bit" and config.strategy.kind == "deepspeed":
        yield Issue(
            ("training.optimizer", "strategy.kind"),
            "adamw_8bit encodes matrices by row, and deepspeed shards them into flat pieces",
            "use strategy: {kind: fsdp}, or optimizer: adamw with strategy.offload_optimizer: cpu",
        )


def _compile(training: TrainingConfig) -> Iterator[Issue]:
    if training.torch_compile is True and training.gradient_checkpointing == "offload":
        yield Issue(
            ("training.torch_compile", "training.gradient_checkpointing"),
            "torch_compile does not work with gradient_checkpointing offload",
            "set torch_compile: auto, or gradient_checkpointing: full",
        )


def _fp8(config: RunConfig) -> Iterator[Issue]:
    training, adapter = config.training, config.adapter
    if training.precision != "fp8-mixed":
        return
    values = {
        "adapter.type": (adapter.type, "none"),
        "training.method": (training.method, "causal_lm"),
    }
    for key, (value, tried) in values.items():
        if value == tried:
            continue
        yield Issue(
            (key, "training.precision"),
            f"fp8-mixed was never tried with {key} {value}",
            "use precision: bf16-mixed",
        )
    for index, cluster in enumerate(config.clusters):
        if cluster.device == "cpu" and (lack := lacking(training.precision, None)) is not None:
            what = f"precision {training.precision} {lack.what.format('CPUs')}"
            yield Issue(("training.precision", f"clusters.{index}.device"), what, lack.fix)
    if training.torch_compile is False:
        yield Issue(
            ("training.torch_compile", "training.precision"),
            "fp8-mixed without torch_compile is slower than bf16-mixed: each step of a cast to fp8 "
            "is then a kernel",
            "set torch_compile: auto, or precision: bf16-mixed",
        )
    if training.gradient_checkpointing == "offload":
        yield Issue(
            ("training.gradient_checkpointing", "training.precision"),
            "fp8-mixed needs torch_compile, which does not work with gradient_checkpointing "
            "offload",
            "use gradient_checkpointing: full, or precision: bf16-mixed",
        )


def _dpo(config: RunConfig) -> Iterator[Issue]:
    training, strategy = config.training, config.strategy
    if training.method != "dpo":
        return
    grid = strategy if isinstance(strategy, MeshSection) else MeshSection()
    for key, what in (("pp_size", "stages"), ("cp_size", "pieces of a sequence")):
        if (size := getattr(grid, key)) > 1:
            yield Issue(
                (f"strategy.{key}", "training.method"),
                f"dpo needs the score of a whole answer on one rank, and {key} {size} distributes "
                f"{what} over ranks",
                f"set {key}: 1. To save memory, use fsdp, deepspeed or tp_size",
            )
    if config.data.streaming:
        yield Issue(
            ("data.streaming", "training.method"),
            "dpo scores every pair before training, and streaming reads pairs only during training",
            "delete streaming: true",
        )


def _trackers(config: RunConfig) -> Iterator[Issue]:
    seen: set[str] = set()
    for index, tracker in enumerate(tracker_sections(config.track)):
        at = f"track.{index}"
        if tracker.kind in seen:
            yield Issue(
                (f"{at}.kind", at, "track"), f"{tracker.kind} is listed twice", "keep one of them"
            )
        seen.add(tracker.kind)
        if not isinstance(tracker, MLflowConfig) or tracker.tracking_uri is None:
            continue
        uri = tracker.tracking_uri
        scheme, separator, rest = uri.partition("://")
        if not separator and uri != "databricks":
            yield Issue(
                (f"{at}.tracking_uri",),
                f"tracking_uri {uri} has no scheme, so MLflow would use it as a folder",
                f"write http://{uri}, or file:///... for a folder",
            )
        elif "@" in rest.partition("/")[0] and not scheme.startswith("databricks"):
            host = rest.rpartition("@")[2]
            yield Issue(
                (f"{at}.tracking_uri",),
                f"tracking_uri {scheme}://...@{host} contains a user name or a password, and "
                "isles copies the run file into run directories, trackers and model descriptions",
                f"write {scheme}://{host}, and set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD in the environment",
            )


def script_rules(config: RunConfig) -> Iterator[Issue]:
    """Keys that a script ignores, and keys for a script in a run without one."""
    training = config.training
    if training.script is not None:
        for key in _unused_by_script(config):
            yield Issue(
                (key,),
                f"{key} has no effect with training.script: {training.script} does not read the "
                "run file",
                "delete it, and pass values to the script with training.script_args",
            )
        return
    if training.script_args:
        yield Issue(
            ("training.script_args",),
            "script_args needs training.script, which is not set",
            "add script: my_train.py, or delete script_args",
        )
    if not config.watchdog.is_default("max_silence"):
        yield Issue(
            ("watchdog.max_silence",),
            "max_silence is only for training.script. For the built-in trainer, use slow_factor "
            "and min_time",
            "delete it",
        )


def _unused_by_script(config: RunConfig) -> Iterator[str]:
    # Given keys that a script ignores, in the order of the sections.
    stand_ins = {"model": NO_MODEL, "data": NO_DATA}
    for name in type(config).model_fields:
        value = getattr(config, name)
        is_used = name in (*USED, "checkpoint") or value is stand_ins.get(name)
        if name in config.model_fields_set and not is_used:
            yield name
    for section, used in (("training", USED_IN_TRAINING), ("checkpoint", ("timeout",))):
        value = getattr(config, section)
        for name in type(value).model_fields:
            if name in value.model_fields_set and name not in used:
                yield f"{section}.{name}"
