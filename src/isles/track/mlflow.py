"""Tracker for an MLflow server."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from typing import Any

from isles.config.sections.output import MLflowConfig
from isles.run.records import read_record
from isles.track.base import Row, RunFacts, keep_id, numbers

_DEFAULT_EXPERIMENT = "isles"
_MAX_METRICS = 1000
_MAX_PARAMS = 100
_MAX_VALUE_CHARS = 500
_NOT_IN_NAMES = re.compile(r"[^\w\-./ ]")


class MLflowTracker:
    """One run on an MLflow server. A restarted run continues under the same id.

    Call `load_mlflow` first.

    Args:
        run: facts about the run, shown next to the curves.
    """

    def __init__(self, config: MLflowConfig, run: RunFacts) -> None:
        from mlflow import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=config.tracking_uri)
        self._id: str | None = (read_record(run.record) or {}).get("run_id")
        if self._id is None:
            created = self._client.create_run(self._experiment(config), run_name=run.name)
            self._id = str(created.info.run_id)
            keep_id(run, run_id=self._id)
        self._client.update_run(self._id, status="RUNNING")
        self._describe(run)

    def log(self, rows: Sequence[Row]) -> None:
        """Send rows, with as many rows per request as the server accepts."""
        from mlflow.entities import Metric

        metrics = [
            Metric(f"{row['kind']}/{name}", float(value), int(row["at"] * 1000), row["step"])
            for row in rows
            for name, value in numbers(row)
        ]
        for first in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MAX_METRICS])

    def close(self, summary: dict[str, Any] | None) -> None:
        """Send the final figures and the run's status."""
        from mlflow.entities import Metric

        if summary is None:
            self._client.update_run(self._id, status="SCHEDULED")  # the run will be resumed
            return
        now, step = int(time.time() * 1000), int(summary.get("steps") or 0)
        figures = [
            Metric(f"final/{name}", float(value), now, step)
            for name, value in summary.items()
            if isinstance(value, int | float)
        ]
        self._client.log_batch(self._id, metrics=figures)
        self._client.set_terminated(self._id, status="FINISHED")

    def _experiment(self, config: MLflowConfig) -> str:
        from mlflow import environment_variables

        of_environment: Any = environment_variables.MLFLOW_EXPERIMENT_NAME
        name = config.experiment or of_environment.get() or _DEFAULT_EXPERIMENT
        known = self._client.get_experiment_by_name(name)
        return str(known.experiment_id if known else self._client.create_experiment(name))

    def _describe(self, run: RunFacts) -> None:
        # The run file as parameters. MLflow never changes a parameter's first value, so a value
        # that a restart has changed is shown as a tag next to it.
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self._id).data.params
        wanted = {_name(key): _text(value) for key, value in run.config.items()}
        new = [Param(key, value) for key, value in wanted.items() if key not in known]
        for first in range(0, len(new), _MAX_PARAMS):
            self._client.log_batch(self._id, params=new[first : first + _MAX_PARAMS])
        tags = [
            RunTag(f"now.{key}", value)
            for key, value in wanted.items()
            if key in known and known[key] != value
        ]
        tags += [RunTag(f"isles.{_name(key)}", _text(value)) for key, value in run.about.items()]
        for first in range(0, len(tags), _MAX_PARAMS):
            self._client.log_batch(self._id, tags=tags[first : first + _MAX_PARAMS])


def load_mlflow() -> None:
    """Import MLflow with short timeouts instead of minutes; later rows try again."""
    # MLflow reads these only from the environment; the user's own values win.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow.tracking  # noqa: F401  # not in the thread: two threads that import can deadlock


def _name(key: str) -> str:
    return _NOT_IN_NAMES.sub("_", key)[:250]


def _text(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."
