"""OpenPBS and Torque: their commands, and one job of theirs: how it stands, and its end."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from isles.errors import ExitCode, PreflightError, UserError
from isles.facts.units import format_duration
from isles.launch.queue.job import ASK_S, JobReport, JobWord
from isles.launch.queue.reasons import ended_reason, pending_reason
from isles.launch.ssh.shell import Result, Shell
from isles.run.outcome import error_record
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record
from isles.run.restarts import newest_step
from isles.run.stop import request_stop

Dialect = Literal["openpbs", "torque"]

_RUNNING = ("R", "E", "B", "S", "U")
_WAITING = ("Q", "H", "W", "T", "M")
_HISTORY_FULL = "Unknown Job"


@dataclass(frozen=True, slots=True)
class Pbs:
    """The commands of PBS on this machine.

    Args:
        bin_path: the folder that they are in; None: on PATH.
        shell: where they run.
        ask_s: longest wait for one of them: the server may be busy for some seconds.
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

    def find_by_output(self, output: str) -> str | None:
        """The job whose output goes to this file, which no other job has; None: there is none.

        Raises:
            PreflightError: PBS does not answer.
        """
        done = self.run("qstat", "-f")
        if done.returncode:
            raise PreflightError(
                last_line(done), where=f"{self.path('qstat')} -f", id="queue.commands"
            )
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
        said = f"{done.stdout}\n{done.stderr}"
        if re.search(r"pbs_version\s*=|PBSPro", said):
            return "openpbs"
        if re.search(r"^\s*Version:\s*\d", said, re.MULTILINE):
            return "torque"
        first = next((line.strip() for line in said.splitlines() if line.strip()), "nothing")
        raise PreflightError(
            f"qstat --version says {first[:80]!r}: this is no PBS",
            where=f"{self.path('qstat')} on {self.shell.name}",
            fix="use launcher: {kind: slurm, ...} where Slurm has a qstat of its own; or say "
            "which PBS it is: launcher.dialect=openpbs or torque",
            id="queue.commands",
        )


