"""One job of Slurm: how it stands, and its end."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from isles.errors import ExitCode, UserError
from isles.facts.units import format_duration
from isles.launch.queue.job import ASK_S, JobReport, JobWord
from isles.launch.queue.reasons import ENDINGS, pending_reason
from isles.launch.ssh.shell import Result, Shell
from isles.run.outcome import error_record
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record
from isles.run.restarts import newest_step
from isles.run.stop import request_stop

_PAUSE_S = 125.0
"""How long Slurm holds a job that was queued again: somewhat more than a credential lives."""

_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
_FIELD = re.compile(r"(?:^|\s)([A-Za-z/:]+)=(.*?)(?=\s+[A-Za-z/:]+=|\s*$)")
_NAMED_NODES = 8


@dataclass(frozen=True, slots=True)
class Slurm:
    """Slurm's commands on this machine.

    Args:
        bin_path: the folder that they are in; None: on PATH.
        shell: where they run.
        ask_s: longest wait for one of them: slurmctld may be busy for some seconds.
    """

    bin_path: str | None = None
    shell: Shell = field(default_factory=Shell)
    ask_s: float = ASK_S

    def run(self, command: str, *args: str) -> Result:
        """Run one of them.

        Raises:
            PreflightError: it is not here, or does not answer in time.
        """
        return self.shell.run([self.path(command), *args], timeout_s=self.ask_s)

    def path(self, command: str) -> str:
        """One of them, as it is typed."""
        return str(Path(self.bin_path).expanduser() / command) if self.bin_path else command


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """The Slurm job of one start of a run; see `QueueJob`."""

    run_dir: RunDir
    attempt: Attempt
    job_id: str
    slurm: Slurm

    @classmethod
    def of(
        cls, run_dir: RunDir, attempt: Attempt, launch: dict[str, Any], *, ask_s: float = ASK_S
    ) -> SlurmJob:
        """The job that a launch record names, or the one that it was submitted again as."""
        job_id = _resubmitted(attempt) or str(launch["job_id"])
        return cls(run_dir, attempt, job_id, Slurm(launch.get("bin_path"), ask_s=ask_s))

    @property
    def text(self) -> str:
        """For messages."""
        return f"Slurm job {self.job_id}"

    def state(self) -> JobReport:
        """How it stands now; see `QueueJob.state`."""
        done = self.slurm.run("scontrol", "show", "job", "-o", self.job_id)
        if done.returncode == 0 and done.stdout.strip():
            return self._report(_fields(done.stdout))
        if "invalid job id" not in done.stderr.lower():
            raise UserError(
                f"scontrol does not say how job {self.job_id} stands: {_last_line(done.stderr)}",
                where=f"{self.slurm.path('scontrol')} show job {self.job_id}",
                fix="is slurmctld up? scontrol ping",
                id="queue.commands",
            )
        return self._forgotten()

    def hasten(self, report: JobReport) -> None:
        """Slurm holds every job that was queued again for two minutes, and its own script is ended
        before it could say that this one need not wait. A later start is somebody's wish."""
        why = report.word.partition(" ")[2]
        if report.state != "requeued" or why not in ("", "BeginTime"):  # "": Slurm has yet to look
            return
        if report.starts_at is not None and report.starts_at - time.time() <= _PAUSE_S:
            self.slurm.run("scontrol", "update", f"jobid={self.job_id}", "StartTime=now")

    def cancel(self, *, now: bool) -> None:
        """End it; see `QueueJob.cancel`."""
        report = self.state()
        if not report.is_alive:
            return
        if report.state == "running" and not now:
            request_stop(self.attempt, "save")
            # Its script looks at the request, so that the ranks' node sees the new file at once.
            self._scancel("--signal=USR1", "--batch", self.job_id)
            return
        request_stop(self.attempt, "now" if now else "save")
        self._scancel(self.job_id)

    def ended(self, report: JobReport) -> dict[str, Any]:
        """The outcome of a job whose script was killed; see `QueueJob.ended`."""
        saved = newest_step(self.run_dir)
        kept = "nothing was saved" if saved is None else f"everything up to step {saved} is saved"
        slurm_state = report.word.split(" ")[0]
        _, exit_code, _ = ENDINGS.get(slurm_state, ("", ExitCode.TRAINING, ""))
        stopped = read_record(self.attempt.stopped) or {}
        is_stop = exit_code in (ExitCode.INTERRUPTED, ExitCode.REQUEUE)
        if stopped:
            exit_code, is_stop = ExitCode(int(stopped["exit_code"])), True
        error = None
        if not is_stop:
            error = error_record(
                f"{self.text}: {report.reason}",
                id="",
                kind="JobEnded",
                code=exit_code,
                where=f"{self.attempt.path}/slurm-{self.job_id}.out",
                fix=report.fix or f"look at the end of slurm-{self.job_id}.out",
                at=report.at,
                host=None,
            )
        return {
            "state": "stopped" if is_stop else "failed",
            "exit_code": int(exit_code),
            "step": saved,
            "reason": f"{self.text}: {report.reason}; {kept}",
            "at": report.at,
            "error": error,
        }

    def _scancel(self, *args: str) -> None:
        done = self.slurm.run("scancel", *args)
        if done.returncode and self.state().is_alive:
            raise UserError(
                f"scancel does not end job {self.job_id}: {_last_line(done.stderr)}",
                where=self.text,
                fix=f"by hand: scancel {self.job_id}; it must be a job of yours",
                id="queue.commands",
            )

    def _report(self, fields: dict[str, str]) -> JobReport:
        slurm_state = fields.get("JobState", "UNKNOWN")
        why = fields.get("Reason", "None")
        nodes = "" if fields.get("NodeList", "(null)") == "(null)" else fields["NodeList"]
        has_run = fields.get("Restarts", "0") != "0" or self.attempt.rank_record(0).exists()
        state: JobWord
        if slurm_state in _WAITING:
            state = "requeued" if has_run else "pending"
            reason, fix = self._waits(fields, slurm_state, why)
        elif slurm_state in _RUNNING:
            state, reason, fix = "running", _runs(fields, slurm_state, nodes), ""
        else:
            state = "ended"
            reason, fix = _ended(fields, slurm_state, why)
        word = slurm_state if why == "None" else f"{slurm_state} {why}"
        starts_at = _time_of(fields.get("StartTime", "")) if state != "ended" else None
        return JobReport(state, reason, self.job_id, time.time(), word, nodes, fix, starts_at)

    def _waits(self, fields: dict[str, str], slurm_state: str, why: str) -> tuple[str, str]:
        if slurm_state == "CONFIGURING":
            return "its nodes are being switched on", ""
        reason, fix = pending_reason(why, self.job_id)
        named = re.search(r"UnavailableNodes:(\S+)", why)
        if named is not None or why.startswith(("Nodes_required", "NodeDown", "Resources")):
            reason += self._bad_nodes(fields, named.group(1) if named else None)
        start = _time_of(fields.get("StartTime", ""))
        if start is not None and start > time.time():
            left = format_duration(start - time.time())
            until = "starts" if why == "BeginTime" else "expected to start"
            reason += f"; {until} in {left}"
        return reason, fix

    def _bad_nodes(self, fields: dict[str, str], names: str | None) -> str:
        """The nodes of its partition that are drained or down, with what was said of them."""
        query = ["-n", names] if names else ["-p", fields.get("Partition", ""), "-t", _BAD]
        try:
            done = self.slurm.run("sinfo", "-h", "-N", *query, "-o", "%n|%T|%E")
        except UserError:
            return ""
        found = sorted({line.strip() for line in done.stdout.splitlines() if line.count("|") == 2})
        texts = []
        for line in found:
            name, state, said = line.split("|")
            texts.append(f"{name} is {state}" + (f" ({said})" if said != "none" else ""))
        more = f" and {len(texts) - _NAMED_NODES} more" if len(texts) > _NAMED_NODES else ""
        return f": {', '.join(texts[:_NAMED_NODES])}{more}" if texts else ""

    def _forgotten(self) -> JobReport:
        """What accounting, where there is any, knows of a job that slurmctld has forgotten."""
        word, reason, fix = "UNKNOWN", "it is over, and Slurm knows no more of it", ""
        try:
            done = self.slurm.run(
                "sacct", "-n", "-X", "-P", "-j", self.job_id, "-o", "State,ExitCode,NodeList"
            )
        except UserError:
            done = Result(1, "", "")
        rows = [line.split("|") for line in done.stdout.splitlines() if line.count("|") >= 2]
        if done.returncode == 0 and rows:
            word = rows[-1][0].split(" ")[0]
            reason, fix = _ended({"ExitCode": rows[-1][1]}, word, "None")
        return JobReport("ended", reason, self.job_id, time.time(), word, "", fix)


