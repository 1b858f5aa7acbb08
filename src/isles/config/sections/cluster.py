"""The section `clusters`: the nodes of the ranks, how isles starts them, and their environment."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from isles.config.sections.base import NO_CONTROL, DurationS, Section, Text, own_type
from isles.config.sections.kubernetes import KubernetesLauncherConfig
from isles.config.sections.strategy import StrategyConfig

Share = Annotated[float, Field(ge=0, le=10**6)]

BalanceConfig = Literal["auto", "even"] | Annotated[dict[str, Share], Field(min_length=1)]
"""auto, even, or the share of each host (divided over its ranks) or rank number. The default share
of a host or rank is 1."""


Count = Annotated[int, Field(ge=1, le=100_000)]
Login = Annotated[
    str,
    Field(
        pattern=rf"^[^\s{NO_CONTROL}-][^\s{NO_CONTROL}]*$",
        json_schema_extra={"x-isles-type": "login"},
    ),
]
"""A destination for ssh: host, user@host, or a name of ~/.ssh/config."""


class LocalLauncherConfig(Section):
    """Ranks on this machine."""

    kind: Literal["local"] = "local"
    """This machine."""


class HostConfig(Section):
    """One host of an ssh launcher, or one node that a person starts manually."""

    ssh: Login
    """Host for ssh: host, user@host, or a name of ~/.ssh/config."""

    address: Text | None = None
    """Address of this host for the other hosts. Default: isles finds it."""

    gpus: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Ranks on this host. Default: gpus_per_node."""


class SshLauncherConfig(Section):
    """Ranks on a list of hosts, started from this machine by your own ssh."""

    kind: Literal["ssh"] = "ssh"
    """Hosts that you reach with ssh."""

    hosts: Annotated[tuple[Login | HostConfig, ...], Field(strict=False, min_length=1)]
    """The hosts, in the order of their ranks. The first host keeps the run directory and
    coordinates the run."""

    connect_timeout: Annotated[DurationS, Field(ge=1)] = 10.0
    """Longest wait for a host to answer ssh."""


class ManualLauncherConfig(Section):
    """Prints one command per node, for you to run on the node."""

    kind: Literal["manual"] = "manual"
    """Commands that you run on each node."""

    hosts: Annotated[tuple[Text, ...], Field(strict=False, min_length=1)]
    """Address of every node, in the order of the ranks. The other nodes must reach the first."""


class SkypilotLauncherConfig(Section):
    """Nodes that SkyPilot finds and starts, through your own sky command."""

    kind: Literal["skypilot"] = "skypilot"
    """SkyPilot."""

    accelerators: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Acceptable GPUs without a count, such as [H100, A100-80GB]. SkyPilot takes the cheapest
    available kind, with gpus_per_node GPUs on each node."""

    resources: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies defaults)
    """More `resources` of the task, in SkyPilot's format, such as infra, use_spot, cpus, memory or
    image_id."""

    file_mounts: dict[Text, Any] = {}  # noqa: RUF012
    """Files and buckets on the nodes, in SkyPilot's format, such as {~/runs: {source:
    's3://BUCKET', mode: MOUNT}}."""

    workdir: Text | None = None
    """Folder of this machine that SkyPilot copies to ~/sky_workdir of each node, except the files
    that .skyignore or, without it, .gitignore lists. Default: no folder."""

    setup: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Lines of bash that SkyPilot runs once on each node. Default: isles installs itself into
    ~/.isles/venv, unless environment names the Python."""

    secrets: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Variables of this machine for the nodes, as SkyPilot secrets, such as HF_TOKEN. isles writes
    their values nowhere."""

    cluster: Annotated[str, Field(pattern=r"^[A-Za-z]([-_.A-Za-z0-9]*[A-Za-z0-9])?$")] | None = None
    """Name of the SkyPilot cluster, also for ssh. SkyPilot reuses an existing cluster. Default:
    isles-NAME."""

    managed: bool = False
    """Run as a managed job. SkyPilot restarts the job if its nodes are taken away or it exits with
    code 85. sky jobs shows the job, but isles status does not."""

    autostop: Annotated[DurationS, Field(ge=60)] | None = None
    """Idle time after which SkyPilot stops the nodes. Default: never."""

    launch_timeout: Annotated[DurationS, Field(ge=1)] = 3600.0
    """Longest wait for SkyPilot to find the nodes, set them up and start the run."""


class LoginSection(Section):
    """Keys of all launchers that submit a job."""

    login: Login | None = None
    """Login node for ssh. Default: this machine submits the job."""


class QueueSection(LoginSection):
    """Keys of both Slurm and PBS."""

    time: Annotated[DurationS, Field(ge=60)] | None = None
    """Time limit of the job. Default: the cluster's own."""

    requeue: bool = True
    """Before the time limit, or when the job is preempted: save, and queue the job again until the
    run is finished."""

    save_before: Annotated[DurationS, Field(ge=10)] = 300.0
    """The run saves and stops this long before the time limit."""

    account: Text | None = None
    """Account or project to charge."""

    cpus_per_node: Count | None = None
    """CPU cores on each node. Default: the cluster's own."""

    memory_per_node: Text | None = None
    """Memory on each node, such as 200G. Default: the cluster's own."""

    bin_path: Text | None = None
    """Folder of the scheduler's commands, if they are not on PATH."""

    check: bool = False
    """Run `isles check` on the job's nodes before the ranks start. A failed check ends the job with
    exit code 2."""

    extra: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """More options of the job, such as [--mail-type=END]."""


