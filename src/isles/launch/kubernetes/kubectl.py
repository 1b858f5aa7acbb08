"""The user's own kubectl: the state of the pods of a run, and explanations of its errors."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from isles.errors import PreflightError, UserError
from isles.launch.answers import read_answer
from isles.launch.kubernetes.manifest import KINDS, LABEL
from isles.launch.ssh.shell import CommandResult, Shell
from isles.run.remote import Word

T = TypeVar("T")

_ASK_S = 30.0
_DELETE_S = 120.0
_INDEX = "batch.kubernetes.io/job-completion-index"

HOPELESS = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
"""Reasons of pods that will never start: the image failed twice, or has an invalid name."""

_FIXES = (
    (r"ImagePull|InvalidImage|pull access|manifest", "correct clusters.0.launcher.image, or set "
     "clusters.0.launcher.pull_secret; test the name with `docker pull`"),
    (r"Insufficient", "request less (nodes, gpus_per_node, clusters.0.launcher.resources), wait "
     "until other jobs have ended, or raise clusters.0.launcher.pending_timeout"),
    (r"node affinity|selector|untolerated taint", "correct clusters.0.launcher.node_selector and "
     "clusters.0.launcher.tolerations; see `kubectl get nodes --show-labels` and `kubectl describe "
     "nodes`"),
    (r"persistentvolumeclaim|FailedMount|FailedAttach|volume", "correct "
     "clusters.0.launcher.volumes; see `kubectl get pvc`; pods on several nodes need "
     "ReadWriteMany"),
    (r"quota|forbidden", "request less, or ask the cluster's administrators"),
)  # fmt: skip


# The parts of Kubernetes' objects that isles reads, with the keys that kubectl prints.


@dataclass(frozen=True, slots=True)
class _Metadata:
    name: Word
    uid: str
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletionTimestamp: str | None = None


@dataclass(frozen=True, slots=True)
class _Condition:
    type: str
    status: str
    reason: str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class _Waiting:
    reason: str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class _State:
    waiting: _Waiting | None = None


@dataclass(frozen=True, slots=True)
class _Container:
    state: _State | None = None


@dataclass(frozen=True, slots=True)
class _Status:
    phase: str | None = None
    conditions: tuple[_Condition, ...] | None = None
    containerStatuses: tuple[_Container, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Object:
    metadata: _Metadata
    status: _Status | None = None


@dataclass(frozen=True, slots=True)
class _Objects:
    items: tuple[_Object, ...]


@dataclass(frozen=True, slots=True)
class _About:
    name: str | None = None


@dataclass(frozen=True, slots=True)
class _Event:
    involvedObject: _About
    type: str | None = None
    reason: str | None = None
    message: str | None = None
    lastTimestamp: str | None = None
    eventTime: str | None = None


@dataclass(frozen=True, slots=True)
class _Events:
    items: tuple[_Event, ...]


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod, as reported by kubectl.

    Args:
        index: its node number; None: the pod does not belong to the start.
        phase: Pending, Running, Succeeded, Failed or Unknown.
        waits: Kubernetes' reason why it does not run; empty: no reason.
        is_ending: whether Kubernetes is terminating it.
    """

    name: str
    index: int | None
    phase: str
    waits: str
    is_ending: bool

    @property
    def is_running(self) -> bool:
        return self.phase == "Running" and not self.is_ending

    @property
    def is_hopeless(self) -> bool:
        return self.waits.startswith(HOPELESS)


