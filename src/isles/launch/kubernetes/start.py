"""The launcher kubernetes: creates the objects of a start, and waits until the run has started.

The owner, such as a Job, is created first and suspended. So no pod runs before its prerequisites
exist, and Kubernetes deletes all other objects with the owner. A start that fails, or is
interrupted, deletes the owner.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from typing import Any, Literal

from isles.config.load import Loaded
from isles.config.resolve import Resolved, resolve
from isles.config.sections.kubernetes import KubernetesLauncherConfig
from isles.config.show import show
from isles.errors import PreflightError, UserError
from isles.launch.answers import STARTED, Announced, read_started
from isles.launch.base import Started, StartOptions, ranks_text
from isles.launch.kubernetes.kubectl import Kubectl, Pod, not_running
from isles.launch.kubernetes.manifest import (
    KINDS,
    KubernetesManifest,
    job_name,
    pod_lines,
    python_of,
)
from isles.launch.kubernetes.reach import RunLocation
from isles.launch.remote.login import started_elsewhere
from isles.launch.ssh.start import interruptible
from isles.run.env import IN_POD
from isles.run.remote import RUNS

_LOOK_S = 1.0
_MOST_MISSED = 5
"""Maximum number of consecutive failures of kubectl."""
_BEGIN_S = 300.0
"""Longest wait for the first pod, once it runs, to announce its run."""


def start_kubernetes(
    loaded: Loaded, launcher: KubernetesLauncherConfig, options: StartOptions
) -> Started | str:
    """Start a run, or describe the start; see `isles.launch.start.start`.

    Raises:
        UserError: the cluster refuses an object, the pods do not start in time, or the pods refuse
            the
            run file.
    """
    resolved = resolve_pods(loaded)
    name = job_name(loaded.config.name)
    manifest = KubernetesManifest(
        name, loaded, resolved, options.resume, options.typed, suspend=not options.dry_run
    )
    if options.dry_run:
        note = "kubectl would create these objects, and a Secret with the token of the attempt"
        return f"{show(resolved).rstrip()}\n\n{note}:\n\n{manifest.text()}"
    kubectl = Kubectl(launcher.context, launcher.namespace)
    kubectl.require(loaded.where("clusters.0.launcher"))
    with interruptible() as hand_back:
        try:
            _create(kubectl, manifest, options.join)
            ranks = ranks_text(resolved.world_size, resolved.device)
            options.print_line(
                f"created {launcher.flavor} {name}: {ranks} in {_pods_text(manifest)}"
            )
            begun = _begun(kubectl, manifest, options)
            hand_back()
        except BaseException:
            options.print_line(f"deleting {launcher.flavor} {name}")
            try:
                kubectl.delete(launcher.flavor, name, is_at_once=True)
            except UserError as error:
                options.warn(f"{error}")
            raise
    place = RunLocation(
        context=launcher.context,
        namespace=launcher.namespace,
        flavor=launcher.flavor,
        job=name,
        reader=manifest.reader(),
    )
    claims = [volume.model_dump() for volume in launcher.volumes]
    key = json.dumps([launcher.context, launcher.namespace, claims, begun.path])
    destination = IN_POD + hashlib.sha256(key.encode()).hexdigest()[:8]
    place.write(destination)
    lines, python = pod_lines(loaded), python_of(loaded)
    # The output folder is in the pods, and need not exist on this machine.
    return started_elsewhere(
        loaded, options, begun, [destination], lines, python, folder=RUNS.absolute()
    )


def resolve_pods(loaded: Loaded) -> Resolved:
    """The run with the ranks of its pods, from the run file alone.

    Raises:
        ConfigError: they do not fit.
    """
    cluster = loaded.config.clusters[0]
    assert isinstance(cluster.gpus_per_node, int), "config/rules/cluster.py"
    device: Literal["cuda", "cpu"] = "cpu" if cluster.device == "cpu" else "cuda"
    return resolve(loaded, nproc=(cluster.gpus_per_node,) * cluster.max_nodes, device=device)


def _create(kubectl: Kubectl, manifest: KubernetesManifest, join: str) -> None:
    flavor, name = manifest.launcher.flavor, manifest.name
    before = manifest.before()
    for item in before:
        kubectl.create(item)
    _, uid = kubectl.create(manifest.owner())
    owned = {"metadata": {"ownerReferences": [manifest.reference(uid)]}}
    for item in before:
        _patch(kubectl, item["kind"].lower(), name, owned)
    others = manifest.others(uid)
    # Passed through a pipe, so it is in no command line, no printed manifest and no local file.
    # With its owner from the beginning: a start killed at this point leaves no token behind.
    start = json.dumps({"token": secrets.token_hex(16), "join": join})
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": others[0]["metadata"]}
    for item in (*others, {**secret, "stringData": {"start": start}}):
        kubectl.create(item)
    _patch(kubectl, KINDS[flavor][0], name, {"spec": {"suspend": False}})


def _patch(kubectl: Kubectl, kind: str, name: str, change: dict[str, Any]) -> None:
    kubectl.ask("patch", kind, name, "--type=merge", f"--patch={json.dumps(change)}")


def _begun(kubectl: Kubectl, manifest: KubernetesManifest, options: StartOptions) -> Announced:
    # Wait until all pods run and the first pod has started a run; returns its announcement.
    launcher, cluster = manifest.launcher, manifest.loaded.config.clusters[0]
    deadline, begin_by, said = time.monotonic() + launcher.pending_timeout, 0.0, ""
    missed = 0
    while True:
        try:
            pods = kubectl.pods(manifest.name)
            first = next((pod for pod in pods if pod.index == 0), None)
            has_begun = first is not None and first.phase != "Pending"
            text = kubectl.logs(first.name) if first is not None and has_begun else ""
            why = kubectl.failure(launcher.flavor, manifest.name)
        except UserError:  # a server that is busy for a moment must not end the start
            missed += 1
            if missed == _MOST_MISSED:
                raise
            time.sleep(_LOOK_S)
            continue
        missed = 0
        lines = [line for line in text.splitlines() if line.startswith(STARTED)]
        running = sum(pod.is_running for pod in pods)
        waiting = [f"{pod.name}: {pod.waits or pod.phase}" for pod in pods if not pod.is_running]
        line = f"{running} of {_pods_text(manifest)} are running" + "".join(
            f"; {w}" for w in waiting
        )
        if line != said:
            options.print_line(line)
            said = line
        if lines and (running >= cluster.min_nodes or (first and first.phase == "Succeeded")):
            return read_started(
                lines[-1],
                where=f"job {manifest.name}",
                fix="build clusters.0.launcher.image with the isles of this machine; "
                "docs/kubernetes.md has a Dockerfile",
            )
        if first is not None and first.phase == "Failed" and not lines:
            raise _failed(first, text)
        if why:
            # `pods` may be older than the failure of the Job.
            pods = kubectl.pods(manifest.name)
            failed = [pod for pod in pods if pod.index == 0 and pod.phase == "Failed"]
            if failed and not lines:
                raise _failed(failed[0], kubectl.logs(failed[0].name))
            raise not_running(kubectl, manifest.name, pods, f"the start has failed: {why}")
        if any(pod.is_hopeless for pod in pods):
            what = "a pod cannot get its image"
            raise not_running(kubectl, manifest.name, pods, what)
        now = time.monotonic()
        if running >= cluster.min_nodes:
            begin_by = begin_by or now + _BEGIN_S
            if now > begin_by:
                what = (
                    f"the first pod is running, but did not start the run within {_BEGIN_S:.0f} s"
                )
                raise not_running(kubectl, manifest.name, pods, what)
        elif now > deadline:
            what = (
                f"{running} of {_pods_text(manifest)} are running after "
                f"{launcher.pending_timeout:.0f} s"
            )
            raise not_running(kubectl, manifest.name, pods, what)
        time.sleep(_LOOK_S)


def _failed(pod: Pod, text: str) -> UserError:
    # The error that isles in the pod printed, or the last line of another program's output.
    what, _, rest = text.partition("error: ")[2].partition("\n  fix: ")
    if what:
        return UserError(what.strip(), where=f"pod {pod.name}", fix=rest.strip())
    last = [line for line in text.splitlines() if line.strip()][-1:] or ["no output"]
    return PreflightError(
        f"isles could not start in the image: {last[0]}",
        where=f"pod {pod.name}",
        fix="the image needs bash, Python (clusters.0.environment.python), torch and this isles; "
        "docs/kubernetes.md has a Dockerfile",
        id="start.failed",
    )


def _pods_text(manifest: KubernetesManifest) -> str:
    nodes = manifest.loaded.config.clusters[0].max_nodes
    return f"{nodes} pod{'s' * (nodes != 1)}"
