"""The sections `environment` and `network` of a cluster: what its nodes run in and talk over."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isles.config.sections.base import Section

Text = Annotated[
    str,
    Field(min_length=1, pattern=r"^[^\n\r\x00]*$", json_schema_extra={"x-isles-type": "one-line"}),
]
"""One line of text."""


class EnvironmentConfig(Section):
    """The Python of a cluster's nodes, and what must be set up before it starts. At most one of
    venv and conda."""

    python: Text | None = None
    """Python on the nodes. null: that of venv or conda; without them the same path as here."""

    venv: Text | None = None
    """Folder of a virtual environment on every node."""

    conda: Text | None = None
    """Name or folder of a conda environment on every node."""

    modules: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Environment modules to load, in this order, such as [gcc/12, cuda/12.8]."""

    setup: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Lines of bash that come before everything else."""

    variables: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = Field(
        default={}
    )
    """Environment variables of the ranks. They are written into scripts and records: no secrets."""

    packages: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """What `isles setup` installs beside isles itself, as pip takes it."""


class NetworkConfig(Section):
    """How the ranks of a cluster reach one another."""

    profile: Literal["auto", "infiniband", "roce", "ethernet"] = "auto"
    """Settings of NCCL for this kind of network. auto: NCCL's own choice."""

    interface: Text | None = None
    """Network interface of the ranks, such as eth0. null: the one that has the node's address."""

    port: Annotated[int, Field(ge=1024, le=65_435)] = 29500
    """First port that is tried on the first node; the next 99 follow."""


class SyncConfig(Section):
    """Copies files from here to every node before the start, by rsync over ssh."""

    paths: Annotated[tuple[Text, ...], Field(strict=False, min_length=1)]
    """Files and folders of this machine, copied into workdir under their own names; [.] copies
    what is in the current folder."""

    exclude: Annotated[tuple[Text, ...], Field(strict=False)] = (
        ".git",
        "__pycache__",
        ".venv",
        "runs",
    )
    """Patterns of rsync that are not copied."""
