"""How many ranks, and where, a rendered file is for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isles.config.files import shape_faults
from isles.config.load import Loaded
from isles.config.resolve import resolve
from isles.config.sections.cluster import LocalLauncherConfig
from isles.errors import ConfigError, ConfigErrors
from isles.launch.gpus import find_gpus
from isles.run.env import hub_cache


@dataclass(frozen=True, slots=True)
class Size:
    """The nodes of a rendered file.

    Args:
        nproc: ranks on each node.
        device: cpu or cuda.
        workdir: the folder in which the ranks run, absolute.
        notes: what was settled here and may be otherwise there.
    """

    nproc: tuple[int, ...]
    device: Literal["cuda", "cpu"]
    workdir: str
    notes: tuple[str, ...]

    @property
    def nodes(self) -> int:
        """How many."""
        return len(self.nproc)

    @property
    def world_size(self) -> int:
        """Ranks on all of them."""
        return sum(self.nproc)

    def equal(self, loaded: Loaded) -> int:
        """Ranks on each node, where a queue gives equal ones.

        Raises:
            ConfigError: they are not equal.
        """
        if len(set(self.nproc)) > 1:
            raise ConfigError(
                f"the hosts have {', '.join(map(str, self.nproc))} ranks, and the nodes of a queue "
                "have equally many",
                where=loaded.where("clusters.0.launcher.hosts"),
                fix="use --to torchrun, or a run file with nodes and gpus_per_node",
            )
        return self.nproc[0]


def settle_size(loaded: Loaded) -> Size:
    """The nodes and ranks of a run file, as far as they can be known here.

    Raises:
        ConfigErrors: a model that is not there, or rows that do not divide among the ranks.
    """
    cluster = loaded.config.clusters[0]
    notes: list[str] = []
    asked = cluster.gpus_per_node
    device: Literal["cuda", "cpu"] = "cpu" if cluster.device == "cpu" else "cuda"
    is_here = isinstance(cluster.launcher, LocalLauncherConfig)
    num_gpus = 0
    if asked == "auto" or (is_here and cluster.device == "auto"):
        num_gpus = len(find_gpus().gpus)
        if cluster.device == "auto" and not num_gpus:
            device = "cpu"
    if asked == "auto":
        ranks = max(1, num_gpus) if device == "cuda" else 1
        notes.append(f"gpus_per_node is auto, and this machine has {num_gpus} GPUs: {ranks} ranks")
    else:
        ranks = asked
    nproc = tuple(host.gpus or ranks for host in cluster.hosts) or (ranks,) * cluster.max_nodes
    faults = list(shape_faults(loaded, hub_cache()))
    try:
        resolve(loaded, nproc=nproc, device=device)
    except ConfigError as error:
        faults.append(error)
    if faults:
        raise ConfigErrors(faults)
    return Size(nproc, device, cluster.workdir or str(Path.cwd()), tuple(notes))
