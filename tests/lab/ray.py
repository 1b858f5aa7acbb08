"""A real Ray on the pretend hosts: `ray start` on each, as its user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.lab.home import until
from tests.lab.hosts import MARK, Lab

ADDRESS = "http://10.77.1.1:8265"
_SMALL = ("--object-store-memory=100000000", "--disable-usage-stats", "--block")
# Where Ray chooses them itself, a raylet ends unless its agents have come up within 15 s:
# https://github.com/ray-project/ray/issues/65983
_PORTS = ("dashboard-agent-grpc", "dashboard-agent-listen", "runtime-env-agent", "metrics-export")
_FIXED = tuple(f"--{name}-port={port}" for port, name in enumerate(_PORTS, 6400))
_TRIES = 3


@dataclass
class RayLab:
    """A Ray cluster whose head is a1.

    Args:
        resources: of each host, as options of `ray start`.
        niceness: of Ray's workers; Ray's own 15 would let everything else here go first.
    """

    lab: Lab
    resources: Mapping[str, Sequence[str]]
    niceness: int
    _started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _tries: int = 0

    def start(self, *hosts: str) -> None:
        """Start Ray on hosts, and wait until all of them are nodes.

        Ray gives a raylet 30 s to come up; on a busy machine it is started again.
        """
        for host in hosts:
            if host != "a1":
                until(lambda: self._answers(6379), "Ray's head is up")
            self._begin(host)
            if host == "a1":
                until(lambda: self._answers(8265), "Ray's dashboard is up")
        addresses = {self.lab.address(host) for host in hosts}
        until(lambda: addresses <= self._nodes(), lambda: f"nodes of Ray: {self._nodes()}")

    def end(self, *hosts: str) -> None:
        """End Ray on hosts at once, as when they are switched off: all processes there."""
        for host in hosts or tuple(self._started):
            process = self._started.pop(host)
            self.lab.run(host, ["bash", "-c", "kill -KILL -1"])  # all but sshd, its first process
            # pytest shows it where the test has failed.
            sys.stdout.write(f"ray start on {host}: {process.communicate()[0].decode()}\n")

    def _begin(self, host: str) -> None:
        how = ["--head", "--port=6379", "--dashboard-host=0.0.0.0"]
        if host != "a1":
            how = ["--address=10.77.1.1:6379"]
        at = f"--node-ip-address={self.lab.address(host)}"
        command = [*_ray(self.lab), "start", *how, at, *_SMALL, *_FIXED, *self.resources[host]]
        # A token in ~/.ray of this machine would be asked for between the hosts.
        more = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": str(self.niceness)}
        # Ray's own processes are not a test's.
        self._started[host] = self.lab.popen(host, ["env", "-u", MARK, *command], **more)

    def _answers(self, port: int) -> bool:
        for host, process in self._started.items():
            if process.poll() is not None:
                self._tries += 1
                self.end(host)
                assert self._tries <= _TRIES, f"ray start on {host} has ended: its words are below"
                self._begin(host)
                return False
        text = f"exec 3<>/dev/tcp/10.77.1.1/{port}"
        return self.lab.run("a1", ["bash", "-c", text]).returncode == 0

    def _nodes(self) -> set[str]:
        """The addresses of those that are alive, by the head."""
        if not self._answers(8265):
            return set()
        words = ["curl", "-s", "--max-time", "30", f"{ADDRESS}/api/v0/nodes?limit=100"]
        try:
            every = json.loads(self.lab.run("a1", words).stdout)["data"]["result"]["result"]
        except (ValueError, TypeError, KeyError):  # the head has only begun
            return set()
        return {node["node_ip"] for node in every if node["state"] == "ALIVE"}


def _ray(lab: Lab) -> list[str]:
    # Ray 2.60 puts its Python into shell lines as it is: no path with a space may be in them.
    link = lab.shared / ".python"
    if not link.is_symlink():
        link.symlink_to(sys.prefix)
    return ["/shared/.python/bin/python", "/shared/.python/bin/ray"]


@contextmanager
def ray_cluster(
    lab: Lab, resources: Mapping[str, Sequence[str]], *hosts: str, niceness: int = 0
) -> Iterator[RayLab]:
    """Ray on these hosts; the first is a1. `resources` as of `RayLab`, also of hosts to come."""
    cluster = RayLab(lab, resources, niceness)
    try:
        cluster.start(*hosts)
        yield cluster
    finally:
        cluster.end()