@dataclass(frozen=True, slots=True)
class PbsJob:
    """The PBS job of one start of a run; see `QueueJob`."""

    run_dir: RunDir
    attempt: Attempt
    job_id: str
    dialect: Dialect
    pbs: Pbs

    @classmethod
    def of(
        cls, run_dir: RunDir, attempt: Attempt, launch: dict[str, Any], *, ask_s: float = ASK_S
    ) -> PbsJob:
        """The job that a launch record names, or the one that it was submitted again as."""
        job_id = last_submitted(attempt) or str(launch["job_id"])
        pbs = Pbs(launch.get("bin_path"), ask_s=ask_s)
        return cls(run_dir, attempt, job_id, read_dialect(attempt), pbs)

    @property
    def text(self) -> str:
        """For messages."""
        return f"PBS job {self.job_id}"

    def state(self) -> JobReport:
        """How it stands now; see `QueueJob.state`."""
        # Torque knows -x as a wish for XML, and shows ended jobs for a while without it.
        words = ["-f", self.job_id] if self.dialect == "torque" else ["-x", "-f", self.job_id]
        done = self.pbs.run("qstat", *words)
        if done.returncode == 0 and "job_state" in done.stdout:
            return self._report(read_attributes(done.stdout))
        if _HISTORY_FULL.lower() in done.stderr.lower():
            return self._new("ended", "it is over, and PBS knows no more of it", "UNKNOWN")
        raise UserError(
            f"qstat does not say how job {self.job_id} stands: {last_line(done)}",
            where=f"{self.pbs.path('qstat')} {' '.join(words)}",
            fix="is the PBS server up? qstat -B",
            id="queue.commands",
        )

    def hasten(self, report: JobReport) -> None:
        """PBS holds no job for having been queued again."""

    def cancel(self, *, now: bool) -> None:
        """End it; see `QueueJob.cancel`."""
        report = self.state()
        if not report.is_alive:
            return
        request_stop(self.attempt, "now" if now else "save")
        if report.state == "running" and not now:
            return  # qdel would give it some ten seconds only
        done = self.pbs.run("qdel", self.job_id)
        if done.returncode and self.state().is_alive:
            raise UserError(
                f"qdel does not end job {self.job_id}: {last_line(done)}",
                where=self.text,
                fix=f"by hand: qdel {self.job_id}; it must be a job of yours",
                id="queue.commands",
            )

    def ended(self, report: JobReport) -> dict[str, Any]:
        """The outcome of a job whose script was killed; see `QueueJob.ended`."""
        saved = newest_step(self.run_dir)
        kept = "nothing was saved" if saved is None else f"everything up to step {saved} is saved"
        log = self.attempt.path / "pbs.log"
        request = read_record(self.attempt.stop_request) or {}
        # The request of the script itself, before the time limit, is nobody's wish to end the run.
        stopped = bool(request and not request.get("requeue")) or report.word.endswith(" 271")
        exit_code = ExitCode.INTERRUPTED if stopped else ExitCode.TRAINING
        if stopped and read_record(self.attempt.stopped) is not None:
            exit_code = ExitCode.REQUEUE  # its ranks had saved when PBS killed the script
        error = None
        if not stopped:
            error = error_record(
                f"{self.text}: {report.reason}",
                id="",
                kind="JobEnded",
                code=exit_code,
                where=str(log if log.exists() else self.attempt.path / "pbs.out"),
                fix=report.fix or "look at the end of that file",
                at=report.at,
                host=None,
            )
        return {
            "state": "stopped" if stopped else "failed",
            "exit_code": int(exit_code),
            "step": saved,
            "reason": f"{self.text}: {report.reason}; {kept}",
            "at": report.at,
            "error": error,
        }

    def _report(self, attributes: dict[str, str]) -> JobReport:
        letter = attributes.get("job_state", "?")
        nodes = "+".join(_hosts(attributes.get("exec_host", "")))
        if letter in _WAITING:
            has_run = attributes.get("run_count", "0") not in ("", "0")
            has_run = has_run or self.attempt.rank_record(0).exists()
            reason, fix = pending_reason(letter, attributes, self.job_id)
            return self._new("requeued" if has_run else "pending", reason, letter, "", fix)
        if letter in _RUNNING:
            return self._new("running", _runs(letter, attributes, nodes), letter, nodes)
        status = attributes.get("Exit_status", attributes.get("exit_status", ""))
        reason, fix = ended_reason(status, attributes)
        return self._new("ended", reason, f"{letter} {status}".strip(), nodes, fix)

    def _new(
        self, state: JobWord, reason: str, word: str, nodes: str = "", fix: str = ""
    ) -> JobReport:
        return JobReport(state, reason, self.job_id, time.time(), word, nodes, fix)


def dialect_note(attempt: Attempt) -> Path:
    """Where a start notes which PBS has taken its job."""
    return attempt.path / "pbs.json"


def read_dialect(attempt: Attempt) -> Dialect:
    """Which PBS has taken, or takes, the job of an attempt."""
    noted = (read_record(dialect_note(attempt)) or {}).get("dialect")
    return "torque" if noted == "torque" else "openpbs"


def last_submitted(attempt: Attempt) -> str | None:
    """The job that goes on in place of the first one; None while that one does."""
    try:
        words = (attempt.path / "job-id").read_text(encoding="utf-8").split()
    except OSError:
        return None
    return words[-1] if words else None


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


def last_line(done: Result) -> str:
    """What a command has said last."""
    lines = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit status {done.returncode}"


def _hosts(exec_host: str) -> list[str]:
    """The hosts of `a1/0*4+a2/0*4`, each once."""
    return list(dict.fromkeys(part.partition("/")[0] for part in exec_host.split("+") if part))


def _runs(letter: str, attributes: dict[str, str], nodes: str) -> str:
    if letter == "E":
        return f"it is ending on {nodes}"
    if letter in ("S", "U"):
        return f"it is suspended on {nodes}"
    limit, used = (
        _seconds(attributes.get(f"{kind}.walltime", ""))
        for kind in ("Resource_List", "resources_used")
    )
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
