"""The whole run file: its sections, and the keys at the top."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from isles.config.sections.base import Section, Text
from isles.config.sections.cluster import BalanceConfig, ClusterConfig
from isles.config.sections.data import DataConfig, SourceConfig
from isles.config.sections.model import AdapterConfig, ModelConfig, TokenizerConfig
from isles.config.sections.outer import DiLoCoConfig, NoOuter, OuterConfig
from isles.config.sections.output import CheckpointConfig, TrackerConfig, TrackerName
from isles.config.sections.strategy import AutoStrategy, StrategyConfig
from isles.config.sections.training import TrainingConfig, WatchdogConfig

NO_MODEL = ModelConfig(name_or_path="llama-2m", init="scratch")
"""Stand-in for the model in the run file of a script. Nothing reads it."""

NO_DATA = DataConfig(sources=(SourceConfig(type="fake"),))
"""Stand-in for the data in the run file of a script. Nothing reads it."""

USED = ("name", "output_dir", "training", "watchdog", "clusters")
"""Keys of a run file that the run of a script uses, and the timeout of checkpoint."""

USED_IN_TRAINING = ("script", "script_args")


class RunConfig(Section):
    """One training run, from its first to its last step."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = "run"
    """Name of the run. The run directory is OUTPUT_DIR/NAME-N."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the weights, the order of the data and dropout."""

    output_dir: Text = "runs"
    """Folder of the run directories, relative to clusters.workdir or the current folder."""

    model: ModelConfig
    """The model to train."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer."""

    adapter: AdapterConfig = AdapterConfig()
    """Train small matrices next to the frozen model, instead of all weights."""

    data: DataConfig
    """The training data."""

    training: TrainingConfig
    """Length, batch size, optimizer and precision."""

    strategy: StrategyConfig = AutoStrategy()
    """How the ranks of a cluster share the model."""

    balance: BalanceConfig = "auto"
    """Share of each rank in the global batch. auto: in proportion to the measured speed of the
    rank, within its memory. even: the same for all ranks. A map sets shares by host or rank, such
    as {big-box: 3, "2": 1}. In a pipeline, the ranks of a stage get layers by these shares."""

    outer: OuterConfig = NoOuter()
    """How several clusters train one model over slow links."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save checkpoints, and how many to keep."""

    track: Annotated[tuple[TrackerName | TrackerConfig, ...], Field(strict=False)] = (
        "jsonl",
        "tensorboard",
    )
    """Trackers for the metrics: names, or sections with settings, such as [tensorboard, {kind:
    wandb, project: p}]. Every run also writes metrics.jsonl."""

    watchdog: WatchdogConfig = WatchdogConfig()
    """What isles does if a step takes far longer than usual."""

    clusters: Annotated[
        tuple[ClusterConfig, ...], Field(min_length=1, max_length=64, strict=False)
    ] = (ClusterConfig(),)
    """Where the ranks run. Default: this machine. Several clusters need `outer: {kind: diloco}`."""

    @model_validator(mode="before")
    @classmethod
    def _fill_absent(cls, data: object) -> object:
        """The data, with stand-ins for the model and the data that a script does not need."""
        if not isinstance(data, Mapping):
            return data
        training = data.get("training")
        if not isinstance(training, Mapping) or not isinstance(training.get("script"), str):
            return data
        return {"model": NO_MODEL, "data": NO_DATA, **data}

    @property
    def diloco(self) -> DiLoCoConfig | None:
        """The settings of the outer steps, or None without outer steps."""
        return self.outer if isinstance(self.outer, DiLoCoConfig) else None

    def of_cluster(self, index: int) -> RunConfig:
        """The run of one of its clusters: only that cluster, with its own strategy."""
        cluster = self.clusters[index]
        own: dict[str, Any] = {
            "clusters": (cluster.model_copy(update={"strategy": None, "balance": None}),)
        }
        if cluster.strategy is not None:
            own["strategy"] = cluster.strategy
        if cluster.balance is not None:
            own["balance"] = cluster.balance
        return self.model_copy(update=own)

    def at(self, key: str) -> Any:  # values are of every type
        """The value or section of a dotted key, or None if sections of this kind lack the key."""
        found: Any = self
        for name in key.split("."):
            found = found[int(name)] if isinstance(found, tuple) else getattr(found, name, None)
        return found

    def values(self) -> dict[str, Any]:
        """Every value that the run uses, by section: a script has neither model nor data."""
        data = self.model_dump()
        if self.training.script is None:
            return data
        used = {key: data[key] for key in USED}
        used["training"] = {key: data["training"][key] for key in USED_IN_TRAINING}
        used["clusters"] = [
            {key: cluster[key] for key in cluster if key not in ("strategy", "balance")}
            for cluster in data["clusters"]
        ]
        if "timeout" in self.checkpoint.model_fields_set:
            used["checkpoint"] = {"timeout": self.checkpoint.timeout}
        return used