class SlurmLauncherConfig(QueueSection):
    """A Slurm job."""

    kind: Literal["slurm"] = "slurm"
    """Slurm."""

    partition: Text | None = None
    """Partition. Default: the cluster's own."""

    qos: Text | None = None
    """Quality of service."""

    constraint: Text | None = None
    """Features that the nodes must have."""

    gres: Text | None = None
    """Generic resources of each node, such as gpu:a100:4. The value none requests no GPUs. Default:
    gpu:GPUS_PER_NODE."""

    nodelist: Text | None = None
    """Nodes that the job must have."""

    exclude: Text | None = None
    """Nodes that the job must not have."""

    reservation: Text | None = None
    """A reservation that the job may use."""


class PbsLauncherConfig(QueueSection):
    """An OpenPBS or Torque job."""

    kind: Literal["pbs"] = "pbs"
    """PBS."""

    dialect: Literal["auto", "openpbs", "torque"] = "auto"
    """openpbs requests with -l select=, and torque with -l nodes=:ppn=. auto: isles reads it from
    qstat --version."""

    queue: Text | None = None
    """Queue. Default: the cluster's own."""

    resources: Text | None = None
    """The whole resource request after -l, for special sites. It must request the same number of
    nodes as `nodes`."""


class RayBundleConfig(Section):
    """Resources that Ray reserves for one node of a run."""

    gpus: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Ranks on this node. Default: gpus_per_node."""

    resources: dict[Text, Annotated[float, Field(gt=0)]] = Field(default={})
    """Resources that the node must have free, in addition to a GPU and a CPU per rank, such as
    {memory: 64000000000, big_disk: 1}."""

    label_selector: dict[Text, Text] = Field(default={})
    """Labels that the node must have, in Ray's format: {ray.io/accelerator-type: H100}."""


class RayLauncherConfig(LoginSection):
    """A job of a Ray cluster."""

    kind: Literal["ray"] = "ray"
    """Ray."""

    address: Text = "auto"
    """Address to submit jobs to: http://HEAD:8265, ray://HEAD:10001, or auto for the cluster of
    this machine. RAY_ADDRESS overrides this key."""

    bundles: Annotated[tuple[RayBundleConfig, ...], Field(strict=False)] = ()
    """Requirements of the nodes, see docs/ray.md. Default: a GPU and a CPU per rank, or only a CPU
    without GPUs."""


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
"""Program that runs a container."""


class ContainerConfig(Section):
    """Container image for the agents and ranks of a cluster."""

    image: Text
    """A file or folder that the nodes see (image.sif, image.sqsh, ./folder), or a name in a
    registry, such as ghcr.io/me/train:1.2."""

    runtime: Runtime | Literal["auto"] = "auto"
    """auto for a file: apptainer. auto for a name in a registry: pyxis in Slurm if srun supports
    it, else apptainer in jobs and podman outside of jobs."""

    python: Text = "python3"
    """Python in the image."""

    binds: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """More files and folders to mount: PATH, FROM:TO or FROM:TO:ro. isles always mounts the run
    directory, workdir, the paths of the run file and the caches."""

    extra: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """More options, one word each, of apptainer exec, podman run or srun."""


class EnvironmentConfig(Section):
    """The Python of a cluster's nodes, and the setup before it starts. Give at most one of venv and
    conda."""

    python: Text | None = None
    """Python on the nodes, and on the login node of a launcher. Default: the Python of venv or
    conda, else the path of the Python that runs isles on this machine."""

    venv: Text | None = None
    """Folder of a virtual environment on every node."""

    conda: Text | None = None
    """Name or folder of a conda environment on every node."""

    modules: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Environment modules to load, in this order, such as [gcc/12, cuda/12.8]."""

    setup: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Lines of bash that run first."""

    variables: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], Lines] = Field(
        default={}
    )
    """Environment variables of the ranks. Values stay as typed, such as 010. isles writes them into
    scripts and records, so do not put secrets here."""

    packages: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Packages that `isles setup` also installs, in pip's format."""

    container: Text | ContainerConfig | None = None
    """Container image for the agents and ranks, with isles and torch. The Python of the nodes then
    needs only isles. Default: no container."""

    @property
    def own_container(self) -> ContainerConfig | None:
        """The container as a section, even if the run file gives only its image."""
        if isinstance(self.container, str):
            return ContainerConfig(image=self.container)
        return self.container


