"""An MLflow tracking server."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

from isles.config.sections.output import MLflowConfig
from isles.track.base import RunFacts
from isles.track.sent import Sent

_DEFAULT_EXPERIMENT = "isles"
_KEY_TAG = "isles.run"
_MAX_METRICS = 1000
_MAX_PARAMS = 100
_MAX_VALUE_CHARS = 500
_NOT_IN_NAMES = re.compile(r"[^\w\-./ ]")


class MLflowTracker:
    """One run at an MLflow server, which goes on under the same id after a restart.

    Args:
        config: address and experiment.
        run: what is shown besides the curves.
        sent: this tracker's record.

    `load_mlflow` must be called before.
    """

    def __init__(self, config: MLflowConfig, run: RunFacts, sent: Sent) -> None:
        from mlflow import MlflowClient

        self._sent = sent
        self._client: Any = MlflowClient(tracking_uri=config.tracking_uri)
        self._id = sent.get("run_id") or self._find_or_create(config, run)
        sent.keep(run_id=self._id)
        # The server's word, not ours: a kill may come between its answer and our record.
        sent.known_to(
            train=self._last_step("train/learning_rate"), eval=self._last_step("eval/loss")
        )
        self._client.update_run(self._id, status="RUNNING")
        self._describe(run)

    def log(self, rows: Sequence[dict[str, Any]]) -> None:
        """Send rows, as many in one request as a server takes."""
        from mlflow.entities import Metric

        metrics: list[Metric] = []
        batch: list[dict[str, Any]] = []
        for row in rows:
            if self._sent.has(row):
                continue
            figures = [
                Metric(f"{row['kind']}/{name}", float(value), int(row["at"] * 1000), row["step"])
                for name, value in row.items()
                if name not in ("kind", "step", "at") and isinstance(value, int | float)
            ]
            if len(metrics) + len(figures) > _MAX_METRICS:
                self._send(metrics, batch)
                metrics, batch = [], []
            metrics += figures
            batch.append(row)
        self._send(metrics, batch)

    def close(self, summary: dict[str, Any] | None) -> None:
        """Send the final figures, and say how the run stands."""
        from mlflow.entities import Metric

        if summary is None:
            self._client.update_run(self._id, status="SCHEDULED")  # it goes on some time
            return
        now, step = int(time.time() * 1000), int(summary.get("steps") or 0)
        figures = [
            Metric(f"final/{name}", float(value), now, step)
            for name, value in summary.items()
            if isinstance(value, int | float)
        ]
        self._client.log_batch(self._id, metrics=figures)
        self._client.set_terminated(self._id, status="FINISHED")

    def _last_step(self, metric: str) -> int:
        """The last step of a metric that every row of its kind has; -1: none."""
        history = self._client.get_metric_history(self._id, metric)
        return max((point.step for point in history), default=-1)

    def _send(self, metrics: list[Any], rows: list[dict[str, Any]]) -> None:
        if rows:
            self._client.log_batch(self._id, metrics=metrics)
            self._sent.add(*rows)

    def _find_or_create(self, config: MLflowConfig, run: RunFacts) -> str:
        """The server's id of this run.

        A key of ours is on record before the run is made, and found again by it: a start that is
        killed in between, or an answer that is lost, must not fork the curve.
        """
        key = self._sent.get("key")
        if key is None:
            key = secrets.token_hex(8)
            self._sent.keep(key=key)
        experiment = self._experiment(config)
        found = self._client.search_runs([experiment], f"tags.`{_KEY_TAG}` = '{key}'")
        if found:
            return str(found[0].info.run_id)
        created = self._client.create_run(experiment, run_name=run.name, tags={_KEY_TAG: key})
        return str(created.info.run_id)

    def _experiment(self, config: MLflowConfig) -> str:
        from mlflow import environment_variables

        of_environment: Any = environment_variables.MLFLOW_EXPERIMENT_NAME
        name = config.experiment or of_environment.get() or _DEFAULT_EXPERIMENT
        known = self._client.get_experiment_by_name(name)
        return str(known.experiment_id if known else self._client.create_experiment(name))

    def _describe(self, run: RunFacts) -> None:
        """The run file as parameters. MLflow keeps a parameter's first value for good; one that a
        restart has changed is shown as a tag beside it."""
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
    """Import MLflow; with short waits instead of minutes, since `Background` tries again."""
    # MLflow has no other place for these; a user's own values win.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow.tracking  # noqa: F401  # here, since a thread that imports may meet another


def _name(key: str) -> str:
    return _NOT_IN_NAMES.sub("_", key)[:250]


def _text(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."
