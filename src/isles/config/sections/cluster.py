"""The section `clusters`: where the ranks run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from isles.config.sections.balance import BalanceConfig
from isles.config.sections.base import DurationS, Section
from isles.config.sections.environment import EnvironmentConfig, NetworkConfig, SyncConfig, Text
from isles.config.sections.launcher import (
    HostConfig,
    LauncherConfig,
    LocalLauncherConfig,
    ManualLauncherConfig,
    SshLauncherConfig,
)
from isles.config.sections.strategy import StrategyConfig


def _node_range(text: str) -> str:
    least, _, most = text.partition(":")
    if not 1 <= int(least) <= int(most) <= 1024:
        raise ValueError(f"{text} is no range of nodes: write MIN:MAX, such as 1:3")
    return text


NodeRange = Annotated[
    str,
    Field(pattern=r"^\d{1,4}:\d{1,4}$"),
    AfterValidator(_node_range),
    WithJsonSchema(
        {"type": "string", "examples": ["1:3"], "x-isles-type": "range"},
    ),
]
"""Least and most nodes, as torchrun writes them: `1:3`."""


class ClusterConfig(Section):
    """A group of ranks on fast links that take every optimizer step together."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = "local"
    """A short name, for messages."""

    launcher: LauncherConfig = LocalLauncherConfig()
    """How the processes are started."""

    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    """Ranks on each node, one per GPU. auto: every GPU that is visible. On a machine without GPUs
    these are CPU processes (auto: one)."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """What the ranks compute on. auto: cuda where there are GPUs (local, ssh), and for a queue or
    commands to type, whose nodes cannot be seen from here."""

    nodes: Annotated[int, Field(ge=1, le=1024)] | NodeRange | Literal["auto"] = "auto"
    """How many nodes: a number, or MIN:MAX. With MIN:MAX the run goes on while MIN are there, and
    grows again when one comes back. auto: every host of the list (ssh, manual), else one. The
    local launcher starts all of them on this machine."""

    strategy: StrategyConfig | None = None
    """How this cluster holds the model. null: as `strategy` says for all."""

    balance: BalanceConfig | None = None
    """Rows of each rank of this cluster. null: as `balance` says for all."""

    environment: EnvironmentConfig = EnvironmentConfig()
    """The Python of the nodes, and what is set up before it starts."""

    network: NetworkConfig = NetworkConfig()
    """How the ranks reach one another."""

    workdir: Text | None = None
    """Folder on the nodes in which the ranks run, and to which the paths of this file are
    relative. null: the same as here."""

    sync: SyncConfig | None = None
    """Files that are copied to the nodes before the start. null: none."""

    start_timeout: Annotated[DurationS, Field(ge=1)] = 120.0
    """Longest wait for all nodes to be there, once the first is; who is missing is named."""

    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """How often all ranks are started again from the last checkpoint after one was lost. An error
    that would only come again, such as a wrong run file, ends the run at once."""

    comm_timeout: Annotated[DurationS, Field(ge=1)] = 600.0
    """Longest wait for another rank in one collective operation, before the run stops with an
    error that names the rank."""

    @property
    def hosts(self) -> tuple[HostConfig, ...]:
        """The hosts that are listed, in the order of their ranks; none where a queue chooses."""
        match self.launcher:
            case SshLauncherConfig(hosts=hosts):
                return tuple(HostConfig(ssh=h) if isinstance(h, str) else h for h in hosts)
            case ManualLauncherConfig(hosts=addresses):
                return tuple(HostConfig(ssh=h, address=h) for h in addresses)
            case _:
                return ()

    @property
    def min_nodes(self) -> int:
        """As many nodes must be there for the run to go on."""
        return self._nodes[0]

    @property
    def max_nodes(self) -> int:
        """As many nodes are started, and no more can join."""
        return self._nodes[1]

    @property
    def _nodes(self) -> tuple[int, int]:
        if self.nodes == "auto":
            return (len(self.hosts) or 1,) * 2
        if isinstance(self.nodes, int):
            return self.nodes, self.nodes
        least, _, most = self.nodes.partition(":")
        return int(least), int(most)
