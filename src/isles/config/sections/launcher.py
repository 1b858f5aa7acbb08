"""The section `launcher` of a cluster: how its processes are started."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isles.config.sections.base import DurationS, Section
from isles.config.sections.environment import Text

Count = Annotated[int, Field(ge=1, le=100_000)]
Login = Annotated[
    str, Field(pattern=r"^[^\s-][^\s]*$", json_schema_extra={"x-isles-type": "login"})
]
"""A destination as ssh takes it: host, user@host, or a name of ~/.ssh/config."""


class LocalLauncherConfig(Section):
    """Ranks on this machine."""

    kind: Literal["local"] = "local"
    """This machine."""


class HostConfig(Section):
    """One host of an ssh launcher, or one node that a person starts by hand."""

    ssh: Login
    """How ssh reaches it from here: host, user@host, or a name of ~/.ssh/config."""

    address: Text | None = None
    """The address at which the other hosts reach it. null: found out."""

    gpus: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Ranks on this host. null: gpus_per_node."""


class SshLauncherConfig(Section):
    """Ranks on a list of hosts, started from here by the user's own ssh."""

    kind: Literal["ssh"] = "ssh"
    """Hosts that ssh reaches."""

    hosts: Annotated[tuple[Login | HostConfig, ...], Field(strict=False, min_length=1)]
    """The hosts; the order is the order of the ranks. The first keeps the run directory, and its
    processes lead the run."""

    connect_timeout: Annotated[DurationS, Field(ge=1)] = 10.0
    """Longest wait for a host to answer ssh."""


class ManualLauncherConfig(Section):
    """Prints one command for each node, for a person to type there."""

    kind: Literal["manual"] = "manual"
    """Commands to type."""

    hosts: Annotated[tuple[Text, ...], Field(strict=False, min_length=1)]
    """Address of every node; the order is the order of the ranks. The others must reach the
    first."""


class QueueSection(Section):
    """What Slurm and PBS have in common."""

    login: Login | None = None
    """Login node, as ssh takes it. null: this machine submits."""

    time: Annotated[DurationS, Field(ge=60)] | None = None
    """Time limit of the job. null: the cluster's default."""

    requeue: bool = True
    """Before the time limit, or when preempted: save, and queue again until the run is finished."""

    save_before: Annotated[DurationS, Field(ge=10)] = 300.0
    """How long before the time limit the run is told to save."""

    account: Text | None = None
    """Account, or project, that the job is charged to."""

    cpus_per_node: Count | None = None
    """CPU cores on each node. null: the cluster's default."""

    memory_per_node: Text | None = None
    """Memory on each node, as the scheduler writes it: 200G. null: the cluster's default."""

    bin_path: Text | None = None
    """Folder of the scheduler's commands, where they are not on PATH."""

    check: bool = False
    """Look at the job's nodes and the links between them before the ranks start, as its step 0, as
    `isles check` does. What is not fit ends the job, with exit code 2."""

    extra: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Further options of the job, one line each, such as --mail-type=END."""


class SlurmLauncherConfig(QueueSection):
    """A job of Slurm: one task a node, torchrun inside."""

    kind: Literal["slurm"] = "slurm"
    """Slurm."""

    partition: Text | None = None
    """Partition. null: the cluster's default."""

    qos: Text | None = None
    """Quality of service."""

    constraint: Text | None = None
    """Features that the nodes must have."""

    gres: Text | None = None
    """Generic resources of each node, such as gpu:a100:4. null: gpu:GPUS_PER_NODE; none: no
    GPUs are asked for."""

    nodelist: Text | None = None
    """Nodes that the job must have."""

    exclude: Text | None = None
    """Nodes that the job must not have."""

    reservation: Text | None = None
    """A reservation that the job may use."""


class PbsLauncherConfig(QueueSection):
    """A job of OpenPBS or Torque: one task a node, torchrun inside."""

    kind: Literal["pbs"] = "pbs"
    """PBS."""

    dialect: Literal["auto", "openpbs", "torque"] = "auto"
    """openpbs: -l select=; torque: -l nodes=:ppn=. auto: what qstat --version says."""

    queue: Text | None = None
    """Queue. null: the cluster's default."""

    resources: Text | None = None
    """The whole resource request after -l, where the one that isles writes does not fit. It must
    ask for as many nodes as `nodes`."""


LauncherConfig = Annotated[
    LocalLauncherConfig
    | SshLauncherConfig
    | SlurmLauncherConfig
    | PbsLauncherConfig
    | ManualLauncherConfig,
    Field(discriminator="kind"),
]
