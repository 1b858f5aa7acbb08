"""The section `clusters`: where the ranks run, how they are started, and what their nodes have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from isles.config.sections.base import NO_CONTROL, DurationS, Section, Text, own_type
from isles.config.sections.kubernetes import KubernetesLauncherConfig
from isles.config.sections.strategy import StrategyConfig

Share = Annotated[float, Field(ge=0, le=10**6)]

BalanceConfig = Literal["auto", "even"] | Annotated[dict[str, Share], Field(min_length=1)]
"""auto, even, or the share of each host (divided over its ranks) or rank number; a host or rank
that is not named has share 1."""


Count = Annotated[int, Field(ge=1, le=100_000)]
Login = Annotated[
    str,
    Field(
        pattern=rf"^[^\s{NO_CONTROL}-][^\s{NO_CONTROL}]*$",
        json_schema_extra={"x-isles-type": "login"},
    ),
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


class SkypilotLauncherConfig(Section):
    """Nodes that SkyPilot finds and starts, by the user's own command sky: an agent on each."""

    kind: Literal["skypilot"] = "skypilot"
    """SkyPilot."""

    accelerators: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Cards that will do, as SkyPilot names them and without a count: [H100, A100-80GB]. It takes
    the cheapest that it gets, gpus_per_node of it on each node."""

    resources: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies defaults)
    """Further `resources` of the task, as SkyPilot writes them: infra, use_spot, cpus, memory,
    image_id, disk_size …"""

    file_mounts: dict[Text, Any] = {}  # noqa: RUF012
    """Files and buckets on the nodes, as SkyPilot writes them, such as
    {~/runs: {source: 's3://BUCKET', mode: MOUNT}}."""

    workdir: Text | None = None
    """Folder of this machine that SkyPilot copies to ~/sky_workdir of each node, without what
    .skyignore, or else .gitignore, names. null: none."""

    setup: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Lines of bash that SkyPilot runs once on each node. Empty: isles makes ~/.isles/venv there
    and installs itself, unless environment names the Python."""

    secrets: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Variables of this machine that the nodes get as secrets of SkyPilot, such as HF_TOKEN. Their
    values stand in no file and on no command line."""

    cluster: Annotated[str, Field(pattern=r"^[A-Za-z]([-_.A-Za-z0-9]*[A-Za-z0-9])?$")] | None = None
    """Name of SkyPilot's cluster, by which ssh reaches its first node; one that is there is used
    again. null: isles-NAME."""

    managed: bool = False
    """A managed job: SkyPilot starts it again, elsewhere if it must, when its nodes are taken away
    or it ends with exit code 85. sky jobs shows it; isles status does not."""

    autostop: Annotated[DurationS, Field(ge=60)] | None = None
    """SkyPilot stops the nodes after so long without a job. null: they stay until sky stop or sky
    down."""

    launch_timeout: Annotated[DurationS, Field(ge=1)] = 3600.0
    """Longest wait for SkyPilot to have found the nodes, set them up and begun the run."""


class LoginSection(Section):
    """What the launchers that submit a job have in common."""

    login: Login | None = None
    """Login node, as ssh takes it. null: this machine submits."""


class QueueSection(LoginSection):
    """What Slurm and PBS have in common."""

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
    """A job of Slurm: an agent on each node."""

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
    """A job of OpenPBS or Torque: an agent on each node."""

    kind: Literal["pbs"] = "pbs"
    """PBS."""

    dialect: Literal["auto", "openpbs", "torque"] = "auto"
    """openpbs: -l select=; torque: -l nodes=:ppn=. auto: what qstat --version says."""

    queue: Text | None = None
    """Queue. null: the cluster's default."""

    resources: Text | None = None
    """The whole resource request after -l, where the one that isles writes does not fit. It must
    ask for as many nodes as `nodes`."""


