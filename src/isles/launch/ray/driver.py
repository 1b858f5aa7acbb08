"""The driver of a Ray job: starts the agents of one attempt, and starts lost agents again.

    python -m isles.launch.ray.driver RUN_DIR --attempt N --begun-at T

The job's entrypoint starts it, on the head of the cluster. The coordinator, another process on the
head, decides about ranks, restarts and stops; it survives the loss of every node but the head. The
request to Ray is in `launch.json`: the driver does not read the run file, because the config
classes are slow to import.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import multiprocessing
import os
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from isles.errors import ExitCode, PreflightError, UserError, not_installed
from isles.facts.terminal import show_streams
from isles.launch.ray.bundles import RayRequest
from isles.launch.ray.placement import Placed, Placement, why_gone
from isles.launch.ssh.facts import free_port, port_taken
from isles.run.env import settle_home
from isles.run.nodes import Fleet, FleetNode
from isles.run.outcome import agent_error, end_failed, end_stopped
from isles.run.paths import Attempt, RunDir
from isles.run.process import die_with_parent, signal_name
from isles.run.records import read_record, write_record
from isles.run.restarts import newest_step
from isles.run.stop import read_stop_request

_LOOK_S = 0.1
_SHORT_S = 60.0
_TRIES = 3
"""Number of consecutive exits within `_SHORT_S` after which an agent's node is given up."""
_END_S = 10.0


class Driver:
    """Starts the agents of one attempt.

    Args:
        launch: the launch record of the attempt.
    """

    placement: Placement
    fleet: Fleet

    def __init__(self, run_dir: RunDir, attempt: Attempt, launch: Mapping[str, Any]) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._launch = launch
        self._request = RayRequest(**launch["request"])
        self._token = attempt.token.read_text(encoding="utf-8").strip()
        self._given_up: dict[int, str] = {}
        self._has_begun = False
        self._over = threading.Event()
        self._signal = 0

    def run(self) -> int:
        """Start the agents and the coordinator, and wait for the end of the run; returns its exit
        code.

        Raises:
            UserError: Ray does not provide the nodes, or they do not see the run directory, or Ray
                is not
                installed on this host.
        """
        if (error := not_installed("ray", "launcher ray", sys.executable, "ray")) is not None:
            raise error
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
        # Forked before Ray has threads. Its imports run while Ray starts.
        fork = multiprocessing.get_context("fork")
        waits, go = fork.Pipe(duplex=False)
        arguments = (waits, go, self._run_dir.path, self._attempt.number)
        self._coordinator = fork.Process(target=_coordinator, args=arguments, daemon=True)
        self._coordinator.start()
        waits.close()
        import ray

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take_signal)
        ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
        name = f"{self._run_dir.name}-{self._attempt.number}"
        self.placement = Placement(
            name, self._attempt, self._launch["begun_at"], self._request, self._is_over
        )
        try:
            if not self.placement.reserve(self._say):
                return self._stop()
            return self._coordinate(go)
        finally:
            self._over.set()
            ray.shutdown()  # its actors and placement groups end with the driver

    def _take_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number

    def _is_over(self) -> bool:
        # Handles signals until the coordinator does, by writing a stop request.
        if self._has_begun:
            return self._over.is_set()
        return bool(self._signal) or read_stop_request(self._attempt) is not None

    def _stop(self) -> int:
        request = read_stop_request(self._attempt)
        is_kept = request is not None and request.kind == "save"
        code = ExitCode.REQUEUE if is_kept else ExitCode.INTERRUPTED
        end_stopped(self._attempt, code, newest_step(self._run_dir))
        return int(code)

    def _say(self, text: str) -> None:
        _log(text)
        status = read_record(self._run_dir.status) or {}
        status |= {"phase": "waiting for nodes", "detail": text, "updated_at": time.time()}
        with suppress(OSError):
            write_record(self._run_dir.status, status, durable=False)

    def _coordinate(self, go: Connection) -> int:
        fleet = self.fleet = self._make_fleet()
        fleet.write(self._attempt)
        self._has_begun = True
        go.send("the nodes are ready")
        threads = [
            threading.Thread(target=self._keep, args=(number,), daemon=True)
            for number in range(len(fleet))
        ]
        for thread in threads:
            thread.start()
        forwarded = 0
        while (code := self._coordinator.exitcode) is None:
            if self._signal != forwarded:
                forwarded = self._signal
                assert self._coordinator.pid is not None, "it was started"
                os.kill(self._coordinator.pid, forwarded)
            time.sleep(_LOOK_S)
        self._over.set()
        if code < 0:
            fix = "it was killed, or the head ran out of memory; run `dmesg | tail` there"
            what = f"the coordinator of this run was ended by {signal_name(-code)}"
            end_failed(self._attempt, agent_error(what, fix, id="run.coordinator"))
            code = ExitCode.COMMUNICATION
        for thread in threads:
            thread.join(_END_S)
        return int(code)

    def _make_fleet(self) -> Fleet:
        import ray

        self._put_first()
        request, every = self._request, self.placement.placed
        if (port := free_port(request.port)) is None:
            raise port_taken(request.port, socket.gethostname())
        nodes = []
        for number, ranks in enumerate(request.ranks):
            placed = every.get(number)
            name, address = (placed.host, placed.address) if placed else ("no host yet", "")
            nodes.append(FleetNode(number, name, None, address, ranks))
        _log(f"placed {', '.join(node.label for node in nodes if node.address)}")
        return Fleet(
            launcher="ray",
            nodes=tuple(nodes),
            port=port,
            min_nodes=request.min_nodes,
            device=request.device,
            start_timeout_s=request.start_timeout_s,
            digest="",
            resume_from=self._launch["resumed_from"],
            coordinator=ray.util.get_node_ip_address(),
            sees_run_dir=all(placed.sees for placed in every.values()),
        )

    def _put_first(self) -> None:
        # If not all nodes see the run directory, the first node must, because it keeps the run.
        bundles, placed = self._request.bundles, self.placement.placed
        first = placed.get(0)
        if all(each.sees for each in placed.values()) or (first is not None and first.sees):
            return
        for number, each in placed.items():
            if each.sees and bundles[number] == bundles[0]:
                self.placement.swap(0, number)
                return
        raise PreflightError(
            f"no possible first node sees the run directory {self._run_dir.path} (checked: "
            f"{', '.join(sorted(each.host for each in placed.values()))})",
            where=f"Ray, as seen by its job on {socket.gethostname()}",
            fix="set output_dir to a folder that the head and the nodes share, or make the head "
            "one of the nodes, with the same user",
            id="files.output",
        )

    def _keep(self, number: int) -> None:
        # A thread that starts the agent of one node, repeatedly.
        from ray.exceptions import RayError

        placement, tries = self.placement, 0
        while not self._over.is_set():
            placed, began = placement.placed.get(number), time.monotonic()
            try:
                placed = placed or placement.place(number)
                if placed is None:
                    return
                began = time.monotonic()
                if (answer := placement.answer(self._start(number, placed))) is None:
                    return
                code, words = answer
                last = [line for line in words.splitlines() if line.strip()][-1:]
                why = f"its agent on {placed.host} exited with {code}: {(last or ['no output'])[0]}"
            except RayError as error:
                host = f" on {placed.host}" if placed is not None else ""
                why = f"its actor{host} is gone: {why_gone(error)}"
            placement.placed.pop(number, None)
            if self._over.wait(1.0) or self._attempt.outcome.exists():
                return
            tries = tries + 1 if time.monotonic() - began < _SHORT_S else 1
            _log(f"node {number}: {why}" + ("; starting it again" if tries < _TRIES else ""))
            if tries == _TRIES:
                self._give_up(number, why)
                return

    def _start(self, number: int, placed: Placed) -> Any:
        attempt, meets = self._attempt, f"{self.fleet.meets_at}:{self.fleet.port}"
        words = [str(self._run_dir.path) if placed.sees else meets]
        words += ["--attempt", str(attempt.number), "--node", str(number)]
        log = str(attempt.node_log(number))
        words += ["--address", placed.address, "--log", log]
        if not placed.sees:
            words += ["--output-dir", str(self._run_dir.path.parent)]
        token = "" if placed.sees else self._token
        _log(f"node {number}: starting its agent on {placed.host} ({placed.address})")
        return placed.actor.run.remote(shlex.join(words), token, log)

    def _give_up(self, number: int, why: str) -> None:
        self._given_up[number] = why
        if len(self.fleet) - len(self._given_up) >= self.fleet.min_nodes:
            return
        fix = f"see {self._attempt.path}/node-{number}.log or the output above; `isles check` "
        fix += "finds more"
        what = f"cannot start node {number}: {why}"
        error = agent_error(what, fix, ExitCode.PREFLIGHT, id="start.failed", will_recur=True)
        end_failed(self._attempt, error)


