"""torch's elastic agent, told when to start the ranks again and when not to."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import DistStoreError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler

from isles.errors import ExitCode
from isles.rundir.manifest import list_checkpoints
from isles.rundir.nodes import Meeting
from isles.rundir.paths import Attempt, RunDir
from isles.rundir.records import read_record, write_record
from isles.rundir.restarts import (
    newest_step,
    read_last_step,
    update_restart,
)
from isles.train.members import Members, Waiting, judge_members
from isles.train.rank import RankStart, rank_process
from isles.train.relay import SignalRelay
from isles.train.verdict import find_culprit, judge, write_stop

GRACE_S = 30
"""How long surviving ranks may take to end after another has failed."""

_SOME = 1
"""torch counts restarts down; ours are on record, and this only says: once more."""


class Concluded(Exception):
    """The run has its outcome: there is nothing left to start."""


@dataclass(frozen=True, slots=True)
class Gang:
    """The ranks of one node, and what they need to start.

    Args:
        run_dir: the run directory.
        attempt: the folder of this start.
        node: the number of this node's place.
        nproc_per_node: ranks here.
        max_restarts: how often ranks that were lost are started again.
        timeout_s: longest wait for other nodes.
        save_timeout_s: longest wait for ranks that save before they hand over.
        resume_from: a checkpoint that was asked for by name.
        scratch: a folder for the files through which the ranks of one node meet.
        meeting: where the nodes meet; None where there is one.
    """

    run_dir: RunDir
    attempt: Attempt
    node: int
    nproc_per_node: int
    max_restarts: int
    timeout_s: float
    save_timeout_s: float
    resume_from: Path | None
    scratch: Path
    meeting: Meeting | None


class ElasticAgent(LocalElasticAgent):
    """Starts the ranks of this node, and starts them again as the records decide.

    torch restarts after every failure, so many times on each node. Here a failure is judged first
    (`verdict.judge`), the count is the run's, and nodes that come are waited for by ranks that
    save before they end.
    """

    def __init__(self, gang: Gang, relay: SignalRelay, handler: RendezvousHandler) -> None:
        spec = WorkerSpec(
            role="default",
            local_world_size=gang.nproc_per_node,
            entrypoint=rank_process,
            rdzv_handler=handler,
            max_restarts=_SOME,
            monitor_interval=0.1,
            local_addr="127.0.0.1",
        )
        super().__init__(
            spec,
            DefaultLogsSpecs(),
            start_method="forkserver",
            exit_barrier_timeout=GRACE_S,
            shutdown_timeout=GRACE_S,
        )
        self._gang = gang
        self._relay = relay
        self._restart = 0
        self._asked_at: float | None = None
        self._outcome_at: float | None = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._remaining_restarts = _SOME if self._goes_on(result) else 0
        elif result.state is WorkerState.SUCCEEDED:
            if ExitCode.HANDOVER in result.return_values.values():
                super()._restart_workers(worker_group)
                return RunResult(state=WorkerState.HEALTHY)
            self._note_stop()
        elif self._gang.meeting is not None:
            self._end_with_the_others(worker_group)
        return result

    def _goes_on(self, result: RunResult) -> bool:
        """Whether the ranks are started again after a failure."""
        gang = self._gang
        codes = {failure.exitcode for failure in result.failures.values()}
        if self._relay.requested and codes <= {ExitCode.REQUEUE, ExitCode.INTERRUPTED}:
            self._note_stop()  # they were stuck before the first step
        if gang.attempt.outcome.exists():
            return False  # another node has judged, or the run was over before this rank ended
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        paths = (gang.attempt.rank_error(rank, self._restart) for rank in ranks)
        errors = [error for path in paths if (error := read_record(path))]
        are_all = len(ranks) == self._worker_group.workers[0].world_size
        culprit = find_culprit(errors, result.failures, ranks, are_all=are_all)
        if culprit is None:
            return True  # the nodes that meet again will see who is missing
        verdict = judge(
            gang.run_dir,
            gang.attempt,
            self._restart,
            culprit,
            max_restarts=gang.max_restarts,
            stop=self._relay.requested,
        )
        if verdict.verdict == "restart":
            return True
        # Before this node's own ranks are ended: the others must not begin without it.
        with suppress(Exception):
            self._rdzv_handler.set_closed()  # type: ignore[no-untyped-call]
        return False

    def _note_stop(self) -> None:
        """Write that the ranks were stopped, where they had nothing to save and wrote nothing."""
        if self._relay.requested:
            stopped_between(self._gang, self._relay)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state is WorkerState.HEALTHY and not self._is_overdue():
            self._ask_to_hand_over()  # nodes are waiting to join
            return
        super()._restart_workers(worker_group)

    def _ask_to_hand_over(self) -> None:
        """Let the ranks save and end, once; all of them do so at the same step."""
        if self._asked_at is not None or self._relay.requested:
            return
        if read_last_step(self._gang.attempt, self._restart) is None:
            return  # they have only just been started
        self._asked_at = time.monotonic()
        say("other nodes are waiting to join: the ranks save and meet again")
        assert self._pcontext is not None
        for pid in self._pcontext.pids().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)

    def _is_overdue(self) -> bool:
        asked = self._asked_at
        return asked is not None and time.monotonic() - asked > self._gang.save_timeout_s

    def _end_with_the_others(self, worker_group: WorkerGroup) -> None:
        """Ranks that wait for those of a node which has ended the run would wait too long."""
        if not self._gang.attempt.outcome.exists():
            return
        self._outcome_at = self._outcome_at or time.monotonic()
        if time.monotonic() - self._outcome_at > GRACE_S:
            self._stop_workers(worker_group)
            raise Concluded

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        gang = self._gang
        with self._relay.between_ranks():
            while True:
                try:
                    with Waiting(gang.run_dir, gang.attempt, gang.meeting):
                        super()._rendezvous(worker_group)
                    self._restart = self._agree(worker_group)
                    return
                except DistStoreError as error:
                    # The first of the nodes was lost before it had said what the others wait for.
                    say(f"meeting again: {error}")

    def _agree(self, worker_group: WorkerGroup) -> int:
        """The number of this restart, from the first of the nodes that have met."""
        # Typed as None by torch, which is what they are before anybody has met.
        store: Any = worker_group.store
        place: Any = worker_group.group_rank
        store.set(f"isles/node/{place}", str(self._gang.node))
        if place == 0:
            places = range(worker_group.group_world_size or 1)
            nodes = tuple(int(store.get(f"isles/node/{other}")) for other in places)
            ranks = worker_group.workers[0].world_size
            store.set("isles/restart", json.dumps(self._settle(Members(nodes, ranks))))
        restart = json.loads(store.get("isles/restart"))
        if restart is None:
            raise Concluded
        return int(restart)

    def _settle(self, members: Members) -> int | None:
        """What those who have met do: the number of the restart, or None where the run ends."""
        gang = self._gang
        path = gang.attempt.path / "members.json"
        before = read_record(path)
        if before is None:
            write_record(path, {"restart": 0, **members.record()})
            return 0
        number = int(before["restart"]) + 1
        restart = judge_members(
            gang.run_dir, gang.attempt, Members.of(before), members, number, gang.max_restarts
        )
        if restart.verdict != "restart":
            return None
        restart = replace(
            restart,
            saved=newest_step(gang.run_dir),
            nodes=members.nodes,
            world_size=members.world_size,
        )
        update_restart(gang.attempt, restart)
        write_record(path, {"restart": number, **members.record()})
        say(restart.text)
        return number

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        gang, meeting = self._gang, self._gang.meeting
        start = RankStart(
            restart=self._restart,
            store=gang.scratch / f"store-{self._restart}" if meeting is None else None,
            meeting=(meeting.address, meeting.port) if meeting is not None else None,
        )
        worker_group.spec.args = (
            gang.run_dir.path,
            gang.attempt.number,
            _checkpoint_to_load(gang, self._restart),
            start,
        )
        self._asked_at = None
        self._relay.expect(self._restart, [worker.global_rank for worker in worker_group.workers])
        ids: dict[int, Any] = super()._start_workers(worker_group)
        return ids


def stopped_between(gang: Gang, relay: SignalRelay) -> int:
    """Write that a stop came while no rank was there; returns the exit code."""
    code = relay.requested or ExitCode.REQUEUE
    write_stop(gang.attempt, code, newest_step(gang.run_dir))
    return int((read_record(gang.attempt.outcome) or {}).get("exit_code", code))


def say(line: str) -> None:
    """One line for the agent's log."""
    sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} agent: {line}\n")
    sys.stderr.flush()


def _checkpoint_to_load(gang: Gang, restart: int) -> Path | None:
    """A checkpoint asked for by name, until this start has saved one of its own."""
    if gang.resume_from is None or restart == 0:
        return gang.resume_from
    begun_at = float((read_record(gang.attempt.launch) or {}).get("begun_at", 0.0))
    is_ours = any(info.created_at >= begun_at for info in list_checkpoints(gang.run_dir))
    return None if is_ours else gang.resume_from
