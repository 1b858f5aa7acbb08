"""The launcher ssh: one run on a list of hosts, started from here by the user's own ssh.

One Python process on each host answers (`isles.launch.ssh.node`), all at once: facts, then
the run directory on the first host, then the start. Either all hosts have started, or what has
started is ended again and the host that did not is named. After that nothing needs ssh: the nodes
hold together by themselves.
"""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isles.config.load import Loaded
from isles.config.resolve import Resolved, dump_resolved, resolve
from isles.config.sections.cluster import ClusterConfig, SshLauncherConfig
from isles.errors import ConfigError, ConfigErrors, PreflightError, UserError
from isles.launch.base import Started, StartOptions
from isles.launch.remote.login import remember
from isles.launch.remote.sync import sync_hosts
from isles.launch.ssh.environment import network_line, network_variables, python_of, setting_lines
from isles.launch.ssh.facts import machine_id
from isles.launch.ssh.hosts import Host, ask_all, connect, gather, meet, reach, settle_ranks
from isles.launch.ssh.node import FORGOTTEN_AFTER_S
from isles.launch.ssh.text import dry_run_text, fleet_text
from isles.launch.worker import NEEDED_TO_TRAIN
from isles.run.nodes import Fleet, FleetNode
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.remote import RemoteRun

_ASK_S = 60.0
"""Longest wait for a host to do its part: to read the run file's data folder, to write a folder."""

_SIGN_S = 3.0
"""So often a host hears from here while its ranks begin."""

_GIVE_UP_S = 15.0


