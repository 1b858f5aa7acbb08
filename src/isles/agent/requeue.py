"""Whether the ranks of a job go on later: it is queued again, within bounds."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from isles.config.sections.run import RunConfig
from isles.errors import ExitCode
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record
from isles.run.restarts import (
    Restart,
    current_restart,
    list_restarts,
    newest_step,
    read_last_step,
    update_restart,
    write_restart,
)
from isles.agent.failure import trouble, write_failure

REQUEUE = "requeue"

IN_VAIN_LIMIT, IN_VAIN_TAKEN, _IN_VAIN_SCRIPT = 1, 10, 20
"""How often in a row a job may be queued again without coming further: after its time limit, after
its nodes were taken from it, and where a script of the user's own says nothing of how far it is."""


@dataclass(frozen=True, slots=True)
class Gang:
    """The ranks of a job that have just ended, or are to be started.

    Args:
        run_dir, attempt: the run, and this start of it.
        config: its run file.
        job: the job, for messages.
        output: the file that the job's script prints to.
    """

    run_dir: RunDir
    attempt: Attempt
    config: RunConfig
    job: str
    output: Path

    @property
    def restart(self) -> int:
        """How often the ranks were started again before."""
        return current_restart(self.attempt)


def requeue(gang: Gang, why: str, most: int) -> str:
    """The job is queued again, or starts again, unless it came no further for too often.

    Args:
        gang: the ranks.
        why: in a few words.
        most: how often in a row it may come no further.

    Returns:
        REQUEUE, or the exit code with which the job ends.
    """
    saved = newest_step(gang.run_dir)
    is_script = gang.config.training.script is not None
    if is_script:
        most = _IN_VAIN_SCRIPT
    times = _times_in_vain(gang)
    if times < most:
        go_on(gang, why)
        return REQUEUE
    is_limit = most == IN_VAIN_LIMIT
    culprit = trouble(
        f"the time limit leaves no time for a single step: {gang.job} began and ended at "
        f"step {saved or 0}"
        if is_limit
        else f"{why}, and it has come no further in {times + 1} starts"
        + ("" if is_script else f": the last step that was saved is {saved or 0}"),
        "raise clusters[0].launcher.time, or lower clusters[0].launcher.save_before"
        if is_limit
        else "let the script tell its steps (isles.report), so that it is seen to come further"
        if is_script
        else "save more often (checkpoint.every_minutes), or ask for nodes that are not taken away",
        ExitCode.TRAINING,
        id="queue.limit",
    )
    gang.attempt.outcome.unlink(missing_ok=True)
    write_failure(gang.attempt, {**culprit, "kind": "NoProgress"}, step=saved)
    gang.attempt.stopped.unlink(missing_ok=True)
    return str(int(ExitCode.TRAINING))


def _times_in_vain(gang: Gang) -> int:
    """How often in a row, until now, it was queued again and then came no further.

    A trainer comes further when it saves, a script of the user's own when it reports a step.
    """
    if gang.config.training.script is None:
        now, marks = newest_step(gang.run_dir), "saved"
    else:
        now, marks = read_last_step(gang.attempt, gang.restart), "reached"
    times = 0
    for entry in reversed(list_restarts(gang.attempt)):
        if (getattr(entry, marks) or 0) < (now or 0):
            break
        times += not entry.is_counted
    return times


def go_on(gang: Gang, why: str) -> None:
    """Put on record that the ranks go on later; what was said of their end no longer holds."""
    restart = gang.restart
    record_nodes(
        gang,
        Restart(
            number=restart + 1,
            at=time.time(),
            decision="restart",
            culprit=None,
            why=why,
            reached=read_last_step(gang.attempt, restart),
            saved=newest_step(gang.run_dir),
            count=sum(entry.is_counted for entry in list_restarts(gang.attempt)),
            max_restarts=gang.config.clusters[0].max_restarts,
            is_counted=False,
        ),
        is_new=True,
    )
    for path in (gang.attempt.outcome, gang.attempt.stopped):
        path.unlink(missing_ok=True)
    # A stop that a user has asked for meanwhile stays: the next `begin` heeds it.
    if (read_record(gang.attempt.stop_request) or {}).get("requeue"):
        gang.attempt.stop_request.unlink(missing_ok=True)


def record_nodes(gang: Gang, restart: Restart, *, is_new: bool = False) -> None:
    """A job has all its nodes, or none."""
    nodes = tuple(range(gang.config.clusters[0].max_nodes))
    world_size = int((read_record(gang.attempt.launch) or {}).get("world_size", 1))
    full = replace(restart, nodes=nodes, world_size=world_size)
    if is_new:
        write_restart(gang.attempt, full)
    else:
        update_restart(gang.attempt, full)
