"""Packages and servers that a run file needs in addition to the training packages."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from isles.config.sections.output import MLflowConfig, tracker_sections
from isles.config.sections.run import RunConfig
from isles.errors import ConfigError, MissingDependencyError
from isles.run.env import has_mlflow_server

_EXTRAS = {"tensorboard": "train", "wandb": "wandb", "mlflow": "mlflow"}
"""Optional dependencies of isles for trackers. Each has the name of the tracker's package."""


def require_packages(config: RunConfig) -> None:
    """Refuse a run whose trackers lack a package or a server; imports none of them.

    Raises:
        MissingDependencyError: a package is missing. The fix shows how to install it.
        ConfigError: MLflow has no server.
    """
    for tracker in tracker_sections(config.track):
        extra = _EXTRAS.get(tracker.kind)
        if extra is not None and find_spec(tracker.kind) is None:
            raise MissingDependencyError(
                f"track has {tracker.kind}, and the package {tracker.kind} is not installed",
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
