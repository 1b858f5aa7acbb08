"""The sections `checkpoint` and `track`: the results of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isles.config.sections.base import DurationS, Section, Text

HuggingFaceId = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*$",
        max_length=96,
        json_schema_extra={"x-isles-type": "huggingface-id"},
    ),
]
"""A repository at Hugging Face."""


_AUTO_SAVE_S = 600.0


class CheckpointConfig(Section):
    """When to save checkpoints, and how many to keep."""

    every_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps between two checkpoints. Default: isles saves by time. isles also saves on a stop and
    at the end of the run. If the disk is still busy with the checkpoint before, isles saves a few
    steps later."""

    every_minutes: Annotated[float, Field(gt=0)] | Literal["auto"] | None = "auto"
    """Minutes between two checkpoints. auto: 10 minutes, or longer if saving would stop training
    for more than 2 % of the time. If every_steps is set, auto saves by steps only. null disables
    saving by time."""

    keep: Annotated[int, Field(ge=1)] = 3
    """Number of checkpoints to keep. isles verifies a new checkpoint before it deletes an old
    checkpoint."""

    async_save: bool = True
    """Write checkpoints in the background while training continues. false: training waits for each
    checkpoint."""

    export_on_finish: bool = True
    """At the end of the run, write a Hugging Face folder to RUN/model."""

    export_dtype: Literal["base", "float32", "bfloat16", "float16"] = "base"
    """Type of the weights in an exported model. base: the type of the initial model files, or of
    the training for a model from scratch. An unmerged adapter keeps its training type."""

    merge_adapter: bool = False
    """Export a whole model with the adapter merged into it. false: export only the adapter, in
    peft's format."""

    max_shard_gb: Annotated[float, Field(ge=1e-6, le=1000)] = 5.0
    """Largest weight file of an export in GB (10^9 bytes). It also limits the memory for the
    export."""

    push_to_hub: HuggingFaceId | None = None
    """Upload the export to this Hugging Face repository. isles creates a missing repository as
    private. The token comes from `hf auth login` or HF_TOKEN. A failed upload does not fail the
    run."""

    remote: Text | None = None
    """Checkpoint bucket: also keep verified checkpoints in NAME-N below this address, such as
    s3://bucket/prefix, gs://, hf:// or a folder. Needs `pip install 'isles[bucket]'` (gs: gcsfs).
    Never write credentials here, see docs/checkpoints.md."""

    timeout: DurationS = 1800.0
    """Longest time without progress while isles writes a checkpoint. Then the run stops with an
    error. With training.script: time from SIGTERM to a kill of the script, 60s if not set."""

    @property
    def save_every_s(self) -> float | None:
        """Seconds between two checkpoints by time. None: isles does not save by time."""
        if self.every_minutes == "auto":
            return _AUTO_SAVE_S if self.every_steps is None else None
        return None if self.every_minutes is None else 60 * self.every_minutes


TrackerName = Literal["jsonl", "tensorboard", "wandb", "mlflow"]


class JsonlConfig(Section):
    """RUN/metrics.jsonl, which every run writes."""

    kind: Literal["jsonl"] = "jsonl"
    """`isles status` and loss.png use its rows."""


class TensorBoardConfig(Section):
    """Event files for `tensorboard --logdir RUN/logs/runs`."""

    kind: Literal["tensorboard"] = "tensorboard"
    """isles writes them in RUN/logs/runs."""


class WandbConfig(Section):
    """Weights & Biases, with files in RUN/wandb; needs `pip install 'isles[wandb]'`. Login: `wandb
    login` or WANDB_API_KEY."""

    kind: Literal["wandb"] = "wandb"
    """wandb needs an account, or mode: offline."""

    project: Text | None = None
    """Project. Default: $WANDB_PROJECT, else isles."""

    entity: Text | None = None
    """User or team. Default: wandb's own choice."""

    group: Text | None = None
    """Group of this run."""

    tags: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Tags of the run."""

    mode: Literal["online", "offline"] | None = None
    """offline only records; `wandb sync` uploads later. Default: $WANDB_MODE, else online with a
    key, else offline."""


class MLflowConfig(Section):
    """MLflow, on a server or Databricks; needs `pip install 'isles[mlflow]'`. Login:
    MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN."""

    kind: Literal["mlflow"] = "mlflow"
    """Needs a server, or Databricks."""

    tracking_uri: Text | None = None
    """Server, such as http://tracker:5000. Default: $MLFLOW_TRACKING_URI."""

    experiment: Text | None = None
    """Experiment. Default: $MLFLOW_EXPERIMENT_NAME, else isles."""


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
    """Every entry of `track` as a section. A name becomes a section with default values."""
    return tuple(_BY_NAME[entry]() if isinstance(entry, str) else entry for entry in track)
