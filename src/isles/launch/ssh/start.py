"""The launcher ssh: one run on a list of hosts, started from this machine with the user's own ssh.

One Python process on each host (`node.py`) answers in parallel: facts, then the run directory on
the first host, then the start. Either all hosts start, or isles ends all started processes and
reports the host that failed. After that nothing needs ssh: the agents have their own connections.
"""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from isles import __version__
from isles.config.load import Loaded
from isles.config.resolve import dump_resolved, resolve
from isles.config.sections.cluster import ClusterConfig, SshLauncherConfig
from isles.config.show import show
from isles.errors import ConfigError, ConfigErrors, UserError
from isles.launch.answers import Announced
from isles.launch.base import Started, StartOptions, check_cpu, make_fleet, ranks_text
from isles.launch.container.enter import container_record
from isles.launch.remote.login import started_elsewhere
from isles.launch.remote.sync import sync_hosts
from isles.launch.ssh.channel import error_words
from isles.launch.ssh.environment import network_line, network_variables, python_of, setting_lines
from isles.launch.ssh.facts import machine_id, port_taken
from isles.launch.ssh.hosts import (
    SshHost,
    ask_facts,
    choose_addresses,
    connect,
    gather,
    resolve_ranks,
)
from isles.launch.worker import NEEDED_TO_TRAIN
from isles.run.limits import raise_open_files
from isles.run.nodes import Fleet, FleetNode
from isles.run.paths import RunDir
from isles.run.process import ProcessId, handled
from isles.run.records import read_record

_ASK_S = 60.0
"""Longest wait for a host to read the run file's data folder, or to write a folder."""

_SIGN_S = 3.0
"""Interval of heartbeats from this machine to the hosts."""

_GIVE_UP_S = 15.0


