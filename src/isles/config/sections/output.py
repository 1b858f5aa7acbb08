"""The sections `checkpoint` and `track`: what a run leaves."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isles.config.sections.base import DurationS, Section, Text

HubId = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*$",
        max_length=96,
        json_schema_extra={"x-isles-type": "hub-id"},
    ),
]
"""A repository of the Hugging Face hub."""


class CheckpointConfig(Section):
    """When to save, and how many to keep."""

    every_steps: Annotated[int, Field(ge=1)] | None = 200
    """Save every so many steps. null: only by time, on a stop and at the end."""

    every_minutes: Annotated[float, Field(gt=0)] | None = 20.0
    """Save when this many minutes have passed since the last save. null: never by time."""

    keep: Annotated[int, Field(ge=1)] = 3
    """Newest checkpoints that are kept; an older one goes only when a newer one is verified."""

    async_save: bool = True
    """Write in the background while training goes on."""

    export_on_finish: bool = True
    """At the end, write RUN/model: a Hugging Face folder that from_pretrained loads."""

    export_dtype: Literal["base", "float32", "bfloat16", "float16"] = "base"
    """Type of the weights in an exported model. base: the type of the files that training began
    with; a model from scratch is exported in the type that it was trained in. With an
    adapter, the key applies to a merged model only, also if `isles checkpoint export
    --merge-adapter` merges it later; the adapter alone keeps its training type."""

    merge_adapter: bool = False
    """Export a whole model with the adapter merged into it. false: the adapter alone, as peft loads
    it."""

    max_shard_gb: Annotated[float, Field(ge=1e-6, le=1000)] = 5.0
    """Largest file of weights in an export, in GB (10^9 bytes), and so the memory that it needs. A
    larger tensor has a separate file."""

    push_to_hub: HubId | None = None
    """Upload the export to this repository of the Hugging Face hub, owner/name; made private if it
    is not there. The token comes from `hf auth login` or HF_TOKEN, and is checked before the start.
    An upload that fails is not the run's failure: the export stays, and the log says how to
    repeat it."""

    remote: Text | None = None
    """Also keep verified checkpoints here, so that a new machine can resume the run:
    s3://bucket/prefix, gs://, hf://, or a folder. Needs `pip install 'isles[bucket]'` (gs: gcsfs).
    isles keeps the run in NAME-N below this address. Never write credentials here: isles takes them
    from the places where the bucket's own tools look, on the machine of rank 0."""

    timeout: DurationS = 1800.0
    """Longest wait for one checkpoint to be written, before the run stops with an error."""


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

    project: Text | None = None
    """Project. Default: $WANDB_PROJECT, or isles if it is not set."""

    entity: Text | None = None
    """User or team that owns the project. Default: wandb's own choice."""

    group: Text | None = None
    """Group of this run."""

    tags: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Tags of the run."""

    mode: Literal["online", "offline"] | None = None
    """offline: record only, to be sent by `wandb sync` later. null: $WANDB_MODE, else online where
    there is a key, and offline (the log says so) where there is none."""


class MLflowConfig(Section):
    """MLflow; needs `pip install 'isles[mlflow]'`. User and password come from
    MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or a token from MLFLOW_TRACKING_TOKEN."""

    kind: Literal["mlflow"] = "mlflow"
    """Needs a server, or Databricks."""

    tracking_uri: Text | None = None
    """Address of the server, such as http://tracker:5000. Default: $MLFLOW_TRACKING_URI."""

    experiment: Text | None = None
    """Experiment. Default: $MLFLOW_EXPERIMENT_NAME, or isles if it is not set."""


TrackerConfig = Annotated[
    JsonlConfig | TensorBoardConfig | WandbConfig | MLflowConfig, Field(discriminator="kind")
]


_BY_NAME: dict[TrackerName, type[TrackerConfig]] = {
    "jsonl": JsonlConfig,
    "tensorboard": TensorBoardConfig,
    "wandb": WandbConfig,
    "mlflow": MLflowConfig,
}


def tracker_sections(track: tuple[TrackerName | TrackerConfig, ...]) -> tuple[TrackerConfig, ...]:
    """Every entry of `track` as a section; a plain name is one with its defaults."""
    return tuple(_BY_NAME[entry]() if isinstance(entry, str) else entry for entry in track)
