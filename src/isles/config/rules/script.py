"""The rules of a run of the user's own script: what it does not use is not given."""

from __future__ import annotations

from collections.abc import Iterator

from isles.config.issue import Violation
from isles.config.sections.run import RunConfig
from isles.config.sections.script import NO_DATA, NO_MODEL, USED, USED_IN_TRAINING
from isles.config.sections.watchdog import WatchdogConfig


def script_rules(config: RunConfig) -> Iterator[Violation]:
    """Every key beside training.script that the script would never see."""
    training = config.training
    if training.script is None:
        if training.script_args:
            yield Violation(
                ("training.script_args",),
                "script_args are the arguments of a script, and there is none",
                "add script: my_train.py, or delete them",
            )
        # As the shown run file gives it, it asks for nothing.
        if config.watchdog.max_silence != WatchdogConfig().max_silence:
            yield Violation(
                ("watchdog.max_silence",),
                "max_silence is for a script of your own: the built-in trainer's steps are watched "
                "by slow_factor and min_time",
                "delete it",
            )
        return
    for key in _given(config):
        yield Violation(
            (key,),
            f"{key} means nothing beside training.script: {training.script} is started as it is, "
            "and reads no run file",
            "delete it; what the script must know belongs in training.script_args",
        )


def _given(config: RunConfig) -> Iterator[str]:
    """Keys that were given and that no script sees."""
    for name in type(config).model_fields:
        if name not in config.model_fields_set or name in (*USED, "checkpoint"):
            continue
        if config.model is NO_MODEL and name == "model":
            continue
        if config.data is NO_DATA and name == "data":
            continue
        yield name
    training, checkpoint = config.training, config.checkpoint
    fields = type(training).model_fields
    given = [name for name in fields if name in training.model_fields_set]
    yield from (f"training.{name}" for name in given if name not in USED_IN_TRAINING)
    fields = type(checkpoint).model_fields
    given = [name for name in fields if name in checkpoint.model_fields_set]
    yield from (f"checkpoint.{name}" for name in given if name != "timeout")
