"""The user's own kubectl: what it says of the pods of a start, and why it refuses something."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from isles.errors import PreflightError, UserError
from isles.launch.kubernetes.manifest import KINDS, LABEL
from isles.launch.ssh.shell import Result, Shell

_ASK_S = 30.0
_DELETE_S = 120.0
_INDEX = "batch.kubernetes.io/job-completion-index"

HOPELESS = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
"""Reasons for which a pod waits in vain: the image was tried twice, or has a wrong name."""

_FIXES = (
    (r"ImagePull|InvalidImage|pull access|manifest", "correct launcher.image, or give "
     "launcher.pull_secret; `docker pull` of that name shows whether the registry has it"),
    (r"Insufficient", "ask for less (nodes, gpus_per_node, launcher.resources), wait until others "
     "have ended, or raise launcher.pending_timeout"),
    (r"node affinity|selector|untolerated taint", "correct launcher.node_selector and "
     "launcher.tolerations: `kubectl get nodes --show-labels`, `kubectl describe nodes`"),
    (r"persistentvolumeclaim|FailedMount|FailedAttach|volume", "correct launcher.volumes: "
     "`kubectl get pvc`; pods on several nodes need ReadWriteMany"),
    (r"quota|forbidden", "ask for less, or ask who runs the cluster"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod, as kubectl has shown it.

    Args:
        index: its node number; None: it is none of the start's.
        phase: Pending, Running, Succeeded, Failed or Unknown.
        waits: why it does not run, in Kubernetes' words; empty: nothing is said.
        is_ending: whether it was told to end.
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
    """kubectl with one context and namespace; None: as kubectl itself chooses."""

    context: str | None
    namespace: str | None

    def argv(self, *words: str) -> list[str]:
        """A command line."""
        place = [f"--context={self.context}"] if self.context else []
        place += [f"--namespace={self.namespace}"] if self.namespace else []
        return ["kubectl", *place, *words]

    def require(self, where: str) -> None:
        """PreflightError: there is no kubectl on this machine."""
        if shutil.which("kubectl") is None:
            raise PreflightError(
                "there is no program kubectl on this machine, which makes the pods",
                where=where,
                fix="install it (kubernetes.io/docs/tasks/tools), and see that "
                "`kubectl get pods` answers",
                id="kubernetes.kubectl",
            )

    def run(self, *words: str, stdin: str | None = None, timeout_s: float = _ASK_S) -> Result:
        """Run it to its end, whatever it says. PreflightError: no answer in time."""
        return Shell().run(self.argv(*words), stdin=stdin, timeout_s=timeout_s)

    def ask(self, *words: str, stdin: str | None = None) -> str:
        """Run it, and return what it prints.

        Raises:
            UserError: it fails; in its own words.
        """
        done = self.run(*words, stdin=stdin)
        if done.returncode == 0:
            return done.stdout
        text = done.stderr.strip() or f"exit status {done.returncode}"
        raise UserError(
            f"kubectl {words[0]} fails: {text.splitlines()[-1]}",
            where=" ".join(self.argv()),
            fix=_fix(text, "try `kubectl get pods` by hand; launcher.context and "
            "launcher.namespace say where"),
            id="kubernetes.refused",
        )  # fmt: skip

    def create(self, item: dict[str, Any]) -> dict[str, Any]:
        """Make an object; returns it as the cluster has it."""
        made = json.loads(self.ask("create", "-f", "-", "-o", "json", stdin=json.dumps(item)))
        return dict(made)

    def items(self, kind: str, *more: str) -> list[dict[str, Any]]:
        """The objects of a kind."""
        return list(json.loads(self.ask("get", kind, *more, "-o", "json")).get("items", ()))

    def pods(self, job: str) -> list[Pod]:
        """The pods of a start, those that run first, and by their index."""
        found = [_pod(item) for item in self.items("pods", "-l", f"{LABEL}={job}")]
        return sorted(found, key=lambda p: (not p.is_running, p.index or 0))

    def logs(self, pod: str) -> str:
        """What a pod has printed; empty where it has not begun."""
        done = self.run("logs", pod)
        return done.stdout if done.returncode == 0 else ""

    def failure(self, flavour: str, job: str) -> str:
        """Why the owner of a start has failed; empty: it has not."""
        done = self.run("get", KINDS[flavour][0], job, "-o", "json")
        if "NotFound" in done.stderr:
            return f"somebody has deleted {job}"
        status = json.loads(done.stdout).get("status", {}) if done.returncode == 0 else {}
        for condition in status.get("conditions") or ():
            if condition.get("type") == "Failed" and condition.get("status") == "True":
                return str(condition.get("message") or condition.get("reason") or "it has failed")
        return ""

    def warnings(self, job: str) -> list[str]:
        """The last word of each warning event about the objects of a start."""
        events: dict[str, tuple[str, str]] = {}
        with suppress(UserError, ValueError):  # who may not read events knows less
            for event in self.items("events"):
                about = str((event.get("involvedObject") or {}).get("name", ""))
                if event.get("type") == "Warning" and about.startswith(job):
                    at = str(event.get("lastTimestamp") or event.get("eventTime") or "")
                    text = f"{about}: {event.get('reason')}: {event.get('message')}"
                    events[about] = max(events.get(about, ("", "")), (at, text))
        return [text for _, text in events.values()]

    def delete(self, flavour: str, job: str, *, is_at_once: bool = False) -> None:
        """Delete all objects of a start, and wait until its pods are gone.

        Args:
            is_at_once: do not wait, and give the pods no time to save.
        """
        words = ["--ignore-not-found", "-l", f"{LABEL}={job}"]
        how = ["--wait=false"] if is_at_once else ["--cascade=foreground"]
        done = self.run("delete", ",".join(KINDS[flavour]), *words, *how, timeout_s=_DELETE_S)
        if is_at_once:
            self.run("delete", "pods", *words, "--grace-period=0", "--force", "--wait=false")
        if done.returncode:
            last = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise UserError(
                f"kubectl delete fails: {last[-1]}",
                where=f"{LABEL}={job}",
                fix=f"by hand: kubectl delete {','.join(KINDS[flavour])} -l {LABEL}={job}",
                id="kubernetes.refused",
            )


def not_running(kubectl: Kubectl, job: str, pods: Sequence[Pod], what: str) -> PreflightError:
    """The error of pods that do not come to run, with the words of Kubernetes and what to do."""
    words = [f"{pod.name}: {pod.waits}" for pod in pods if not pod.is_running and pod.waits]
    words = list(dict.fromkeys([*words, *kubectl.warnings(job)]))
    text = "\n    ".join(words) or "Kubernetes says no reason"
    return PreflightError(
        f"{what}:\n    {text}",
        where=f"job {job}",
        fix=_fix(text, "see `kubectl describe pods`; launcher.pending_timeout waits longer"),
        id="kubernetes.pending",
    )


def _pod(item: dict[str, Any]) -> Pod:
    metadata, status = item["metadata"], item.get("status") or {}
    named = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
    index = str(named.get(_INDEX, ""))
    waits = ""
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            waits = f"{condition.get('reason')}: {condition.get('message')}"
    for container in status.get("containerStatuses") or ():
        if waiting := (container.get("state") or {}).get("waiting"):
            waits = f"{waiting.get('reason')}: {waiting.get('message', '')}".rstrip(": ")
    return Pod(
        name=str(metadata["name"]),
        index=int(index) if index.isdecimal() else None,
        phase=str(status.get("phase", "Pending")),
        waits=waits,
        is_ending="deletionTimestamp" in metadata,
    )


def _fix(text: str, otherwise: str) -> str:
    for pattern, fix in _FIXES:
        if re.search(pattern, text, re.IGNORECASE):
            return fix
    return otherwise
