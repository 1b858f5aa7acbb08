"""The process of the coordinator: finds out the nodes, listens, starts agents, and coordinates."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM, SIGUSR1
from typing import Any

import psutil

from isles import __version__
from isles.agent.agent import AgentSignals
from isles.agent.connection import versions
from isles.agent.coordinator import Coordinator
from isles.agent.live import LiveRecord
from isles.agent.protocol import log_line
from isles.agent.requeue import QueuedRun
from isles.agent.script.watch import ScriptWatch
from isles.agent.server import NodeRecords, RendezvousServer
from isles.config.resolve import load_resolved
from isles.config.sections.cluster import PbsLauncherConfig, QueueSection, SlurmLauncherConfig
from isles.config.sections.kubernetes import KubernetesLauncherConfig
from isles.config.sections.run import RunConfig
from isles.errors import ExitCode, PreflightError, UserError
from isles.launch.container.enter import container_record
from isles.launch.container.failure import explain
from isles.launch.kubernetes.pod import PodAllocation
from isles.launch.local import place_here
from isles.launch.manual import node_environ
from isles.launch.queue.job import JobAllocation
from isles.launch.queue.pbs import PbsAllocation
from isles.launch.queue.slurm import SlurmAllocation
from isles.run.begin import write_launch
from isles.run.env import inherited, is_sampled
from isles.run.find import typed_name
from isles.run.nodes import Fleet, FleetNode, require_nodes
from isles.run.outcome import agent_error, end_failed
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import MAX_LIST_BYTES, read_record
from isles.run.state import attempt_state

_LOOK_S = 0.05
_END_S = 10.0
_PORTS = 100
_STARTERS = ("srun", "pbsdsh", "ssh", "bash")


class Lead:
    """Coordinates one attempt, in a thread next to the first node's agent if it is on this host."""

    nodes: Fleet
    server: RendezvousServer

    def __init__(self, run_dir: RunDir, attempt: Attempt, signals: AgentSignals) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._signals = signals
        self._config: RunConfig = load_resolved(run_dir.resolved.read_text(encoding="utf-8")).config
        self._allocation: JobAllocation | None = None
        self._job: QueuedRun | None = None
        self._placed: dict[str, subprocess.Popen[bytes]] = {}
        self._is_limit_known = False
        self._thread = threading.Thread(target=self._run, name="coordinator")

    def open(self) -> int | None:
        """Find out the nodes, check them if the run file asks for it, and listen.

        Returns the exit code if there is nothing to coordinate. UserError: the nodes of the run
        cannot be determined.
        """
        launcher = self._config.clusters[0].launcher
        if not isinstance(launcher, QueueSection | KubernetesLauncherConfig):
            self.nodes = require_nodes(self._attempt)
            if self.nodes.launcher == "manual":
                self._claim()
                os.environ.update(node_environ(self._run_dir, self.nodes, 0))
        try:
            code = self._open_job()
            if code is not None:
                return code
            listener = self._open_port()
        except UserError as error:  # nobody sees the terminal of this process
            log_line(error.what)
            found = agent_error(error.what, error.fix, error.exit_code, id=error.id)
            end_failed(self._attempt, found)
            return int(error.exit_code)
        run_dir, attempt, config = self._run_dir, self._attempt, self._config
        script = config.training.script
        digest = hashlib.sha256(run_dir.resolved.read_bytes()).hexdigest()
        self.server = RendezvousServer(
            listener,
            replace(self.nodes, digest=digest),
            run_dir.name,
            attempt.number,
            versions(),
            attempt.token.read_text(encoding="utf-8").strip(),
            self._files,
        )
        self._coordinator = Coordinator(
            run_dir,
            attempt,
            self.nodes,
            self.server,
            max_restarts=config.clusters[0].max_restarts,
            save_timeout_s=config.checkpoint.timeout,
            script=ScriptWatch(run_dir, attempt, script, config.watchdog) if script else None,
            job=self._job,
        )
        self._records = NodeRecords(attempt, self.nodes, self.server)
        self._live = LiveRecord(attempt, self.nodes, self.server)
        return None

    def start(self) -> None:
        """Start the agents that this process is responsible for, and begin to coordinate."""
        if self._allocation is not None:
            words, log = ["--nodes-file", str(self._nodes_file)], self._attempt.path / "node-%n.log"
            for command in self._allocation.on_all_nodes(words, log):
                words_of = [Path(word).name for word in command]
                name = next((word for word in words_of if word in _STARTERS), words_of[0])
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
                self._placed[f"{name} {len(self._placed)}" if self._placed else name] = process
        elif self.nodes.launcher == "local" and not self.nodes.has_own_node:
            for node in self.nodes:
                self._placed[f"the agent of node {node.node}"] = place_here(
                    self._run_dir, self._attempt, self.nodes, node.node
                )
        self._thread.start()

    def join(self) -> int:
        """Wait for the end of the run on all nodes; returns the exit code of this process."""
        self._thread.join()
        self.server.close()
        deadline = time.monotonic() + _END_S
        for name, process in self._placed.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log_line(f"{name} ({process.pid}) did not exit; killing it")
                process.kill()
        if self._allocation is not None:
            self._nodes_file.unlink(missing_ok=True)
        if self._job is not None and self._job.is_requeued:
            return self._job.queue_again()
        return int(self._coordinator.outcome["exit_code"])

    def _claim(self) -> None:
        # For commands typed by a person: of two commands at the same time, the second is refused.
        attempt, asked = self._attempt, self.nodes.resume_from
        with attempt.agent_log.open("ab") as log:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(log, fcntl.LOCK_EX)
            what, fix = "has ended", "prepare it again with `isles train run.yaml`"
            if not attempt.outcome.exists():
                what, fix = "is running already", f"isles status {typed_name(self._run_dir)}"
            if attempt.outcome.exists() or attempt_state(self._run_dir, attempt).is_alive:
                raise UserError(f"{self._run_dir.name} {what}", where=str(attempt.path), fix=fix)
            write_launch(
                attempt,
                ProcessId.of(os.getpid()),
                world_size=self.nodes.world_size,
                device=self.nodes.device,
                command=tuple(sys.argv),
                resumed_from=Path(asked) if asked else None,
                launcher="manual",
            )

    # In the job of a queue.

    def _open_job(self) -> int | None:
        cluster = self._config.clusters[0]
        launcher, num_nodes = cluster.launcher, cluster.max_nodes
        match launcher:
            case SlurmLauncherConfig():
                container = container_record(cluster, self._config, cluster.device)
                allocation: JobAllocation = SlurmAllocation(
                    launcher, self._attempt, inherited(), container
                )
            case KubernetesLauncherConfig(pending_timeout=pending_s):
                allocation = PodAllocation(self._attempt, num_nodes, pending_s)
            case PbsLauncherConfig():
                allocation = PbsAllocation(launcher, self._attempt, inherited(), num_nodes)
            case _:
                return None
        self._allocation = allocation
        self._job = QueuedRun(self._run_dir, self._attempt, self._config, allocation)
        if (code := self._job.begin()) is not None:
            return code
        self.nodes = self._nodes_of(allocation)
        names = ", ".join(node.name for node in self.nodes)
        log_line(f"{allocation.job} on {names}: {self.nodes.world_size} ranks")
        self._write_nodes()
        has_check = isinstance(launcher, QueueSection) and launcher.check
        return self._check(allocation) if has_check else None

    @property
    def _nodes_file(self) -> Path:
        # A name that no node has looked up before: NFS caches old entries.
        assert self._allocation is not None
        return self._attempt.path / f"fleet-{self._allocation.key}.json"

    def _nodes_of(self, allocation: JobAllocation) -> Fleet:
        launch = read_record(self._attempt.launch) or {}
        cluster, nodes = self._config.clusters[0], allocation.nodes
        nproc = cluster.gpus_per_node
        assert isinstance(nproc, int), "a config rule guarantees it"
        places = [
            FleetNode(number, node.name, None, node.address, nproc)
            for number, node in enumerate(nodes)
        ]
        interface = cluster.network.interface
        if interface is not None and len(nodes) > 1:
            own = _address_on(interface)
            places[0] = replace(places[0], address=own, interface=interface)
        device = "cpu" if cluster.device == "cpu" else "cuda"
        return Fleet(
            launcher=cluster.launcher.kind,
            nodes=tuple(places),
            port=cluster.network.port + allocation.first_port,
            min_nodes=cluster.min_nodes,
            device=device,
            start_timeout_s=cluster.start_timeout + allocation.wait_s,
            digest="",
            resume_from=launch.get("resumed_from"),
            container=container_record(cluster, self._config, device),
        )

    def _check(self, allocation: JobAllocation) -> int | None:
        # Check the nodes and their links before the ranks start. Returns the exit code on failure.
        first = self.nodes.first
        with _listen(self.nodes, _PORTS) as probe:
            at = f"{first.address}:{probe.getsockname()[1]}"
        words = ["--nodes-file", str(self._nodes_file), "--check", at]
        self._attempt.findings.unlink(missing_ok=True)
        log = self._attempt.path / "check-node-%n.log"
        checks = [
            subprocess.Popen(command, stdin=subprocess.DEVNULL)
            for command in allocation.on_all_nodes(words, log)
        ]
        while any(check.poll() is None for check in checks):
            if self._signals.received:
                for check in checks:
                    check.terminate()
            time.sleep(_LOOK_S)
        for path in sorted(self._attempt.path.glob("check-node-*.log")):
            sys.stderr.write(path.read_text(encoding="utf-8", errors="replace"))
        found = (read_record(self._attempt.findings, MAX_LIST_BYTES) or {}).get("findings", ())
        errors = [entry for entry in found if entry.get("level") == "error"]
        if not errors:
            return None
        worst, more = errors[0], f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        error = agent_error(
            f"the nodes of {allocation.job} failed the pre-job check: {worst.get('text')}{more}",
            str(
                worst.get("fix")
                or "see the output of the check, or delete clusters.0.launcher.check"
            ),
            ExitCode.PREFLIGHT,
            id=str(worst.get("id") or "machine"),
            where=f"{worst.get('where')}: {worst.get('id')}",
        )
        end_failed(self._attempt, error)
        return int(ExitCode.PREFLIGHT)

    def _open_port(self) -> socket.socket | None:
        # The socket at which the agents find this process; None if there are no other agents.
        nodes = self.nodes
        if len(nodes) == 1 and nodes.has_own_node:
            return None
        listener = _listen(nodes, 1 if self._job is None else _PORTS)
        port = int(listener.getsockname()[1])
        if port != nodes.port:
            self.nodes = replace(nodes, port=port)
            self._write_nodes()
        return listener

    def _write_nodes(self) -> None:
        self.nodes.write(self._attempt)
        if self._allocation is not None:
            self.nodes.write(self._attempt, self._nodes_file)

    # The coordinator's thread.

    def _run(self) -> None:
        pause = threading.Event()
        try:
            while not self._coordinator.has_ended():
                if not self.nodes.has_own_node:
                    self._take_signal()
                self._coordinator.look()
                self._record()
                self._miss_placed()
                pause.wait(_LOOK_S)
            self._record(now=True)
        except BaseException:  # the edge of a thread that the run depends on
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(ExitCode.TRAINING)

    def _record(self, *, now: bool = False) -> None:
        places = self._coordinator.places()
        self._records.write(places, now=now)
        if is_sampled():
            self._live.write(places, self._coordinator.restart, now=now)

    def _take_signal(self) -> None:
        # Handles signals and the time limit in a process without ranks.
        number, job = self._signals.received, self._job
        save_at = self._allocation.save_at() if self._allocation is not None else None
        is_late = save_at is not None and not self._is_limit_known and time.monotonic() > save_at
        if job is not None and (number == SIGUSR1 or is_late):
            self._signals.received = 0 if number == SIGUSR1 else number
            if not self._coordinator.is_over and not self._is_limit_known:
                log_line("the time limit is near; asking the ranks to save")
                job.limit_is_near()
            self._is_limit_known = True
        elif number:
            if job is not None and number == SIGTERM:
                job.is_terminated = True
            self._coordinator.ask_to_stop(number)

    def _miss_placed(self) -> None:
        # Agents that this process started, and that exited before they connected, will not connect.
        peers, placed = self.server.peers(), self._placed
        if self._coordinator.is_over or (peers and self._allocation is not None):
            return
        # One process per node, except in a job.
        missing = [name for n, name in enumerate(placed) if self._allocation or n not in peers]
        codes = {name: placed[name].poll() for name in missing}
        ended = [f"{name} ended with {code}" for name, code in codes.items() if code is not None]
        if not ended or (self.nodes.is_elastic and len(ended) < len(placed)):
            return
        last, id, code = "", "start.failed", ExitCode.TRAINING
        fix = f"see the end of {self._attempt.path}/node-*.log"
        for log in sorted(self._attempt.path.glob("node-*.log")):
            text = log.read_text(encoding="utf-8", errors="replace")
            lines = text.splitlines()[-20:]
            last = next((ln.strip() for ln in reversed(lines) if "error" in ln.lower()), last)
            if (found := explain(text, self.nodes.container)) is not None:
                last, fix, id, code = found.what, found.fix, found.id, found.exit_code
        what = f"agents exited before the run started: {', '.join(ended)}"
        what += f": {last}" if last else ""
        error = agent_error(what, fix, code, id=id, will_recur=True)
        self._coordinator.fail(error)

    def _files(self) -> dict[str, Any]:
        # Files for a node that does not share the run directory.
        launch = read_record(self._attempt.launch) or {}
        attempts = self._run_dir.attempts()
        first = read_record(attempts[0].launch) or {} if attempts else {}
        return {
            "isles": __version__,
            "run": self._run_dir.name,
            "attempt": self._attempt.number,
            "resolved": self._run_dir.resolved.read_text(encoding="utf-8"),
            "text": self._run_dir.run_file.read_text(encoding="utf-8"),
            "fleet": self.nodes.record(),
            "begun_at": launch.get("begun_at"),
            "born_at": first.get("begun_at"),
        }


