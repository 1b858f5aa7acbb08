"""Decides for all nodes of a run: when ranks start, restart and end."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from isles.agent.ending import Ending
from isles.agent.failure import judge, keep_errors, own_time
from isles.agent.hang import StallsThere
from isles.agent.members import Members, Terms
from isles.agent.requeue import QueuedRun
from isles.agent.server import RendezvousServer, say
from isles.errors import ExitCode
from isles.run.fleet import Fleet
from isles.run.outcome import ErrorRecord, agent_error
from isles.run.pace import CLOSING_S, END_GRACE_S, LOST_AFTER_S, WAITING_EVERY_S
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record
from isles.run.refusals import deleted
from isles.run.restarts import (
    Restart,
    checkpoint_to_load,
    newest_step,
    read_last_step,
    read_restart,
    update_restart,
)
from isles.run.stop_request import read_stop_request
from isles.run.wire import free_port

Phase = Literal["wait", "run", "settle", "halt", "over"]

_SETTLE_S = 0.5
"""How long the reports of other nodes may take to name an earlier cause."""
_GRACE_S = 30.0
"""How long ranks may take to end once the run has its outcome."""
_HALT_S = END_GRACE_S + 45.0
"""A node that has not ended its ranks by then is given up."""


class Coordinator:
    """Decides, from the reports of the nodes, what each of them is to do.

    Args:
        run_dir: the run, on this host.
        attempt: this start of it.
        fleet: its nodes.
        terms: of the run file.
        rendezvous: who is there.
        job: the run in the job of a queue; None: it is in none.
    """

    def __init__(
        self,
        run_dir: RunDir,
        attempt: Attempt,
        fleet: Fleet,
        terms: Terms,
        rendezvous: RendezvousServer,
        job: QueuedRun | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._fleet = fleet
        self._terms = terms
        self._rendezvous = rendezvous
        self._job = job
        self._clock = rendezvous.clock
        self._phase: Phase = "wait"
        self._since = self._waits_since = self._clock()
        self._said_at = self._clock()
        self._waiting = ""
        self._members = Members(run_dir, attempt, fleet, rendezvous, terms.max_restarts)
        self._ending = Ending(attempt, say)
        self._stalls = StallsThere(run_dir, attempt)
        self._common: dict[str, Any] = {}
        self._signal = 0
        self._is_now = False
        self._asked_at: float | None = None
        self._outcome_at: float | None = None
        self._told_stop = 0

    @property
    def is_over(self) -> bool:
        """Whether the run has its outcome, and the nodes are only to end."""
        return self._phase == "over"

    @property
    def exit_code(self) -> int:
        """Of the run, once it is over."""
        return int(self._ending.read()["exit_code"])

    def ask_to_stop(self, number: int) -> None:
        """A signal has come: save and stop; SIGKILL: at once."""
        if number == signal.SIGKILL:
            self._is_now = True
        else:
            self._signal = self._signal or number

    def look(self) -> None:
        """One look at everything; called ten times a second or so."""
        self._rendezvous.look(self._clock())
        if not self.is_over and (gone := deleted(self._attempt)) is not None:
            self._is_now = True
            self.fail(agent_error(gone.what, gone.fix, gone.exit_code, id=gone.id))
        try:
            self._decide()
            self._ending.is_well()
        except OSError as error:  # of records: every connection takes care of its own
            if self._ending.is_hopeless(error, self._clock()):
                what, fix = self._ending.words(error), f"look at {self._attempt.path}"
                self.fail(agent_error(what, fix, id="files.output"))
        for node in self._rendezvous.there():
            self._rendezvous.order(node, self._order(node), self._clock())

    def _decide(self) -> None:
        if not self.is_over:
            self._receive_stop_requests()
        match self._phase:
            case "wait":
                self._gather()
            case "run":
                self._watch()
            case "settle":
                self._settle()
            case "halt":
                self._halt()
            case "over":
                pass

    def has_ended(self) -> bool:
        """Whether all nodes have gone, or have had their time to."""
        peers = self._rendezvous.peers().values()
        is_late = self._clock() - self._since > CLOSING_S
        return self.is_over and (is_late or all(peer.is_done or peer.lost for peer in peers))

    def fail(self, culprit: ErrorRecord) -> None:
        """The run ends because of this, unless it has its outcome."""
        self._ending.fail(culprit, read_last_step(self._attempt, self._members.restart))
        self._enter("over")

    def close(self) -> None:
        """All nodes have gone."""
        self._ending.close()

    def places(self) -> dict[int, tuple[int, int]]:
        """First rank and number of ranks of each node that is a part of the run."""
        return dict(self._members.ranks)

    # What the user wants.

    def _receive_stop_requests(self) -> None:
        request = read_stop_request(self._attempt)
        if request is not None:
            self._is_now = self._is_now or request.kind == "now"
            asked = signal.SIGINT if request.kind == "interrupt" else signal.SIGTERM
            self._signal = self._signal or asked
            if self._told_stop != len(request.kind):
                self._told_stop = len(request.kind)
                say(f"asked to stop ({request.kind}) by {request.by}")
        for node, peer in self._rendezvous.peers().items():
            number = 0 if peer.lost else int(peer.report.get("stop", 0))
            if number == signal.SIGKILL:
                self._is_now = True
            elif number and not self._signal:
                say(f"{self._rendezvous.label(node)} was asked to stop: all nodes save and stop")
                self._signal = number
        if self._is_now:
            self._stop("asked to stop at once", ExitCode.INTERRUPTED)

    @property
    def _stop_code(self) -> ExitCode | None:
        if not self._signal:
            return None
        return ExitCode.INTERRUPTED if self._signal == signal.SIGINT else ExitCode.REQUEUE

    def _stop(self, why: str, code: ExitCode) -> None:
        """No rank is left: the run is stopped, or its job goes on later."""
        say(why)
        if self._job is None:
            self._ending.stop(code, why, self._run_dir)
            self._enter("over")
        else:
            self._end_job(self._job)

    def _end_job(self, job: QueuedRun) -> None:
        self._ending.tries(job.stopped)
        if job.is_requeued:
            self._ending.keep("requeued", ExitCode.REQUEUE, "the job is queued again, to go on")
        self._enter("over")

    # Before the ranks.

    def _gather(self) -> None:
        """Wait for nodes, and begin with them."""
        if self._stop_code is not None:
            self._stop("asked to stop while no rank was there", self._stop_code)
            return
        if (refusal := self._rendezvous.fatal) is not None:
            self.fail(agent_error(refusal.what, refusal.fix, ExitCode.PREFLIGHT, id=refusal.id))
            return
        lost = self._members.lost()
        if lost and not self._fleet.is_elastic:
            self.fail(self._members.lost_culprit(lost[0]))
            return
        there = self._rendezvous.there()
        is_first = not self._members.nodes
        has_head = 0 in there or not self._terms.needs_head
        waited_s = self._clock() - self._waits_since
        is_late = waited_s > self._fleet.start_timeout_s
        wanted = len(self._fleet.nodes) if is_first and not is_late else self._fleet.min_nodes
        if len(there) >= wanted and has_head:
            self._begin(there)
        elif is_late:
            self._give_up_waiting(there)
        elif self._clock() - self._said_at > WAITING_EVERY_S:
            self._say_waiting(there, waited_s)

    def _say_waiting(self, there: list[int], waited_s: float) -> None:
        self._said_at = self._clock()
        self._waiting = self._members.waiting_text(there, self._fleet.start_timeout_s - waited_s)
        say(self._waiting)
        status = read_record(self._run_dir.status) or {}
        status |= {"phase": "waiting for nodes", "detail": self._waiting, "updated_at": time.time()}
        self._ending.tries(lambda: write_record(self._run_dir.status, status, durable=False))

    def _give_up_waiting(self, there: list[int]) -> None:
        head = self._fleet.head
        fix = (
            "are they switched on, and can they reach the first node? try there: "
            f"nc -vz {head.address} {self._fleet.port}; clusters[0].start_timeout waits longer"
        )
        self.fail(agent_error(self._members.late_text(there), fix, id="start.timeout"))

    def _begin(self, there: list[int]) -> None:
        """Start the ranks on these nodes."""
        members, fleet = self._members, self._fleet
        restart: Restart | None = None
        if members.nodes:
            number = members.restart + 1
            restart = read_restart(self._attempt, number) or self._members.changed(there)
        elif len(there) < len(fleet.nodes):
            say(f"beginning without {members.missing(there)}")
        members.begin(there)
        if restart is not None:
            saved, ranks = newest_step(self._run_dir), members.world_size
            restart = replace(restart, saved=saved, nodes=tuple(there), world_size=ranks)
            found = restart
            self._ending.tries(lambda: update_restart(self._attempt, found))
            say(restart.text)
        asked = Path(fleet.resume_from) if fleet.resume_from else None
        checkpoint = checkpoint_to_load(self._run_dir, self._attempt, asked, members.restart)
        # On this machine, as is the coordinator.
        address = fleet.nodes[there[0]].address
        self._common = {
            "world_size": members.world_size,
            "script": self._terms.is_script,
            "store": [address, self._rendezvous.peers()[there[0]].store],
            "master": [address, free_port(address)],
            "resume_from": str(checkpoint) if checkpoint is not None else None,
        }
        self._waiting = ""
        self._enter("run")

    # While the ranks run.

    def _watch(self) -> None:
        """The ranks run: until one is lost, all have ended, or others come."""
        reports = self._members.reports()
        self._stalls.look(reports, self._clock())
        states = [report["state"] for report in reports.values()]
        has_all = len(reports) == len(self._members.nodes)
        if self._attempt.outcome.exists():
            self._outcome_at = self._outcome_at or self._clock()
            is_late = self._clock() - self._outcome_at > _GRACE_S
            if is_late or (has_all and "running" not in states) or self._members.lost():
                self._enter("over")
        elif self._members.lost() or "failed" in states:
            self._enter("settle")
        elif has_all and set(states) == {"succeeded"}:
            self._all_ended(reports)
        elif self._asked_at is not None:
            if self._clock() - self._asked_at > self._terms.save_timeout_s:
                self._enter("halt")
        elif self._members.newcomers() and not self._signal and self._has_stepped():
            names = self._members.labels(self._members.newcomers())
            say(f"{names} waits to join: the ranks save and restart")
            self._asked_at = self._clock()

    def _has_stepped(self) -> bool:
        return read_last_step(self._attempt, self._members.restart) is not None

    def _all_ended(self, reports: dict[int, dict[str, Any]]) -> None:
        codes = {int(code) for report in reports.values() for code in report["codes"].values()}
        if ExitCode.HANDOVER in codes:
            self._enter("wait")
        elif codes <= {ExitCode.OK}:
            # A user's script leaves no outcome; one that a stop request has reached ends not so.
            self._ending.finish()
            self._enter("over")
        elif self._stop_code is not None:
            self._stop("the ranks have stopped as asked, and left no outcome", self._stop_code)
        elif self._job is not None and codes <= {ExitCode.OK, ExitCode.REQUEUE}:
            self._end_job(self._job)  # a script of the user's own asks to be started again
        else:
            what = f"the ranks ended with {sorted(codes)}, and nobody has asked them to"
            fix = "their logs may say why: `isles logs`"
            self.fail(agent_error(what, fix, ExitCode.TRAINING, id="rank.died"))

    def _settle(self) -> None:
        """A rank or a node was lost: find out what came first, then judge."""
        waited_s = self._clock() - self._since
        settle_s = _SETTLE_S if len(self._members.nodes) > 1 else 0.0
        reports = self._members.reports()
        culprits = [own_time(r["culprit"], s) for r, s in self._members.said() if r.get("culprit")]
        if self._members.lost():
            # Its death is the cause of what the others say of their connections.
            if waited_s >= settle_s:
                self._judge_lost(culprits)
            return
        codes = {c for r in reports.values() if r["state"] == "failed" for c in r["codes"].values()}
        if self._stop_code is not None and codes <= {ExitCode.REQUEUE, ExitCode.INTERRUPTED}:
            self._stop("stopped while ranks were stuck before the first step", self._stop_code)
            return
        if culprits and waited_s >= settle_s:
            self._judge(min(culprits, key=lambda error: float(error["at"])))
            return
        has_all = len(reports) == len(self._members.nodes)
        if has_all and all(report["state"] == "succeeded" for report in reports.values()):
            self._enter("run")
            return
        # Each says only that it has lost another one: who is silent will be missed soon.
        are_done = has_all and all(report["state"] != "running" for report in reports.values())
        if waited_s > LOST_AFTER_S + 5.0 or (are_done and not self._members.is_anybody_quiet()):
            errors = [own_time(e, s) for r, s in self._members.said() for e in r.get("errors", ())]
            fix = "look at the logs of the ranks that are missing: `isles logs`"
            unknown = agent_error("the ranks have lost one another", fix, id="rank.others")
            self._judge(min(errors, key=lambda error: float(error["at"]), default=unknown))

    def _judge_lost(self, culprits: list[dict[str, Any]]) -> None:
        lost = self._members.lost()
        remaining = [node for node in self._members.nodes if node not in lost]
        has_head = 0 in remaining or not self._terms.needs_head
        if self._fleet.is_elastic and has_head:
            if culprits:
                say(f"meanwhile: {culprits[0]['what']}")
            self._members.changed(remaining)
            self._enter("halt")
            return
        culprit = self._members.lost_culprit(lost[0])
        if self._job is not None and self._job.lost(str(culprit["what"])):
            say(f"{culprit['what']}: the job is queued again, to go on with other nodes")
            self._end_job(self._job)
        else:
            self._judge({**culprit, "will_recur": True})

    def _judge(self, culprit: ErrorRecord) -> None:
        attempt, restart, terms = self._attempt, self._members.restart, self._terms
        with suppress(OSError):  # the reserve is kept for the decision
            keep_errors(attempt, restart, self._members.said())
        decision = lambda: judge(  # noqa: E731
            self._run_dir,
            attempt,
            restart,
            culprit,
            max_restarts=terms.max_restarts,
            stop=self._stop_code,
        )
        if self._ending.tries(decision):
            self._enter("halt")
        else:
            # Where nothing can be put on record, nothing could be saved: no reason to go on.
            self.fail(culprit)

    def _halt(self) -> None:
        """Until all members have ended their ranks."""
        busy = self._members.busy()
        if self._attempt.outcome.exists():
            self._enter("over")
        elif not busy:
            self._enter("wait")
        elif self._clock() - self._since > _HALT_S:
            for peer in busy:
                self._rendezvous.drop(peer, f"it has not ended its ranks within {_HALT_S:.0f} s")

    # What the nodes are told.

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._since = self._clock()
        if phase in ("wait", "halt", "over"):
            self._asked_at = None
        if phase == "wait":
            self._waits_since = self._said_at = self._clock()

    def _order(self, node: int) -> dict[str, Any]:
        """What a node is to do now."""
        order: dict[str, Any] = {
            "phase": {"settle": "run"}.get(self._phase, self._phase),
            "restart": self._members.restart,
            "waiting": self._waiting,
        }
        if self.is_over:
            return {**order, **self._ending.word(), "now": self._is_now}
        if node not in self._members.nodes or self._phase not in ("run", "settle"):
            return {**order, "phase": "wait" if node not in self._members.nodes else order["phase"]}
        return {
            **order,
            **self._common,
            "ranks": list(self._members.ranks[node]),
            "group": [self._members.nodes.index(node), len(self._members.nodes)],
            "signal": self._signal,
            "stacks": self._stalls.asked,
            "handover": self._asked_at is not None,
        }
