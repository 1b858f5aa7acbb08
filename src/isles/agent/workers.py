"""The ranks of one node: started, watched and ended, as torchrun would."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isles.run.pace import END_GRACE_S
from isles.run.paths import Attempt, RunDir
from isles.agent.forked import MeetingPlace, Ranks
from isles.agent.rank import RankStart, rank_process
from isles.agent.relay import SignalRelay
from isles.agent.reports import failure_report

_END_OTHERS_S = 30.0
"""How long ranks may take to end after another one of this node has failed."""


@dataclass(frozen=True, slots=True)
class Gang:
    """The ranks of one node, and what they need to start.

    Args:
        run_dir: the run directory.
        attempt: the folder of this start.
        nproc: ranks here.
        address: of this node, at which the first rank of a user's script may listen.
        scratch: a folder for files of this start on this node.
    """

    run_dir: RunDir
    attempt: Attempt
    nproc: int
    address: str
    scratch: Path


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
        is_script: whether the ranks are those of a user's own script.
    """

    restart: int
    first: int
    world_size: int
    group: tuple[int, int]
    master: tuple[str, int]
    store: Path | None
    meeting: tuple[str, int] | None
    resume_from: Path | None
    is_script: bool


class WorkerGroup:
    """The ranks of one node.

    Which ranks they are and with whom, and whether they are started again, is for others to say.

    Args:
        gang: what they need to start.
        relay: of signals, which is told whom to hand them to.
        place: the store where the ranks of several nodes meet, where this node may have it.
    """

    def __init__(self, gang: Gang, relay: SignalRelay, place: MeetingPlace | None = None) -> None:
        self._gang = gang
        self._relay = relay
        self._place = place
        self._ranks: Ranks | None = None
        self._part: Part | None = None
        self._failed: dict[int, int] = {}
        self._end_by = 0.0
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
        return -1 if self._part is None else self._part.restart

    def begin(self, part: Part) -> None:
        """Start the ranks."""
        gang = self._gang
        self._part = part
        self._failed = {}
        self._is_handing_over = False
        if self._place is not None and part.group[0] == 0 and not part.is_script:
            self._place.open()
        start = RankStart(restart=part.restart, store=part.store, meeting=part.meeting)
        args = (gang.run_dir.path, gang.attempt.number, part.resume_from, start)
        numbers = range(part.first, part.first + gang.nproc)
        self._relay.expect(part.restart, numbers)
        environs = {rank: self._environ(part, rank) for rank in numbers}
        self._ranks = Ranks(_entry(part), args, environs)
        self.report = {"restart": part.restart, "state": "running"}

    def look(self) -> None:
        """See whether ranks have ended; `report` says so."""
        if not self.is_running:
            return
        assert self._ranks is not None and self._part is not None
        part = self._part
        done, failed = self._ranks.look()
        if failed:
            self._fail(part, failed)
        elif self._ranks.are_all(done):
            codes = {str(rank): code for rank, code in done.items()}
            self.report = {"restart": part.restart, "state": "succeeded", "codes": codes}

    def _fail(self, part: Part, failed: dict[int, int]) -> None:
        """Some have failed, and the others cannot go on: report why, as soon as it is known."""
        assert self._ranks is not None
        now = time.monotonic()
        if not self._failed:
            self._failed, self._end_by = failed, now + _END_OTHERS_S
            self._ranks.signal(signal.SIGTERM)
        numbers = list(range(part.first, part.first + self._gang.nproc))
        attempt = self._gang.attempt
        found = failure_report(attempt, part.restart, numbers, part.world_size, self._failed)
        has_cause = any(not error["is_communication"] for error in found["errors"])
        has_cause = has_cause or any(code < 0 for code in self._failed.values())
        if not has_cause and self._ranks.are_any_left() and now < self._end_by:
            return  # whom they have lost may be one that takes longer to end
        self.report = {"restart": part.restart, "state": "failed", **found}
        self.report["codes"] = {str(rank): code for rank, code in self._failed.items()}

    def settle(self) -> None:
        """After a failure: let the others end, which have been told to; kill what is left."""
        if self._failed:
            self.end(at_once=False)

    def hand_over(self) -> bool:
        """Let the ranks save and end, to go on with other nodes; False where they do already."""
        if self._is_handing_over or not self.is_running:
            return False
        self._is_handing_over = True
        assert self._ranks is not None
        self._ranks.signal(signal.SIGUSR2)
        return True

    def end(self, *, at_once: bool) -> None:
        """End the ranks; what is left of them after a moment is killed."""
        if self._ranks is not None:
            if self._failed and not at_once:  # told already: once more may mean at once
                self._ranks.end(0, max(END_GRACE_S, self._end_by - time.monotonic()))
            else:
                self._ranks.end(signal.SIGKILL if at_once else signal.SIGTERM, END_GRACE_S)
            self._ranks = None
        self._rest()

    def _rest(self) -> None:
        """No rank is here."""
        self.report = {"restart": self.restart, "state": "idle"}

    def _environ(self, part: Part, rank: int) -> dict[str, str]:
        """What torchrun sets for a rank."""
        gang, local_rank = self._gang, rank - part.first
        error = gang.scratch / f"error-{part.restart}-{local_rank}.json"
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(part.group[0]),
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "default",
            "LOCAL_WORLD_SIZE": str(gang.nproc),
            "WORLD_SIZE": str(part.world_size),
            "GROUP_WORLD_SIZE": str(part.group[1]),
            "ROLE_WORLD_SIZE": str(part.world_size),
            "MASTER_ADDR": part.master[0],
            "MASTER_PORT": str(part.master[1]),
            "TORCHELASTIC_RESTART_COUNT": str(part.restart),
            "TORCHELASTIC_RUN_ID": f"{gang.run_dir.name}.{gang.attempt.number}",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_ERROR_FILE": str(error),
        }


def _entry(part: Part) -> Callable[..., int]:
    if part.is_script:
        from isles.agent.script.run import script_process  # its run file takes long to import

        return script_process
    return rank_process
