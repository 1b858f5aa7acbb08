"""The nodes of a PBS job, as its script sees them; and how the job is queued again."""

from __future__ import annotations

import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from isles.config.sections.cluster import PbsLauncherConfig
from isles.errors import CommunicationError, UserError
from isles.launch.queue.job import JobNode, address_of
from isles.launch.queue.pbs import Pbs, read_dialect
from isles.run.paths import Attempt
from isles.run.records import write_text_atomic

_SUBMIT_S = 60.0
"""Longest wait for qsub when a job submits itself again."""


class PbsAllocation:
    """See `isles.launch.queue.job.Allocation`.

    Args:
        launcher: of the run file.
        attempt: whose script this job runs.
        environ: of the job.
        num_nodes: how many nodes the run is for.
    """

    def __init__(
        self,
        launcher: PbsLauncherConfig,
        attempt: Attempt,
        environ: Mapping[str, str],
        num_nodes: int,
    ) -> None:
        self.submit_s = _SUBMIT_S
        self._began = time.monotonic()
        self._launcher = launcher
        self._attempt = attempt
        self._environ = environ
        self._pbs = Pbs(launcher.bin_path)
        self._id = environ["PBS_JOBID"]
        self.job = f"PBS job {self._id}"
        self.key = self._id
        self.first_port = int("".join(c for c in self._id.partition(".")[0] if c.isdigit())) % 100
        self.nodes = self._nodes(num_nodes)

    def _nodes(self, num_nodes: int) -> list[JobNode]:
        # A node file repeats a host for each of its processes.
        lines = Path(self._environ["PBS_NODEFILE"]).read_text(encoding="utf-8").split()
        hosts = list(dict.fromkeys(lines))
        if len(hosts) != num_nodes:
            raise CommunicationError(
                f"{self.job} has {len(hosts)} hosts ({' '.join(hosts)}), and the run is for "
                f"{num_nodes}",
                where=f"host {socket.gethostname()}",
                fix=f"ask for {num_nodes} different hosts in the lines with #PBS -l "
                "(clusters[0].launcher.resources)",
                id="queue.nodes",
            )
        if num_nodes == 1:
            return [JobNode(hosts[0], "127.0.0.1")]  # no port is open to the network
        return [JobNode(host, address_of([host], host)) for host in hosts]

    def on_all_nodes(self, words: list[str], log: Path) -> list[list[str]]:
        """See Allocation: the job's own script, which hands arguments on to the agent.

        A task of pbsdsh gets no variable of the job and begins in $HOME; the script makes what the
        ranks run in. Where there is no pbsdsh, ssh starts the same.
        """
        task = ["/bin/bash", "-l", str(self._attempt.script), *words, "--log", str(log)]
        if len(self.nodes) == 1:
            return [task]
        pbsdsh = shutil.which(self._pbs.path("pbsdsh"))
        if pbsdsh is not None:
            each = ["-u"] if read_dialect(self._attempt) == "torque" else []
            return [[pbsdsh, *each, "--", *task]]
        ssh = ["ssh", "-n", "-o", "BatchMode=yes"]
        return [[*ssh, node.name, shlex.join(task)] for node in self.nodes]

    def save_at(self) -> float | None:
        """See Allocation: PBS sends no signal before its time limit."""
        if self._launcher.time is None:
            return None
        return self._began + self._launcher.time - self._launcher.save_before

    def is_preempted(self) -> bool:
        """See Allocation: PBS queues a job that it preempts again by itself."""
        return False

    def queue_again(self) -> str:
        """See Allocation: the same script once more, from here or from the host that submitted."""
        script, folder = self._attempt.script, self._environ.get("PBS_O_WORKDIR", ".")
        submit = f"cd {shlex.quote(folder)} && {shlex.join([self._pbs.path('qsub'), str(script)])}"
        host = self._environ.get("PBS_O_HOST", "")
        there = ["ssh", "-n", "-o", "BatchMode=yes", host, submit]
        for command in ["/bin/bash", "-c", submit], there:
            try:
                done = subprocess.run(
                    command, check=False, capture_output=True, text=True, timeout=self.submit_s
                )
            except subprocess.TimeoutExpired:
                # A job that was taken without an answer finds the end on record, and ends.
                raise self._refused(f"qsub has not answered within {self.submit_s:.0f} s") from None
            words = done.stdout.split()
            if done.returncode == 0 and words:
                write_text_atomic(self._attempt.path / "job-id", f"{words[-1]}\n")
                return f"it goes on as PBS job {words[-1]}"
            if not host:
                break
        raise self._refused(done.stderr.strip() or f"qsub has ended with {done.returncode}")

    def _refused(self, what: str) -> UserError:
        return UserError(
            what, where=self.job, fix="`isles train` again submits it", id="queue.refused"
        )