_BAD = "drain,down,fail,maint"


def _runs(fields: dict[str, str], slurm_state: str, nodes: str) -> str:
    if slurm_state == "COMPLETING":
        return f"it is ending on {nodes}"
    if slurm_state == "SUSPENDED":
        return f"it is suspended on {nodes}"
    limit = fields.get("TimeLimit", "UNLIMITED")
    end = _time_of(fields.get("EndTime", ""))
    if limit == "UNLIMITED" or end is None:
        return f"on {nodes}"
    return f"on {nodes}; its time limit is in {format_duration(max(0.0, end - time.time()))}"


def _ended(fields: dict[str, str], slurm_state: str, why: str) -> tuple[str, str]:
    known = ENDINGS.get(slurm_state)
    if known is not None:
        return known[0], known[2]
    if slurm_state == "FAILED" and why not in ("None", "NonZeroExitCode"):
        return pending_reason(why, "")
    code, _, number = fields.get("ExitCode", "0:0").partition(":")
    if number not in ("", "0"):
        return f"its script was killed by signal {number}", "the end of its output may say more"
    if slurm_state == "COMPLETED" and code == "0":
        return "its script has ended", ""
    return f"its script ended with exit code {code}", "the end of its output says why"


def _resubmitted(attempt: Attempt) -> str | None:
    """The number of the job that the script has submitted itself as, where it could not requeue."""
    try:
        words = (attempt.path / "job-id").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return words[-1].split(";")[0] if words else None


def _fields(text: str) -> dict[str, str]:
    return {match[1]: match[2].strip() for match in _FIELD.finditer(text.strip())}


def _time_of(text: str) -> float | None:
    """Slurm's own form of a time, in the time zone of its machine."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").astimezone().timestamp()
    except ValueError:
        return None


def _last_line(text: str) -> str:
    lines: Sequence[str] = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no word"
