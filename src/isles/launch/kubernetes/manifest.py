"""The objects of a start on Kubernetes, as dictionaries, without secrets."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isles.config.load import Loaded
from isles.config.resolve import Resolved, dump_resolved
from isles.config.sections.kubernetes import KubernetesLauncherConfig
from isles.config.yaml import dump_for_others
from isles.errors import ExitCode
from isles.launch.ssh.environment import quoted, setting_lines

Object = dict[str, Any]

LABEL = "isles.dev/job"
"""Label of all objects of a start; its value is the start's name."""
FILES, SECRET = "/etc/isles", "/etc/isles-secret"
"""Folder where a pod sees the ConfigMap and the Secret."""
_NAME_CHARS = 30
_JOB_API, _JOBSET_API = "batch/v1", "jobset.x-k8s.io/v1alpha2"
_TRAINER_API = "trainer.kubeflow.org/v1alpha1"
_NOT_RUN = [int(code) for code in ExitCode if 0 < code < ExitCode.HANDOVER] + [126, 127]
"""Exit codes after which another pod would fail in the same way."""

KINDS = {
    "job": ("jobs.batch", "services", "configmaps", "secrets"),
    "jobset": ("jobsets.jobset.x-k8s.io", "configmaps", "secrets"),
    "trainjob": (
        "trainjobs.trainer.kubeflow.org",
        "trainingruntimes.trainer.kubeflow.org",
        "configmaps",
        "secrets",
    ),
}
"""Kinds of objects of each flavor, in kubectl's notation, the owner first."""


