"""Finds the machines of a plan: from `--gpus`, from the run file, or this machine.

Syntax of `--gpus`:

    4090                              one GPU
    2x4090                            two GPUs in one machine; 8*h100 is the same
    2x4090+3090                       one machine with three GPUs
    4090,3070ti@1gbe                  two machines, and the network between them
    4090,3080,3070@1gbe+0.2ms         with the latency of the network
    8xh100;8xa100-80;4090             three clusters, in the order of the run file

`isles.facts.gpus.named_gpu` lists the names of GPUs.
"""

from __future__ import annotations

import re
import shlex
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import psutil

from isles.config.load import Loaded
from isles.config.sections.cluster import (
    ClusterConfig,
    LocalLauncherConfig,
    PbsLauncherConfig,
    RayLauncherConfig,
    SkypilotLauncherConfig,
    SlurmLauncherConfig,
    SshLauncherConfig,
)
from isles.errors import UserError
from isles.facts.gpus import named_gpu
from isles.facts.units import parse_bytes, plural
from isles.launch.gpus import GPU_QUERY, GpuFinding, LocalGpu, find_gpus, free_bytes, read_gpus
from isles.launch.multi_cluster import local_environs
from isles.launch.ray.bundles import (
    RayNode,
    bundles,
    label_selectors,
    lacking,
    match_nodes,
    ranks_of,
)
from isles.launch.ray.jobs import RayJobs
from isles.launch.ssh.environment import python_of, setting_lines
from isles.launch.ssh.shell import Shell, on_all
from isles.plan.machines import (
    GUESSED_FABRIC,
    GUESSED_LINE,
    GUESSED_NETWORK,
    UNKNOWN,
    UNKNOWN_CPU,
    Device,
    Host,
    Link,
    Machines,
    rate_text,
)
from isles.run.env import inherited, usable_cores
from isles.run.limits import memory
from isles.run.links import measured_links

_NAMED_RATES = {"ethernet": 125e6, "wifi": 12.5e6, "ndr": 50e9, "hdr": 25e9, "edr": 12.5e9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(gbe|gbit/?s?|mbit/?s?|g|m)", re.I)
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|us)", re.I)
_COUNT = re.compile(r"(\d+)\s*[x*]\s*(?=\S)", re.I)
_PER_BIT = {"g": 1e9 / 8, "m": 1e6 / 8}

_CPU_FLOPS_PER_CYCLE = 16
"""FLOPs of a core per cycle, in fp32, if half of AVX2's multiply-adds are in use."""

_MOST = 1024
"""Limit of machines per cluster, and of GPUs per machine."""

_ASK_S = 10.0
_LIMITS = (
    "from isles.run.limits import cores, memory; found = memory(); "
    "print(cores(), found.total >> 10, found.available >> 10)"
)
_MACHINE = (
    # nproc prints OMP_NUM_THREADS if a login file sets it, not the cores.
    "unset OMP_NUM_THREADS OMP_THREAD_LIMIT; nproc; "
    "awk '/^Mem(Total|Available):/ { print $2 }' /proc/meminfo"
)
_NOT_FOUND = 127
"""Exit code of a shell: command not found."""


def parse_link(text: str, *, flag: str = "--gpus") -> Link:
    """A link from `1gbe`, `100mbit+25ms`, `20MB`, `hdr` or `8xndr`. UserError: not a valid rate."""
    rate, _, delay = text.strip().partition("+")
    latency = _LATENCY.fullmatch(delay.strip()) if delay else None
    if delay and latency is None:
        raise UserError(
            f"{delay.strip()} is not a valid latency",
            where=flag,
            fix="write it as 1gbe+0.2ms or 100mbit+25ms",
        )
    word, lines = rate.strip().lower(), 1
    if found := _COUNT.match(word):
        lines, word = int(found[1]), word[found.end() :]
    if word in _NAMED_RATES:
        bytes_per_s = _NAMED_RATES[word]
    elif found := _RATE.fullmatch(word):
        bytes_per_s = float(found[1]) * _PER_BIT[found[2][0].lower()]
    else:
        try:
            bytes_per_s = parse_bytes(rate.strip().removesuffix("/s"))
        except ValueError:
            bytes_per_s = 0.0
    bytes_per_s *= lines
    if bytes_per_s <= 0:
        raise UserError(
            f"{rate.strip() or 'nothing'} is not a valid network rate",
            where=flag,
            fix="write it as @1gbe, @10gbe, @100mbit, @100mbit+25ms, @20MB, @hdr or @8xndr",
        )
    scale = 1e3 if latency is None or latency[2].lower() == "ms" else 1e6
    latency_s = float(latency[1]) / scale if latency else (2e-4 if bytes_per_s < 5e9 else 5e-6)
    return Link(bytes_per_s, latency_s, "given", rate_text(bytes_per_s))


