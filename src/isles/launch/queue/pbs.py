"""OpenPBS and Torque: their commands, the job of a run, and the nodes of a job."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from isles.config.sections.cluster import PbsLauncherConfig
from isles.errors import CommunicationError, ExitCode, PreflightError, UserError
from isles.facts.units import format_duration
from isles.launch.queue.job import (
    Allocation,
    JobNode,
    JobReport,
    QueueJob,
    Scheduler,
    address_of,
    last_line,
)
from isles.launch.queue.reasons import PBS_REFUSALS, pbs_ended, pbs_pending
from isles.launch.ssh.shell import Result
from isles.run.paths import Attempt
from isles.run.records import read_record, write_record, write_text_atomic

Dialect = Literal["openpbs", "torque"]

_RUNNING = ("R", "E", "B", "S", "U")
_WAITING = ("Q", "H", "W", "T", "M")
_JOB = re.compile(r"\d+(\[\])?\.?[\w.-]*")

_SUBMIT_S = 60.0
"""Longest wait for qsub when a job submits itself again."""


@dataclass(frozen=True, slots=True)
class Pbs(Scheduler):
    """The commands of PBS on one machine."""

    name = "PBS"
    submit_command = ("qsub",)
    refusals = PBS_REFUSALS
    array_option = r"\s*-[Jt]\s*\d"
    new_words = ("Q",)

    def submitted_id(self, done: Result) -> str | None:
        words = done.stdout.split()
        is_id = done.returncode == 0 and bool(words) and _JOB.fullmatch(words[-1]) is not None
        return words[-1] if is_id else None

    def find(self, attempt: Attempt) -> str | None:
        """See Scheduler: no other job has this output."""
        output = str(attempt.path / "pbs.out")
        done = self.run("qstat", "-f")
        if done.returncode:
            where = f"{self.path('qstat')} -f"
            raise PreflightError(last_line(done), where=where, id="queue.commands")
        for text in re.split(r"^Job Id: ", done.stdout, flags=re.MULTILINE)[1:]:
            to = read_attributes(text).get("Output_Path", "")
            if to == output or to.endswith(f":{output}"):
                return text.split()[0]
        return None

    def dialect(self) -> Dialect:
        """Which PBS it is, by what `qstat --version` says.

        Slurm and Grid Engine have a qstat of their own: its name says nothing.

        Raises:
            PreflightError: it is neither.
        """
        try:
            done = self.run("qstat", "--version")
        except PreflightError as error:
            raise PreflightError(
                error.what,
                where=f"{self.path('qstat')} on {self.shell.name}",
                fix="call isles on the cluster's login node, or name it: launcher.login; or name "
                "the folder of PBS's commands: launcher.bin_path",
                id="queue.commands",
            ) from None
        text = f"{done.stdout}\n{done.stderr}"
        if re.search(r"pbs_version\s*=|PBSPro", text):
            return "openpbs"
        if re.search(r"^\s*Version:\s*\d", text, re.MULTILINE):
            return "torque"
        first = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
        raise PreflightError(
            f"qstat --version says {first[:80]!r}: this is no PBS",
            where=f"{self.path('qstat')} on {self.shell.name}",
            fix="use launcher: {kind: slurm, ...} where Slurm has a qstat of its own; or say "
            "which PBS it is: launcher.dialect=openpbs or torque",
            id="queue.commands",
        )


def write_dialect(attempt: Attempt, dialect: str) -> None:
    """Note which PBS takes the job of an attempt; the job itself reads it."""
    write_record(attempt.path / "pbs.json", {"dialect": dialect})


def read_dialect(attempt: Attempt) -> Dialect:
    """Which PBS has taken, or takes, the job of an attempt."""
    noted = (read_record(attempt.path / "pbs.json") or {}).get("dialect")
    return "torque" if noted == "torque" else "openpbs"


@dataclass(frozen=True, slots=True)
class PbsJob(QueueJob):
    """The PBS job of one start of a run."""

    cancel_command: ClassVar[str] = "qdel"

    def state(self) -> JobReport:
        # Torque knows -x as a wish for XML, and shows ended jobs for a while without it.
        is_torque = read_dialect(self.attempt) == "torque"
        words = ["-f", self.job_id] if is_torque else ["-x", "-f", self.job_id]
        done = self.queue.run("qstat", *words)
        if done.returncode == 0 and "job_state" in done.stdout:
            return self._report_from(read_attributes(done.stdout))
        if "unknown job" in done.stderr.lower():
            return self.report("ended", "it is over, and PBS knows no more of it", "UNKNOWN")
        raise UserError(
            f"qstat does not say how job {self.job_id} stands: {last_line(done)}",
            where=f"{self.queue.path('qstat')} {' '.join(words)}",
            fix="is the PBS server up? qstat -B",
            id="queue.commands",
        )

    def judge(self, report: JobReport) -> tuple[ExitCode, bool]:
        request = read_record(self.attempt.stop_request) or {}
        # The script's own request, before the time limit, does not mean that the run is to end.
        is_stop = bool(request and not request.get("requeue")) or report.word.endswith(" 271")
        if is_stop and read_record(self.attempt.stopped) is not None:
            return ExitCode.REQUEUE, True  # its ranks had saved when PBS killed the script
        return (ExitCode.INTERRUPTED if is_stop else ExitCode.TRAINING), is_stop

    def output(self) -> Path:
        log = self.attempt.path / "pbs.log"
        return log if log.exists() else self.attempt.path / "pbs.out"

    def _report_from(self, attributes: dict[str, str]) -> JobReport:
        letter = attributes.get("job_state", "?")
        # a1/0*4+a2/0*4
        parts = attributes.get("exec_host", "").split("+")
        nodes = "+".join(dict.fromkeys(part.partition("/")[0] for part in parts if part))
        if letter in _WAITING:
            has_run = attributes.get("run_count", "0") not in ("", "0")
            has_run = has_run or self.attempt.rank_record(0).exists()
            reason, fix = pbs_pending(letter, attributes, self.job_id)
            return self.report("requeued" if has_run else "pending", reason, letter, fix=fix)
        if letter in _RUNNING:
            reason = _where_running(letter, attributes, nodes)
            return self.report("running", reason, letter, nodes=nodes)
        status = attributes.get("Exit_status", attributes.get("exit_status", ""))
        reason, fix = pbs_ended(status, attributes)
        return self.report("ended", reason, f"{letter} {status}".strip(), nodes=nodes, fix=fix)


def read_attributes(text: str) -> dict[str, str]:
    """The attributes of one job as `qstat -f` prints them; a long one goes on after a tab."""
    found: dict[str, str] = {}
    key = ""
    for line in text.splitlines():
        if line.startswith("\t") and key:
            found[key] += line.removeprefix("\t")
        elif " = " in line:
            key, _, value = line.lstrip().partition(" = ")
            found[key] = value
    return found


def _where_running(letter: str, attributes: dict[str, str], nodes: str) -> str:
    if letter == "E":
        return f"it is ending on {nodes}"
    if letter in ("S", "U"):
        return f"it is suspended on {nodes}"
    limit = _seconds(attributes.get("Resource_List.walltime", ""))
    used = _seconds(attributes.get("resources_used.walltime", ""))
    if limit is None:
        return f"on {nodes}"
    return f"on {nodes}; its time limit is in {format_duration(max(0.0, limit - (used or 0.0)))}"


def _seconds(walltime: str) -> float | None:
    if not re.fullmatch(r"\d+(:\d+){0,3}", walltime):
        return None
    seconds = 0.0
    for part in walltime.split(":"):
        seconds = seconds * 60 + int(part)
    return seconds


class PbsAllocation(Allocation):
    """The nodes of a PBS job.

    Args:
        attempt: whose script this job runs.
        num_nodes: how many nodes the run is for.
    """

    submit_s = _SUBMIT_S

    def __init__(
        self,
        launcher: PbsLauncherConfig,
        attempt: Attempt,
        environ: Mapping[str, str],
        num_nodes: int,
    ) -> None:
        job_id = environ["PBS_JOBID"]
        super().__init__("PBS", job_id, job_id, attempt)
        self._began = time.monotonic()
        self._launcher = launcher
        self._environ = environ
        self._pbs = Pbs(launcher.bin_path)
        # A node file repeats a host for each of its processes.
        lines = Path(environ["PBS_NODEFILE"]).read_text(encoding="utf-8").split()
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
            self.nodes = [JobNode(hosts[0], "127.0.0.1")]  # no port is open to the network
        else:
            self.nodes = [JobNode(host, address_of([host], host)) for host in hosts]

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
        fix = "`isles train` again submits it"
        return UserError(what, where=self.job, fix=fix, id="queue.refused")
