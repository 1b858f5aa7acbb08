"""OpenPBS and Torque: their commands, and the nodes of a job."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from isles.config.sections.cluster import PbsLauncherConfig
from isles.errors import CommunicationError, ExitCode, PreflightError
from isles.launch.queue.job import (
    JobAllocation,
    JobNode,
    JobReport,
    JobState,
    Scheduler,
    address_of,
    explain,
    hand_on,
    no_answer,
    where_running,
)
from isles.launch.ssh.shell import CommandResult
from isles.run.outcome import AGAIN
from isles.run.paths import Attempt
from isles.run.records import read_record, write_record

Dialect = Literal["openpbs", "torque"]

_RUNNING, _WAITING = "REBSU", "QHWTM"
_JOB = re.compile(r"\d+(\[\])?\.?[\w.-]*")


class Pbs(Scheduler):
    """The commands of PBS on one machine."""

    name = "PBS"
    submit_command = ("qsub",)
    cancel_command = "qdel"
    array_option = r"\s*-[Jt]\s*\d"
    new_words = ("Q",)

    def submitted_id(self, done: CommandResult) -> str | None:
        words = done.stdout.split()
        is_id = done.returncode == 0 and bool(words) and _JOB.fullmatch(words[-1]) is not None
        return words[-1] if is_id else None

    def look(self, attempt: Attempt, job_id: str) -> JobReport:
        # In Torque, -x asks for XML; Torque shows ended jobs for a while without it.
        ended = [] if read_dialect(attempt) == "torque" else ["-x"]
        done = self.run("qstat", *ended, "-f", job_id)
        if "unknown job" in done.stderr.lower():
            reason = "it is over, and PBS has no further record of it"
            return JobReport("ended", reason, job_id, "UNKNOWN")
        if done.returncode or "job_state" not in done.stdout:
            raise no_answer(self, "qstat", done, "check that the PBS server is running: qstat -B")
        # Only one job: a value with a line break looks like the beginning of another job.
        found = {k: v for block in read_blocks(done.stdout).values() for k, v in block.items()}
        letter = found.get("job_state", "?")
        status = found.get("Exit_status", found.get("exit_status", ""))
        if letter in _WAITING:
            has_run = found.get("run_count", "0") not in ("", "0")
            has_run = has_run or attempt.rank_record(0).exists()
            state: JobState = "requeued" if has_run else "pending"
            reason, fix = pending(letter, found.get("comment", "").strip(), job_id)
            return JobReport(state, reason, job_id, letter, fix)
        if letter in _RUNNING:
            # a1/0*4+a2/0*4
            parts = found.get("exec_host", "").split("+")
            nodes = "+".join(dict.fromkeys(part.partition("/")[0] for part in parts if part))
            limit = walltime_s(found.get("Resource_List.walltime", ""))
            used = walltime_s(found.get("resources_used.walltime", "")) or 0.0
            doing = {"E": "ending", "S": "suspended", "U": "suspended"}.get(letter, "")
            reason = where_running(nodes, doing, None if limit is None else limit - used)
            return JobReport("running", reason, job_id, letter)
        reason, fix = ended_as(status, found.get("comment", ""))
        return JobReport("ended", reason, job_id, f"{letter} {status}".strip(), fix)

    def exit_code(self, attempt: Attempt, report: JobReport) -> tuple[ExitCode, bool]:
        request = read_record(attempt.stop_request) or {}
        # A request of the script itself, before the time limit, does not mean that the run must
        # end.
        is_stop = bool(request and not request.get("requeue")) or report.word.endswith(" 271")
        if is_stop and read_record(attempt.stopped) is not None:
            return ExitCode.REQUEUE, True  # its ranks had saved before PBS killed the script
        return (ExitCode.INTERRUPTED if is_stop else ExitCode.TRAINING), is_stop

    def output(self, attempt: Attempt, job_id: str) -> Path:
        log = attempt.path / "pbs.log"
        return log if log.exists() else attempt.path / "pbs.out"

    def dialect(self) -> Dialect:
        """The dialect of PBS, from `qstat --version`.

        Slurm and Grid Engine have their own qstat, so the command's name is not enough.

        Raises:
            PreflightError: it is neither OpenPBS nor Torque.
        """
        where = f"{self.path('qstat')} on {self.shell.name}"
        try:
            done = self.run("qstat", "--version")
        except PreflightError as error:
            fix = "run isles on the cluster's login node, or set clusters.0.launcher.login to it; "
            fix += "or set clusters.0.launcher.bin_path to the folder of PBS's commands"
            raise PreflightError(error.what, where=where, fix=fix, id="queue.commands") from None
        text = f"{done.stdout}\n{done.stderr}"
        if re.search(r"pbs_version\s*=|PBSPro", text):
            return "openpbs"
        if re.search(r"^\s*Version:\s*\d", text, re.MULTILINE):
            return "torque"
        first = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
        raise PreflightError(
            f"qstat --version prints {first[:80]!r}, which is not PBS",
            where=where,
            fix="if this is Slurm's own qstat, use launcher: {kind: slurm, ...}; otherwise set the "
            "dialect: clusters.0.launcher.dialect=openpbs or torque",
            id="queue.commands",
        )


def write_dialect(attempt: Attempt, dialect: str) -> None:
    """Record the PBS dialect of an attempt's job; the job itself reads it."""
    write_record(attempt.path / "pbs.json", {"dialect": dialect})