def parse_gpus(
    text: str, *, nodes: int | None = None
) -> list[tuple[tuple[Host, ...], Link | None]]:
    """The clusters of `--gpus`: the hosts of each cluster, and its network if it is given.

    Args:
        nodes: number of nodes per cluster. Each is a copy of the one host that `text` names.

    Raises:
        UserError: the text is not valid.
    """
    return [_cluster(part, nodes) for part in text.split(";")]


def _cluster(text: str, nodes: int | None) -> tuple[tuple[Host, ...], Link | None]:
    listed, _, rate = text.partition("@")
    hosts = [_host(item, number) for number, item in enumerate(listed.split(","), 1)]
    if nodes is not None:
        if not 1 <= nodes <= _MOST:
            raise UserError(f"{nodes} nodes", where="--nodes", fix=f"use 1 to {_MOST}")
        if len(hosts) > 1:
            raise UserError(
                f"--nodes {nodes} needs one machine, and --gpus names {len(hosts)} machines",
                where="--nodes",
                fix="name one machine in --gpus, such as 8xh100, or remove --nodes",
            )
        hosts = [replace(hosts[0], name=f"node{number}") for number in range(1, nodes + 1)]
    return tuple(hosts), parse_link(rate) if rate else None


def _host(text: str, number: int) -> Host:
    devices: list[Device] = []
    for item in text.split("+"):
        word, count = item.strip(), 1
        if found := _COUNT.match(word):
            count, word = int(found[1]), word[found.end() :].strip()
        try:
            gpu = named_gpu(word)
        except KeyError as error:
            names = [f"{n} ({named_gpu(n).memory_bytes >> 30} GB)" for n in error.args]
            near = f"did you mean {' or '.join(names)}? " if names else ""
            example = "valid names are, for example, 4090, 3070ti, a100-80 or 8xh100"
            raise UserError(
                f"{word!r} is not a known GPU", where="--gpus", fix=f"{near}{example}"
            ) from None
        if not 1 <= count <= _MOST:
            raise UserError(f"{count} GPUs in one machine", where="--gpus", fix=f"use 1 to {_MOST}")
        devices += [Device.of(gpu)] * count
    return Host(f"host{number}", tuple(devices))


def find_machines(loaded: Loaded, gpus: str, nodes: int | None, link: str) -> list[Machines]:
    """The machines of every cluster of a run file.

    Args:
        gpus: text of `--gpus`. Empty: the machines of the run file, or this machine.
        nodes: number of nodes per cluster, used with `gpus`.
        link: uplink to the hub of each cluster, or one for all. Empty: not given.
    """
    clusters = loaded.config.clusters
    lines = [parse_link(part, flag="--link") for part in link.split(";")] if link else []
    if len(lines) not in (0, 1, len(clusters)):
        raise UserError(
            f"{len(lines)} uplinks for {plural(len(clusters), 'cluster')}",
            where="--link",
            fix="pass one uplink for all clusters, or one for each, separated by ;",
        )
    if not gpus:
        if nodes is not None:
            fix = "pass both, for example --gpus 8xh100 --nodes 2"
            raise UserError("--nodes needs --gpus", where="--nodes", fix=fix)
        environs = local_environs(loaded)
        output_dir = Path(loaded.config.output_dir).expanduser()
        found = [
            _measured(
                _known(cluster, environs.get(cluster.name, {}), output_dir), cluster, output_dir
            )
            for cluster in clusters
        ]
    else:
        named = parse_gpus(gpus, nodes=nodes)
        if len(named) not in (1, len(clusters)):
            raise UserError(
                f"--gpus names {len(named)} clusters, and the run file has {len(clusters)}",
                where="--gpus",
                fix="name the machines once for all clusters, or for each cluster, separated by ;",
            )
        named = named * len(clusters) if len(named) == 1 else named
        found = [
            Machines(cluster.name, hosts, network or _network(hosts), GUESSED_LINE)
            for cluster, (hosts, network) in zip(clusters, named, strict=True)
        ]
    if lines:
        lines = lines * len(found) if len(lines) == 1 else lines
        found = [replace(own, line=line) for own, line in zip(found, lines, strict=True)]
    return found


def _network(hosts: Sequence[Host]) -> Link:
    # Machines with NVLink are usually in a data center.
    is_center = any(
        d.gpu is not None and d.gpu.nvlink_bytes_per_s for h in hosts for d in h.devices
    )
    return GUESSED_FABRIC if is_center else GUESSED_NETWORK


