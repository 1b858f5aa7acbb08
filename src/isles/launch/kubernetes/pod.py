"""The first process of each pod of a run: `python -m` this module.

In the pod of index 0 it makes the run directory, or finds the directory of an earlier pod of this
start, and runs the coordinator. In the other pods it runs an agent that gets the run's files from
the coordinator. It forwards signals, reaps orphaned processes, and exits with a code for the Job's
policies: 0: the run is over; 85: another pod must continue; 1 to 5: it failed, without another pod.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import psutil

from isles.config.resolve import Resolved, load_resolved
from isles.errors import ConfigErrors, ExitCode, UserError
from isles.facts.terminal import show_streams
from isles.launch.kubernetes.manifest import FILES, SECRET
from isles.launch.queue.job import JobAllocation, JobNode
from isles.run.env import pod_address, pod_index, settle_home
from isles.run.find import find_attempt
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import MAX_LIST_BYTES, read_record

_AGAIN = int(ExitCode.REQUEUE)
_LINGER_S = 10.0
"""Longest wait for commands in this pod, such as `isles follow`, that report the run's outcome."""
_LOOK_S = 0.1


class PodAllocation(JobAllocation):
    """The pods of a start; the coordinator runs in the pod of index 0.

    Each of the other pods starts its own agent, and Kubernetes replaces a lost pod.
    """

    brings_back = True

    def __init__(self, attempt: Attempt, num_nodes: int, pending_s: float) -> None:
        start, address = _start(), pod_address()
        self.job = f"Kubernetes job {start['job']}"
        self.key = address.replace(".", "-")  # another pod has another address
        self.first_port = 0
        self.wait_s = pending_s
        names = [f"{start['prefix']}-{index}" for index in range(num_nodes)]
        self.nodes = [JobNode(name, f"{name}.{start['domain']}") for name in names]
        self.nodes[0] = JobNode(names[0], address)
        self._attempt = attempt

    def on_all_nodes(self, words: list[str], log: Path) -> list[list[str]]:
        """See JobAllocation: the agent of this pod."""
        run_dir = str(self._attempt.path.parent.parent)
        agent = [sys.executable, "-m", "isles.agent", run_dir]
        agent += ["--attempt", str(self._attempt.number), "--node", "0"]
        return [[*agent, *words, "--log", str(log)]]

    def is_preempted(self) -> bool:
        """See JobAllocation: Kubernetes preempts a pod if it ends it without a stop request."""
        return True

    def queue_again(self) -> str:
        """See JobAllocation: the exit code of this pod requests it."""
        return "Kubernetes restarts the pods, to resume the run"


def main() -> int:
    """Run this pod's agent until it exits; returns the exit code of the pod."""
    settle_home()
    process = _Process()
    index, start = pod_index(), _start()
    try:
        given = json.loads((Path(SECRET) / "start").read_text(encoding="utf-8"))
        if index == 0:
            return _first(process, start, given)
        return _other(process, index, start, given["token"])
    except UserError as error:
        sys.stdout.write(f"error: {error}\n")
        return int(error.exit_code)


def _first(process: _Process, start: Mapping[str, str], given: Mapping[str, str]) -> int:
    from isles.launch.base import Started
    from isles.launch.remote.login import started_line
    from isles.run.begin import write_launch

    resolved = load_resolved(_file("resolved.yaml"))
    run_dir, attempt = _find(resolved, given["token"]) or _begin(resolved, start, given)
    resumed_from = (read_record(attempt.fleet, MAX_LIST_BYTES) or {}).get("resume_from")
    command = [sys.executable, "-m", "isles.agent", str(run_dir.path)]
    command += ["--attempt", str(attempt.number)]
    with attempt.agent_log.open("ab") as log:
        process.start(command, log)
    write_launch(
        attempt,
        ProcessId.of(process.pid),
        world_size=resolved.world_size,
        device=resolved.device,
        command=tuple(command),
        resumed_from=Path(resumed_from) if resumed_from else None,
        launcher="kubernetes",
        job_id=start["job"],
    )
    sys.stdout.write(f"{started_line(Started(run_dir, attempt, None))}\n")
    sys.stdout.write(f"the coordinator of {run_dir.name} runs; its log is {attempt.agent_log}\n")
    sys.stdout.flush()
    code = process.wait()
    outcome = read_record(attempt.outcome) or {}
    sys.stdout.write(f"it ended with {code}: {outcome.get('reason') or 'no outcome'}\n")
    sys.stdout.flush()
    _linger(process)
    if code < 0:
        return 128 - code  # killed, for example for lack of memory
    if not outcome or outcome.get("may_go_on"):
        return _AGAIN if code in (0, _AGAIN) else code
    return code if outcome.get("state") == "failed" else 0


