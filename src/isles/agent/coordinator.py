"""Coordinator of a run: decides for all nodes when ranks start, restart and end."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from isles.agent.failure import decide, keep_errors
from isles.agent.hang import keep_hang_files
from isles.agent.members import Members
from isles.agent.protocol import (
    CLOSING_S,
    END_GRACE_S,
    LOST_AFTER_S,
    WAITING_EVERY_S,
    log_line,
)
from isles.agent.requeue import QueuedRun
from isles.agent.script.watch import ScriptWatch
from isles.agent.server import RendezvousServer
from isles.errors import ExitCode
from isles.run.nodes import Fleet
from isles.run.outcome import ErrorRecord, agent_error, end, end_failed, end_stopped
from isles.run.paths import Attempt, RunDir
from isles.run.records import error_if_deleted, read_record, write_record
from isles.run.restarts import (
    Restart,
    checkpoint_to_load,
    newest_step,
    read_last_step,
    read_restart,
    update_restart,
)
from isles.run.stop import read_stop_request

Phase = Literal["wait", "run", "resolve", "halt", "over"]
"""wait: for nodes. run: the ranks run. resolve: a rank or node was lost; finding the root cause.
halt: all ranks end, and then restart. over: the run has its outcome."""

_RESOLVE_S = 0.5
"""Longest wait for reports of other nodes that may contain an earlier cause."""
_GRACE_S = 30.0
"""Longest time for ranks to end after the run has its outcome."""
_HALT_S = END_GRACE_S + 45.0
"""A node that has not ended its ranks by then is dropped."""
_DISK_S = 20.0
"""Longest time that the run directory's disk may fail before the run fails."""


