"""A run of one node: its ranks are started again after a loss, and judged, by their own agent."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from isles.errors import ExitCode
from isles.run.refusals import deleted
from isles.run.restarts import (
    checkpoint_to_load,
    newest_step,
    read_last_step,
    update_restart,
)
from isles.run.wire import free_port
from isles.agent.connection import say
from isles.agent.ending import Ending
from isles.agent.failure import judge, trouble
from isles.agent.relay import SignalRelay, StopBetween
from isles.agent.workers import Gang, Part, WorkerGroup

_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Alone:
    """One node's run.

    Args:
        gang: its ranks.
        is_script: whether they are those of a user's own script.
        max_restarts: how often ranks that were lost are started again.
        resume_from: a checkpoint that was asked for by name.
    """

    gang: Gang
    is_script: bool
    max_restarts: int
    resume_from: Path | None

    def run(self, relay: SignalRelay) -> int:
        """Run the ranks to the end of the run; returns its exit code."""
        worker_group, ending = WorkerGroup(self.gang, relay), Ending(self.gang.attempt, say)
        restart: int | None = 0
        try:
            while restart is not None:
                with relay.between_ranks():
                    part = self._part(restart)
                worker_group.begin(part)
                while worker_group.is_running and deleted(self.gang.attempt) is None:
                    time.sleep(_LOOK_S)
                    worker_group.look()
                if (gone := deleted(self.gang.attempt)) is not None:
                    say(f"{gone}: the ranks end at once")
                    break
                try:
                    restart = self._after(worker_group, relay, ending)
                except OSError as error:
                    restart = None
                    self._without_record(worker_group, ending, error)
                worker_group.settle()
        except StopBetween:
            self._stopped(relay, ending)
        finally:
            worker_group.end(at_once=True)
            ending.close()
        return int(ending.read()["exit_code"])

    def _without_record(self, worker_group: WorkerGroup, ending: Ending, error: OSError) -> None:
        """Where nothing can be put on record, nothing can be saved: the run ends."""
        what = f"a rank has ended, and {ending.words(error)}"
        culprit = worker_group.report.get("culprit") or trouble(
            what,
            f"make room, or look at {self.gang.attempt.path}",
            ExitCode.TRAINING,
            id="files.output",
        )
        ending.fail(culprit, read_last_step(self.gang.attempt, worker_group.restart))

    def _stopped(self, relay: SignalRelay, ending: Ending) -> None:
        """A stop came while the ranks had nothing to save, unless they wrote an end."""
        ending.stop(relay.requested or ExitCode.REQUEUE, "asked to stop", self.gang.run_dir)

    def _part(self, restart: int) -> Part:
        address = self.gang.address
        return Part(
            restart=restart,
            first=0,
            world_size=self.gang.nproc,
            group=(0, 1),
            master=(address, free_port(address)),
            store=self.gang.scratch / f"store-{restart}",  # no port is opened
            meeting=None,
            resume_from=checkpoint_to_load(
                self.gang.run_dir, self.gang.attempt, self.resume_from, restart
            ),
            is_script=self.is_script,
        )

    def _after(self, worker_group: WorkerGroup, relay: SignalRelay, ending: Ending) -> int | None:
        """The number of the restart that follows; None where the run is over."""
        gang, report = self.gang, worker_group.report
        codes = set(report["codes"].values())
        if report["state"] == "succeeded":
            if self.is_script and codes <= {ExitCode.OK}:
                # Had a stop request reached a script, its starter would not have ended so.
                ending.finish()
            elif relay.requested:
                self._stopped(relay, ending)
            return None
        if relay.requested and codes <= {ExitCode.REQUEUE, ExitCode.INTERRUPTED}:
            self._stopped(relay, ending)  # stuck before the first step
        if gang.attempt.outcome.exists():
            return None  # the run was over before this rank ended
        fix = "look at their logs: `isles logs`"
        lost = trouble("the ranks have lost one another", fix, id="rank.others")
        restart = judge(
            gang.run_dir,
            gang.attempt,
            worker_group.restart,
            report["culprit"] or lost,
            max_restarts=self.max_restarts,
            stop=relay.requested,
        )
        if restart.decision != "restart":
            return None
        nodes, saved = (0,), newest_step(gang.run_dir)
        restart = replace(restart, saved=saved, nodes=nodes, world_size=gang.nproc)
        update_restart(gang.attempt, restart)
        say(restart.text)
        return restart.number