def _other(process: _Process, index: int, start: Mapping[str, str], token: str) -> int:
    # Only the coordinator decides that a run has failed: another pod may replace this one.
    resolved = load_resolved(_file("resolved.yaml"))
    port = resolved.config.clusters[0].network.port
    target = f"{start['prefix']}-0.{start['domain']}:{port}"
    command = [sys.executable, "-m", "isles.agent", target, "--node", str(index)]
    process.start(command, None, stdin=token)
    code = process.wait()
    if code < 0:
        return 128 - code
    found = _find(resolved, token)
    outcome = (read_record(found[1].outcome) if found is not None else None) or {}
    is_over = bool(outcome) and not outcome.get("may_go_on")
    return 0 if is_over or code == 0 else _AGAIN


def _begin(
    resolved: Resolved, start: Mapping[str, str], given: Mapping[str, str]
) -> tuple[RunDir, Attempt]:
    # The attempt of this start, if no earlier pod has made it.
    from isles.launch.base import make_fleet
    from isles.launch.ssh.node import issues
    from isles.run.begin import begin_attempt
    from isles.run.nodes import FleetNode

    text = _file("run.yaml")
    asked = {"config": resolved.config.model_dump(), "origins": resolved.origins}
    if found := issues({**asked, "text": text, "path": "run.yaml"})["issues"]:
        more = [UserError(i["what"], where=i["where"], fix=i["fix"], id=i["id"]) for i in found]
        raise more[0] if len(more) == 1 else ConfigErrors(more)  # type: ignore[arg-type]
    begun, attempt = begin_attempt(
        resolved,
        text,
        start["resume"],
        join=given["join"],
        typed=start["typed"],
        token=given["token"],
    )
    run_dir = RunDir(begun.run_dir.path.absolute())
    nodes = resolved.config.clusters[0].max_nodes
    nproc = resolved.world_size // nodes
    names = [f"{start['prefix']}-{node}" for node in range(nodes)]
    places = [FleetNode(n, name, None, name, nproc) for n, name in enumerate(names)]
    make_fleet(resolved, places, port=0, resume_from=begun.resume_from).write(attempt)
    if begun.note:
        sys.stdout.write(f"{begun.note}\n")
    return run_dir, attempt


def _find(resolved: Resolved, token: str) -> tuple[RunDir, Attempt] | None:
    return find_attempt(Path(resolved.config.output_dir), resolved.config.name, token)


class _Process:
    # This process is the first of its pod, so it forwards signals to its child.

    def __init__(self) -> None:
        self.pid = 0
        signal.signal(signal.SIGTERM, self._pass_on)

    def start(self, command: list[str], log: IO[bytes] | None, *, stdin: str = "") -> None:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT if log else None
        )
        assert child.stdin is not None
        with child.stdin as stream:
            stream.write(f"{stdin}\n".encode())
        self.pid = child.pid

    def wait(self) -> int:
        # Orphaned processes become children of the first process of a pod.
        while True:
            pid, status = os.wait()
            if pid == self.pid:
                return os.waitstatus_to_exitcode(status)

    def _pass_on(self, number: int, _frame: object) -> None:
        if not self.pid:
            os._exit(_AGAIN)
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


def _linger(process: _Process) -> None:
    # When this process exits, the pod ends, and all other processes in it.
    process.pid, deadline = -1, time.monotonic() + _LINGER_S
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while time.monotonic() < deadline and _is_visited():
        time.sleep(_LOOK_S)


def _is_visited() -> bool:
    for other in psutil.process_iter():
        with suppress(psutil.Error):
            if other.pid != os.getpid() and ("-m", "isles") in pairwise(other.cmdline()):
                return True
    return False


def _start() -> dict[str, Any]:
    return dict(json.loads(_file("start.json")))


def _file(name: str) -> str:
    return (Path(FILES) / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    show_streams()
    sys.exit(main())
