"""Placement in Ray: bundles on different nodes, and in each bundle an actor that runs an agent."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from isles.errors import CommunicationError, UserError
from isles.facts.units import format_duration
from isles.launch.ray.bundles import (
    RayNode,
    RayRequest,
    amounts_text,
    lacking,
    match_nodes,
    nodes_text,
)
from isles.run.paths import Attempt

_LOOK_S = 0.1
_SAY_EVERY_S = 5.0
_SOON_S = 10.0
"""Seconds that a run of MIN:MAX nodes waits for Ray to have all nodes, before it starts with the
available nodes; the coordinator then waits for the others."""
_END_S = 10.0


class NodeActor:
    """The actor of one node. Ray sends it to the node by value. It uses only the standard library,
    because the node's Python may lack isles; the agent's own `environment` provides isles.

    Args:
        script: lines of bash that run the agent. The agent starts immediately, and imports while
            the
            run waits for other nodes; `run` passes its arguments.
    """

    def __init__(self, script: str, environ: dict[str, str]) -> None:
        prctl = ctypes.CDLL(None).prctl

        def prepare() -> None:
            # The agent is a child of the actor and ends with it; Ray blocks signals in both.
            prctl(1, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())

        # Ray sets it for all ranks of the actor together, but the agent divides the cores itself.
        own = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        self._out = tempfile.TemporaryFile()  # noqa: SIM115
        self._agent = subprocess.Popen(
            ["bash", "-c", script],
            stdin=subprocess.PIPE,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            env={**own, **environ},
            preexec_fn=prepare,  # noqa: PLW1509  # it acquires no lock
        )

    def facts(self, launch: str, begun_at: float) -> dict[str, Any]:
        """Host of the actor, and whether it sees the run directory, by the launch record of an
        attempt."""
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

    def run(self, arguments: str, token: str, log: str) -> tuple[int, str]:
        """Let the agent run until it exits; returns its exit code and the end of its output.

        Args:
            arguments: arguments of the agent.
            token: read by the agent after its arguments; it is stored nowhere else.
            log: file for the agent's output, after it has read both.
        """
        had = os.path.getsize(log) if os.path.exists(log) else 0  # noqa: PTH110, PTH202
        with suppress(BrokenPipeError):  # it has exited already
            self._agent.communicate(f"{arguments}\n{token}\n".encode())
        code = self._agent.wait()
        self._out.seek(0)
        before, words = self._out.read(), b""
        with suppress(OSError), open(log, "a+b") as file:  # noqa: PTH123
            file.seek(max(had, file.seek(0, os.SEEK_END) - 4096))
            words = file.read()
            file.write(before)
        return code, (words or before[-4096:]).decode(errors="replace")


def why_gone(error: Exception) -> str:
    """Why Ray has lost an actor, in a line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # For an actor that failed to start, the first line has the place, the last one the reason.
    return lines[-1 if "creation task" in lines[0] else 0].strip()


@dataclass(frozen=True, slots=True)
class Placed:
    """A started actor: its handle, and facts about its node."""

    actor: Any
    host: str
    address: str
    ray_node: str
    sees: bool