class RayBundleConfig(Section):
    """What Ray must give for one node of a run."""

    gpus: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Ranks on this node. null: gpus_per_node."""

    resources: dict[Text, Annotated[float, Field(gt=0)]] = Field(default={})
    """What the node must have free beside a GPU and a CPU for each rank, by Ray's names: {CPU: 16,
    memory: 64000000000, big_disk: 1}."""

    label_selector: dict[Text, Text] = Field(default={})
    """Labels that the node must have, as Ray takes them: {ray.io/accelerator-type: H100}."""


class RayLauncherConfig(LoginSection):
    """A job of a Ray cluster: one bundle of a placement group, and an agent in it, on each node."""

    kind: Literal["ray"] = "ray"
    """Ray."""

    address: Text = "auto"
    """Where the cluster takes jobs: http://HEAD:8265, ray://HEAD:10001, or auto, the cluster that
    this machine is a node of. RAY_ADDRESS wins over it, as everywhere in Ray."""

    bundles: Annotated[tuple[RayBundleConfig, ...], Field(strict=False)] = ()
    """What the nodes must have: one entry for all of them, or one for each, in the order of the
    ranks. Empty: a GPU and a CPU for each rank; without GPUs a CPU."""


LauncherConfig = Annotated[
    LocalLauncherConfig
    | KubernetesLauncherConfig
    | SshLauncherConfig
    | SlurmLauncherConfig
    | PbsLauncherConfig
    | ManualLauncherConfig
    | RayLauncherConfig
    | SkypilotLauncherConfig,
    Field(discriminator="kind"),
]


Lines = Annotated[
    str,
    Field(pattern=rf"^(?:\n|[^{NO_CONTROL}])*$", json_schema_extra={"x-isles-type": "text"}),
]
"""The value of a variable, which may have several lines and be empty."""

Runtime = Literal["apptainer", "podman", "pyxis"]
"""What runs a container."""


class ContainerConfig(Section):
    """The image in which the agents and ranks of a cluster run."""

    image: Text
    """A file or folder that the nodes see (image.sif, image.sqsh, ./folder), or a name in a
    registry, such as ghcr.io/me/train:1.2, with or without docker://."""

    runtime: Runtime | Literal["auto"] = "auto"
    """What runs it. auto: apptainer for a file; for a name in a registry pyxis in Slurm where srun
    knows it, else apptainer in jobs, and podman elsewhere."""

    python: Text = "python3"
    """Python in the image."""

    binds: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Further files and folders of the nodes that are seen inside: PATH, FROM:TO or FROM:TO:ro.
    The run directory, workdir, what the run file names and the caches are seen without being
    listed."""

    extra: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Further options, one word each, of apptainer exec, podman run or srun."""


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

    variables: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], Lines] = Field(
        default={}
    )
    """Environment variables of the ranks, as they are typed: 010 stays 010. They are written into
    scripts and records: no secrets."""

    packages: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """What `isles setup` installs beside isles itself, as pip takes it."""

    container: Text | ContainerConfig | None = None
    """The image in which agents and ranks run; its python has isles and torch. Then the Python of
    the nodes themselves needs isles alone. null: none."""

    @property
    def own_container(self) -> ContainerConfig | None:
        """The container as a section, also where the run file names its image alone."""
        if isinstance(self.container, str):
            return ContainerConfig(image=self.container)
        return self.container


Interface = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9._:@-]{1,64}$", json_schema_extra={"x-isles-type": "interface"})
]
"""A network interface. Scripts quote it with double quotes."""


class NetworkConfig(Section):
    """How the ranks of a cluster reach one another."""

    profile: Literal["auto", "infiniband", "roce", "ethernet"] = "auto"
    """Settings of NCCL for this kind of network. auto: NCCL's own choice."""

    interface: Interface | None = None
    """Network interface of the ranks, such as eth0. Default: the interface with the node's
    address."""

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


def _node_range(text: str) -> str:
    least, _, most = text.partition(":")
    if not 1 <= int(least) <= int(most) <= 1024:
        raise ValueError(f"{text} is no range of nodes: write MIN:MAX, such as 1:3")
    return text


NodeRange = Annotated[
    str,
    Field(pattern=r"^\d{1,4}:\d{1,4}$"),
    AfterValidator(_node_range),
    own_type("range", "1:3"),
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
    grows again when one comes back. auto: every host of the list (ssh, manual) or every bundle
    (ray), else one. The local launcher starts all of them on this machine."""

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
    def is_here(self) -> bool:
        """Whether all its ranks are on the machine that starts them."""
        return isinstance(self.launcher, LocalLauncherConfig)

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
            bundles = self.launcher.bundles if isinstance(self.launcher, RayLauncherConfig) else ()
            return (len(self.hosts) or len(bundles) or 1,) * 2
        if isinstance(self.nodes, int):
            return self.nodes, self.nodes
        least, _, most = self.nodes.partition(":")
        return int(least), int(most)
