"""The job of a run in a queue: the meaning of the end of its ranks, and whether to requeue
the job."""

from __future__ import annotations

import sys
import time

from isles.agent.protocol import log_line
from isles.config.sections.cluster import QueueSection
from isles.config.sections.kubernetes import KubernetesLauncherConfig
from isles.config.sections.run import RunConfig
from isles.errors import ExitCode, UserError
from isles.launch.queue.job import LOST, JobAllocation, claim
from isles.run.outcome import agent_error, end, end_failed
from isles.run.paths import Attempt, RunDir
from isles.run.records import explain_write_errors, read_record, write_record
from isles.run.restarts import (
    current_restart,
    list_restarts,
    newest_step,
    read_last_step,
    record_restart,
)
from isles.run.stop import read_stop_request

_LIMIT, _TAKEN, _SCRIPT = 1, 10, 20
"""Number of consecutive requeues without progress: after the time limit, after the nodes were taken
away, and if the user's own script does not report its progress."""


class QueuedRun:
    """A run in the job of a queue; used only by the coordinator.

    Args:
        run_dir, attempt: the run, on a disk that all nodes share.
        allocation: the job's nodes and its scheduler.
    """

    def __init__(
        self, run_dir: RunDir, attempt: Attempt, config: RunConfig, allocation: JobAllocation
    ) -> None:
        launcher = config.clusters[0].launcher
        assert isinstance(launcher, QueueSection | KubernetesLauncherConfig)
        self._run_dir = run_dir
        self._attempt = attempt
        self._config = config
        self._allocation = allocation
        self._is_of_queue = isinstance(launcher, QueueSection)
        self._may_requeue = not isinstance(launcher, QueueSection) or launcher.requeue
        self.brings_back = allocation.brings_back
        """True if a lost node is replaced while the others stay."""
        self._is_script = config.training.script is not None
        self.is_terminated = False
        """True if its user, or the queue for a job with priority, has asked the job to end."""
        self.is_requeued = False
        """True if the job is to be requeued when all agents have exited."""

    def begin(self) -> int | None:
        """Called at the start of the job, which may have run before.

        Returns:
            The exit code if no ranks must be started.
        """
        attempt = self._attempt
        outcome = read_record(attempt.outcome)
        if outcome is not None and not outcome.get("may_go_on"):
            return int(outcome["exit_code"])
        if self._is_of_queue and (holder := self._other_job()):
            log_line(
                f"{self._allocation.job} ends because this run is {holder}; restart it with "
                "`isles train`"
            )
            return int(ExitCode.USER)
        if self._user_stop() is not None:
            self.stop()
            return int((read_record(attempt.outcome) or {})["exit_code"])
        last = read_record(attempt.rank_record(0)) or {}
        if outcome is not None or int(last.get("restart", -1)) == current_restart(attempt):
            if not self._go_on(f"{self._allocation.job} was taken off its nodes", _TAKEN):
                return int(ExitCode.TRAINING)
            self.is_requeued = False  # it is running already
        return None

    def _other_job(self) -> str:
        # Owner of this attempt, if it is not this job. The number of a PBS job may precede another
        # name of its server.
        own = self._allocation.job_id
        submitted = str((read_record(self._attempt.launch) or {}).get("job_id") or "")
        with explain_write_errors(self._attempt.path):
            holder = claim(self._attempt, own, submitted=submitted)
        if holder == LOST:
            return "given up, because its submission was not answered"
        is_own = holder.partition(".")[0] == own.partition(".")[0]
        return "" if is_own else f"job {holder}'s"

    def limit_is_near(self) -> None:
        """Ask the ranks to save, by a request such as `isles stop` leaves."""
        if self._attempt.stop_request.exists():
            return
        by = f"{self._allocation.job}, before its time limit"
        request = {"kind": "save", "by": by, "at": time.time(), "requeue": self._may_requeue}
        write_record(self._attempt.stop_request, request)

    def stopped(self) -> None:
        """Decide, after all ranks have ended, whether the job continues later or is over."""
        if self.is_requeued:
            return
        if (why := self._reason_to_go_on()) is None:
            self.stop()
        else:
            self._go_on(*why)

    def lost(self, why: str) -> bool:
        """Continue with other nodes after a node was lost; False if the job is not requeued."""
        return self._may_requeue and not self.is_terminated and self._go_on(why, _TAKEN)

    def stop(self) -> None:
        """Record the stop. The run continues if the queue itself restarts this job."""
        attempt = self._attempt
        record = read_record(attempt.stopped) or {}
        saved = newest_step(self._run_dir)
        if self._is_script:  # it saves by itself, and has recorded its end
            kept = str(record.get("reason") or "").removeprefix("asked to stop; ")
        else:
            kept = (
                "nothing is saved" if saved is None else f"everything up to step {saved} is saved"
            )
        by = f"{self._allocation.job} was told to end" if self.is_terminated else "asked to stop"
        code = int(record.get("exit_code") or self._user_stop() or ExitCode.REQUEUE)
        attempt.outcome.unlink(missing_ok=True)
        reason = f"{by}; {kept}" if kept else by
        step = record.get("step", saved)
        # A stop by the user is final, even if a signal came with the request.
        may_go_on = self.is_terminated and self._user_stop() is None
        end(attempt, "stopped", code, reason, step=step, may_go_on=may_go_on)
        attempt.stopped.unlink(missing_ok=True)

    def queue_again(self) -> int:
        """Requeue the job after all agents have exited; returns the exit code of this process."""
        job = self._allocation.job
        try:
            sys.stderr.write(f"{time.strftime('%F %T')} {self._allocation.queue_again()}\n")
        except (UserError, OSError) as error:
            sys.stderr.write(f"error: {error}\n")
            saved = "" if self._is_script else "everything is saved; "
            reason = f"{saved}{job} could not be queued again: {getattr(error, 'what', error)}"
            code = ExitCode.REQUEUE
            end(self._attempt, "stopped", code, reason, step=newest_step(self._run_dir))
            return int(code)
        return 0

    def _user_stop(self) -> int | None:
        # Exit code of a stop that a user requested.
        request = read_stop_request(self._attempt)
        if request is None or (read_record(self._attempt.stop_request) or {}).get("requeue"):
            return None
        return int(ExitCode.REQUEUE if request.kind == "save" else ExitCode.INTERRUPTED)

    def _reason_to_go_on(self) -> tuple[str, int] | None:
        # Reason to requeue the job, and the number of times that this may bring no progress.
        job, request = self._allocation.job, read_record(self._attempt.stop_request) or {}
        if self.is_terminated or not self._may_requeue:
            return None
        if request.get("requeue"):
            return f"the time limit of {job} was near", _LIMIT
        if request:
            return None
        if self._allocation.is_preempted():
            return f"another job took the nodes of {job}", _TAKEN
        stopped = read_record(self._attempt.stopped) or {}
        if self._is_script and stopped.get("exit_code") == ExitCode.REQUEUE:
            return "the script asked to be started again", _LIMIT
        return None

    def _go_on(self, why: str, most: int) -> bool:
        # Record that the run continues later; False, and an outcome, if that would bring no
        # progress.
        attempt, restart = self._attempt, current_restart(self._attempt)
        times = self._times_in_vain(restart)
        is_in_vain = times >= (_SCRIPT if self._is_script else most)
        if is_in_vain:
            attempt.outcome.unlink(missing_ok=True)
            what, fix = self._in_vain(why, times, is_limit=most == _LIMIT)
            error = agent_error(what, fix, ExitCode.TRAINING, id="queue.limit", kind="NoProgress")
            end_failed(attempt, error, step=newest_step(self._run_dir))
        else:
            record_restart(
                self._run_dir,
                attempt,
                restart + 1,
                why,
                max_restarts=self._config.clusters[0].max_restarts,
                is_planned=True,
                world_size=int((read_record(attempt.launch) or {}).get("world_size", 1)),
            )
            attempt.outcome.unlink(missing_ok=True)
            # A stop that a user requested in the meantime stays: `begin` obeys it.
            if (read_record(attempt.stop_request) or {}).get("requeue"):
                attempt.stop_request.unlink(missing_ok=True)
        attempt.stopped.unlink(missing_ok=True)
        self.is_requeued = not is_in_vain
        return self.is_requeued

    def _times_in_vain(self, restart: int) -> int:
        # Number of consecutive requeues, up to now, without progress. A trainer makes progress
        # when it saves, a user's own script when it reports a step.
        if self._is_script:
            now, marks = read_last_step(self._attempt, restart), "reached"
        else:
            now, marks = newest_step(self._run_dir), "saved"
        times = 0
        for entry in reversed(list_restarts(self._attempt)):
            if (getattr(entry, marks) or 0) < (now or 0):
                break
            times += not entry.is_counted
        return times

    def _in_vain(self, why: str, times: int, *, is_limit: bool) -> tuple[str, str]:
        # The problem, and its fix.
        step, no_further = newest_step(self._run_dir) or 0, "and it has made no progress in"
        if self._is_script:
            return (
                f"{why}, {no_further} {times + 1} starts",
                "report steps from the script with isles.report, so that isles sees its progress",
            )
        if is_limit:
            return (
                f"the time limit is too short for a single step: {self._allocation.job} started "
                f"and ended at step {step}",
                "raise clusters.0.launcher.time, or lower clusters.0.launcher.save_before",
            )
        return (
            f"{why}, {no_further} {times + 1} starts: the last saved step is {step}",
            "save more often (checkpoint.every_minutes), or request nodes without preemption",
        )
