"""Packages and servers that a run file needs, looked for before hours are spent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from isles.config.sections.output import MLflowConfig, tracker_sections
from isles.config.sections.run import RunConfig
from isles.config.sections.training import missing_torchao
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
