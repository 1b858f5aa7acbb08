"""The launcher kubernetes: makes the objects of a start, and waits until the run has begun.

The owner, a Job for one, is made first and suspended, so that no pod runs before all it needs is
there, and that Kubernetes deletes everything else with it. A start that fails, or is interrupted,
deletes the owner.
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
from isles.launch.kubernetes.manifest import KINDS, Manifest, job_name, pod_lines, python_of
from isles.launch.kubernetes.reach import Place
from isles.launch.remote.login import started_elsewhere
from isles.launch.ssh.start import interruptible
from isles.run.env import IN_POD
from isles.run.remote import RUNS

_LOOK_S = 1.0
_MOST_MISSED = 5
"""Looks in a row that kubectl may fail."""
_BEGIN_S = 300.0
"""Longest wait for the first pod to say which run it has begun, once it runs."""


def start_kubernetes(
    loaded: Loaded, launcher: KubernetesLauncherConfig, options: StartOptions
) -> Started | str:
    """Start a run, or say what would be done; see `isles.launch.start.start`.

    Raises:
        UserError: the cluster refuses an object, the pods do not come to run in time, or what they
            find in the run file.
    """
    resolved = resolve_pods(loaded)
    name = job_name(loaded.config.name)
    manifest = Manifest(
        name, loaded, resolved, options.resume, options.typed, suspend=not options.dry_run
    )
    if options.dry_run:
        note = "kubectl would make these objects, and a Secret with the token of the start"
        return f"{show(resolved).rstrip()}\n\n{note}:\n\n{manifest.text()}"
    kubectl = Kubectl(launcher.context, launcher.namespace)
    kubectl.require(loaded.where("clusters.0.launcher"))
    with interruptible() as hand_back:
        try:
            _create(kubectl, manifest, options.join)
            ranks = ranks_text(resolved.world_size, resolved.device)
            options.print_line(f"made {launcher.flavour} {name}: {ranks} in {_pods_text(manifest)}")
            begun = _begun(kubectl, manifest, options)
            hand_back()
        except BaseException:
            options.print_line(f"deleting {launcher.flavour} {name}")
            try:
                kubectl.delete(launcher.flavour, name, is_at_once=True)
            except UserError as error:
                options.warn(f"{error}")
            raise
    place = Place(
        context=launcher.context,
        namespace=launcher.namespace,
        flavour=launcher.flavour,
        job=name,
        reader=manifest.reader(),
    )
    claims = [volume.model_dump() for volume in launcher.volumes]
    key = json.dumps([launcher.context, launcher.namespace, claims, begun.path])
    destination = IN_POD + hashlib.sha256(key.encode()).hexdigest()[:8]
    place.write(destination)
    lines, python = pod_lines(loaded), python_of(loaded)
    # Its output folder is one of the pods, and may be none of this machine.
    return started_elsewhere(
        loaded, options, begun, [destination], lines, python, folder=RUNS.absolute()
    )


def resolve_pods(loaded: Loaded) -> Resolved:
    """The run with the ranks of its pods, of which only the run file speaks.

    Raises:
        ConfigError: they do not fit.
    """
    cluster = loaded.config.clusters[0]
    assert isinstance(cluster.gpus_per_node, int), "config/rules/cluster.py"
    device: Literal["cuda", "cpu"] = "cpu" if cluster.device == "cpu" else "cuda"
    return resolve(loaded, nproc=(cluster.gpus_per_node,) * cluster.max_nodes, device=device)


def _create(kubectl: Kubectl, manifest: Manifest, join: str) -> None:
    flavour, name = manifest.launcher.flavour, manifest.name
    before = manifest.before()
    for item in before:
        kubectl.create(item)
    _, uid = kubectl.create(manifest.owner())
    owned = {"metadata": {"ownerReferences": [manifest.reference(uid)]}}
    for item in before:
        _patch(kubectl, item["kind"].lower(), name, owned)
    others = manifest.others(uid)
    # It goes through a pipe: no command line, no manifest that is shown and no file here has it.
    # With its owner from the beginning: a start that is killed here leaves no token behind.
    start = json.dumps({"token": secrets.token_hex(16), "join": join})
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": others[0]["metadata"]}
    for item in (*others, {**secret, "stringData": {"start": start}}):
        kubectl.create(item)
    _patch(kubectl, KINDS[flavour][0], name, {"spec": {"suspend": False}})


def _patch(kubectl: Kubectl, kind: str, name: str, change: dict[str, Any]) -> None:
    kubectl.ask("patch", kind, name, "--type=merge", f"--patch={json.dumps(change)}")


def _begun(kubectl: Kubectl, manifest: Manifest, options: StartOptions) -> Announced:
    # Wait until all pods run, and the first one has begun a run: what it says of that.
    launcher, cluster = manifest.launcher, manifest.loaded.config.clusters[0]
    deadline, begin_by, said = time.monotonic() + launcher.pending_timeout, 0.0, ""
    missed = 0
    while True:
        try:
            pods = kubectl.pods(manifest.name)
            first = next((pod for pod in pods if pod.index == 0), None)
            has_begun = first is not None and first.phase != "Pending"
            text = kubectl.logs(first.name) if first is not None and has_begun else ""
            why = kubectl.failure(launcher.flavour, manifest.name)
        except UserError:  # a server that is busy for a moment ends no start
            missed += 1
            if missed == _MOST_MISSED:
                raise
            time.sleep(_LOOK_S)
            continue
        missed = 0
        lines = [line for line in text.splitlines() if line.startswith(STARTED)]
        running = sum(pod.is_running for pod in pods)
        waiting = [f"{pod.name}: {pod.waits or pod.phase}" for pod in pods if not pod.is_running]
        line = f"{running} of {_pods_text(manifest)} run" + "".join(f"; {w}" for w in waiting)
        if line != said:
            options.print_line(line)
            said = line
        if lines and (running >= cluster.min_nodes or (first and first.phase == "Succeeded")):
            return read_started(
                lines[-1],
                where=f"job {manifest.name}",
                fix="build launcher.image with the isles of this machine; docs/kubernetes.md has a "
                "Dockerfile",
            )
        if first is not None and first.phase == "Failed" and not lines:
            raise _failed(first, text)
        if why:
            # The pods may have been seen before that which has failed the Job.
            pods = kubectl.pods(manifest.name)
            failed = [pod for pod in pods if pod.index == 0 and pod.phase == "Failed"]
            if failed and not lines:
                raise _failed(failed[0], kubectl.logs(failed[0].name))
            raise not_running(kubectl, manifest.name, pods, f"the start has failed: {why}")
        if any(pod.is_hopeless for pod in pods):
            what = "a pod cannot have its image"
            raise not_running(kubectl, manifest.name, pods, what)
        now = time.monotonic()
        if running >= cluster.min_nodes:
            begin_by = begin_by or now + _BEGIN_S
            if now > begin_by:
                what = f"the first pod runs, and has begun no run within {_BEGIN_S:.0f} s"
                raise not_running(kubectl, manifest.name, pods, what)
        elif now > deadline:
            what = f"{running} of {_pods_text(manifest)} run after {launcher.pending_timeout:.0f} s"
            raise not_running(kubectl, manifest.name, pods, what)
        time.sleep(_LOOK_S)


def _failed(pod: Pod, text: str) -> UserError:
    # The error that isles in the pod has printed, or the last words of what ran instead of it.
    what, _, rest = text.partition("error: ")[2].partition("\n  fix: ")
    if what:
        return UserError(what.strip(), where=f"pod {pod.name}", fix=rest.strip())
    last = [line for line in text.splitlines() if line.strip()][-1:] or ["it has printed nothing"]
    return PreflightError(
        f"isles could not begin in the image: {last[0]}",
        where=f"pod {pod.name}",
        fix="the image needs bash, Python (environment.python), torch and this isles; "
        "docs/kubernetes.md has a Dockerfile",
        id="start.failed",
    )


def _pods_text(manifest: Manifest) -> str:
    nodes = manifest.loaded.config.clusters[0].max_nodes
    return f"{nodes} pod{'s' * (nodes != 1)}"
