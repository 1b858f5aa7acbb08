"""The key `track`: where curves go."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isles.config.sections.base import Section

Name = Annotated[str, Field(min_length=1)]
TrackerName = Literal["jsonl", "tensorboard", "wandb", "mlflow"]


class JsonlConfig(Section):
    """RUN/metrics.jsonl, which every run writes."""

    kind: Literal["jsonl"] = "jsonl"
    """Its rows are what `isles status` and loss.png are made from."""


class TensorBoardConfig(Section):
    """Event files in RUN/logs/runs."""

    kind: Literal["tensorboard"] = "tensorboard"
    """Shown by `tensorboard --logdir RUN/logs/runs`."""


class WandbConfig(Section):
    """Weights & Biases; needs `pip install 'isles[wandb]'`. The key comes from `wandb login` or
    WANDB_API_KEY."""

    kind: Literal["wandb"] = "wandb"
    """Its own files lie in RUN/wandb."""

    project: Name | None = None
    """Project. null: $WANDB_PROJECT, else isles."""

    entity: Name | None = None
    """User or team that the project belongs to. null: wandb's own default."""

    group: Name | None = None
    """Group that this run is shown in."""

    tags: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    """Tags of the run."""

    mode: Literal["online", "offline"] | None = None
    """offline: record only, to be sent by `wandb sync` later. null: $WANDB_MODE, else online where
    there is a key, and offline (the log says so) where there is none."""


class MLflowConfig(Section):
    """MLflow; needs `pip install 'isles[mlflow]'`. User and password come from
    MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or a token from MLFLOW_TRACKING_TOKEN."""

    kind: Literal["mlflow"] = "mlflow"
    """Needs a server, or Databricks."""

    tracking_uri: Name | None = None
    """Address of the server, such as http://tracker:5000. null: $MLFLOW_TRACKING_URI."""

    experiment: Name | None = None
    """Experiment. null: $MLFLOW_EXPERIMENT_NAME, else isles."""


TrackerConfig = Annotated[
    JsonlConfig | TensorBoardConfig | WandbConfig | MLflowConfig, Field(discriminator="kind")
]


def tracker_sections(track: tuple[TrackerName | TrackerConfig, ...]) -> tuple[TrackerConfig, ...]:
    """Every entry of `track` as a section; a plain name is one with its defaults."""
    return tuple(_section(entry) if isinstance(entry, str) else entry for entry in track)


def _section(name: TrackerName) -> TrackerConfig:
    match name:
        case "jsonl":
            return JsonlConfig()
        case "tensorboard":
            return TensorBoardConfig()
        case "wandb":
            return WandbConfig()
        case "mlflow":
            return MLflowConfig()