def job_name(name: str) -> str:
    """A unique name for the objects of one start of a run."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower())[:_NAME_CHARS].strip("-")
    return f"isles-{slug or 'run'}-{secrets.token_hex(3)}"


def python_of(loaded: Loaded) -> str:
    """Python in the pods, as a command after `pod_lines`."""
    return loaded.config.clusters[0].environment.python or "python3"


def pod_lines(loaded: Loaded) -> list[str]:
    """Lines of bash before Python in a pod."""
    cluster = loaded.config.clusters[0]
    lines = setting_lines(cluster, cluster.workdir or ".")
    return lines[cluster.workdir is None :]  # else the folder of the image


@dataclass(frozen=True, slots=True)
class KubernetesManifest:
    """The objects of one start.

    Args:
        name: name of all objects.
        resume, typed: as in `StartOptions`.
        suspend: whether the owner is created suspended, so that it creates no pods yet.
    """

    name: str
    loaded: Loaded
    resolved: Resolved
    resume: str = "auto"
    typed: str = ""
    suspend: bool = False

    @property
    def labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/managed-by": "isles", LABEL: self.name}

    @property
    def launcher(self) -> KubernetesLauncherConfig:
        found = self.loaded.config.clusters[0].launcher
        assert isinstance(found, KubernetesLauncherConfig)
        return found

    @property
    def hosts(self) -> tuple[str, str]:
        """The part of a pod's host name before its index, and the domain after it."""
        # A JobSet names its Jobs NAME-REPLICATED_JOB-0.
        is_job = self.launcher.flavor == "job"
        return (self.name if is_job else f"{self.name}-node-0"), self.name

    def objects(self) -> list[Object]:
        """All objects: prerequisites of the owner, the owner, and the objects that belong to it."""
        return [*self.before(), self.owner(), *self.others()]

    def text(self) -> str:
        """The objects as YAML."""
        return "---\n".join(dump_for_others(each) for each in self.objects())

    def owner(self) -> Object:
        """The Job, JobSet or TrainJob; Kubernetes deletes the other objects with it."""
        job, suspend = self._job(), {"suspend": True} if self.suspend else {}
        match self.launcher.flavor:
            case "job":
                keep = {"ttlSecondsAfterFinished": math.ceil(self.launcher.keep_job)}
                return self._object(_JOB_API, "Job", {**job, **keep, **suspend})
            case "jobset":
                return self._object(_JOBSET_API, "JobSet", {**self._jobset(job), **suspend})
            case "trainjob":
                runtime = {
                    "apiGroup": _TRAINER_API.partition("/")[0],
                    "kind": "TrainingRuntime",
                    "name": self.name,
                }
                nodes = {"numNodes": job["completions"]}
                spec = {"runtimeRef": runtime, "trainer": nodes, **suspend}
                return self._object(_TRAINER_API, "TrainJob", spec)

    def before(self) -> list[Object]:
        """Objects that must exist before the owner: the runtime of a TrainJob."""
        if self.launcher.flavor != "trainjob":
            return []
        job = self._job()
        jobset = self._jobset(job)
        # The controller of a TrainJob decides when it is over, and keeps its JobSet until then.
        del jobset["ttlSecondsAfterFinished"]
        spec = {"mlPolicy": {"numNodes": job["completions"]}, "template": {"spec": jobset}}
        return [self._object(_TRAINER_API, "TrainingRuntime", spec)]

    def others(self, owner_uid: str = "") -> list[Object]:
        """The objects that belong to the owner; they need its uid."""
        prefix, domain = self.hosts
        start = {
            "job": self.name,
            "prefix": prefix,
            "domain": domain,
            "resume": self.resume,
            "typed": self.typed,
        }
        data = {
            "run.yaml": self.loaded.text,
            "resolved.yaml": dump_resolved(self.resolved),
            "start.json": json.dumps(start, indent=2),
        }
        found = [self._object("v1", "ConfigMap", None, data=data)]
        if self.launcher.flavor == "job":  # a JobSet has a Service of its own
            spec = {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {LABEL: self.name},
            }
            found.append(self._object("v1", "Service", spec))
        if owner_uid:
            for each in found:
                each["metadata"]["ownerReferences"] = [self.reference(owner_uid)]
        return found

    def reference(self, uid: str) -> Object:
        """The reference to the owner in other objects."""
        owner = self.owner()
        names = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": self.name}
        return {**names, "uid": uid}

    def reader(self) -> Object:
        """A Job with one pod that sees the same volumes, and waits a while for commands."""
        pod = self._pod(["sleep 900"], {})
        pod["volumes"] = [v for v in pod["volumes"] if v["name"] not in ("files", "secret")]
        mounts = pod["containers"][0]["volumeMounts"]
        names = {volume["name"] for volume in pod["volumes"]}
        pod["containers"][0]["volumeMounts"] = [m for m in mounts if m["name"] in names]
        pod.pop("subdomain", None)
        pod["terminationGracePeriodSeconds"] = 0
        labels = {"app.kubernetes.io/managed-by": "isles"}
        spec = {
            "backoffLimit": 0,
            "activeDeadlineSeconds": 900,
            "ttlSecondsAfterFinished": 60,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }
        metadata = {"generateName": f"{self.name}-read-", "labels": labels}
        return {"apiVersion": _JOB_API, "kind": "Job", "metadata": metadata, "spec": spec}

    def _object(self, api: str, kind: str, spec: Object | None, **more: Any) -> Object:
        metadata: Object = {"name": self.name, "labels": self.labels}
        body = {"spec": spec} if spec is not None else {}
        return {"apiVersion": api, "kind": kind, "metadata": metadata, **body, **more}

    def _jobset(self, job: Object) -> Object:
        labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
        metadata = {"metadata": {"labels": labels}} if self.launcher.flavor == "trainjob" else {}
        return {
            "ttlSecondsAfterFinished": math.ceil(self.launcher.keep_job),
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [
                {"name": "node", "replicas": 1, "template": {**metadata, "spec": job}}
            ],
        }

    def _job(self) -> Object:
        # The spec of an Indexed Job, equal in all flavors.
        cluster = self.loaded.config.clusters[0]
        nodes, again = cluster.max_nodes, int(ExitCode.REQUEUE)
        resources: dict[str, str] = dict(self.launcher.resources)
        if self.resolved.device == "cuda":
            resources[self.launcher.gpu_resource] = str(self.resolved.world_size // nodes)
        lines = [*pod_lines(self.loaded), f"exec {quoted(python_of(self.loaded))} -m {_POD}"]
        return {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            # For killed pods; isles restarts ranks in place after failures that it detects
            # (max_restarts).
            "backoffLimit": cluster.max_restarts,
            "podReplacementPolicy": "Failed",
            # The pod of index 0 has the coordinator: when it is done, so is the run.
            "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [again]}},
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                    {"action": "FailJob", "onExitCodes": {"operator": "In", "values": _NOT_RUN}},
                ]
            },
            "template": {
                "metadata": {"labels": self.labels},
                "spec": self._pod(lines, resources),
            },
        }

    def _pod(self, lines: Sequence[str], resources: dict[str, str]) -> Object:
        launcher, volumes, mounts = self.launcher, list[Object](), list[Object]()

        def mount(name: str, path: str, source: Object, **more: object) -> None:
            if all(volume["name"] != name for volume in volumes):
                volumes.append({"name": name, **source})
            mounts.append({"name": name, "mountPath": path, **more})

        claims = sorted({volume.claim for volume in launcher.volumes})
        for each in launcher.volumes:
            more: Object = {"subPath": each.sub_path} if each.sub_path else {}
            more |= {"readOnly": True} if each.read_only else {}
            source = {"persistentVolumeClaim": {"claimName": each.claim}}
            mount(f"claim-{claims.index(each.claim)}", each.path, source, **more)
        mount("files", FILES, {"configMap": {"name": self.name}}, readOnly=True)
        secret = {"secretName": self.name, "defaultMode": 0o400}
        mount("secret", SECRET, {"secret": secret}, readOnly=True)
        # A container has 64 MiB there by default; NCCL and data loaders need more.
        mount("shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}})
        container: Object = {
            "name": "node",
            "image": launcher.image,
            "command": ["/bin/bash", "-c", "\n".join(lines)],
            "env": [
                {"name": "ISLES_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
            ],
            "volumeMounts": mounts,
        }
        if resources:
            container["resources"] = {"requests": resources, "limits": dict(resources)}
        pod: Object = {
            "restartPolicy": "Never",
            "subdomain": self.name,
            "terminationGracePeriodSeconds": math.ceil(launcher.save_within),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "containers": [container],
            "volumes": volumes,
        }
        if launcher.flavor != "job":
            del pod["subdomain"]  # JobSet sets it
        if launcher.service_account:
            pod["serviceAccountName"] = launcher.service_account
        if launcher.pull_secret:
            pod["imagePullSecrets"] = [{"name": launcher.pull_secret}]
        if launcher.node_selector:
            pod["nodeSelector"] = dict(launcher.node_selector)
        if launcher.tolerations:
            pod["tolerations"] = [_toleration(t.model_dump()) for t in launcher.tolerations]
        return pod


_POD = "isles.launch.kubernetes.pod"


def _toleration(values: dict[str, Any]) -> Object:
    found = {key: value for key, value in values.items() if value is not None}
    return {**found, "operator": "Equal" if "value" in found else "Exists"}
