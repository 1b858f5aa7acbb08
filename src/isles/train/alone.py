"""A run of one node: its ranks are started again after a loss, and judged, by their own agent."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from isles.errors import ExitCode
from isles.rundir.paths import Attempt, RunDir
from isles.rundir.records import read_record
from isles.rundir.restarts import checkpoint_to_load, newest_step, update_restart
from isles.rundir.wire import free_port
from isles.train.contact import say
from isles.train.crew import Crew, Gang, Part
from isles.train.relay import SignalRelay, StopBetween
from isles.train.script_end import write_end
from isles.train.verdict import judge, trouble, write_stop

_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Alone:
    """One node's run.

    Args:
        gang: its ranks.
        max_restarts: how often ranks that were lost are started again.
        resume_from: a checkpoint that was asked for by name.
        scratch: a folder for the files through which the ranks meet: no port is opened.
    """

    gang: Gang
    max_restarts: int
    resume_from: Path | None
    scratch: Path

    def run(self, relay: SignalRelay) -> int:
        """Run the ranks to the end of the run; returns its exit code."""
        crew = Crew(self.gang, relay)
        restart: int | None = 0
        try:
            while restart is not None:
                with relay.between_ranks():
                    part = self._part(restart)
                crew.begin(part)
                while crew.is_running:
                    time.sleep(_LOOK_S)
                    crew.look()
                restart = self._after(crew, relay)
        except StopBetween:
            _stopped(self.gang.attempt, self.gang.run_dir, relay)
        finally:
            crew.end(at_once=True)
        outcome = read_record(self.gang.attempt.outcome) or {}
        return int(outcome.get("exit_code", ExitCode.TRAINING))

    def _part(self, restart: int) -> Part:
        address = self.gang.address
        return Part(
            restart=restart,
            first=0,
            world_size=self.gang.nproc,
            group=(0, 1),
            master=(address, free_port(address)),
            store=self.scratch / f"store-{restart}",
            meeting=None,
            resume_from=checkpoint_to_load(
                self.gang.run_dir, self.gang.attempt, self.resume_from, restart
            ),
        )

    def _after(self, crew: Crew, relay: SignalRelay) -> int | None:
        """The number of the restart that follows; None where the run is over."""
        gang, report = self.gang, crew.report
        codes = set(report["codes"].values())
        if report["state"] == "succeeded":
            if gang.is_script and codes <= {ExitCode.OK}:
                # Had a wish to stop reached a script, its starter would not have ended so.
                write_end(gang.attempt, "finished", ExitCode.OK, "finished")
            elif relay.requested:
                _stopped(gang.attempt, gang.run_dir, relay)
            return None
        if relay.requested and codes <= {ExitCode.REQUEUE, ExitCode.INTERRUPTED}:
            _stopped(gang.attempt, gang.run_dir, relay)  # stuck before the first step
        if gang.attempt.outcome.exists():
            return None  # the run was over before this rank ended
        lost = trouble("the ranks have lost one another", "look at their logs: `isles logs`")
        restart = judge(
            gang.run_dir,
            gang.attempt,
            crew.restart,
            report["culprit"] or lost,
            max_restarts=self.max_restarts,
            stop=relay.requested,
        )
        if restart.verdict != "restart":
            return None
        nodes, saved = (0,), newest_step(gang.run_dir)
        restart = replace(restart, saved=saved, nodes=nodes, world_size=gang.nproc)
        update_restart(gang.attempt, restart)
        say(restart.text)
        return restart.number


def _stopped(attempt: Attempt, run_dir: RunDir, relay: SignalRelay) -> None:
    """Write that a stop came while the ranks had nothing to save, unless they wrote an end."""
    write_stop(attempt, relay.requested or ExitCode.REQUEUE, newest_step(run_dir))