def _coordinator(waits: Connection, go: Connection, run_dir: Path, attempt: int) -> None:
    # A separate process; it ends with the driver, even if the driver has already ended.
    die_with_parent()
    go.close()
    agent = importlib.import_module(
        "isles.agent.__main__"
    )  # which other launchers also start by name
    importlib.import_module("isles.agent.lead")
    try:
        waits.recv()
    except EOFError:
        return
    sys.argv = ["isles.agent", str(run_dir), "--attempt", str(attempt)]
    sys.exit(agent.main())


def _log(line: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} ray: {line}\n")
        sys.stderr.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m isles.launch.ray.driver")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--begun-at", type=float, required=True, help="identifies the attempt")
    options = parser.parse_args()
    settle_home()
    run_dir = RunDir(options.run_dir)
    attempt = run_dir.attempt(options.attempt)
    # This host may have a different run with this name.
    launch = read_record(attempt.launch) or {}
    if launch.get("begun_at") != options.begun_at:
        error = PreflightError(
            f"{os.uname().nodename}, where Ray runs the job, does not see the run directory "
            f"{run_dir.path}",
            fix="set output_dir to a folder that it shares with the submitting machine, or submit "
            "on the cluster: set clusters.0.launcher.login",
            id="files.output",
        )
        sys.stderr.write(f"error: {error}\n")
        return int(ExitCode.PREFLIGHT)
    if (outcome := read_record(attempt.outcome)) is not None:
        return int(outcome["exit_code"])
    with attempt.agent_log.open("ab") as log:  # also the coordinator's log
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        return Driver(run_dir, attempt, launch).run()
    except UserError as error:
        _log(error.what)
        found = agent_error(error.what, error.fix, error.exit_code, id=error.id, where=error.where)
        end_failed(attempt, found)
        return int(error.exit_code)
    except Exception as error:  # the edge of a process that nobody sees
        traceback.print_exc()
        what = f"the driver of the Ray job failed: {type(error).__name__}: {error!s:.300}"
        fix = f"see its traceback in {attempt.agent_log}"
        end_failed(attempt, agent_error(what, fix, ExitCode.TRAINING, id="start.failed"))
        return int(ExitCode.TRAINING)


if __name__ == "__main__":
    show_streams()
    sys.exit(main())
