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
"""Stands where a script's run file has no model; nothing reads it."""

NO_DATA = DataConfig(sources=(SourceConfig(type="fake"),))
"""Stands where a script's run file has no data; nothing reads it."""

USED = ("name", "output_dir", "training", "watchdog", "clusters")
"""The keys of a run file that a script's run uses; and of checkpoint, its timeout."""

USED_IN_TRAINING = ("script", "script_args")


class RunConfig(Section):
    """One training run, from its first to its last step."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = "run"
    """Short name; the run directory is OUTPUT_DIR/NAME-N."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the weights, the order of the data and dropout."""

    output_dir: Text = "runs"
    """Folder of the run directories; relative to where isles is called."""

    model: ModelConfig
    """Which model."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """Which tokenizer."""

    adapter: AdapterConfig = AdapterConfig()
    """Train a few matrices beside a frozen model instead of all weights."""

    data: DataConfig
    """What the model reads."""

    training: TrainingConfig
    """How long, how large, how fast, how precise."""

    strategy: StrategyConfig = AutoStrategy()
    """How a cluster holds the model."""

    balance: BalanceConfig = "auto"
    """Rows of each rank in a step. auto: as many as its measured speed and memory allow, so that
    unequal GPUs need equal time; even; or shares by host or rank, such as {big-box: 3, "2": 1}."""

    outer: OuterConfig = NoOuter()
    """How several clusters train one model over slow links."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save, and how many to keep."""

    track: Annotated[tuple[TrackerName | TrackerConfig, ...], Field(strict=False)] = (
        "jsonl",
        "tensorboard",
    )
    """Where curves go besides metrics.jsonl, which every run writes: names, or sections with
    settings, such as [tensorboard, {kind: wandb, project: p}, {kind: mlflow, experiment: e}]."""

    watchdog: WatchdogConfig = WatchdogConfig()
    """What happens when a step takes far longer than usual."""

    clusters: Annotated[
        tuple[ClusterConfig, ...], Field(min_length=1, max_length=64, strict=False)
    ] = (ClusterConfig(),)
    """Where the ranks run. Left out: this machine. Several need `outer: {kind: diloco}`."""

    @model_validator(mode="before")
    @classmethod
    def _fill_absent(cls, data: object) -> object:
        """The data, with a stand-in for the model and the data that a script does not need."""
        if not isinstance(data, Mapping):
            return data
        training = data.get("training")
        if not isinstance(training, Mapping) or not isinstance(training.get("script"), str):
            return data
        return {"model": NO_MODEL, "data": NO_DATA, **data}

    @property
    def diloco(self) -> DiLoCoConfig | None:
        """The outer steps; None where there are none."""
        return self.outer if isinstance(self.outer, DiLoCoConfig) else None

    def of_cluster(self, index: int) -> RunConfig:
        """The run as one of its clusters has it: that cluster alone, with its own strategy."""
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
        """The value or section of a dotted key; None where sections of this kind lack it."""
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
