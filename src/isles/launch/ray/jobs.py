"""Jobs of a Ray cluster: submitted, queried and stopped through the REST API of its dashboard.

Ray's own client would first import all of Ray, which takes a second or more, and has no timeout.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.request import Request

from pydantic import Field

from isles.errors import ExitCode, MissingDependencyError, PreflightError, UserError
from isles.launch.answers import read_answer
from isles.launch.queue.job import ASK_S, JobQueue, JobReport, JobState, QueueJob
from isles.launch.ray.bundles import RayNode
from isles.run.paths import Attempt
from isles.run.records import write_text_atomic
from isles.run.web import ask_url

T = TypeVar("T")

_MOST_LETTERS = 500
SUBMIT_S = 60.0
"""Longest wait for a cluster to accept a job; it installs nothing for the job."""

_STATES: Mapping[str, JobState] = {"PENDING": "pending", "RUNNING": "running"}
_REACH = (
    "check that the cluster is running and that this machine can reach its dashboard. Set "
    "clusters.0.launcher.address to http://HEAD:8265. A cluster with RAY_AUTH_MODE=token needs "
    "its token on this machine too"
)


# The parts of the dashboard's answers that isles reads.


@dataclass(frozen=True, slots=True)
class _Version:
    ray_version: str


@dataclass(frozen=True, slots=True)
class _DashboardNode:
    node_name: str
    state: str
    resources_total: dict[str, float] | None = None
    labels: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class _NodesResult:
    result: tuple[_DashboardNode, ...]


@dataclass(frozen=True, slots=True)
class _Data:
    result: _NodesResult


@dataclass(frozen=True, slots=True)
class _Nodes:
    data: _Data


@dataclass(frozen=True, slots=True)
class _Job:
    status: Annotated[str, Field(pattern=r"^[A-Z_]+$")]
    message: str | None = None
    driver_node_id: str | None = None
    driver_exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class _Logs:
    logs: str


@dataclass(frozen=True, slots=True)
class _Refusal:
    msg: str


class RayJobs(JobQueue):
    """The jobs of a Ray cluster
    (https://docs.ray.io/en/latest/cluster/running-applications/job-submission/rest.html).

    Args:
        address: address of its dashboard.
        ask_s: longest wait for an answer.
    """

    name = "Ray"

    def __init__(self, address: str, *, ask_s: float = ASK_S) -> None:
        self.address = address.rstrip("/")
        self._ask_s = ask_s

    @classmethod
    def reach(cls, address: str) -> RayJobs:
        """Connect to the jobs of a cluster, by `launcher.address`.

        Raises:
            UserError: the cluster does not answer, or finding it needs the package ray, which is
                not
                installed.
        """
        address = os.environ.get("RAY_ADDRESS") or address
        if not address.startswith(("http://", "https://")):
            address = _dashboard_of(address)
        jobs = cls(address, ask_s=SUBMIT_S)
        jobs._ask("/api/version")
        return jobs

    def submit(self, job_id: str, command: str) -> None:
        """Submit a job.

        Raises:
            TimeoutError: it is unknown whether the cluster has the job.
            UserError: the cluster refuses it.
        """
        try:
            self._ask("/api/jobs/", {"entrypoint": command, "submission_id": job_id})
        except TimeoutError:
            raise
        except BaseException:
            with suppress(UserError):  # the job may have been accepted: the error is enough
                self._stop(job_id)
            raise

    def nodes(self) -> list[RayNode]:
        """The nodes that are alive. UserError: the cluster does not answer."""
        found = self._read(_Nodes, self._ask("/api/v0/nodes?limit=10000")).data.result.result
        return [
            RayNode(node.node_name, node.resources_total or {}, node.labels or {})
            for node in found
            if node.state == "ALIVE"
        ]

    def versions(self) -> tuple[str, str]:
        """Versions of Ray on the cluster, and on this machine; empty if it is not
        installed here."""
        own = ""
        with suppress(metadata.PackageNotFoundError):
            own = metadata.version("ray")
        return self._read(_Version, self._ask("/api/version")).ray_version, own

    def look(self, attempt: Attempt, job_id: str) -> JobReport:
        try:
            info = self._read(_Job, self._ask(f"/api/jobs/{job_id}"))
        except _NoJobError:
            what = "the Ray cluster does not know the job, because its head was restarted"
            return JobReport("ended", what, job_id, "UNKNOWN")
        word, message, host = info.status, info.message or "", info.driver_node_id or ""
        state = _STATES.get(word, "ended")
        reason, fix = message.partition("\n")[0], ""
        if state == "running":
            reason = f"its driver is on Ray node {host[:8]}" if host else "its driver is running"
        elif state == "pending":
            reason = "Ray starts its driver"
        elif found := re.search(
            r"^error: (.*)\n  fix: (.*)$", message, re.M
        ):  # an error of the driver
            reason, fix = found[1], found[2]
        code = info.driver_exit_code
        return JobReport(state, reason, job_id, word if code is None else f"{word} {code}", fix)

    def cancel(self, job: QueueJob, *options: str) -> None:
        with suppress(_NoJobError):
            self._stop(job.job_id)

    def exit_code(self, attempt: Attempt, report: JobReport) -> tuple[ExitCode, bool]:
        word, _, code = report.word.partition(" ")
        if word == "STOPPED":
            return ExitCode.INTERRUPTED, True
        known = code.isdecimal() and int(code) in list(ExitCode) and int(code) != ExitCode.OK
        return ExitCode(int(code)) if known else ExitCode.TRAINING, False

    def output(self, attempt: Attempt, job_id: str) -> Path:
        path = attempt.path / "ray-driver.log"
        with suppress(UserError, OSError):
            found = self._read(_Logs, self._ask(f"/api/jobs/{job_id}/logs"))
            write_text_atomic(path, found.logs)
        return path

    def _read(self, kind: type[T], text: str) -> T:
        # A proxy, or another program at this port, may have answered.
        return read_answer(
            kind,
            text,
            by=f"Ray's dashboard at {self.address}",
            where="launcher ray",
            fix=_REACH,
            id="queue.commands",
        )

    def _stop(self, job_id: str) -> None:
        self._ask(f"/api/jobs/{job_id}/stop", {})

    def _ask(self, path: str, body: Mapping[str, str] | None = None) -> str:
        # TimeoutError: a request with a body was sent, and no answer came.
        request = Request(
            self.address + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"} | _authorization(),
        )
        try:
            answer = ask_url(request, self._ask_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            is_late = isinstance(reason, TimeoutError)
            if is_late and path == "/api/jobs/":
                raise TimeoutError from error
            late = f"did not answer within {self._ask_s:.0f} s"
            raise PreflightError(
                f"the Ray cluster at {self.address} "
                + (late if is_late else f"is unreachable: {reason}"),
                where="launcher ray",
                fix=_REACH,
                id="queue.commands",
            ) from error
        words = answer.body.decode(errors="replace")
        if answer.status == 200:
            return words
        with suppress(UserError):
            words = self._read(_Refusal, words).msg  # else plain text
        first = (words.strip().splitlines() or [""])[0][:_MOST_LETTERS]
        is_of_job = path.startswith("/api/jobs/") and answer.status == 404
        raise (_NoJobError if is_of_job else PreflightError)(
            f"the Ray cluster at {self.address} refused the request (HTTP {answer.status}): "
            f"{first}",
            where="launcher ray",
            fix=_REACH,
            id="queue.refused" if path == "/api/jobs/" else "queue.commands",
        )


class _NoJobError(PreflightError):
    """The cluster does not know this job."""


def _authorization() -> dict[str, str]:
    # The locations of the token and their order are Ray's (docs: "Token authentication").
    if os.environ.get("RAY_AUTH_MODE", "token") != "token":
        return {}
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    if not token:
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
        with suppress(OSError):
            token = path.read_text(encoding="utf-8")
    return {"Authorization": f"Bearer {token.strip()}"} if token.strip() else {}


def _dashboard_of(address: str) -> str:
    # Resolved by Ray, in a thread because it has no timeout: `auto`, `ray://HEAD:10001`,
    # `HEAD:6379`.
    try:
        from ray.dashboard.utils import get_address_for_submission_client
    except ImportError:
        raise MissingDependencyError(
            f"the address {address} of a Ray cluster needs the package ray[default], which is not "
            "installed",
            where=sys.executable,
            fix="run pip install 'isles[ray]', in the cluster's version of Ray, or set "
            "clusters.0.launcher.address to its dashboard, such as http://HEAD:8265",
        ) from None
    found: list[str] = []
    failed: list[BaseException] = []

    def find() -> None:
        try:
            found.append(str(get_address_for_submission_client(address)))
        except BaseException as error:  # the thread's edge: reported below
            failed.append(error)

    thread = threading.Thread(target=find, daemon=True)
    thread.start()
    thread.join(SUBMIT_S)
    if found:
        return found[0]
    why = f"did not answer within {SUBMIT_S:.0f} s"
    if failed:
        why = f"refuses: {(str(failed[0]).strip() or type(failed[0]).__name__).splitlines()[0]}"
    raise PreflightError(
        f"the Ray cluster at {address} {why}",
        where="launcher ray",
        fix=_REACH,
        id="queue.commands",
    )