class Coordinator:
    """Decides, from the reports of the nodes, on the command for each node.

    Args:
        save_timeout_s: longest wait for ranks that save before nodes join.
        script: watches the user's own script; None: the ranks run the built-in trainer.
        job: the run in the job of a queue; None: it is not in a queue.
    """

    def __init__(
        self,
        run_dir: RunDir,
        attempt: Attempt,
        nodes: Fleet,
        server: RendezvousServer,
        *,
        max_restarts: int,
        save_timeout_s: float,
        script: ScriptWatch | None = None,
        job: QueuedRun | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._nodes = nodes
        self._server = server
        self._max_restarts = max_restarts
        self._save_timeout_s = save_timeout_s
        self._script = script
        self._job = job
        self._clock = server.clock
        self._phase: Phase = "wait"
        self._since = self._waits_since = self._logged_at = self._clock()
        self._waiting = ""
        self._members = Members(run_dir, attempt, nodes, server, max_restarts)
        self._common: dict[str, Any] = {}
        self._signal = 0
        self._is_now = False
        self._asked_at: float | None = None
        self._outcome_at: float | None = None
        self._logged_stop = ""
        self._outcome: dict[str, Any] = {"exit_code": int(ExitCode.TRAINING), "reason": ""}
        """The outcome, if the disk has no record of it, or if the run continues in another job."""
        self._disk_failed_at: float | None = None

    @property
    def is_over(self) -> bool:
        """True if the run has its outcome, and the nodes only have to end."""
        return self._phase == "over"

    @property
    def outcome(self) -> dict[str, Any]:
        """The outcome, once the run is over: `exit_code`, `reason`."""
        with suppress(OSError):
            return read_record(self._attempt.outcome) or self._outcome
        return self._outcome

    def ask_to_stop(self, number: int) -> None:
        """Save and stop, depending on the signal; SIGKILL: stop immediately."""
        if number == signal.SIGKILL:
            self._is_now = True
        else:
            self._signal = self._signal or number

    def look(self) -> None:
        """Check everything once, and decide; called about ten times per second."""
        self._server.look(self._clock())
        if not self.is_over and (gone := error_if_deleted(self._attempt)) is not None:
            self._is_now = True
            self.fail(agent_error(gone.what, gone.fix, gone.exit_code, id=gone.id))
        try:
            self._decide()
            self._disk_failed_at = None
        except OSError as error:  # errors of records: every connection handles its own errors
            what = f"{error.filename or self._attempt.path} cannot be used: {error.strerror}"
            if self._disk_failed_at is None:
                log_line(what)
                self._disk_failed_at = self._clock()
            elif self._clock() - self._disk_failed_at > _DISK_S:
                self.fail(agent_error(what, f"check {self._attempt.path}", id="files.output"))
        for node in self._server.connected():
            self._server.command(node, self._command(node), self._clock())

    def has_ended(self) -> bool:
        """True if all nodes have exited, or their time to exit is over."""
        peers = self._server.peers().values()
        is_late = self._clock() - self._since > CLOSING_S
        return self.is_over and (is_late or all(peer.is_done or peer.lost for peer in peers))

    def fail(self, root_cause: ErrorRecord) -> None:
        """End the run with this cause, unless it already has an outcome."""
        if self.is_over:
            return
        log_line(str(root_cause["what"]))
        step = read_last_step(self._attempt, self._members.restart)
        self._end(
            lambda: end_failed(self._attempt, root_cause, step=step),
            int(root_cause["exit_code"]),
            str(root_cause["what"]),
        )

    def places(self) -> dict[int, tuple[int, int]]:
        """First rank and number of ranks of each node that trains."""
        return dict(self._members.ranks)

    @property
    def restart(self) -> int:
        """Number of the current restart of the ranks; 0 before the first restart."""
        return self._members.restart

    def _decide(self) -> None:
        if not self.is_over:
            self._receive_stop_requests()
        match self._phase:
            case "wait":
                self._gather()
            case "run":
                self._watch()
            case "resolve":
                self._resolve()
            case "halt":
                self._halt()
            case "over":
                pass

    def _end(self, write: Callable[[], object], code: int, reason: str) -> None:
        # The run is over; `write` records the outcome, unless the disk is full.
        self._enter("over")
        self._outcome = {"exit_code": code, "reason": reason}
        try:
            write()
        except OSError as error:
            why = f"{reason} (this could not be recorded: {error.strerror})"
            log_line(f"the run has ended with {code}: {why}")

    # Stop requests.

    def _receive_stop_requests(self) -> None:
        request = read_stop_request(self._attempt)
        if request is not None:
            self._is_now = self._is_now or request.kind == "now"
            asked = signal.SIGINT if request.kind == "interrupt" else signal.SIGTERM
            self._signal = self._signal or asked
            if self._logged_stop != request.kind:
                self._logged_stop = request.kind
                log_line(f"asked to stop ({request.kind}) by {request.by}")
        for node, peer in self._server.peers().items():
            number = 0 if peer.lost else int(peer.report.get("stop", 0))
            if number == signal.SIGKILL:
                self._is_now = True
            elif number and not self._signal:
                label = self._server.label(node)
                log_line(f"{label} was asked to stop, so all nodes save and stop")
                self._signal = number
        if self._is_now:
            self._stop("asked to stop immediately", ExitCode.INTERRUPTED)

    @property
    def _stop_code(self) -> ExitCode | None:
        if not self._signal:
            return None
        return ExitCode.INTERRUPTED if self._signal == signal.SIGINT else ExitCode.REQUEUE

    def _stop(self, why: str, code: ExitCode) -> None:
        # All ranks have ended: the run is stopped, or its job continues later.
        log_line(why)
        if self._job is not None:
            self._end_job(self._job)
            return
        saved = newest_step(self._run_dir)
        self._end(lambda: end_stopped(self._attempt, code, saved), int(code), why)

    def _end_job(self, job: QueuedRun) -> None:
        self._end(job.stopped, int(ExitCode.REQUEUE), "the job is queued again, to resume the run")

    # Before the ranks start.

    def _gather(self) -> None:
        if self._stop_code is not None:
            self._stop("asked to stop while no rank was running", self._stop_code)
            return
        if (refusal := self._server.fatal) is not None:
            self.fail(agent_error(refusal.what, refusal.fix, ExitCode.PREFLIGHT, id=refusal.id))
            return
        if self._attempt.outcome.exists():  # the process that starts the agents has given up
            self._enter("over")
            return
        members, nodes = self._members, self._nodes
        are_replaced = nodes.are_replaced or self._brings_back
        if (lost := members.lost()) and not (nodes.is_elastic or are_replaced):
            self.fail(members.lost_error(lost[0]))
            return
        connected = self._server.connected()
        waited_s = self._clock() - self._waits_since
        is_late = waited_s > nodes.start_timeout_s
        wanted = len(nodes) if not members.nodes and not is_late else nodes.min_nodes
        refused = self._server.refused
        more = f" (refused: {refused.what})" if refused is not None else ""
        if len(connected) >= wanted and self._has_first_node(connected):
            self._begin(connected)
        elif is_late:
            present = members.labels(connected) or "none"
            self.fail(
                agent_error(
                    f"{members.missing(connected)} did not join within "
                    f"{nodes.start_timeout_s:.0f} s; joined: {present}{more}",
                    "check that they are switched on and can reach the first node: "
                    f"nc -vz {nodes.meets_at} {nodes.port}. To wait longer, raise "
                    "clusters.0.start_timeout",
                    id="start.timeout",
                )
            )
        elif self._clock() - self._logged_at > WAITING_EVERY_S:
            self._logged_at = self._clock()
            self._waiting = (
                f"waiting for {members.missing(connected)}: {len(connected)} of {len(nodes)} nodes "
                f"have joined, {nodes.start_timeout_s - waited_s:.0f} s left{more}"
            )
            log_line(self._waiting)
            status = read_record(self._run_dir.status) or {}
            status |= {"phase": "waiting for nodes", "detail": self._waiting}
            status |= {"updated_at": time.time()}
            with suppress(OSError):
                write_record(self._run_dir.status, status, durable=False)

    def _has_first_node(self, nodes: list[int]) -> bool:
        # If only the first node has the run directory, the run cannot continue without it.
        return 0 in nodes or self._nodes.is_shared

    def _begin(self, connected: list[int]) -> None:
        members, nodes = self._members, self._nodes
        restart: Restart | None = None
        if members.nodes:
            number = members.restart + 1
            restart = read_restart(self._attempt, number) or members.changed(connected)
        elif len(connected) < len(nodes):
            log_line(f"starting without {members.missing(connected)}")
        members.begin(connected)
        if restart is not None:
            saved, ranks = newest_step(self._run_dir), members.world_size
            found = replace(restart, saved=saved, world_size=ranks)
            with suppress(OSError):
                update_restart(self._attempt, found)
            log_line(found.text)
        asked = Path(nodes.resume_from) if nodes.resume_from else None
        checkpoint = checkpoint_to_load(self._run_dir, self._attempt, asked, members.restart)
        address = self._server.place(connected[0]).address
        self._common = {
            "world_size": members.world_size,
            "script": self._script is not None,
            "store": [address, self._server.peers()[connected[0]].store],
            # Also free there, if the first of the nodes is this machine.
            "master": [address, _free_port(address)],
            "resume_from": str(checkpoint) if checkpoint is not None else None,
        }
        if self._script is not None:
            self._script.begin(members.restart, members.hosts(), self._clock())
        self._waiting = ""
        self._enter("run")

    # While the ranks run.

    def _watch(self) -> None:
        # Until a rank fails, all ranks have ended, or other nodes join.
        members, now = self._members, self._clock()
        reports = members.reports()
        keep_hang_files(self._run_dir, self._attempt, reports.values())
        hang = self._script.look(reports, now) if self._script is not None else None
        states = [report["state"] for report in reports.values()]
        has_all = len(reports) == len(members.nodes)
        if self._attempt.outcome.exists():
            self._outcome_at = self._outcome_at or now
            is_late = now - self._outcome_at > _GRACE_S
            if is_late or (has_all and "running" not in states) or members.lost():
                self._enter("over")
        elif members.lost() or "failed" in states:
            self._enter("resolve")
        elif hang is not None:
            self._decide_failure(hang)
        elif has_all and set(states) == {"succeeded"}:
            self._all_ended(reports)
        elif self._asked_at is not None:
            if now - self._asked_at > self._save_timeout_s:
                self._enter("halt")
        elif (newcomers := members.newcomers()) and not self._signal:
            has_stepped = read_last_step(self._attempt, members.restart) is not None
            if (
                has_stepped
            ):  # else the ranks are still starting, and the time for their start would be lost
                log_line(f"{members.labels(newcomers)} waits to join; the ranks save and restart")
                self._asked_at = now

    def _all_ended(self, reports: dict[int, dict[str, Any]]) -> None:
        attempt = self._attempt
        codes = {int(code) for report in reports.values() for code in report["codes"].values()}
        if ExitCode.HANDOVER in codes:
            self._enter("wait")
        elif codes <= {ExitCode.OK}:
            # A user's script leaves no outcome. After a stop request, a script does not end this
            # way.
            step, word = read_last_step(attempt, None), "finished"
            if self._script is not None:
                self._script.finished()
            self._end(
                lambda: end(attempt, "finished", ExitCode.OK, word, step=step), ExitCode.OK, word
            )
        elif self._stop_code is not None:
            self._stop("the ranks stopped as requested, without an outcome", self._stop_code)
        elif self._job is not None and codes <= {ExitCode.OK, ExitCode.REQUEUE}:
            self._end_job(self._job)  # the user's own script asks to be restarted
        else:
            what = f"the ranks ended with {sorted(codes)} without a stop request"
            fix = "check their logs with `isles logs`"
            self.fail(agent_error(what, fix, ExitCode.TRAINING, id="rank.died"))

    def _resolve(self) -> None:
        # A rank or a node was lost: find the first failure, then decide.
        members = self._members
        waited_s = self._clock() - self._since
        resolve_s = _RESOLVE_S if len(members.nodes) > 1 else 0.0
        reports = members.reports()
        causes = [report["root_cause"] for report in reports.values() if report.get("root_cause")]
        if members.lost():
            # Its loss is the cause of connection errors on the other nodes.
            if waited_s >= resolve_s:
                self._decide_lost(causes)
            return
        codes = {c for r in reports.values() if r["state"] == "failed" for c in r["codes"].values()}
        if self._stop_code is not None and codes <= {ExitCode.REQUEUE, ExitCode.INTERRUPTED}:
            self._stop("stopped while ranks were stuck before the first step", self._stop_code)
            return
        if causes and waited_s >= resolve_s:
            self._decide_failure(min(causes, key=lambda error: float(error["at"])))
            return
        has_all = len(reports) == len(members.nodes)
        if has_all and all(report["state"] == "succeeded" for report in reports.values()):
            self._enter("run")
            return
        # Each rank only reports a lost peer. A node that sends nothing is declared lost soon.
        are_done = has_all and all(report["state"] != "running" for report in reports.values())
        if waited_s > LOST_AFTER_S + 5.0 or (are_done and not members.is_anybody_quiet()):
            errors = [error for report in reports.values() for error in report.get("errors", ())]
            fix = "check the logs of the missing ranks with `isles logs`"
            unknown = agent_error(
                "the ranks lost their connections to each other", fix, id="rank.others"
            )
            first = min(errors, key=lambda error: float(error["at"]), default=unknown)
            self._decide_failure(first)

    @property
    def _brings_back(self) -> bool:
        # Whether the ranks wait for a replacement of a lost node.
        return self._job is not None and self._job.brings_back

    def _decide_lost(self, causes: list[ErrorRecord]) -> None:
        lost = self._members.lost()
        remaining = [node for node in self._members.nodes if node not in lost]
        if self._brings_back or (self._nodes.is_elastic and self._has_first_node(remaining)):
            if causes:
                log_line(f"meanwhile: {causes[0]['what']}")
            self._members.changed(remaining)
            self._enter("halt")
            return
        error = self._members.lost_error(lost[0])
        if self._job is not None and self._job.lost(str(error["what"])):
            log_line(f"{error['what']}; the job is queued again, to resume with other nodes")
            self._end_job(self._job)
        else:
            self._decide_failure({**error, "will_recur": not self._nodes.are_replaced})

    def _decide_failure(self, root_cause: ErrorRecord) -> None:
        attempt, restart = self._attempt, self._members.restart
        limit, stop = self._max_restarts, self._stop_code
        try:
            keep_errors(attempt, restart, self._members.reports().values())
            decide(self._run_dir, attempt, restart, root_cause, max_restarts=limit, stop=stop)
            self._enter("halt")
        except OSError:
            # If nothing can be recorded, nothing can be saved: there is no reason to continue.
            self.fail(root_cause)

    def _halt(self) -> None:
        # Waits until all members have ended their ranks.
        busy = self._members.busy()
        if self._attempt.outcome.exists():
            self._enter("over")
        elif not busy:
            self._enter("wait")
        elif self._clock() - self._since > _HALT_S:
            for peer in busy:
                self._server.drop(peer, f"its ranks did not end within {_HALT_S:.0f} s")

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._since = self._clock()
        if phase in ("wait", "halt", "over"):
            self._asked_at = None
        if phase == "wait":
            self._waits_since = self._logged_at = self._clock()

    def _command(self, node: int) -> dict[str, Any]:
        members, phase = self._members, self._phase
        command: dict[str, Any] = {"restart": members.restart, "waiting": self._waiting}
        if phase == "over":
            outcome = self.outcome
            reason = str((outcome.get("error") or {}).get("what") or outcome["reason"] or "")
            code = int(outcome["exit_code"])
            last = {"phase": "over", "exit_code": code, "reason": reason, "now": self._is_now}
            return {**command, **last}
        if node not in members.nodes or phase not in ("run", "resolve"):
            return {**command, "phase": "wait" if node not in members.nodes else phase}
        return {
            **command,
            **self._common,
            "phase": "run",
            "ranks": list(members.ranks[node]),
            "group": [members.nodes.index(node), len(members.nodes)],
            "signal": self._signal,
            "stacks": self._script.question if self._script is not None else 0,
            "handover": self._asked_at is not None,
        }


def _free_port(address: str) -> int:
    # A free port at this address; 0 if this machine does not have the address.
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return 0
        return int(probe.getsockname()[1])
