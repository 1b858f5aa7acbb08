"""The ranks of one node under torch's elastic agent: started, watched and ended."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import Worker, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from isles.rundir.pace import END_GRACE_S
from isles.rundir.paths import Attempt, RunDir
from isles.train.rank import RankStart, rank_process
from isles.train.relay import SignalRelay
from isles.train.reports import failure_report
from isles.train.script import script_process


@dataclass(frozen=True, slots=True)
class Gang:
    """The ranks of one node, and what they need to start.

    Args:
        run_dir: the run directory.
        attempt: the folder of this start.
        nproc: ranks here.
        address: of this node, at which the first rank of a user's script may listen.
        is_script: whether the ranks are those of a user's own script.
    """

    run_dir: RunDir
    attempt: Attempt
    nproc: int
    address: str
    is_script: bool


@dataclass(frozen=True, slots=True)
class Part:
    """The part that the ranks of this node have in one start of all ranks.

    Args:
        restart: how often all ranks were started again before.
        first: number of the first rank here.
        world_size: ranks on all nodes.
        group: this node's place among the nodes, and how many they are.
        master: host and port that torchrun's variables name to a user's script.
        store, meeting: through which isles' own ranks meet: a file, or host and port.
        resume_from: a checkpoint that was asked for by name.
    """

    restart: int
    first: int
    world_size: int
    group: tuple[int, int]
    master: tuple[str, int]
    store: Path | None
    meeting: tuple[str, int] | None
    resume_from: Path | None


class Crew(LocalElasticAgent):
    """Ranks under torch's elastic agent, of which the starting, watching and ending is used.

    Which ranks they are and with whom, and whether they are started again, is for others to say:
    nothing is asked of a rendezvous, and torch's own count of restarts is not used.
    """

    def __init__(self, gang: Gang, relay: SignalRelay) -> None:
        spec = WorkerSpec(
            role="default",
            local_world_size=gang.nproc,
            entrypoint=script_process if gang.is_script else rank_process,
            rdzv_handler=_Met(f"{gang.run_dir.name}.{gang.attempt.number}"),  # type: ignore[arg-type]
            local_addr=gang.address,
        )
        super().__init__(
            spec,
            DefaultLogsSpecs(),
            start_method="forkserver",
            shutdown_timeout=int(END_GRACE_S),
        )
        self._gang = gang
        self._relay = relay
        self._restart = -1
        self._is_handing_over = False
        self.report: dict[str, Any] = {}
        self._rest()

    @property
    def is_running(self) -> bool:
        """Whether ranks have been started and not been seen to end."""
        return bool(self.report["state"] == "running")

    @property
    def restart(self) -> int:
        """The restart to which the ranks belong, running or not; -1 before the first."""
        return self._restart

    def begin(self, part: Part) -> None:
        """Start the ranks."""
        group: Any = self._worker_group  # torch types its places as None
        group.group_rank, group.group_world_size = part.group
        group.master_addr, group.master_port = part.master
        group.store = _NO_STORE
        ranks = range(part.first, part.first + self._gang.nproc)
        group.workers = [
            Worker(
                local_rank=local_rank,
                global_rank=rank,
                role_rank=rank,
                world_size=part.world_size,
                role_world_size=part.world_size,
            )
            for local_rank, rank in enumerate(ranks)
        ]
        self._restart = part.restart
        self._is_handing_over = False
        group.spec.args = (
            self._gang.run_dir.path,
            self._gang.attempt.number,
            part.resume_from,
            RankStart(restart=part.restart, store=part.store, meeting=part.meeting),
        )
        self._relay.expect(part.restart, ranks)
        for local_rank, pid in self._start_workers(group).items():
            group.workers[local_rank].id = pid
        group.state = WorkerState.HEALTHY
        self.report = {"restart": self._restart, "state": "running"}

    def look(self) -> None:
        """See whether ranks have ended; `report` says so."""
        if not self.is_running:
            return
        group = self._worker_group
        result = self._monitor_workers(group)
        if result.state is WorkerState.SUCCEEDED:
            codes = {str(rank): int(code or 0) for rank, code in result.return_values.items()}
            self.report = {"restart": self._restart, "state": "succeeded", "codes": codes}
        elif result.state is not WorkerState.HEALTHY:
            failures = {rank: int(f.exitcode) for rank, f in result.failures.items()}
            ranks = [worker.global_rank for worker in group.workers]
            world_size = group.workers[0].world_size
            attempt = self._gang.attempt
            found = failure_report(attempt, self._restart, ranks, world_size, failures)
            self.report = {"restart": self._restart, "state": "failed", **found}
            self.report["codes"] = {str(rank): code for rank, code in failures.items()}

    def hand_over(self) -> bool:
        """Let the ranks save and end, to go on with other nodes; False where they do already."""
        if self._is_handing_over or not self.is_running:
            return False
        self._is_handing_over = True
        assert self._pcontext is not None
        for pid in self._pcontext.pids().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        return True

    def end(self, *, at_once: bool) -> None:
        """End the ranks; what is left of them after a moment is killed."""
        if self._pcontext is not None:
            number = signal.SIGKILL if at_once else signal.SIGTERM
            self._shutdown(number, timeout=int(END_GRACE_S))
        self._rest()

    def _rest(self) -> None:
        """No rank is here."""
        self.report = {"restart": self._restart, "state": "idle"}


class _Met:
    """In place of a rendezvous, which has happened at the supervisor."""

    use_agent_store = False

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_run_id(self) -> str:
        """As torch puts it into the environment of the ranks."""
        return self._run_id


# torch asks that there be one, and does nothing with it where the ranks have numbers.
_NO_STORE: Any = object()