class Placement:
    """The bundles and actors of one attempt.

    Args:
        name: name of its placement groups, for the dashboard.
        begun_at: identifies the attempt, for a node that sees its directory.
        is_over: returns whether waiting for actors is pointless.

    Attributes:
        placed: the started actors, by the number of their node.
    """

    def __init__(
        self,
        name: str,
        attempt: Attempt,
        begun_at: float,
        request: RayRequest,
        is_over: Callable[[], bool],
    ) -> None:
        import ray

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        self.placed: dict[int, Placed] = {}
        self._request = request
        self._name = name
        self._is_over = is_over
        self._launch = str(attempt.launch)
        self._begun_at = begun_at
        self._slots: dict[int, tuple[Any, int]] = {}

    def reserve(self, say: Callable[[str], object]) -> bool:
        """Wait for all nodes, or only briefly for the available nodes if they are enough to start.

        Args:
            say: called every few seconds with a line about the wait.

        Returns:
            False: the run was over before.

        Raises:
            CommunicationError: the nodes were not available within start_timeout.
        """
        import ray
        from ray.exceptions import RayError

        began = said = time.monotonic()
        every = numbers = list(range(len(self._request.bundles)))
        least, wait_s = self._request.min_nodes, self._request.start_timeout_s
        group = self._group(numbers)
        while not group.wait(_LOOK_S):
            waited_s = time.monotonic() - began
            if self._is_over():
                return False
            if waited_s > wait_s:
                raise self._late(f"the nodes were not available within {{}}: {self._lacking()}")
            if waited_s > _SOON_S and least < len(every):
                there = sorted(
                    match_nodes(self._request.bundles, self._request.labels, self._nodes())
                )
                if len(there) >= least and there != numbers:
                    ray.util.remove_placement_group(group)
                    numbers, group = there, self._group(there)
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                say(f"waiting for nodes: {self._lacking()}; {wait_s - waited_s:.0f} s left")
        self._slots = {number: (group, index) for index, number in enumerate(numbers)}
        actors = {number: self._actor(number) for number in numbers}
        for number, actor in actors.items():
            try:
                found = self._meet(actor, began + wait_s)
            except RayError as error:  # it is started again, like an actor that is lost later
                say(f"node {number}: its actor is gone ({why_gone(error)})")
                continue
            if found is None and self._is_over():
                return False
            if found is None:
                raise self._late(f"Ray has not started the actor of node {number} within {{}}")
            self.placed[number] = found
        return True

    def place(self, number: int) -> Placed | None:
        """Start the actor of a node again, as soon as Ray can; None: the run was over before.

        Raises:
            RayError: the actor is already lost.
        """
        if number not in self._slots:
            self._slots[number] = (self._group([number]), 0)
        found = self._meet(self._actor(number))
        if found is not None:
            self.placed[number] = found
        return found

    def swap(self, one: int, other: int) -> None:
        """Swap the numbers of two nodes with equal bundles."""
        for table in (self._slots, self.placed):
            values: dict[int, Any] = table
            mine, theirs = values.pop(one, None), values.pop(other, None)
            values |= {n: v for n, v in ((one, theirs), (other, mine)) if v is not None}

    def answer(self, reference: Any, until_s: float | None = None, *, end_s: float = _END_S) -> Any:
        """Result of an actor's method; None: no result in time, or the run is over.

        Args:
            reference: the pending result.
            until_s: longest wait, by time.monotonic(); None: no limit.
            end_s: longest wait after the end of the run, while the agents exit.

        Raises:
            RayError: the actor is lost.
        """
        import ray

        over_at: float | None = None
        while not ray.wait([reference], timeout=_LOOK_S * 5)[0]:
            now = time.monotonic()
            over_at = over_at or (now if self._is_over() else None)
            if (over_at is not None and now - over_at >= end_s) or (until_s and now > until_s):
                return None
        return ray.get(reference)

    def _group(self, numbers: Sequence[int]) -> Any:
        # The bundles of some nodes, on different nodes; never on a node with an agent.
        import ray

        labels = [dict(self._request.labels[number]) for number in numbers]
        if used := sorted({placed.ray_node for placed in self.placed.values()}):
            labels = [{**label, "ray.io/node-id": f"!in({','.join(used)})"} for label in labels]
        return ray.util.placement_group(
            [dict(self._request.bundles[number]) for number in numbers],
            strategy="STRICT_SPREAD",
            name=self._name,
            bundle_label_selector=labels,
        )

    def _actor(self, number: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, index = self._slots[number]
        wanted = dict(self._request.bundles[number])
        kind = ray.remote(NodeActor).options(
            num_gpus=wanted.pop("GPU", 0),
            num_cpus=wanted.pop("CPU", 0),
            memory=wanted.pop("memory", None),
            resources=wanted,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        )
        return kind.remote(self._request.script, dict(self._request.environ))

    def _meet(self, actor: Any, until_s: float | None = None) -> Placed | None:
        facts = actor.facts.remote(self._launch, self._begun_at)
        facts = self.answer(facts, until_s, end_s=0.0)
        return Placed(actor, **facts) if facts is not None else None

    def _nodes(self) -> list[RayNode]:
        import ray

        return [
            RayNode(str(node["NodeManagerHostname"]), node["Resources"], node.get("Labels") or {})
            for node in ray.nodes()
            if node["Alive"]
        ]

    def _lacking(self) -> str:
        # The nodes that the run waits for, and why.
        import ray

        nodes, bundles, labels = self._nodes(), self._request.bundles, self._request.labels
        fitting = match_nodes(bundles, labels, nodes)
        if len(fitting) < len(bundles):
            return f"{lacking(bundles, labels, fitting)} ({nodes_text(nodes)})"
        free = amounts_text(ray.available_resources())
        return f"Ray's nodes are busy with other work (free in total: {free}; {nodes_text(nodes)})"

    def _late(self, what: str) -> UserError:
        return CommunicationError(
            what.replace("{}", format_duration(self._request.start_timeout_s)),
            where="clusters.0.launcher",
            fix="`ray status` on the cluster shows who uses its nodes. Request less (nodes, "
            "gpus_per_node, clusters.0.launcher.bundles), or raise clusters.0.start_timeout",
            id="start.timeout",
        )