def _listen(nodes: Fleet, num_ports: int) -> socket.socket:
    # Two jobs that share a node start at different ports, and use the next free port.
    first = nodes.first
    for port in range(nodes.port, nodes.port + num_ports):
        try:
            return socket.create_server((nodes.meets_at, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port < nodes.port + num_ports - 1:
                continue
            if nodes.coordinator:
                first = replace(first, name=os.uname().nodename, address=nodes.coordinator)
            raise _cannot_listen(first, port, num_ports, error) from error
    raise AssertionError("the last port has raised")


def _cannot_listen(first: FleetNode, port: int, num_ports: int, error: OSError) -> UserError:
    what = f"cannot listen at {first.address}:{port}: {error.strerror}"
    fix = "set clusters.0.network.port"
    if error.errno == errno.EADDRINUSE:
        more = f", and the {num_ports - 1} before it" if num_ports > 1 else ""
        what = f"the port {port} of {first.name} ({first.address}) is taken{more}"
        fix = (
            f"find the program with `ss -ltnp | grep {port}` there, or set clusters.0.network.port"
        )
    elif error.errno == errno.EADDRNOTAVAIL:
        what = f"{first.name} does not have the address {first.address}, which the other nodes "
        what += "should connect to"
        fix = "list its addresses with `ip -brief address` there; correct the first entry of "
        fix += "clusters.0.launcher.hosts, or set clusters.0.network.interface"
    found = PreflightError(what, where=f"host {first.name}", fix=fix, id="port.taken")
    found.exit_code = ExitCode.COMMUNICATION
    return found


def _address_on(interface: str) -> str:
    for entry in psutil.net_if_addrs().get(interface, ()):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    raise PreflightError(
        f"{os.uname().nodename} has no IPv4 address on the interface {interface}",
        where="clusters.0.network.interface",
        fix=f"use one of its interfaces: {', '.join(psutil.net_if_addrs())}",
        id="net.interface",
    )