def start_ssh(loaded: Loaded, launcher: SshLauncherConfig, options: StartOptions) -> Started | str:
    """Start a run on all hosts of the list, or say what would be done.

    Args:
        loaded: the run file.
        launcher: its section.
        options: how `isles train` was typed.

    Raises:
        ConfigErrors: every fault that the first host finds in the run file.
        UserError: hosts that cannot take part, or the run cannot be begun.
    """
    cluster = loaded.config.clusters[0]
    workdir = cluster.workdir or str(Path.cwd())
    with interruptible() as hand_back, ExitStack() as stack:
        if cluster.sync and (text := sync_hosts(loaded, cluster.sync, workdir, options)):
            return text
        channels = connect(cluster, workdir, stack, timeout_s=launcher.connect_timeout)
        # The head loads what reads run files while it is asked for its facts.
        files = channels[0].ask("faults", **_portable(loaded))
        # A script of the user's own needs no more than torchrun does.
        needed = ("torch",) if loaded.config.training.script else NEEDED_TO_TRAIN
        hosts = meet(cluster, channels, options.warn, needed)
        start = _SshStart(loaded, options, cluster, hosts, workdir)
        start.settle()
        _refuse_faults(hosts[0], gather([(channels[0], files)], "faults", _ASK_S)[0])
        if options.dry_run:
            return start.dry_run()
        return start.run(hand_back)


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Ctrl+C, SIGTERM and SIGHUP end a start that is on its way, and not only the following.

    Yields:
        What gives the signals back to whoever had them, once the run is there: from then on they
        are for the run.
    """

    def end(signum: int, _frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(signum).name)

    before = {}
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            before[signum] = signal.signal(signum, end)

    def hand_back() -> None:
        for signum, handler in before.items():
            signal.signal(signum, handler)

    try:
        yield hand_back
    finally:
        hand_back()


@dataclass(slots=True)
class _SshStart:
    """One start, once all hosts have answered."""

    loaded: Loaded
    options: StartOptions
    cluster: ClusterConfig
    hosts: list[Host]
    workdir: str
    fleet: Fleet | None = None
    resolved: Resolved | None = None
    text: str = ""

    def settle(self) -> None:
        """Addresses, ranks, port: what the hosts are to agree on."""
        nproc, device = settle_ranks(self.cluster, self.hosts)
        reaches = reach(self.cluster, self.hosts)
        self.resolved = resolve(self.loaded, nproc=nproc, device=device)
        self.text = dump_resolved(self.resolved)
        names = _names(self.hosts)
        port = self.hosts[0].facts["port"]
        if port is None:
            first = self.cluster.network.port
            raise PreflightError(
                f"all ports from {first} to {first + 99} are taken",
                where=f"host {self.hosts[0].name}",
                fix="set clusters[0].network.port to the first of a hundred others",
                id="port.taken",
            )
        self.fleet = Fleet(
            launcher="ssh",
            nodes=tuple(
                FleetNode(
                    node=host.node,
                    name=name,
                    ssh=host.name,
                    address=found.address,
                    nproc=ranks,
                    interface=self.cluster.network.interface or found.interface,
                )
                for host, name, found, ranks in zip(self.hosts, names, reaches, nproc, strict=True)
            ),
            port=port,
            min_nodes=self.cluster.min_nodes,
            device=device,
            start_timeout_s=self.cluster.start_timeout,
            digest=hashlib.sha256(self.text.encode()).hexdigest(),
        )

    def variables(self, node: FleetNode) -> dict[str, str]:
        """What the launcher adds to the environment of a node's ranks."""
        assert self.fleet is not None
        variables = network_variables(self.cluster.network, node.interface, self.fleet.device)
        if self.fleet.device == "cpu":
            # Without it every rank starts a thread per core, and they fight for the cores.
            cores = int(self.hosts[node.node].facts["num_cores"])
            variables["OMP_NUM_THREADS"] = str(max(1, cores // node.nproc))
        return variables

    def dry_run(self) -> str:
        """What `run` would do."""
        assert self.fleet is not None and self.resolved is not None
        begun = self._begin(dry_run=True)
        lines = setting_lines(self.cluster, self.workdir)
        variables = [self.variables(node) for node in self.fleet.nodes]
        return dry_run_text(
            self.resolved, self.fleet, begun, lines, python_of(self.cluster.environment), variables
        )

    def run(self, hand_back: Callable[[], None]) -> Started:
        """Begin the run on the head, start it on all, and see that all have begun.

        Args:
            hand_back: called once the run goes on by itself; see `interruptible`.
        """
        assert self.fleet is not None
        say = self.options.say
        begun = self._begin(dry_run=False)
        if begun["note"]:
            say(begun["note"])
        name = Path(begun["run_dir"]).name
        say(fleet_text(name, self.fleet, begun["run_dir"]))
        say(network_line(self.cluster.network, self.fleet.head.interface, self.fleet.device))
        try:
            started = self._start(begun)
            self._see_them_begin()
            nodes = [
                {"node": host.node, "ssh": host.name, **answer["process"]}
                for host, answer in zip(self.hosts, started, strict=True)
            ]
            ask_all([host.channel for host in self.hosts], "keep", timeout_s=_ASK_S, nodes=nodes)
            hand_back()
        except UserError as error:
            self._give_up(error)
            raise
        except KeyboardInterrupt:
            self._give_up(UserError("it was interrupted while it was being started"))
            raise
        return self._started(begun)

    def _begin(self, *, dry_run: bool) -> dict[str, Any]:
        assert self.fleet is not None
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
        self.fleet = Fleet.of(begun["fleet"])
        asked = [
            (
                host.channel,
                host.channel.ask(
                    "start",
                    **begun,
                    node=node.node,
                    resolved=self.text,
                    text=self.loaded.text,
                    variables=self.variables(node),
                ),
            )
            for host, node in zip(self.hosts, self.fleet.nodes, strict=True)
        ]
        # No host may take longer than the others wait to hear from here again.
        return gather(asked, "start", FORGOTTEN_AFTER_S - 2 * _SIGN_S)

    def _see_them_begin(self) -> None:
        """Wait until the ranks of every host have begun; name the host whose processes end.

        Once start_timeout is over it is the nodes' own affair: they say whom they wait for.
        """
        assert self.fleet is not None
        waiting = set(self.hosts)
        deadline = time.monotonic() + self.cluster.start_timeout
        while waiting and time.monotonic() < deadline:
            asked = {
                host.channel.ask("wait", timeout_s=_SIGN_S, nproc=node.nproc): host
                for host, node in zip(self.hosts, self.fleet.nodes, strict=True)
            }
            # In the order in which they answer: who ends first is the cause, not a consequence.
            with suppress(TimeoutError):
                for future in as_completed(asked, timeout=_SIGN_S * 3):
                    host, answer = asked[future], future.result()
                    if answer["ended"] is not None:
                        raise self._ended(host, answer)
                    if answer["has_begun"]:
                        waiting.discard(host)

    def _ended(self, host: Host, answer: dict[str, Any]) -> UserError:
        words = "\n".join(f"    {line}" for line in answer["tail"]) or "    (not a word)"
        return PreflightError(
            f"the {answer['ended']} ended with exit code {answer['code']} before its ranks had "
            f"begun; its last words:\n{words}",
            where=f"host {host.name}",
            fix="mend what it says; isles check finds more",
            id="start.failed",
        )

    def _give_up(self, error: UserError) -> None:
        """End on every host what was started there."""
        record = {
            "what": error.what,
            "where": error.where,
            "fix": error.fix,
            "id": error.id,
            "exit_code": int(error.exit_code),
        }
        asked = [(host, host.channel.ask("end", **record)) for host in self.hosts]
        deadline = time.monotonic() + _GIVE_UP_S
        for host, future in asked:
            try:
                future.result(timeout=max(0.1, deadline - time.monotonic()))
            except (UserError, TimeoutError):
                # A host that is out of reach ends what it has started by itself, when it finds
                # that the connection is gone.
                self.options.warn(
                    f"host {host.name} did not answer; what was started there ends by itself"
                )

    def _started(self, begun: dict[str, Any]) -> Started:
        assert self.fleet is not None
        run_dir = RunDir(Path(begun["run_dir"]))
        attempt = run_dir.attempt(begun["attempt"])
        head, output_dir = self.hosts[0], Path(self.loaded.config.output_dir).expanduser()
        is_here = bool(machine_id()) and head.facts["machine_id"] == machine_id()
        if is_here and run_dir.path.parent == output_dir.absolute():
            return Started(run_dir, attempt, _coordinator(attempt))
        remote = RemoteRun(
            name=run_dir.name,
            ssh=head.name,
            path=begun["run_dir"],
            elsewhere=begun["elsewhere"],
            lines=tuple(setting_lines(self.cluster, self.workdir)),
            python=python_of(self.cluster.environment),
            launcher="ssh",
            hosts=tuple(host.name for host in self.hosts),
            started_at=time.time(),
        )
        remote = remember(output_dir, remote, self.options.warn)
        return Started(run_dir, attempt, None, remote=remote)


def _coordinator(attempt: Attempt) -> ProcessId | None:
    from isles.run.records import read_record

    return ProcessId.from_record(read_record(attempt.launch) or {})


def _portable(loaded: Loaded) -> dict[str, Any]:
    return {
        "config": loaded.config.model_dump(),
        "origins": loaded.origins,
        "text": loaded.text,
        "path": str(loaded.path),
    }


def _refuse_faults(head: Host, answer: dict[str, Any]) -> None:
    """Faults that only the head can see, with the run file's lines and the head's name."""
    faults = [
        ConfigError(
            fault["what"],
            where=f"{fault['where']} (on host {head.name})",
            fix=fault["fix"],
            id=fault.get("id", ""),
        )
        for fault in answer["faults"]
    ]
    if faults:
        raise ConfigErrors(faults)


def _names(hosts: Sequence[Host]) -> list[str]:
    """The hosts' own names, where they tell them apart; else as ssh takes them."""
    own = [str(host.facts["host"]) for host in hosts]
    return own if len(set(own)) == len(own) else [host.name for host in hosts]
