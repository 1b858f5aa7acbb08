"""Slurm: its commands, the job of a run, and the nodes of a job."""

from __future__ import annotations

import difflib
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from isles.config.load import Loaded
from isles.config.sections.cluster import SlurmLauncherConfig
from isles.errors import ExitCode, PreflightError, UserError
from isles.facts.units import format_duration
from isles.launch.queue.job import (
    Allocation,
    JobNode,
    JobReport,
    JobState,
    QueueJob,
    Scheduler,
    address_of,
    last_line,
)
from isles.launch.queue.reasons import SLURM_ENDINGS, SLURM_REFUSALS, slurm_pending
from isles.launch.ssh.shell import Result
from isles.run.paths import Attempt
from isles.run.records import read_record, write_text_atomic

_PAUSE_S = 125.0
"""How long Slurm holds a job that was queued again: somewhat more than a credential lives."""

_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
_BAD_NODES = "drain,down,fail,maint"
_FIELD = re.compile(r"(?:^|\s)([A-Za-z/:]+)=(.*?)(?=\s+[A-Za-z/:]+=|\s*$)")
_NAMED_NODES = 8


@dataclass(frozen=True, slots=True)
class Slurm(Scheduler):
    """Slurm's commands on one machine."""

    name = "Slurm"
    submit_command = ("sbatch", "--parsable")
    refusals = SLURM_REFUSALS
    array_option = r"\s*(--array|-a)(=|\s|\d|$)"
    new_words = ("PENDING", "PENDING Priority")

    def submitted_id(self, done: Result) -> str | None:
        job_id = done.stdout.strip().partition(";")[0]
        return job_id if done.returncode == 0 and job_id.isdecimal() else None

    def find(self, attempt: Attempt) -> str | None:
        """See Scheduler: no other job has this script."""
        done = self.run("squeue", "-h", "--me", "--states=all", "-o", "%i|%o")
        if done.returncode:
            text = done.stderr.strip() or "squeue failed"
            raise PreflightError(text, where="squeue", id="queue.commands")
        for line in done.stdout.splitlines():
            job_id, _, command = line.partition("|")
            if command.strip() == str(attempt.script) and job_id.isdecimal():
                return job_id
        return None

    def refusal_fix(self, keys: tuple[str, ...], loaded: Loaded) -> str:
        """See Scheduler: which partitions there are."""
        launcher = loaded.config.clusters[0].launcher
        if keys[:1] != ("partition",) or not isinstance(launcher, SlurmLauncherConfig):
            return ""
        try:
            names = self.run("sinfo", "-h", "-o", "%R").stdout.split()
        except PreflightError:
            return ""
        near = difflib.get_close_matches(launcher.partition or "", names, n=1)
        if near and near[0] != launcher.partition:
            return f"did you mean {near[0]}? There are: {', '.join(names)}"
        return f"the partitions are: {', '.join(names)}" if names else ""


@dataclass(frozen=True, slots=True)
class SlurmJob(QueueJob):
    """The Slurm job of one start of a run."""

    cancel_command: ClassVar[str] = "scancel"

    def state(self) -> JobReport:
        done = self.queue.run("scontrol", "show", "job", "-o", self.job_id)
        if done.returncode == 0 and done.stdout.strip():
            fields = {m[1]: m[2].strip() for m in _FIELD.finditer(done.stdout.strip())}
            return self._report_from(fields)
        if "invalid job id" not in done.stderr.lower():
            raise UserError(
                f"scontrol does not say how job {self.job_id} stands: {last_line(done)}",
                where=f"{self.queue.path('scontrol')} show job {self.job_id}",
                fix="is slurmctld up? scontrol ping",
                id="queue.commands",
            )
        return self._forgotten()

    def hasten(self, report: JobReport) -> None:
        why = report.word.partition(" ")[2]
        if report.state != "requeued" or why not in ("", "BeginTime"):  # "": Slurm has yet to look
            return
        # A job that was queued again is held for two minutes; a later start was chosen by a user.
        if report.starts_at is not None and report.starts_at - time.time() <= _PAUSE_S:
            self.queue.run("scontrol", "update", f"jobid={self.job_id}", "StartTime=now")

    def ask_to_save(self) -> None:
        """See QueueJob: the script looks at the request, on the host that sees the file at once."""
        self.run_cancel("--signal=USR1", "--batch")

    def judge(self, report: JobReport) -> tuple[ExitCode, bool]:
        if (stopped := read_record(self.attempt.stopped)) is not None:
            return ExitCode(int(stopped["exit_code"])), True
        known = SLURM_ENDINGS.get(report.word.split(" ")[0])
        code = known[1] if known is not None else ExitCode.TRAINING
        return code, code in (ExitCode.INTERRUPTED, ExitCode.REQUEUE)

    def output(self) -> Path:
        return self.attempt.path / f"slurm-{self.job_id}.out"

    def _report_from(self, fields: dict[str, str]) -> JobReport:
        state = fields.get("JobState", "UNKNOWN")
        why = fields.get("Reason", "None")
        word = state if why == "None" else f"{state} {why}"
        nodes = "" if fields.get("NodeList", "(null)") == "(null)" else fields["NodeList"]
        starts_at = _time_of(fields.get("StartTime", ""))
        if state in _WAITING:
            has_run = fields.get("Restarts", "0") != "0" or self.attempt.rank_record(0).exists()
            reason, fix = self._why_waiting(fields, state, why)
            waits: JobState = "requeued" if has_run else "pending"
            return self.report(waits, reason, word, nodes=nodes, fix=fix, starts_at=starts_at)
        if state in _RUNNING:
            reason = _where_running(fields, state, nodes)
            return self.report("running", reason, word, nodes=nodes, starts_at=starts_at)
        reason, fix = _how_ended(fields, state, why)
        return self.report("ended", reason, word, nodes=nodes, fix=fix)

    def _why_waiting(self, fields: dict[str, str], state: str, why: str) -> tuple[str, str]:
        if state == "CONFIGURING":
            return "its nodes are being switched on", ""
        reason, fix = slurm_pending(why, self.job_id)
        named = re.search(r"UnavailableNodes:(\S+)", why)
        if named is not None or why.startswith(("Nodes_required", "NodeDown", "Resources")):
            partition = ("-p", fields.get("Partition", ""), "-t", _BAD_NODES)
            reason += self._bad_nodes(*(("-n", named[1]) if named else partition))
        start = _time_of(fields.get("StartTime", ""))
        if start is not None and start > time.time():
            until = "starts" if why == "BeginTime" else "expected to start"
            reason += f"; {until} in {format_duration(start - time.time())}"
        return reason, fix

    def _bad_nodes(self, *query: str) -> str:
        # Which nodes are drained or down, with the reason that an administrator gave.
        try:
            done = self.queue.run("sinfo", "-h", "-N", *query, "-o", "%n|%T|%E")
        except UserError:
            return ""
        texts = []
        for line in sorted({line.strip() for line in done.stdout.splitlines()}):
            if line.count("|") == 2:
                name, state, text = line.split("|")
                texts.append(f"{name} is {state}" + (f" ({text})" if text != "none" else ""))
        more = f" and {len(texts) - _NAMED_NODES} more" if len(texts) > _NAMED_NODES else ""
        return f": {', '.join(texts[:_NAMED_NODES])}{more}" if texts else ""

    def _forgotten(self) -> JobReport:
        # slurmctld forgets a job some minutes after its end; accounting may know it.
        word, reason, fix = "UNKNOWN", "it is over, and Slurm knows no more of it", ""
        try:
            what = "State,ExitCode,NodeList"
            done = self.queue.run("sacct", "-n", "-X", "-P", "-j", self.job_id, "-o", what)
        except UserError:
            done = Result(1, "", "")
        rows = [line.split("|") for line in done.stdout.splitlines() if line.count("|") >= 2]
        if done.returncode == 0 and rows:
            word = rows[-1][0].split(" ")[0]
            reason, fix = _how_ended({"ExitCode": rows[-1][1]}, word, "None")
        return self.report("ended", reason, word, fix=fix)


