"""Plan of a check: its extent, the run, the plan of each node, and the hosts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from isles.check.finding import IDS, Finding
from isles.config.load import Loaded
from isles.config.memory import Sizes, architecture_of, checkpoint_sizes, main_memory
from isles.config.sections.cluster import ClusterConfig
from isles.config.sections.run import RunConfig
from isles.errors import UserError
from isles.facts.memory.architecture import Architecture
from isles.launch.huggingface import huggingface_repos
from isles.launch.ssh.channel import Channel
from isles.launch.ssh.hosts import Reach
from isles.run.env import huggingface_cache

PrintLine = Callable[[str], object]
Device = Literal["cpu", "cuda"]

Answers = dict[str, dict[str, Any]]
"""Answers by the host's name."""

QUICK_S = 15.0
"""Timeout of an answer that needs no work."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Extent of a check.

    Args:
        net: check the links between hosts, and the all-reduce.
        smoke: train a small model on each machine.
        rows: read the first rows of the data.
        in_job: check the nodes of Slurm in a short job.
        as_json: print the report as JSON.
        timeout_s: longest wait for one answer.
        contact_s: longest wait for the first answer.
    """

    net: bool = True
    smoke: bool = False
    rows: bool = True
    in_job: bool = False
    as_json: bool = False
    timeout_s: float = 60.0
    contact_s: float = 40.0


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Checks of one node. JSON serializes it completely.

    Args:
        is_first: whether the node has the run directory.
        num_hosts, world_size: totals of the check.
        nproc: ranks of this node that take part.
        workdir: working folder of the ranks.
        output_dir: folder of run directories.
        is_copied: whether `isles train` copies the working folder to the node.
        run: config, origins, text and path of the run file. None: check the machine alone.
        repos: kind and id of repositories that may have to be downloaded.
        num_params: parameters of the model. 0: unknown, and then the bytes are also 0.
        load_bytes: bytes of the model in the main memory of one rank.
        kept_bytes: bytes of the checkpoints and the export that the run keeps on disk.
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
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A cluster, and the run on it.

    Args:
        workdir: working folder of the ranks.
        loaded: the run file. None: check the machines alone.
        model: None if its shape is unknown on this machine, or for a user's own script.
    """

    cluster: ClusterConfig
    workdir: str
    loaded: Loaded | None = None
    model: Architecture | None = None

    @classmethod
    def of(cls, loaded: Loaded) -> CheckedRun:
        """Facts of a run file with one cluster."""
        cluster = loaded.config.clusters[0]
        workdir = cluster.workdir or str(Path.cwd())
        return cls(cluster, workdir, loaded, _architecture(loaded.config))

    @property
    def config(self) -> RunConfig | None:
        return self.loaded.config if self.loaded is not None else None

    @property
    def output_dir(self) -> str:
        return self.config.output_dir if self.config is not None else "."

    def plan(self, name: str, nproc: Mapping[str, int], device: Device) -> NodePlan:
        """Plan of one node. `nproc`: ranks of every host, the first host first."""
        plan = NodePlan(
            name=name,
            is_first=name == next(iter(nproc)),
            num_hosts=len(nproc),
            world_size=sum(nproc.values()),
            nproc=nproc[name],
            device=device,
            workdir=self.workdir,
            launcher=self.cluster.launcher.kind,
            is_copied=self.cluster.sync is not None,
        )
        if self.loaded is None:
            return plan
        config = self.loaded.config
        run: dict[str, Any] = {"config": config.model_dump(mode="json")}
        run["origins"] = self.loaded.origins
        run |= {"text": self.loaded.text, "path": str(self.loaded.path)}
        sizes = self._sizes()
        params = self.model.params if self.model is not None else 0
        return replace(
            plan,
            output_dir=config.output_dir,
            run=run,
            repos=() if config.training.script is not None else tuple(huggingface_repos(config)),
            num_params=params,
            load_bytes=self._load_bytes(plan),
            kept_bytes=sizes.kept if sizes is not None else 0,
        )

    def gradient_bytes(self) -> int:
        """Bytes of the gradients of one rank."""
        sizes = self._sizes()
        return sizes.gradients if sizes is not None else 0

    def _load_bytes(self, plan: NodePlan) -> int:
        if self.config is None or self.model is None:
            return 0
        try:
            needed = main_memory(
                self.model,
                self.config,
                world_size=plan.world_size,
                local_world_size=plan.nproc,
                is_cuda=plan.device == "cuda",
            )
        except UserError:
            return 0  # the ranks report it
        return int(needed)

    def _sizes(self) -> Sizes | None:
        if self.config is None or self.model is None:
            return None
        return checkpoint_sizes(self.model, self.config)


def _architecture(config: RunConfig) -> Architecture | None:
    if config.training.script is not None:
        return None
    try:
        return architecture_of(config, huggingface_cache())
    except UserError:
        return None  # the ranks report it


class Hosts:
    """The hosts that still respond, and the findings so far.

    All hosts are queried in parallel, each with a deadline. A host that misses the deadline gets no
    more queries. The caller closes the channels.
    """

    def __init__(
        self, channels: Sequence[Channel], run: CheckedRun, extent: Extent, print_line: PrintLine
    ) -> None:
        self.run, self.extent, self.print_line = run, extent, print_line
        self.findings: list[Finding] = []
        self.facts: Answers = {}
        self.nproc: dict[str, int] = {}
        self.device: Device = "cpu"
        self.reach: dict[str, Reach] = {}
        self._channels = list(channels)

    @property
    def names(self) -> list[str]:
        """Hosts that have answered all queries so far, in order."""
        return [channel.name for channel in self._channels]

    def ask(
        self,
        op: str,
        args: Mapping[str, Any] | Callable[[str], Mapping[str, Any]] | None = None,
        *,
        timeout_s: float = QUICK_S,
        only: Sequence[str] | None = None,
        finding_id: str | None = None,
    ) -> Callable[[], Answers]:
        """Query all hosts in parallel, without waiting.

        Args:
            args: arguments for all, or for each host by its name.
            timeout_s: longest wait for an answer, from now.
            only: query only these hosts.
            finding_id: id of the finding if a node refuses. None: use the id of the node's error,
                and send the host no more queries.

        Returns:
            A function that waits for all answers, and adds a finding for each missing answer.
        """
        futures = {}
        for channel in self._channels:
            if only is None or channel.name in only:
                own = args(channel.name) if callable(args) else args or {}
                futures[channel.name] = channel.ask(op, **own)
        deadline = time.monotonic() + timeout_s

        def wait() -> Answers:
            found: Answers = {}
            for name, future in futures.items():
                try:
                    found[name] = future.result(timeout=max(0.0, deadline - time.monotonic()))
                except NoAnswer:
                    self._drop(name)
                    limit = f"{timeout_s:.0f} s"
                    text = f"no answer to the query `{op}` within {limit}"
                    fix = "check on that host whether it is overloaded, whether a disk or driver "
                    fix += "hangs (dmesg), and whether its network is up"
                    silent = Finding("host.answers", "error", name, text, f"more than {limit}")
                    self.findings.append(replace(silent, fix=fix))
                except UserError as error:
                    if finding_id is None:
                        self._drop(name)
                    self.findings.append(error_finding(name, error, finding_id))
            return found

        return wait

    def check(
        self, name: str, *, timeout_s: float | None = None, finding_id: str | None = None
    ) -> Callable[[], list[Finding]]:
        """Run one of `isles.check.node.CHECKS` on every host; see `ask`."""
        limit_s = self.extent.timeout_s if timeout_s is None else timeout_s
        answers = self.ask(name, self.plan, timeout_s=limit_s, finding_id=finding_id)
        return lambda: findings_of(answers())

    def plan(self, name: str) -> dict[str, Any]:
        """Plan of a host, as the arguments of a query."""
        return {"plan": asdict(self.run.plan(name, self.nproc, self.device))}

    def _drop(self, name: str) -> None:
        self._channels = [channel for channel in self._channels if channel.name != name]


def findings_of(answers: Answers) -> list[Finding]:
    return [Finding(**own) for answer in answers.values() for own in answer["findings"]]


def error_finding(name: str, error: UserError, finding_id: str | None = None) -> Finding:
    """Finding for an error of a host. It keeps the error's id if findings have this id."""
    own = error.id if error.id in IDS else "ssh.connect"
    fix = error.fix or "run `isles check` on that host for details"
    return Finding(finding_id or own, "error", name, error.what, fix=fix)
