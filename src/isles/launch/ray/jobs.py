"""The jobs of a Ray cluster: submitted, asked for and ended by its job submission API."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from isles.errors import ExitCode, MissingDependencyError, PreflightError, UserError
from isles.launch.queue.job import ASK_S, JobQueue, JobReport, JobState, QueueJob
from isles.launch.ray.bundles import RayNode
from isles.run.paths import Attempt
from isles.run.records import write_text_atomic

SUBMIT_S = 60.0
"""Longest wait for a cluster to take a job; it installs nothing for it."""

_STATES: Mapping[str, JobState] = {"PENDING": "pending", "RUNNING": "running"}
_REACH = (
    "is the cluster up, and its dashboard reachable from here? clusters[0].launcher.address takes "
    "http://HEAD:8265; a cluster with RAY_AUTH_MODE=token wants its token here as well"
)

T = TypeVar("T")


class RayJobs(JobQueue):
    """The jobs of a Ray cluster, by its job submission API.

    Args:
        address: of its dashboard, or as `launcher.address`.
        ask_s: longest wait for an answer.
    """

    name = "Ray"

    def __init__(self, address: str, *, ask_s: float = ASK_S) -> None:
        self.address = address
        self._ask_s = ask_s
        self._client: Any = None

    @classmethod
    def reach(cls, address: str) -> RayJobs:
        """The jobs of a cluster that answers, by the address of its dashboard.

        Raises:
            UserError: it does not answer, or the package ray is not here.
        """
        jobs = cls(address, ask_s=SUBMIT_S)
        jobs.address = str(jobs._ask(lambda client: client.get_address()))
        return jobs

    def submit(self, job_id: str, command: str) -> None:
        """Submit a job.

        Raises:
            TimeoutError: it is not known whether the cluster has it.
            UserError: the cluster refuses it.
        """
        try:
            self._ask(
                lambda client: client.submit_job(entrypoint=command, submission_id=job_id),
                timeout_s=SUBMIT_S,
            )
        except TimeoutError:
            raise
        except BaseException:
            with suppress(Exception):  # it may have been taken: the error says enough
                self._ask(lambda client: client.stop_job(job_id))
            raise

    def nodes(self) -> list[RayNode]:
        """The nodes that are alive. UserError: the cluster does not answer."""

        def ask(_: Any) -> list[RayNode]:
            from ray.util.state import list_nodes

            found = list_nodes(
                address=self.address,
                filters=[("state", "=", "ALIVE")],
                limit=10_000,
                raise_on_missing_output=False,  # it takes nodes that have ended for missing
            )
            return [RayNode(node.node_name, node.resources_total, node.labels) for node in found]

        return self._ask(ask)

    def versions(self) -> tuple[str, str]:
        """Of Ray on the cluster, and of the package here."""

        def ask(client: Any) -> tuple[str, str]:
            import ray

            return str(
                client._do_request("GET", "/api/version").json()["ray_version"]
            ), ray.__version__

        return self._ask(ask)

    def look(self, attempt: Attempt, job_id: str) -> JobReport:
        try:
            info = self._ask(lambda client: client.get_job_info(job_id))
        except PreflightError as error:
            if "404" not in error.what:
                raise
            what = "the Ray cluster does not know the job: its head was started anew"
            return JobReport("ended", what, job_id, "UNKNOWN")
        word, message = str(info.status.value), str(info.message or "")
        state = _STATES.get(word, "ended")
        host = str(getattr(info, "driver_node_id", None) or "")
        reason, fix = message.partition("\n")[0], ""
        if state == "running":
            reason = f"its driver is on Ray node {host[:8]}" if host else "its driver runs"
        elif state == "pending":
            reason = "Ray starts its driver"
        elif found := re.search(r"^error: (.*)\n  fix: (.*)$", message, re.M):  # of the driver
            reason, fix = found[1], found[2]
        code = getattr(info, "driver_exit_code", None)
        return JobReport(state, reason, job_id, word if code is None else f"{word} {code}", fix)

    def cancel(self, job: QueueJob, *options: str) -> None:
        try:
            self._ask(lambda client: client.stop_job(job.job_id))
        except PreflightError as error:
            if "404" not in error.what:
                raise

    def exit_code(self, attempt: Attempt, report: JobReport) -> tuple[ExitCode, bool]:
        word, _, code = report.word.partition(" ")
        if word == "STOPPED":
            return ExitCode.INTERRUPTED, True
        known = code.isdecimal() and int(code) in list(ExitCode) and int(code) != ExitCode.OK
        return ExitCode(int(code)) if known else ExitCode.TRAINING, False

    def output(self, attempt: Attempt, job_id: str) -> Path:
        path = attempt.path / "ray-driver.log"
        with suppress(UserError, OSError):
            write_text_atomic(path, str(self._ask(lambda client: client.get_job_logs(job_id))))
        return path

    def _ask(self, what: Callable[[Any], T], timeout_s: float | None = None) -> T:
        # In a thread, as Ray's own client waits for ever.
        make_client = _import_client()  # outside of the time: a busy machine imports it for long
        limit_s = timeout_s or self._ask_s
        found: list[T] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                if self._client is None:
                    self._client = make_client(self.address)
                found.append(what(self._client))
            except BaseException as error:  # the thread's edge: raised again below
                failed.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(limit_s)
        if found:
            return found[0]
        if not failed:
            if timeout_s is not None:
                raise TimeoutError
            raise PreflightError(
                f"the Ray cluster at {self.address} has not answered within {limit_s:.0f} s",
                where="launcher ray",
                fix=_REACH,
                id="queue.commands",
            )
        error = failed[0]
        if isinstance(error, RuntimeError) and "ray[default]" in str(error):
            raise _missing()
        raise PreflightError(
            f"the Ray cluster at {self.address} refuses: {_first_line(error)}",
            where="launcher ray",
            fix=_REACH,
            id="queue.refused" if timeout_s is not None else "queue.commands",
        ) from error


def _import_client() -> Callable[[str], Any]:
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError:
        raise _missing() from None
    make: Callable[[str], Any] = JobSubmissionClient
    return make


def _missing() -> UserError:
    return MissingDependencyError(
        "launcher ray needs the package ray[default], which is not installed",
        where=sys.executable,
        fix="pip install 'isles[ray]'; its version must be that of the cluster",
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    with suppress(ValueError):  # what the job server says, without its traceback
        text = text.partition(": ")[0] + ": " + json.loads(text.partition(": ")[2])["msg"]
    return text.splitlines()[0] if text else type(error).__name__