def _measured(found: Machines, cluster: ClusterConfig, output_dir: Path) -> Machines:
    # The network between the hosts of a run file, as `isles check` measured it.
    hosts = [host.ssh for host in cluster.hosts] or [host.name for host in found.hosts]
    links = measured_links(output_dir, hosts) if len(hosts) > 1 else None
    if links is None:
        return found
    network = Link(links.bytes_per_s, links.rtt_s / 2, "measured", rate_text(links.bytes_per_s))
    day = datetime.fromtimestamp(links.at).astimezone().strftime("%Y-%m-%d")
    note = f"network: its slowest link, as `isles check` measured it on {day}"
    return replace(found, network=network, notes=(*found.notes, note))


def _known(cluster: ClusterConfig, environ: Mapping[str, str], output_dir: Path) -> Machines:
    match cluster.launcher:
        case LocalLauncherConfig():
            found = _here(cluster, environ, output_dir)
        case SshLauncherConfig(connect_timeout=connect_s):
            found = _asked(cluster, connect_s)
        case RayLauncherConfig() as launcher:
            found = _of_ray(cluster, launcher)
        case _:
            found = _in_queue(cluster)
    return found


def _existing(folder: Path) -> Path:
    # The nearest existing parent: a new folder will be on the same disk.
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _here(cluster: ClusterConfig, environ: Mapping[str, str], output_dir: Path) -> Machines:
    # Its visible GPUs, or processes on its CPU. Several clusters on this machine each have their
    # own GPUs.
    finding = find_gpus({**inherited(), **environ})
    notes = (finding.warning,) if finding.warning else ()
    wanted = cluster.gpus_per_node
    disk = shutil.disk_usage(_existing(output_dir)).free
    name, main = socket.gethostname(), memory()
    if finding.gpus and cluster.device != "cpu":
        gpus = finding.gpus if wanted == "auto" else finding.gpus[:wanted]
        free = free_bytes()
        devices = tuple(Device.reported(g.name, g.memory_bytes, free.get(g.uuid)) for g in gpus)
    else:
        count = (1 if wanted == "auto" else wanted) * cluster.max_nodes
        devices = (_cpu(count, main.total, main.available),) * count
        if cluster.device == "cuda":
            notes = (*notes, "device is cuda, but this machine has no visible GPU")
    host = Host(name, devices, main.total, disk)
    return Machines(cluster.name, (host,), GUESSED_NETWORK, GUESSED_LINE, notes)


def _cpu(
    processes: int, total: float, available: float | None = None, cores: int | None = None
) -> Device:
    # The speed of a process is the clock times the FLOPs of a core per cycle times its cores. The
    # clock of this machine is also used for the cores of other machines.
    if cores is None:
        cores = min(psutil.cpu_count(logical=False) or usable_cores(), usable_cores())
    frequency = psutil.cpu_freq()
    megahertz = (frequency.max or frequency.current) if frequency else 2500.0
    flops = cores * megahertz * 1e6 * _CPU_FLOPS_PER_CYCLE / processes
    return Device(
        f"CPU process, {cores / processes:g} cores",
        None,
        total / processes,
        None if available is None else available / processes,
        "guess",
        flops,
        20e9 / processes,
        is_cuda=False,
    )


def _asked(cluster: ClusterConfig, connect_s: float) -> Machines:
    # Query the hosts of an ssh launcher. The GPUs of a host that does not respond are unknown.
    shells = {host.ssh: Shell(host.ssh, connect_s) for host in cluster.hosts}
    query = ["bash", "-c", _cpu_query(cluster)]

    def ask(name: str) -> tuple[GpuFinding, tuple[int, ...]]:
        # Its GPUs. If it has none: its cores, and its total and available bytes of memory.
        result = shells[name].run(list(GPU_QUERY), timeout_s=_ASK_S + connect_s)
        found = GpuFinding(())
        if result.returncode != _NOT_FOUND and cluster.device != "cpu":
            found = read_gpus(result.returncode, result.stdout, result.stderr, None)
        if found.gpus:
            return found, ()
        result = shells[name].run(query, timeout_s=_ASK_S + connect_s)
        words = result.stdout.split()
        if len(words) != 3 or not all(word.isdecimal() for word in words):
            return found, ()
        return found, (int(words[0]), int(words[1]) << 10, int(words[2]) << 10)

    answers, failures = on_all(list(shells), ask)
    notes = [str(error.what) + f" ({name})" for name, error in failures]
    hosts = []
    for host, answer in zip(cluster.hosts, answers, strict=True):
        wanted = host.gpus or cluster.gpus_per_node
        found: tuple[LocalGpu, ...] = answer[0].gpus if answer is not None else ()
        devices = tuple(Device.reported(g.name, g.memory_bytes, None) for g in found)
        count = wanted if isinstance(wanted, int) else max(1, len(devices))
        is_cpu = answer is not None and not found and cluster.device != "cuda"
        more, total = UNKNOWN_CPU if is_cpu else UNKNOWN, None
        if is_cpu and answer is not None and answer[1]:
            cores, total, available = answer[1]
            more = _cpu(count, total, available, cores)
        devices = (devices + (more,) * count)[:count]
        hosts.append(Host(host.ssh.rpartition("@")[2], devices, total))
    if failures:
        notes.append("use --gpus to name the GPUs of hosts that do not respond")
    return Machines(cluster.name, tuple(hosts), GUESSED_NETWORK, GUESSED_LINE, tuple(notes))