def read_dialect(attempt: Attempt) -> Dialect:
    """The PBS dialect of an attempt's job."""
    noted = (read_record(attempt.path / "pbs.json") or {}).get("dialect")
    return "torque" if noted == "torque" else "openpbs"


def read_blocks(text: str, sign: str = "") -> dict[str, dict[str, str]]:
    """The attributes of jobs, queues, servers or nodes in PBS' output, by the line above each
    block.

    A long value continues after a tab. `sign` is removed from the line above, such as `Queue:`.
    """
    block: dict[str, str] = {}
    blocks, key = {"": block}, ""
    for line in text.splitlines():
        if line.startswith("\t") and key:
            block[key] += line.removeprefix("\t")
        elif line and not line[0].isspace():
            block, key = blocks.setdefault(line.removeprefix(sign).strip(), {}), ""
        elif " = " in line:
            key, _, value = line.lstrip().partition(" = ")
            block[key] = value
    return {name: block for name, block in blocks.items() if block}


def pending(letter: str, comment: str, job_id: str) -> tuple[str, str]:
    """Why a job waits, and a fix, from its job_state and its comment."""
    known = comment and explain("pbs", "pending", comment, job=job_id)
    known = known or explain("pbs", "letters", letter, job=job_id)
    if known:
        return known[0] + (f" ({comment})" if comment else ""), known[1]
    return f"it waits: {comment or 'the scheduler has not given a reason'}", ""


def ended_as(status: str, comment: str) -> tuple[str, str]:
    """How a job ended, and a fix, from its Exit_status; empty: it never ran."""
    if not re.fullmatch(r"-?\d+", status):
        return f"it was deleted before it ran{f' ({comment})' if comment else ''}", ""
    if known := explain("pbs", "ended", status, go_on=AGAIN):
        return known
    code = int(status)
    if code > 128:
        return f"its script was killed by signal {code - (256 if code > 256 else 128)}", AGAIN
    return ("its script ended" if code == 0 else f"its script ended with exit status {code}"), ""


def walltime_s(walltime: str) -> float | None:
    """Seconds of `[[[dd:]hh:]mm:]ss`; None: the text has another form."""
    if not re.fullmatch(r"\d+(:\d+){0,3}", walltime):
        return None
    parts = [int(part) for part in reversed(walltime.split(":"))]
    return float(sum(each * unit for each, unit in zip(parts, (1, 60, 3600, 86400), strict=False)))


class PbsAllocation(JobAllocation):
    """The nodes of a PBS job; `num_nodes`: number of nodes of the run."""

    submit_s = 60.0
    """Longest wait for qsub when a job submits itself again."""

    def __init__(
        self,
        launcher: PbsLauncherConfig,
        attempt: Attempt,
        environ: Mapping[str, str],
        num_nodes: int,
    ) -> None:
        self._pbs = Pbs(launcher.bin_path)
        super().__init__(self._pbs, environ["PBS_JOBID"], attempt, environ)
        self._began = time.monotonic()
        self._launcher = launcher
        # A node file repeats a host for each of its processes.
        lines = Path(environ["PBS_NODEFILE"]).read_text(encoding="utf-8").split()
        hosts = list(dict.fromkeys(lines))
        if len(hosts) != num_nodes:
            raise CommunicationError(
                f"{self.job} has {len(hosts)} hosts ({' '.join(hosts)}), but the run needs "
                f"{num_nodes}",
                where=f"host {socket.gethostname()}",
                fix=f"request {num_nodes} different hosts in the lines with #PBS -l "
                "(clusters.0.launcher.resources)",
                id="queue.nodes",
            )
        if num_nodes == 1:
            self.nodes = [JobNode(hosts[0], "127.0.0.1")]  # opens no port to the network
        else:
            self.nodes = [JobNode(host, address_of([host], host)) for host in hosts]

    def on_all_nodes(self, words: list[str], log: Path) -> list[list[str]]:
        """See JobAllocation: the job's own script, which passes arguments to the agent.

        A task of pbsdsh gets no variables of the job and starts in $HOME; the script sets up the
        environment of the ranks. If pbsdsh does not exist, ssh starts the same script.
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
        """See JobAllocation: PBS sends no signal before its time limit."""
        if self._launcher.time is None:
            return None
        return self._began + self._launcher.time - self._launcher.save_before

    def queue_again(self) -> str:
        """See JobAllocation: submits the same script again, from this host or from the submitting
        host."""
        folder, host = self._environ.get("PBS_O_WORKDIR", "."), self._environ.get("PBS_O_HOST", "")
        words = shlex.join([self._pbs.path("qsub"), str(self._attempt.script)])
        submit = f"cd {shlex.quote(folder)} && {words}"
        commands = [["/bin/bash", "-c", submit]]
        commands += [["ssh", "-n", "-o", "BatchMode=yes", "--", host, submit]] if host else []
        error = ""
        hand_on(self._attempt)
        for command in commands:
            try:
                done = subprocess.run(
                    command, check=False, capture_output=True, text=True, timeout=self.submit_s
                )
            except subprocess.TimeoutExpired:
                # A job that was accepted without an answer finds the recorded end, and exits.
                raise self.refused(f"qsub did not answer within {self.submit_s:.0f} s") from None
            job_id = done.stdout.split()[-1:]
            if done.returncode == 0 and job_id:
                hand_on(self._attempt, job_id[0])
                return f"the run continues as PBS job {job_id[0]}"
            error = done.stderr.strip() or f"qsub exited with {done.returncode}"
        raise self.refused(error)