def start_ssh(loaded: Loaded, launcher: SshLauncherConfig, options: StartOptions) -> Started | str:
    """Start a run on all hosts of the list, or describe the start.

    Raises:
        ConfigErrors: every issue that the first host finds in the run file.
        UserError: hosts that cannot take part, or a run that cannot be started.
    """
    cluster = loaded.config.clusters[0]
    workdir = cluster.workdir or str(Path.cwd())
    raise_open_files()  # each host takes three pipes
    with interruptible() as hand_back, ExitStack() as stack:
        if cluster.sync and (text := sync_hosts(loaded, cluster.sync, workdir, options)):
            return text
        channels = connect(cluster, workdir, stack, timeout_s=launcher.connect_timeout)
        # The first host imports the config classes while the facts are gathered.
        files = channels[0].ask(
            "issues",
            container=container_record(cluster, loaded.config),
            config=loaded.config.model_dump(),
            origins=loaded.origins,
            text=loaded.text,
            path=str(loaded.path),
        )
        # A user's own script needs only torchrun's packages.
        needed = ("torch",) if loaded.config.training.script else NEEDED_TO_TRAIN
        hosts = ask_facts(loaded.config, channels, options.warn, needed)
        start = _SshStart(loaded, options, cluster, hosts, workdir)
        found = channels[0].wait(files, "issues", _ASK_S)["issues"]
        on = f" (on host {hosts[0].name})"
        if found:
            raise ConfigErrors(
                [
                    ConfigError(i["what"], where=i["where"] + on, fix=i["fix"], id=i["id"])
                    for i in found
                ]
            )
        return start.dry_run() if options.dry_run else start.run(hand_back)


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Make Ctrl+C, SIGTERM and SIGHUP end a start in progress, and not only the following of the
    run.

    Yields:
        A function that restores the former handlers, called when the run has started: from then on
        signals are for the run.
    """

    def end(signum: int, _frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(signum).name)

    with ExitStack() as stack:
        stack.enter_context(handled(end, signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        yield stack.close


class _SshStart:
    # One start, after all hosts have answered.

    def __init__(
        self,
        loaded: Loaded,
        options: StartOptions,
        cluster: ClusterConfig,
        hosts: list[SshHost],
        workdir: str,
    ) -> None:
        self.options = options
        self.cluster = cluster
        self.hosts = hosts
        self.lines = setting_lines(cluster, workdir)
        self.python = python_of(cluster.environment)
        self.loaded = loaded
        nproc, device = resolve_ranks(cluster, hosts)
        reaches = choose_addresses(
            [host.name for host in hosts],
            [host.facts for host in hosts],
            [host.given.address for host in hosts],
            cluster.network,
        )
        self.resolved = resolve(loaded, nproc=nproc, device=device)
        if issues := check_cpu(loaded, self.resolved):
            raise ConfigErrors(issues)
        self.text = dump_resolved(self.resolved)
        if (port := hosts[0].facts["port"]) is None:
            raise port_taken(cluster.network.port, hosts[0].name)
        # The hosts' own names, if they are unique; else the ssh destinations.
        names = [str(host.facts["host"]) for host in hosts]
        if len(set(names)) < len(names):
            names = [host.name for host in hosts]
        nodes = [
            FleetNode(
                node=host.node,
                name=name,
                ssh=host.name,
                address=found.address,
                nproc=ranks,
                interface=cluster.network.interface or found.interface,
            )
            for host, name, found, ranks in zip(hosts, names, reaches, nproc, strict=True)
        ]
        self.fleet = make_fleet(self.resolved, nodes, port=port)

    def variables(self, node: FleetNode) -> dict[str, str]:
        """Variables that the launcher adds to the environment of a node's ranks."""
        variables = network_variables(self.cluster.network, node.interface, self.fleet.device)
        if self.fleet.device == "cpu":
            # Without it every rank starts one thread per core, and the threads compete for the
            # cores.
            cores = int(self.hosts[node.node].facts["num_cores"])
            variables["OMP_NUM_THREADS"] = str(max(1, cores // node.nproc))
        return variables

    def dry_run(self) -> str:
        """Description of `run`: every resolved value, and the commands of each host."""
        fleet, begun = self.fleet, self._begin(dry_run=True)
        run_dir, attempt = begun["run_dir"], begun["attempt"]
        parts = [
            show(self.resolved).rstrip(),
            begun["note"] or f"this would be a new run: {run_dir.rpartition('/')[2]}",
            f"this would start {_fleet_text(fleet, run_dir)}",
            f"with the coordinator at {fleet.first.address} port {fleet.port}",
            "on every host, in bash:\n" + "\n".join(f"    {line}" for line in self.lines),
        ]
        for node in fleet.nodes:
            there = run_dir if node.node == 0 else str(begun["elsewhere"])
            words = [self.python, "-m", "isles.agent", there, "--attempt", str(attempt)]
            # The first host also coordinates the run.
            words += ["--node", str(node.node)] if node.node else []
            if added := self.variables(node):
                words = ["env", *(f"{k}={v}" for k, v in added.items()), *words]
            parts.append(f"then on {_place(node)}:\n    {shlex.join(words)}")
        return "\n\n".join(parts)

    def run(self, hand_back: Callable[[], None]) -> Started:
        """Prepare the run on the first host, start it on all hosts, and check that all have
        started.

        Args:
            hand_back: called when the run continues by itself; see `interruptible`.
        """
        print_line, fleet = self.options.print_line, self.fleet
        begun = self._begin(dry_run=False)
        if begun["note"]:
            print_line(begun["note"])
        print_line(f"starting {_fleet_text(fleet, begun['run_dir'])}")
        print_line(network_line(self.cluster.network, fleet.first.interface, fleet.device))
        self.fleet = Fleet.of(begun["fleet"])
        try:
            started = self._start(begun)
            nodes = [
                {"node": host.node, "ssh": host.name, **answer["process"]}
                for host, answer in zip(self.hosts, started, strict=True)
            ]
            kept = [(host.channel, host.channel.ask("keep", nodes=nodes)) for host in self.hosts]
            gather(kept, "keep", _ASK_S)
            hand_back()
        except UserError as error:
            self._give_up(error)
            raise
        except KeyboardInterrupt:
            self._give_up(UserError("the start was interrupted"))
            raise
        return self._started(begun)

    def _begin(self, *, dry_run: bool) -> dict[str, Any]:
        return self.hosts[0].channel.call(
            "begin",
            timeout_s=_ASK_S,
            resolved=self.text,
            text=self.loaded.text,
            resume=self.options.resume,
            join="" if dry_run else self.options.join,
            typed=self.options.typed,
            fleet=self.fleet.record(),
            dry_run=dry_run,
        )

    def _start(self, begun: dict[str, Any]) -> list[dict[str, Any]]:
        # The agents; each host answers when its ranks have started.
        shared = {**begun, "resolved": self.text, "text": self.loaded.text}
        asked = {
            host.channel.ask(
                "start", **shared, node=node.node, variables=self.variables(node)
            ): host.channel
            for host, node in zip(self.hosts, self.fleet.nodes, strict=True)
        }
        deadline = time.monotonic() + self.fleet.start_timeout_s + _ASK_S
        while time.monotonic() < deadline:
            for channel in asked.values():
                channel.ask("ping")
            # In the order of the answers: the first exit is the cause, not a consequence.
            with suppress(TimeoutError):
                for future in as_completed(asked, timeout=_SIGN_S):
                    future.result()
                break
        return gather([(channel, future) for future, channel in asked.items()], "start", _SIGN_S)

    def _give_up(self, error: UserError) -> None:
        # End on every host the processes that were started there.
        asked = [(host, host.channel.ask("end", **error_words(error))) for host in self.hosts]
        deadline = time.monotonic() + _GIVE_UP_S
        for host, future in asked:
            try:
                future.result(timeout=max(0.1, deadline - time.monotonic()))
            except (UserError, TimeoutError):
                # An unreachable host ends its processes by itself, when it notices that the
                # connection is gone.
                self.options.warn(
                    f"host {host.name} did not answer; the processes started there end by "
                    "themselves"
                )

    def _started(self, begun: dict[str, Any]) -> Started:
        run_dir = RunDir(Path(begun["run_dir"]))
        output_dir = Path(self.loaded.config.output_dir).expanduser()
        is_here = bool(machine_id()) and self.hosts[0].facts["machine_id"] == machine_id()
        if is_here and run_dir.path.parent == output_dir.absolute():
            attempt = run_dir.attempt(begun["attempt"])
            coordinator = ProcessId.from_record(read_record(attempt.launch) or {})
            return Started(run_dir, attempt, coordinator)
        path, elsewhere, hosts = begun["run_dir"], begun["elsewhere"], [h.name for h in self.hosts]
        found = Announced(__version__, path, begun["attempt"], elsewhere=elsewhere)
        return started_elsewhere(self.loaded, self.options, found, hosts, self.lines, self.python)


def _fleet_text(fleet: Fleet, run_dir: str) -> str:
    hosts = f"{len(fleet)} host{'' if len(fleet) == 1 else 's'}"
    places = ", ".join(_place(node) for node in fleet)
    return (
        f"{run_dir.rpartition('/')[2]}: {ranks_text(fleet.world_size, fleet.device)} on {hosts} "
        f"({places}), in {fleet.first.ssh}:{run_dir}"
    )


def _place(node: FleetNode) -> str:
    return f"{node.ssh}: {node.address}, {node.nproc} rank{'s' if node.nproc > 1 else ''}"