Interface = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9._:@-]{1,64}$", json_schema_extra={"x-isles-type": "interface"})
]
"""A network interface. Scripts quote it with double quotes."""


class NetworkConfig(Section):
    """How the ranks of a cluster reach each other."""

    profile: Literal["auto", "infiniband", "roce", "ethernet"] = "auto"
    """NCCL settings for this kind of network. auto: NCCL's own choice."""

    interface: Interface | None = None
    """Network interface of the ranks, such as eth0. Default: the interface with the node's
    address."""

    port: Annotated[int, Field(ge=1024, le=65_435)] = 29500
    """First port to try on the first node. isles also tries the next 99."""


class SyncConfig(Section):
    """Copies files from this machine to every node before the run starts, by rsync over ssh."""

    paths: Annotated[tuple[Text, ...], Field(strict=False, min_length=1)]
    """Files and folders of this machine to copy into workdir. [.] copies the content of the current
    folder."""

    exclude: Annotated[tuple[Text, ...], Field(strict=False)] = (
        ".git",
        "__pycache__",
        ".venv",
        "runs",
    )
    """rsync patterns of files not to copy."""


def _node_range(text: str) -> str:
    least, _, most = text.partition(":")
    if not 1 <= int(least) <= int(most) <= 1024:
        raise ValueError(f"{text} is not a valid range of nodes: write MIN:MAX, such as 1:3")
    return text


NodeRange = Annotated[
    str,
    Field(pattern=r"^\d{1,4}:\d{1,4}$"),
    AfterValidator(_node_range),
    own_type("range", "1:3"),
]
"""Minimum and maximum number of nodes, in torchrun's format: `1:3`."""


class ClusterConfig(Section):
    """A group of ranks on fast links that take every optimizer step together."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = "local"
    """Name of the cluster. All clusters of a run, at all sites, need different names."""

    launcher: LauncherConfig = LocalLauncherConfig()
    """How isles starts the processes."""

    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    """Ranks on each node, one per GPU. auto: every visible GPU. Without GPUs: CPU processes on each
    node, and auto means one."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device of the ranks. auto: with local and ssh, cuda if the hosts have GPUs. With a queue or
    the manual launcher, auto is always cuda."""

    nodes: Annotated[int, Field(ge=1, le=1024)] | NodeRange | Literal["auto"] = "auto"
    """Number of nodes. MIN:MAX: the run continues with at least MIN nodes, and grows again when a
    node reconnects. auto: every listed host (ssh, manual) or bundle (ray), else one. The local
    launcher starts all nodes on this machine."""

    strategy: StrategyConfig | None = None
    """How the ranks of this cluster share the model. Default: `strategy` of the run file."""

    balance: BalanceConfig | None = None
    """Share of each rank in the global batch. Default: `balance` of the run file."""

    environment: EnvironmentConfig = EnvironmentConfig()
    """The Python of the nodes, and the setup before it starts."""

    network: NetworkConfig = NetworkConfig()
    """How the ranks reach each other."""

    workdir: Text | None = None
    """Working folder of the ranks. Paths of the run file are relative to it. Default: the current
    folder."""

    sync: SyncConfig | None = None
    """Files to copy to the nodes before the run starts. Default: none."""

    start_timeout: Annotated[DurationS, Field(ge=1)] = 120.0
    """Longest wait for all nodes to connect, after the first node has connected."""

    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """How often isles restarts all ranks from the last checkpoint after failures. An error that
    would repeat, such as a wrong run file, ends the run immediately."""

    comm_timeout: Annotated[DurationS, Field(ge=1)] = 600.0
    """Longest wait for another rank in one collective operation. Then an error names the rank."""

    @property
    def is_here(self) -> bool:
        """True if all its ranks run on the machine that starts them."""
        return isinstance(self.launcher, LocalLauncherConfig)

    @property
    def hosts(self) -> tuple[HostConfig, ...]:
        """The listed hosts in the order of their ranks, or none if a queue chooses."""
        match self.launcher:
            case SshLauncherConfig(hosts=hosts):
                return tuple(HostConfig(ssh=h) if isinstance(h, str) else h for h in hosts)
            case ManualLauncherConfig(hosts=addresses):
                return tuple(HostConfig(ssh=h, address=h) for h in addresses)
            case _:
                return ()

    @property
    def min_nodes(self) -> int:
        """Number of connected nodes that the run needs to continue."""
        return self._nodes[0]

    @property
    def max_nodes(self) -> int:
        """Number of nodes to start. No more nodes can join."""
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