def _where_running(fields: dict[str, str], state: str, nodes: str) -> str:
    if state == "COMPLETING":
        return f"it is ending on {nodes}"
    if state == "SUSPENDED":
        return f"it is suspended on {nodes}"
    end = _time_of(fields.get("EndTime", ""))
    if fields.get("TimeLimit", "UNLIMITED") == "UNLIMITED" or end is None:
        return f"on {nodes}"
    return f"on {nodes}; its time limit is in {format_duration(max(0.0, end - time.time()))}"


def _how_ended(fields: dict[str, str], state: str, why: str) -> tuple[str, str]:
    known = SLURM_ENDINGS.get(state)
    if known is not None:
        return known[0], known[2]
    if state == "FAILED" and why not in ("None", "NonZeroExitCode"):
        return slurm_pending(why, "")
    code, _, number = fields.get("ExitCode", "0:0").partition(":")
    if number not in ("", "0"):
        return f"its script was killed by signal {number}", "the end of its output may say more"
    if state == "COMPLETED" and code == "0":
        return "its script has ended", ""
    return f"its script ended with exit code {code}", "the end of its output says why"


def _time_of(text: str) -> float | None:
    # Slurm writes times in the time zone of its machine.
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").astimezone().timestamp()
    except ValueError:
        return None


class SlurmAllocation(Allocation):
    """The nodes of a Slurm job.

    Args:
        attempt: whose script this job runs.
    """

    def __init__(
        self, launcher: SlurmLauncherConfig, attempt: Attempt, environ: Mapping[str, str]
    ) -> None:
        job_id = environ["SLURM_JOB_ID"]
        key = f"{job_id}-{environ.get('SLURM_RESTART_COUNT', '0')}"
        super().__init__("Slurm", job_id, key, attempt)
        self._launcher = launcher
        self._slurm = Slurm(launcher.bin_path)
        hosts = self._run("scontrol", "show", "hostnames", environ["SLURM_JOB_NODELIST"]).split()
        if len(hosts) == 1:
            self.nodes = [JobNode(hosts[0], "127.0.0.1")]  # no port is open to the network
        else:
            self.nodes = [JobNode(host, self._address(host)) for host in hosts]

    def _address(self, host: str) -> str:
        # Not every node knows the names of the others: the address that Slurm itself uses.
        found = re.search(r" NodeAddr=(\S+)", self._run("scontrol", "show", "node", "-o", host))
        return address_of([host, found[1] if found else host], host)

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

    def is_preempted(self) -> bool:
        """See Allocation: a job with a time of grace gets SIGTERM, and is not queued again."""
        text = self._run("scontrol", "show", "job", "-o", self._id)
        return re.search(r" PreemptTime=\d", text) is not None

    def queue_again(self) -> str:
        # Slurm ends this job to queue it again, and with it the command that has asked for it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        done = self._slurm.run("scontrol", "requeue", self._id)
        if done.returncode == 0:
            return f"{self.job} is queued again, to go on"
        after = f"--dependency=afterany:{self._id}"
        again = self._slurm.run(*self._slurm.submit_command, after, str(self._attempt.script))
        new = self._slurm.submitted_id(again)
        if new is None:
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
