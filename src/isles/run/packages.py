"""Packages and servers that a run file needs, looked for before hours are spent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from isles.config.sections.output import MLflowConfig, tracker_sections
from isles.config.sections.run import RunConfig
from isles.config.sections.training import TrainingConfig
from isles.errors import ConfigError, MissingDependencyError
from isles.run.env import has_mlflow_server

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
_EXTRAS = {"tensorboard": "train", "wandb": "wandb", "mlflow": "mlflow"}


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Let a package that is not imported yet look as if it were not installed.

    For libraries that import all of an optional package where it is there, used or not.
    """
    modules: dict[str, Any] = sys.modules
    if package in modules:
        yield
        return
    modules[package] = None  # Python's own way to say so
    try:
        yield
    finally:
        del modules[package]


def missing_torchao(training: TrainingConfig) -> MissingDependencyError | None:
    """The error to raise where the optimizer needs torchao, and it is not installed."""
    is_eight_bit = training.optimizer == "adamw_8bit"
    if not (is_eight_bit or training.stochastic_rounding) or find_spec("torchao") is not None:
        return None
    key, value = ("optimizer", "adamw_8bit") if is_eight_bit else ("stochastic_rounding", "true")
    return MissingDependencyError(
        f"{key}: {value} needs the package torchao, which is not installed",
        where=f"training.{key}",
        fix="pip install 'isles[torchao]'",
    )


def require_packages(config: RunConfig) -> None:
    """Make sure that this machine has what the trackers and the optimizer need; imports none of it.

    Raises:
        MissingDependencyError: a package is missing; the message says how to install it.
        ConfigError: MLflow has no server.
    """
    if error := missing_torchao(config.training):
        raise error
    for tracker in tracker_sections(config.track):
        package = _PACKAGES.get(tracker.kind)
        if package is not None and find_spec(package) is None:
            extra = _EXTRAS[tracker.kind]
            raise MissingDependencyError(
                f"track names {tracker.kind}, and the package {package} is not installed",
                where=sys.executable,
                fix=f"pip install 'isles[{extra}]', or set track to a list without {tracker.kind}",
            )
        if (
            isinstance(tracker, MLflowConfig)
            and tracker.tracking_uri is None
            and not has_mlflow_server()
        ):
            raise ConfigError(
                "mlflow has no tracking_uri, and MLFLOW_TRACKING_URI is not set",
                where="track",
                fix="write track: [{kind: mlflow, tracking_uri: http://HOST:5000}], or set "
                "MLFLOW_TRACKING_URI",
                id="track.account",
            )
