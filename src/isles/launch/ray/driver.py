"""The driver of a Ray job: has Ray place an actor on each node, which runs the agent.

    python -m isles.launch.ray.driver RUN_DIR --attempt N --workdir FOLDER

The job's entrypoint starts it. One placement group has one bundle for each node, on different
nodes. An agent that ends without the run, or is lost with its actor or its node, is placed anew in
its bundle, once Ray has a node for it. Ranks, restarts and stops are the coordinator's, a process
beside this one; it outlives every node but the head.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from isles.config.resolve import load_resolved
from isles.errors import CommunicationError, ExitCode, PreflightError, UserError
from isles.facts.units import format_duration
from isles.launch.ray.start import bundles, label_selectors, ranks_of
from isles.launch.ssh.environment import network_variables, python_of, setting_lines
from isles.launch.ssh.facts import free_port, port_taken
from isles.run.nodes import Fleet, FleetNode
from isles.run.outcome import agent_error, end_failed, end_stopped
from isles.run.paths import Attempt, RunDir
from isles.run.process import die_with_parent
from isles.run.records import read_record, write_record
from isles.run.restarts import newest_step
from isles.run.stop import read_stop_request

_LOOK_S = 0.1
_SAY_EVERY_S = 5.0
_SOON_S = 10.0
"""A run of MIN:MAX nodes waits so long for Ray to have all, before it begins with those there are;
the coordinator then waits for the others."""
_SHORT_S = 60.0
_TRIES = 3
"""So many times in a row an agent may end within `_SHORT_S`; then its node is given up."""
_END_S = 10.0


class Place:
    """The actor of one node. It travels to the node by value, and knows the standard library only:
    the node's Python may have no isles, which the agent's own `environment` names."""

    def facts(self, launch: str, begun_at: float) -> dict[str, Any]:
        """Where the actor is, and whether it sees the run directory, by the record of a start."""
        import ray

        try:
            record = json.loads(open(launch, encoding="utf-8").read())  # noqa: PTH123, SIM115
            token = os.path.join(os.path.dirname(launch), "token")  # noqa: PTH118, PTH120
            sees = record.get("begun_at") == begun_at and os.access(token, os.R_OK)
        except (OSError, ValueError):
            sees = False
        context = ray.get_runtime_context()
        return {
            "host": socket.gethostname(),
            "address": ray.util.get_node_ip_address(),
            "ray_node": context.get_node_id(),
            "sees": sees,
        }

    def run(self, script: str, environ: dict[str, str], token: str, log: str) -> tuple[int, str]:
        """Run the agent, by a script of bash, to its end: its exit code and last words.

        Args:
            token: what the agent reads from standard input; it stands nowhere else.
            log: takes what the agent prints; empty: only its last words are kept.
        """
        prctl = ctypes.CDLL(None).prctl

        def prepare() -> None:
            # The agent ends with the actor, of which it is a child; Ray blocks signals in both.
            prctl(1, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())

        # Ray sets it for all ranks of the actor together; the agent divides the cores itself.
        own = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        with open(log, "a+b") if log else tempfile.TemporaryFile() as out:  # noqa: PTH123
            process = subprocess.Popen(
                ["bash", "-c", script],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**own, **environ},
                preexec_fn=prepare,  # noqa: PLW1509  # it takes no lock
            )
            with suppress(BrokenPipeError):
                process.communicate(f"{token}\n".encode())
            code = process.wait()
            out.seek(max(0, out.seek(0, os.SEEK_END) - 4096))
            return code, out.read().decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Placed:
    """An actor that Ray has placed: its handle, and what it says of its node."""

    actor: Any
    host: str
    address: str
    ray_node: str
    sees: bool


class Driver:
    """Places the agents of one attempt.

    Args:
        workdir: folder on the nodes in which the ranks run.
        resume_from: the checkpoint that was asked for by name.
    """

    def __init__(
        self, run_dir: RunDir, attempt: Attempt, workdir: str, resume_from: str | None
    ) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._resume_from = resume_from
        text = run_dir.resolved.read_text(encoding="utf-8")
        self._cluster = cluster = load_resolved(text).config.clusters[0]
        self._device = "cpu" if cluster.device == "cpu" else "cuda"
        self._lines = setting_lines(cluster, workdir)
        self._bundles = bundles(cluster)
        self._labels = label_selectors(cluster)
        self._token = attempt.token.read_text(encoding="utf-8").strip()
        self._begun_at = float((read_record(attempt.launch) or {})["begun_at"])
        self._slots: dict[int, tuple[Any, int]] = {}
        self._placed: dict[int, Placed] = {}
        self._given_up: dict[int, str] = {}
        self._fleet: Fleet | None = None
        self._over = threading.Event()
        self._signal = 0

    def run(self) -> int:
        """Place the agents and the coordinator, to the end of the run; returns its exit code.

        Raises:
            UserError: Ray does not give the nodes, or they do not see the run directory.
        """
        import ray

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
        ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
        try:
            code = self._reserve()
            return code if code is not None else self._coordinate()
        finally:
            self._over.set()
            ray.shutdown()  # its actors and placement groups end with the driver

    def _take_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number

    # Until Ray has the nodes.

    def _reserve(self) -> int | None:
        # A placement group of all nodes; where fewer may begin, soon of those that there are.
        import ray

        began = said = time.monotonic()
        every = numbers = list(range(len(self._bundles)))
        least, wait_s = self._cluster.min_nodes, self._cluster.start_timeout
        group = self._group(numbers)
        while not group.wait(_LOOK_S):
            if (code := self._stop_code()) is not None:
                return code
            waited_s = time.monotonic() - began
            if waited_s > wait_s:
                raise self._too_few(wait_s)
            if waited_s > _SOON_S and least < len(every):
                there = sorted(self._fitting())
                if len(there) >= least and there != numbers:
                    ray.util.remove_placement_group(group)
                    numbers, group = there, self._group(there)
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                self._say(f"{self._lacking()}; {wait_s - waited_s:.0f} s left")
        self._slots = {number: (group, index) for index, number in enumerate(numbers)}
        actors = {number: self._actor(number) for number in numbers}
        for number, actor in actors.items():
            placed = self._meet(actor)
            if placed is None:
                return self._stop_code()
            self._placed[number] = placed
        return None

    def _group(self, numbers: Sequence[int]) -> Any:
        # The bundles of some nodes, on different nodes; never on one where an agent is already.
        import ray

        labels = [self._labels[number] for number in numbers]
        if used := sorted({placed.ray_node for placed in self._placed.values()}):
            labels = [{**label, "ray.io/node-id": f"!in({','.join(used)})"} for label in labels]
        return ray.util.placement_group(
            [self._bundles[number] for number in numbers],
            strategy="STRICT_SPREAD",
            name=f"{self._run_dir.name}-{self._attempt.number}",
            bundle_label_selector=labels,
        )

    def _actor(self, number: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, index = self._slots[number]
        wanted = dict(self._bundles[number])
        return (
            ray.remote(Place)
            .options(
                num_gpus=wanted.pop("GPU", 0),
                num_cpus=wanted.pop("CPU", 0),
                memory=wanted.pop("memory", None),
                resources=wanted,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            )
            .remote()
        )

    def _meet(self, actor: Any) -> Placed | None:
        # Once it is placed; None: the run is over before.
        facts = self._answer(actor.facts.remote(str(self._attempt.launch), self._begun_at))
        return Placed(actor, **facts) if facts is not None else None

    def _answer(self, reference: Any) -> Any:
        # None: the run is over, and it has not come.
        import ray

        ended_at = None
        while not ray.wait([reference], timeout=_LOOK_S * 5)[0]:
            if self._fleet is None and self._is_stopped():
                return None
            if self._over.is_set():
                ended_at = ended_at or time.monotonic()
                if time.monotonic() - ended_at > _END_S:
                    return None
        return ray.get(reference)

    def _is_stopped(self) -> bool:
        return bool(self._signal) or read_stop_request(self._attempt) is not None

    def _stop_code(self) -> ExitCode | None:
        # Before there is a coordinator: the outcome of a stop that was asked for.
        if not self._is_stopped():
            return None
        request = read_stop_request(self._attempt)
        is_kept = request is not None and request.kind == "save"
        code = ExitCode.REQUEUE if is_kept else ExitCode.INTERRUPTED
        end_stopped(self._attempt, code, newest_step(self._run_dir))
        return code

    def _say(self, text: str) -> None:
        _log(text)
        status = read_record(self._run_dir.status) or {}
        status |= {"phase": "waiting for nodes", "detail": text, "updated_at": time.time()}
        with suppress(OSError):
            write_record(self._run_dir.status, status, durable=False)

    def _fitting(self) -> dict[int, dict[str, Any]]:
        # Which bundle could be on which node, by what the nodes have in all.
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"]]
        return match_nodes(self._bundles, self._labels, nodes)

    def _lacking(self) -> str:
        # Whom the run waits for, and why.
        import ray

        there, number = self._fitting(), len(self._bundles)
        missing = [n for n in range(number) if n not in there]
        have = "; ".join(
            f"{node['NodeManagerHostname']} has {_resources(node['Resources'])}"
            for node in ray.nodes()
            if node["Alive"]
        )
        if not missing:
            free = _resources(ray.available_resources())
            return f"waiting for Ray: other work has its nodes; free in all: {free} ({have})"
        wanted = "; ".join(
            f"node {n} needs {_resources(self._bundles[n])}"
            + "".join(f", {key}={value}" for key, value in self._labels[n].items())
            for n in missing
        )
        return f"waiting for Ray: it has no node for {len(missing)} of {number}: {wanted} ({have})"

    def _too_few(self, wait_s: float) -> UserError:
        what = self._lacking().removeprefix("waiting for Ray: ")
        return CommunicationError(
            f"Ray did not give the nodes within {format_duration(wait_s)}: {what}",
            where="clusters.0.launcher",
            fix="`ray status` on the cluster shows who has its nodes; ask for less (nodes, "
            "gpus_per_node, launcher.bundles); clusters[0].start_timeout waits longer",
            id="start.timeout",
        )

    # Once it has them.

    def _coordinate(self) -> int:
        fleet = self._fleet = self._make_fleet()
        fleet.write(self._attempt)
        command = [sys.executable, "-m", "isles.agent", str(self._run_dir.path)]
        command += ["--attempt", str(self._attempt.number)]
        coordinator = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,  # noqa: PLW1509  # it takes no lock
        )
        threads = [
            threading.Thread(target=self._keep, args=(number,), daemon=True)
            for number in range(len(fleet))
        ]
        for thread in threads:
            thread.start()
        forwarded = 0
        while (code := coordinator.poll()) is None:
            if self._signal != forwarded:
                forwarded = self._signal
                coordinator.send_signal(forwarded)
            time.sleep(_LOOK_S)
        self._over.set()
        if code < 0:
            fix = "it was killed, or the head ran out of memory: see `dmesg | tail` there"
            what = f"the coordinator of this run was ended by {signal.Signals(-code).name}"
            end_failed(self._attempt, agent_error(what, fix, id="run.coordinator"))
            code = ExitCode.COMMUNICATION
        for thread in threads:
            thread.join(_END_S)
        return int(code)

    def _make_fleet(self) -> Fleet:
        import ray

        self._put_first()
        cluster = self._cluster
        if (port := free_port(cluster.network.port)) is None:
            raise port_taken(cluster.network.port, socket.gethostname())
        nodes = []
        for number, ranks in enumerate(ranks_of(cluster)):
            placed = self._placed.get(number)
            name, address = (placed.host, placed.address) if placed else ("no host yet", "")
            nodes.append(FleetNode(number, name, None, address, ranks))
        _log(f"placed {', '.join(node.label for node in nodes if node.address)}")
        return Fleet(
            launcher="ray",
            nodes=tuple(nodes),
            port=port,
            min_nodes=cluster.min_nodes,
            device=self._device,
            start_timeout_s=cluster.start_timeout,
            digest="",
            resume_from=self._resume_from,
            coordinator=ray.util.get_node_ip_address(),
            sees_run_dir=all(placed.sees for placed in self._placed.values()),
        )

    def _put_first(self) -> None:
        # Where not all nodes see the run directory, the first of the ranks must: it keeps the run.
        placed, first = self._placed, self._placed.get(0)
        if all(each.sees for each in placed.values()) or (first is not None and first.sees):
            return
        for number, each in placed.items():
            if each.sees and self._bundles[number] == self._bundles[0]:
                for table in (self._slots, self._placed):
                    mine, other = table.pop(number), table.pop(0, None)
                    table[0] = mine  # type: ignore[assignment]
                    if other is not None:
                        table[number] = other  # type: ignore[assignment]
                return
        raise PreflightError(
            f"no node that may be the first sees the run directory {self._run_dir.path} (asked: "
            f"{', '.join(sorted(each.host for each in placed.values()))})",
            where=f"Ray, as seen by its job on {socket.gethostname()}",
            fix="set output_dir to a folder that the head and the nodes share; or let the head be "
            "one of the nodes, with the same user",
            id="files.output",
        )

    def _keep(self, number: int) -> None:
        # A thread: places the agent of one node, again and again.
        from ray.exceptions import RayError

        tries = 0
        while not self._over.is_set():
            placed, began, why = self._placed.get(number), time.monotonic(), ""
            try:
                if number not in self._slots:
                    self._slots[number] = (self._group([number]), 0)
                placed = placed or self._meet(self._actor(number))
                if placed is None:
                    return
                self._placed[number] = placed
                began = time.monotonic()
                if (answer := self._answer(self._start(number, placed))) is None:
                    return
                code, words = answer
                last = [line for line in words.splitlines() if line.strip()][-1:]
                why = f"its agent on {placed.host} ended with {code}: {(last or ['not a word'])[0]}"
            except RayError as error:
                host = f" on {placed.host}" if placed is not None else ""
                why = f"its actor{host} is gone: {str(error).strip().splitlines()[0]}"
            self._placed.pop(number, None)
            if self._over.wait(1.0) or self._attempt.outcome.exists():
                return
            tries = tries + 1 if time.monotonic() - began < _SHORT_S else 1
            _log(f"node {number}: {why}" + ("; it is placed anew" if tries < _TRIES else ""))
            if tries == _TRIES:
                self._give_up(number, why)
                return

    def _start(self, number: int, placed: Placed) -> Any:
        assert self._fleet is not None
        attempt, python = self._attempt, python_of(self._cluster.environment)
        meets = f"{self._fleet.meets_at}:{self._fleet.port}"
        words = [python, "-m", "isles.agent", str(self._run_dir.path) if placed.sees else meets]
        words += ["--attempt", str(attempt.number), "--node", str(number)]
        words += ["--address", placed.address]
        log = str(attempt.node_log(number))
        if not placed.sees:
            words += ["--output-dir", str(self._run_dir.path.parent), "--log", log]
        lines = [*self._lines, f"exec {shlex.join(words)}"]
        environ = network_variables(self._cluster.network, None, self._device)
        token = "" if placed.sees else self._token
        _log(f"node {number}: starting its agent on {placed.host} ({placed.address})")
        return placed.actor.run.remote("\n".join(lines), environ, token, log if placed.sees else "")

    def _give_up(self, number: int, why: str) -> None:
        assert self._fleet is not None
        self._given_up[number] = why
        if len(self._fleet) - len(self._given_up) >= self._fleet.min_nodes:
            return
        fix = f"its words are in {self._attempt.path}/node-{number}.log or above; `isles check` "
        fix += "finds more"
        what = f"node {number} cannot be started: {why}"
        error = agent_error(what, fix, ExitCode.PREFLIGHT, id="start.failed", will_recur=True)
        end_failed(self._attempt, error)


def match_nodes(
    bundles: Sequence[Mapping[str, float]],
    labels: Sequence[Mapping[str, str]],
    nodes: Sequence[dict[str, Any]],
) -> dict[int, dict[str, Any]]:
    """As many bundles as can be on different nodes, each with its node.

    Args:
        labels: that the node of each bundle must have; a selector that is no plain value counts as
            met.
        nodes: as of `ray.nodes()`.
    """
    owner: dict[int, int] = {}

    def fits(number: int, node: dict[str, Any]) -> bool:
        has, marks = node["Resources"], node.get("Labels") or {}
        plain = {key: value for key, value in labels[number].items() if not set("!(") & set(value)}
        return all(
            has.get(name, 0.0) >= wanted for name, wanted in bundles[number].items()
        ) and all(marks.get(key) == value for key, value in plain.items())

    def place(number: int, tried: set[int]) -> bool:
        for index, node in enumerate(nodes):
            if index in tried or not fits(number, node):
                continue
            tried.add(index)
            if index not in owner or place(owner[index], tried):
                owner[index] = number
                return True
        return False

    for number in range(len(bundles)):
        place(number, set())
    return {number: nodes[index] for index, number in owner.items()}


def _resources(amounts: Mapping[str, float]) -> str:
    shown = {k: v for k, v in amounts.items() if ":" not in k and k != "object_store_memory"}
    gib = {k: f"{v / 2**30:.0f} GiB" for k, v in shown.items() if k == "memory"}
    return ", ".join(f"{key} {gib.get(key, f'{value:g}')}" for key, value in sorted(shown.items()))


def _log(line: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} ray: {line}\n")
        sys.stderr.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m isles.launch.ray.driver")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--resume-from")
    options = parser.parse_args()
    run_dir = RunDir(options.run_dir)
    attempt = run_dir.attempt(options.attempt)
    if not attempt.launch.exists():
        host = os.uname().nodename
        sys.stderr.write(
            f"error: {host}, where Ray runs the job, does not see the run directory "
            f"{run_dir.path}\n"
        )
        return int(ExitCode.PREFLIGHT)
    if (outcome := read_record(attempt.outcome)) is not None:
        return int(outcome["exit_code"])
    with attempt.agent_log.open("ab") as log:  # of the coordinator as well
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        return Driver(run_dir, attempt, options.workdir, options.resume_from).run()
    except UserError as error:
        _log(error.what)
        found = agent_error(error.what, error.fix, error.exit_code, id=error.id, where=error.where)
        end_failed(attempt, found)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