@dataclass(frozen=True, slots=True)
class Kubectl:
    """kubectl with one context and namespace; None: kubectl's default."""

    context: str | None
    namespace: str | None

    def argv(self, *words: str) -> list[str]:
        """A command line."""
        place = [f"--context={self.context}"] if self.context else []
        place += [f"--namespace={self.namespace}"] if self.namespace else []
        return ["kubectl", *place, *words]

    def require(self, where: str) -> None:
        """PreflightError: kubectl is not installed on this machine."""
        if shutil.which("kubectl") is None:
            raise PreflightError(
                "kubectl, which creates the pods, is not installed on this machine",
                where=where,
                fix="install it (kubernetes.io/docs/tasks/tools), and test it with "
                "`kubectl get pods`",
                id="kubernetes.kubectl",
            )

    def run(
        self, *words: str, stdin: str | None = None, timeout_s: float = _ASK_S
    ) -> CommandResult:
        """Run it and return its result, also on failure. PreflightError: no answer in time."""
        return Shell().run(self.argv(*words), stdin=stdin, timeout_s=timeout_s)

    def ask(self, *words: str, stdin: str | None = None) -> str:
        """Run it, and return its output.

        Raises:
            UserError: kubectl fails; with kubectl's message.
        """
        done = self.run(*words, stdin=stdin)
        if done.returncode == 0:
            return done.stdout
        text = done.stderr.strip() or f"exit status {done.returncode}"
        raise UserError(
            f"kubectl {words[0]} failed: {text.splitlines()[-1]}",
            where=" ".join(self.argv()),
            fix=_fix(text, "run `kubectl get pods` manually; set clusters.0.launcher.context and "
            "clusters.0.launcher.namespace if they are wrong"),
            id="kubernetes.refused",
        )  # fmt: skip

    def create(self, item: dict[str, Any]) -> tuple[str, str]:
        """Create an object; returns its name and uid."""
        text = self.ask("create", "-f", "-", "-o", "json", stdin=json.dumps(item))
        made = self._read(_Object, "create", text).metadata
        return made.name, made.uid

    def pods(self, job: str, label: str = LABEL) -> list[Pod]:
        """The pods of a start: running pods first, then by index.

        Args:
            label: a label whose value is the name of the job.
        """
        text = self.ask("get", "pods", "-l", f"{label}={job}", "-o", "json")
        found = [_pod(item) for item in self._read(_Objects, "get", text).items]
        return sorted(found, key=lambda p: (not p.is_running, p.index or 0))

    def logs(self, pod: str) -> str:
        """Output of a pod; empty if it has not started."""
        done = self.run("logs", pod)
        return done.stdout if done.returncode == 0 else ""

    def failure(self, flavor: str, job: str) -> str:
        """Why the owner object of a start has failed; empty: it has not failed."""
        done = self.run("get", KINDS[flavor][0], job, "-o", "json")
        if "NotFound" in done.stderr:
            return f"{job} was deleted"
        if done.returncode:
            return ""
        status = self._read(_Object, "get", done.stdout).status or _Status()
        for condition in status.conditions or ():
            if condition.type == "Failed" and condition.status == "True":
                return condition.message or condition.reason or "it has failed"
        return ""

    def warnings(self, job: str) -> list[str]:
        """The last line of each warning event about the objects of a start."""
        events: dict[str, tuple[str, str]] = {}
        with suppress(UserError):  # without permission for events there are no warnings
            for event in self._read(_Events, "get", self.ask("get", "events", "-o", "json")).items:
                about = event.involvedObject.name or ""
                if event.type == "Warning" and about.startswith(job):
                    at = event.lastTimestamp or event.eventTime or ""
                    text = f"{about}: {event.reason}: {event.message}"
                    events[about] = max(events.get(about, ("", "")), (at, text))
        return [text for _, text in events.values()]

    def delete(self, flavor: str, job: str, *, is_at_once: bool = False) -> None:
        """Delete all objects of a start, and wait until its pods are gone.

        Args:
            is_at_once: do not wait, and give the pods no time to save.
        """
        words = ["--ignore-not-found", "-l", f"{LABEL}={job}"]
        how = ["--wait=false"] if is_at_once else ["--cascade=foreground"]
        done = self.run("delete", ",".join(KINDS[flavor]), *words, *how, timeout_s=_DELETE_S)
        if is_at_once:
            self.run("delete", "pods", *words, "--grace-period=0", "--force", "--wait=false")
        if done.returncode:
            last = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise UserError(
                f"kubectl delete failed: {last[-1]}",
                where=f"{LABEL}={job}",
                fix=f"delete them manually with kubectl delete {','.join(KINDS[flavor])} -l "
                f"{LABEL}={job}",
                id="kubernetes.refused",
            )

    def _read(self, kind: type[T], word: str, text: str) -> T:
        return read_answer(
            kind,
            text,
            by=f"kubectl {word}",
            where=" ".join(self.argv()),
            fix="check that `kubectl get pods -o json` prints JSON; another program of that name, "
            "or a plugin for logins, may write to its output",
            id="kubernetes.refused",
        )


def not_running(kubectl: Kubectl, job: str, pods: Sequence[Pod], what: str) -> PreflightError:
    """The error for pods that do not start, with Kubernetes' reasons and a fix."""
    words = [f"{pod.name}: {pod.waits}" for pod in pods if not pod.is_running and pod.waits]
    words = list(dict.fromkeys([*words, *kubectl.warnings(job)]))
    text = "\n    ".join(words) or "Kubernetes gives no reason"
    return PreflightError(
        f"{what}:\n    {text}",
        where=f"job {job}",
        fix=_fix(
            text,
            "see `kubectl describe pods`; to wait longer, raise "
            "clusters.0.launcher.pending_timeout",
        ),
        id="kubernetes.pending",
    )


def _pod(item: _Object) -> Pod:
    metadata, status = item.metadata, item.status or _Status()
    index = {**(metadata.labels or {}), **(metadata.annotations or {})}.get(_INDEX, "")
    waits = ""
    for condition in status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            waits = f"{condition.reason}: {condition.message}"
    for container in status.containerStatuses or ():
        if container.state is not None and (waiting := container.state.waiting):
            waits = f"{waiting.reason}: {waiting.message or ''}".rstrip(": ")
    return Pod(
        name=metadata.name,
        index=int(index) if index.isdecimal() and len(index) < 10 else None,
        phase=status.phase or "Pending",
        waits=waits,
        is_ending=metadata.deletionTimestamp is not None,
    )


def _fix(text: str, otherwise: str) -> str:
    for pattern, fix in _FIXES:
        if re.search(pattern, text, re.IGNORECASE):
            return fix
    return otherwise
