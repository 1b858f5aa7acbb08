"""What is checked: a cluster, and what a run on it needs of its machines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isles.config.files import find_shape
from isles.config.load import Loaded
from isles.config.sections.cluster import ClusterConfig
from isles.config.sections.run import RunConfig
from isles.facts.memory import copy_bytes, frozen_bytes, optimizer_bytes, weight_bytes
from isles.facts.models import llama_parameters
from isles.launch.hub import hub_repos
from isles.run.env import hub_cache


@dataclass(frozen=True, slots=True)
class Subject:
    """What is checked.

    Args:
        cluster: the machines.
        workdir: folder in which the ranks run.
        loaded: the run file; None: the machines alone are checked.
        num_params: of the model, where its shape is known here.
    """

    cluster: ClusterConfig
    workdir: str
    loaded: Loaded | None = None
    num_params: int | None = None

    @classmethod
    def of(cls, loaded: Loaded) -> Subject:
        """A run file's."""
        cluster = loaded.config.clusters[0]
        subject = cls(cluster, cluster.workdir or str(Path.cwd()), loaded)
        return replace(subject, num_params=_num_params(loaded.config))

    @property
    def config(self) -> RunConfig | None:
        """The run, if there is one."""
        return self.loaded.config if self.loaded is not None else None

    @property
    def output_dir(self) -> str:
        """Where run directories are made, as the run file has it."""
        return self.config.output_dir if self.config is not None else "."

    @property
    def has_script(self) -> bool:
        """Whether the ranks run a script of the user's: model and data are its own affair."""
        return self.config is not None and getattr(self.config.training, "script", None) is not None

    def record(self) -> dict[str, Any] | None:
        """The run file as nodes take it."""
        if self.loaded is None:
            return None
        return {
            "config": self.loaded.config.model_dump(mode="json"),
            "origins": self.loaded.origins,
            "text": self.loaded.text,
            "path": str(self.loaded.path),
        }

    def checkpoint_bytes(self) -> int | None:
        """What the run keeps on disk at most: its checkpoints with one more on the way, and the
        exported model. None: unknown."""
        config = self.config
        if config is None or self.num_params is None or self.has_script:
            return None
        params, precision = self.num_params, config.training.precision
        trained = params if config.adapter.type == "none" else params // 50
        weights = weight_bytes(trained, precision)
        one = weights + optimizer_bytes(trained, weights, config.training.optimizer)
        export = weights if config.checkpoint.export_on_finish else 0
        return one * (config.checkpoint.keep + 1) + export

    def rank_bytes(self) -> int | None:
        """Memory of a rank that holds the whole model: weights, gradients, optimizer. None:
        unknown, or cut over the ranks."""
        config = self.config
        if config is None or self.num_params is None or self.has_script:
            return None
        if config.strategy.kind not in ("auto", "ddp") or config.adapter.type != "none":
            return None
        params, precision = self.num_params, config.training.precision
        weights = weight_bytes(params, precision)
        state = optimizer_bytes(params, weights, config.training.optimizer)
        return 2 * weights + state + copy_bytes(params, precision)

    def load_bytes(self) -> int | None:
        """What the model's weights take while they are read. None: unknown."""
        config = self.config
        if config is None or self.num_params is None or self.has_script:
            return None
        return frozen_bytes(self.num_params, config.training.precision)

    def gradient_bytes(self) -> int | None:
        """What a rank sends in a step, once around. None: unknown."""
        config = self.config
        if config is None or self.num_params is None or self.has_script:
            return None
        trained = self.num_params if config.adapter.type == "none" else self.num_params // 50
        return weight_bytes(trained, config.training.precision)

    def hub_repos(self) -> list[tuple[str, str]]:
        """What the run file names and may have to come from the Hugging Face hub: kind and id."""
        config = self.config
        if config is None or self.has_script:
            return []
        return list(hub_repos(config))


def _num_params(config: RunConfig) -> int | None:
    """Parameters, of a model built as a Llama is. An estimate for disks and links, no more."""
    if getattr(config, "model", None) is None:
        return None
    shape = find_shape(config.model, hub_cache())
    if shape is None:
        return None
    try:
        heads = shape["num_attention_heads"]
        return llama_parameters(
            {"num_key_value_heads": heads, "tie_word_embeddings": False, **shape}
        )
    except (KeyError, TypeError, ZeroDivisionError):
        return None