def _cpu_query(cluster: ClusterConfig) -> str:
    # Bash that prints the cores of a host, and the KiB of its total and available memory: within
    # every limit if isles is installed there, else those of the machine.
    lines = setting_lines(cluster, cluster.workdir or str(Path.cwd()))
    python = shlex.quote(python_of(cluster.environment))
    ask = f"exec {python} -c {shlex.quote(_LIMITS)} 2>/dev/null"
    return "\n".join(["({", *lines, "} >/dev/null 2>&1", ask, ") || {", _MACHINE, "}"])


def _of_ray(cluster: ClusterConfig, launcher: RayLauncherConfig) -> Machines:
    # The nodes that fit the bundles. Ray knows their GPUs by one of its labels.
    wanted, labels = bundles(cluster), label_selectors(cluster)
    notes: tuple[str, ...] = ()
    nodes: Mapping[int, RayNode] = {}
    try:
        nodes = match_nodes(wanted, labels, RayJobs.reach(launcher.address).nodes())
        if len(nodes) < len(wanted):
            notes = (lacking(wanted, labels, nodes),)
    except UserError as error:
        notes = (error.what,)
    hosts = []
    for number, ranks in enumerate(ranks_of(cluster)):
        node = nodes.get(number)
        card = (node.labels if node else labels[number]).get("ray.io/accelerator-type", "")
        device = UNKNOWN_CPU if cluster.device == "cpu" else next(_named_in(card), UNKNOWN)
        name = node.name if node is not None else f"node{number + 1}"
        hosts.append(Host(name, (device,) * ranks))
        if device is UNKNOWN and not notes:
            notes = (f"Ray does not know the GPUs of {name}: name them, such as --gpus 8xh100",)
    found = tuple(hosts)
    return Machines(cluster.name, found, _network(found), GUESSED_LINE, notes)


def _in_queue(cluster: ClusterConfig) -> Machines:
    # This machine cannot see the nodes of a queue. The request of the launcher may name the GPU.
    asked = ""
    if isinstance(cluster.launcher, SlurmLauncherConfig):
        asked = f"{cluster.launcher.gres or ''}:{cluster.launcher.constraint or ''}"
    elif isinstance(cluster.launcher, SkypilotLauncherConfig):
        asked = ":".join(cluster.launcher.accelerators)
    device = next(_named_in(asked), UNKNOWN)
    count = cluster.gpus_per_node if isinstance(cluster.gpus_per_node, int) else 1
    total, cores, notes = None, None, list[str]()
    launcher = cluster.launcher
    if isinstance(launcher, SlurmLauncherConfig | PbsLauncherConfig):
        total, cores = _asked_memory(launcher), launcher.cpus_per_node
        if cores is not None:
            threads = plural(max(1, cores // count), "thread")
            notes.append(f"{threads} for each rank: cpus_per_node {cores}, {plural(count, 'rank')}")
        elif cluster.device == "cpu":
            cores = count  # default of a queue if none are requested
    if cluster.device == "cpu":
        total = total or float(memory().total)
        device = _cpu(count, total, cores=cores)
        notes.append(
            "this machine cannot see the nodes: the plan uses the CPU of this machine, with the "
            "cores and the memory that the launcher requests"
        )
    elif device is UNKNOWN:
        notes.append("this machine cannot see the nodes: name their GPUs, such as --gpus 8xh100")
    names = [host.ssh for host in cluster.hosts]
    names = names or [f"node{number}" for number in range(1, cluster.max_nodes + 1)]
    hosts = tuple(Host(name, (device,) * count, total) for name in names)
    return Machines(cluster.name, hosts, _network(hosts), GUESSED_LINE, tuple(notes))


def _asked_memory(launcher: SlurmLauncherConfig | PbsLauncherConfig) -> float | None:
    # Memory as schedulers write it: 200G, 200gb, 1500 (MB for Slurm). None: not set.
    found = re.fullmatch(r"(\d+)([kmgt]?)b?", launcher.memory_per_node or "", re.I)
    if found is None or not int(found[1]):
        return None
    return float(int(found[1]) << 10 * (1 + "kmgt".index(found[2].lower() or "m")))


def _named_in(text: str) -> Iterator[Device]:
    for word in re.split(r"[:,|&\s]+", text):
        try:
            if word and not word.isdecimal():
                yield Device.of(named_gpu(word))
        except KeyError:
            continue
