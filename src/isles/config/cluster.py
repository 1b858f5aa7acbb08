"""The section `clusters`: where the ranks run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from isles.config.section import DurationS, Section


class LocalLauncherConfig(Section):
    """Ranks on this machine, under torch's elastic agent."""

    kind: Literal["local"] = "local"
    """This machine."""


LauncherConfig = LocalLauncherConfig
"""With a second kind this becomes a union with `kind` as its discriminator."""


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

    nodes: Annotated[int, Field(ge=1, le=1024)] | NodeRange = 1
    """How many nodes: a number, or MIN:MAX. With MIN:MAX the run goes on while MIN are there, and
    grows again when one comes back. The local launcher starts MAX of them on this machine."""

    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """How often all ranks are started again from the last checkpoint after one was lost. An error
    that would only come again, such as a wrong run file, ends the run at once."""

    comm_timeout: Annotated[DurationS, Field(ge=1)] = 600.0
    """Longest wait for another rank in one collective operation, before the run stops with an
    error that names the rank."""

    @property
    def min_nodes(self) -> int:
        """As many nodes must be there for the run to go on."""
        return self.nodes if isinstance(self.nodes, int) else int(self.nodes.partition(":")[0])

    @property
    def max_nodes(self) -> int:
        """As many nodes are started, and no more can join."""
        return self.nodes if isinstance(self.nodes, int) else int(self.nodes.partition(":")[2])
