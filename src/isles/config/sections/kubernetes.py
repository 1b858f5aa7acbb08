"""The section `launcher` of kind kubernetes: the pods of a cluster, and their Job."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isles.config.sections.base import NO_CONTROL, DurationS, Section, Text

Folder = Annotated[str, Field(pattern=rf"^/[^:{NO_CONTROL}]*$")]
"""A folder in the pods, absolute."""

Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]{1,316}$")]
"""The key of a label, a resource or a taint."""


class VolumeConfig(Section):
    """A PersistentVolumeClaim that every pod mounts."""

    claim: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
    """Name of the PersistentVolumeClaim, in the namespace of the run. Pods on several nodes need
    access mode ReadWriteMany."""

    path: Folder
    """Mount path in the pods."""

    sub_path: Text | None = None
    """Folder of the volume to mount. Default: the whole volume."""

    read_only: bool = False
    """The pods can only read the volume."""


class TolerationConfig(Section):
    """A taint of nodes that the pods tolerate."""

    key: Label
    """The taint's key."""

    value: Text | None = None
    """The taint's value. Default: every value."""

    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect. Default: every effect."""


class KubernetesLauncherConfig(Section):
    """Pods of a Kubernetes cluster, made by your own kubectl."""

    kind: Literal["kubernetes"] = "kubernetes"
    """Kubernetes."""

    image: Text
    """Container image with bash, Python, torch and this version of isles."""

    volumes: Annotated[tuple[VolumeConfig, ...], Field(strict=False)] = ()
    """Claims to mount. `output_dir` must be on a claim without read_only, because Kubernetes
    deletes a pod's other files together with the pod."""

    flavor: Literal["job", "jobset", "trainjob"] = "job"
    """job: an Indexed Job, which every cluster supports. jobset: a JobSet. trainjob: a TrainJob of
    Kubeflow Trainer. The pods are the same."""

    context: Text | None = None
    """Context of kubectl. Default: the current context."""

    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] | None = None
    """Namespace. Default: the namespace of the context."""

    gpu_resource: Label = "nvidia.com/gpu"
    """Resource for GPUs. Each pod requests gpus_per_node of it."""

    resources: dict[Label, Text] = Field(default={})
    """More resources of each pod, as requests and limits: `{cpu: "16", memory: 128Gi}`."""

    node_selector: dict[Label, Text] = Field(default={})
    """Labels that the nodes must have."""

    tolerations: Annotated[tuple[TolerationConfig, ...], Field(strict=False)] = ()
    """Taints that the pods tolerate, see docs/kubernetes.md."""

    pull_secret: Text | None = None
    """Secret for pulling the image."""

    service_account: Text | None = None
    """Service account of the pods, without its token. Default: the namespace's default."""

    pending_timeout: Annotated[DurationS, Field(ge=10)] = 600.0
    """Longest wait for the pods to run, at the start and after the loss of a pod, in addition to
    start_timeout."""

    save_within: Annotated[DurationS, Field(ge=10)] = 300.0
    """Time that a pod has to save after Kubernetes asks it to stop (eviction, drain)."""

    keep_job: Annotated[DurationS, Field(ge=30)] = 3600.0
    """Time after which Kubernetes deletes the ended Job and its objects. The run directory stays on
    its claim."""
