"""A run of the user's own script: what its run file leaves out, and what would mean nothing."""

from __future__ import annotations

from collections.abc import Mapping

from isles.config.sections.data import DataConfig, SourceConfig
from isles.config.sections.model import ModelConfig

NO_MODEL = ModelConfig(name_or_path="llama-2m", init="scratch")
"""Stands where a script's run file has no model; nothing reads it."""

NO_DATA = DataConfig(sources=(SourceConfig(type="fake"),))
"""Stands where a script's run file has no data; nothing reads it."""

USED = ("name", "output_dir", "training", "watchdog", "clusters")
"""The keys of a run file that a script's run uses; and of checkpoint, its timeout."""

USED_IN_TRAINING = ("script", "script_args")


def fill_absent(data: object) -> object:
    """A run file's data, with a stand-in for the model and the data that a script does not need.

    Args:
        data: what is to be validated; anything but the run file of a script is left as it is.
    """
    if not isinstance(data, Mapping):
        return data
    training = data.get("training")
    if not isinstance(training, Mapping) or not isinstance(training.get("script"), str):
        return data
    return {"model": NO_MODEL, "data": NO_DATA, **data}
