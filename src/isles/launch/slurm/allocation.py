"""The nodes of a Slurm job, as its script sees them; and how the job is queued again."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from isles.config.sections.cluster import SlurmLauncherConfig
from isles.errors import PreflightError, UserError
from isles.launch.queue.job import JobNode, address_of
from isles.launch.queue.slurm import Slurm
from isles.run.paths import Attempt
from isles.run.records import write_text_atomic


class SlurmAllocation:
    """See `isles.launch.queue.job.Allocation`.

    Args:
        launcher: of the run file.
        attempt: whose script this job runs.
        environ: of the job.
    """

    def __init__(
        self, launcher: SlurmLauncherConfig, attempt: Attempt, environ: Mapping[str, str]
    ) -> None:
        self._launcher = launcher
        self._attempt = attempt
        self._environ = environ
        self._slurm = Slurm(launcher.bin_path)
        self._id = environ["SLURM_JOB_ID"]
        self.job = f"Slurm job {self._id}"
        self.key = f"{self._id}-{environ.get('SLURM_RESTART_COUNT', '0')}"
        self.first_port = int(self._id) % 100
        self.nodes = self._nodes()

    def _nodes(self) -> list[JobNode]:
        names = self._run("scontrol", "show", "hostnames", self._environ["SLURM_JOB_NODELIST"])
        hosts = names.split()
        if len(hosts) == 1:
            return [JobNode(hosts[0], "127.0.0.1")]  # no port is open to the network
        return [
            JobNode(host, address_of([host, self._known_address(host)], host)) for host in hosts
        ]

    def _known_address(self, host: str) -> str:
        """The address that Slurm itself uses; not every node knows the names of the others."""
        found = re.search(r" NodeAddr=(\S+)", self._run("scontrol", "show", "node", "-o", host))
        return found[1] if found else host

    def on_all_nodes(self, words: list[str], log: Path) -> list[list[str]]:
        """See Allocation: one task a node, which may use all cores that the job has there."""
        nodes, cpus = len(self.nodes), self._launcher.cpus_per_node
        return [
            [
                self._slurm.path("srun"),
                f"--nodes={nodes}",
                f"--ntasks={nodes}",
                "--ntasks-per-node=1",
                # Since Slurm 22.05 a step no longer takes this from its job.
                *([f"--cpus-per-task={cpus}"] if cpus else []),
                "--cpu-bind=none",
                "--export=ALL",
                # What becomes of the other nodes when one is lost, the coordinator decides.
                "--no-kill",
                "--kill-on-bad-exit=0",
                "--wait=0",
                "--output",
                str(log.parent).replace("%", "%%") + f"/{log.name}",
                "--open-mode=append",
                sys.executable,
                "-m",
                "isles.agent",
                str(self._attempt.path.parent.parent),
                "--attempt",
                str(self._attempt.number),
                *words,
            ]
        ]

    def save_at(self) -> float | None:
        """See Allocation: Slurm sends SIGUSR1 to the script."""
        return None

    def is_preempted(self) -> bool:
        """See Allocation: a job with a time of grace gets SIGTERM, and is not queued again."""
        text = self._run("scontrol", "show", "job", "-o", self._id)
        return re.search(r" PreemptTime=\d", text) is not None

    def queue_again(self) -> str:
        """See Allocation."""
        # Slurm ends this job to queue it again, and with it the command that has asked for it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        done = self._slurm.run("scontrol", "requeue", self._id)
        if done.returncode == 0:
            return f"{self.job} is queued again, to go on"
        again = self._slurm.run(
            "sbatch", "--parsable", f"--dependency=afterany:{self._id}", str(self._attempt.script)
        )
        new = again.stdout.strip().partition(";")[0]
        if again.returncode or not new.isdecimal():
            raise UserError(
                again.stderr.strip() or done.stderr.strip() or "sbatch says nothing",
                where=self.job,
                fix="`isles train` again submits it",
                id="queue.refused",
            )
        write_text_atomic(self._attempt.path / "job-id", f"{new}\n")
        return f"Slurm does not queue this job again: it goes on as job {new}"

    def _run(self, command: str, *args: str) -> str:
        done = self._slurm.run(command, *args)
        if done.returncode:
            raise PreflightError(
                f"{command} {' '.join(args)} failed: {done.stderr.strip()}",
                where=self.job,
                fix="is slurmctld up? scontrol ping",
                id="queue.commands",
            )
        return done.stdout
