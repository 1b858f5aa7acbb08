"""What is checked: a cluster and its run, how much of it, and what one node is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from isles.config.files import find_shape
from isles.config.load import Loaded
from isles.config.sections.cluster import ClusterConfig
from isles.config.sections.run import RunConfig
from isles.facts.memory import frozen_bytes, optimizer_bytes, weight_bytes
from isles.facts.models import llama_parameters
from isles.launch.huggingface import huggingface_repos
from isles.run.env import hub_cache

Say = Callable[[str], object]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is checked.

    Args:
        net: the links between hosts, and the all-reduce.
        smoke: train a small model on each machine.
        timeout_s: longest wait for one answer.
        contact_s: longest wait for the first.
        compare_here: whether isles must be the same as on this machine.
    """

    net: bool = True
    smoke: bool = False
    timeout_s: float = 60.0
    contact_s: float = 40.0
    compare_here: bool = True


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What one node is told; JSON takes all of it.

    Args:
        name: of the node, for findings.
        is_first: whether it keeps the run directory.
        num_hosts, world_size: of the whole check.
        nproc: ranks of this node that take part.
        device: what they compute on.
        workdir: folder in which the ranks run.
        output_dir: where run directories are made.
        launcher: its kind.
        is_copied: whether `isles train` copies the working folder to it.
        run: config, origins, text and path of the run file; None: the machine alone is checked.
        repos: what may have to come from the hub: kind and id.
        num_params: of the model; 0: unknown. The bytes are 0 with it.
        load_bytes: of the weights while they are read.
        checkpoint_bytes: that the run keeps on disk.
    """

    name: str
    is_first: bool = True
    num_hosts: int = 1
    world_size: int = 1
    nproc: int = 1
    device: Device = "cpu"
    workdir: str = "."
    output_dir: str = "."
    launcher: str = "local"
    is_copied: bool = False
    run: dict[str, Any] | None = None
    repos: tuple[tuple[str, str], ...] = ()
    num_params: int = 0
    load_bytes: int = 0
    checkpoint_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A cluster, and what is known of the run on it.

    Args:
        cluster: the machines.
        workdir: folder in which the ranks run.
        loaded: the run file; None: the machines alone are checked.
        num_params: of the model; 0 where its shape is not known here, or the ranks run a script
            of the user's.
    """

    cluster: ClusterConfig
    workdir: str
    loaded: Loaded | None = None
    num_params: int = 0

    @classmethod
    def of(cls, loaded: Loaded) -> RunFacts:
        """A run file's."""
        cluster = loaded.config.clusters[0]
        workdir = cluster.workdir or str(Path.cwd())
        return cls(cluster, workdir, loaded, _num_params(loaded.config))

    @property
    def config(self) -> RunConfig | None:
        """The run, if there is one."""
        return self.loaded.config if self.loaded is not None else None

    @property
    def output_dir(self) -> str:
        """Where run directories are made, as the run file has it."""
        return self.config.output_dir if self.config is not None else "."

    def plan(self, name: str, nproc: Mapping[str, int], device: Device) -> NodePlan:
        """What one node is told.

        Args:
            name: of the node.
            nproc: ranks of every host, the first host first.
            device: what they compute on.
        """
        config, loaded = self.config, self.loaded
        run: dict[str, Any] | None = None
        if config is not None and loaded is not None:
            run = {"config": config.model_dump(mode="json"), "origins": loaded.origins}
            run |= {"text": loaded.text, "path": str(loaded.path)}
        return NodePlan(
            name=name,
            is_first=name == next(iter(nproc)),
            num_hosts=len(nproc),
            world_size=sum(nproc.values()),
            nproc=nproc[name],
            device=device,
            workdir=self.workdir,
            output_dir=self.output_dir,
            launcher=self.cluster.launcher.kind,
            is_copied=self.cluster.sync is not None,
            run=run,
            repos=self.repos(),
            num_params=self.num_params,
            load_bytes=frozen_bytes(self.num_params, config.training.precision) if config else 0,
            checkpoint_bytes=self.checkpoint_bytes(),
        )

    def repos(self) -> tuple[tuple[str, str], ...]:
        """What the run file names and may have to come from the Hugging Face hub."""
        if self.config is None or self.config.training.script is not None:
            return ()
        return tuple(huggingface_repos(self.config))

    def checkpoint_bytes(self) -> int:
        """What the run keeps on disk at most: its checkpoints with one more on the way, and the
        exported model."""
        config = self.config
        if config is None:
            return 0
        weights = self.gradient_bytes()
        one = weights + optimizer_bytes(self._num_trained, weights, config.training.optimizer)
        export = weights if config.checkpoint.export_on_finish else 0
        return one * (config.checkpoint.keep + 1) + export

    def gradient_bytes(self) -> int:
        """What a rank sends in a step, once around."""
        config = self.config
        return weight_bytes(self._num_trained, config.training.precision) if config else 0

    @property
    def _num_trained(self) -> int:
        is_whole = self.config is None or self.config.adapter.type == "none"
        return self.num_params if is_whole else self.num_params // 50


def _num_params(config: RunConfig) -> int:
    """Parameters, of a model built as a Llama is. An estimate for disks and links, no more."""
    if config.training.script is not None:
        return 0
    shape = find_shape(config.model, hub_cache())
    if shape is None:
        return 0
    try:
        heads = shape["num_attention_heads"]
        return llama_parameters(
            {"num_key_value_heads": heads, "tie_word_embeddings": False, **shape}
        )
    except (KeyError, TypeError, ZeroDivisionError):
        return 0
