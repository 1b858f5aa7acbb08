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
    """Name of the PersistentVolumeClaim, in the namespace of the run. Pods on several nodes need a
    claim with access mode ReadWriteMany."""

    path: Folder
    """Mount path in the pods."""

    sub_path: Text | None = None
    """Folder of the volume to mount. Default: the whole volume."""

    read_only: bool = False
    """Whether the pods can only read the volume, such as a data set."""


class TolerationConfig(Section):
    """A taint of nodes that the pods tolerate."""

    key: Label
    """The taint's key."""

    value: Text | None = None
    """The taint's value. Default: every value."""

    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect. Default: every effect."""


class KubernetesLauncherConfig(Section):
    """Pods of a Kubernetes cluster, made by the user's own kubectl, with an agent in each."""

    kind: Literal["kubernetes"] = "kubernetes"
    """Kubernetes."""

    image: Text
    """Container image with bash, Python, torch and this version of isles."""

    volumes: Annotated[tuple[VolumeConfig, ...], Field(strict=False)] = ()
    """Claims that the pods mount. `output_dir` must be on a claim without read_only: all other
    files of a pod are deleted with it."""

    flavor: Literal["job", "jobset", "trainjob"] = "job"
    """job: an Indexed Job, which every cluster supports. jobset: a JobSet. trainjob: a TrainJob of
    Kubeflow Trainer. The pods are the same."""

    context: Text | None = None
    """Context of kubectl. Default: the current context."""

    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] | None = None
    """Namespace. Default: the namespace of the context."""

    gpu_resource: Label = "nvidia.com/gpu"
    """Resource for GPUs. Each pod requests gpus_per_node of it if the ranks use GPUs."""

    resources: dict[Label, Text] = Field(default={})
    """More resources of each pod, as requests and limits: `{cpu: "16", memory: 128Gi}`."""

    node_selector: dict[Label, Text] = Field(default={})
    """Labels that the nodes must have."""

    tolerations: Annotated[tuple[TolerationConfig, ...], Field(strict=False)] = ()
    """Taints that the pods tolerate."""

    pull_secret: Text | None = None
    """Secret for pulling the image."""

    service_account: Text | None = None
    """Service account of the pods. The pods get no token for it. Default: the namespace's
    default."""

    pending_timeout: Annotated[DurationS, Field(ge=10)] = 600.0
    """Longest wait for the pods to run, at the start and after a pod was lost. It includes
    scheduling and pulling the image, and adds to start_timeout."""

    save_within: Annotated[DurationS, Field(ge=10)] = 300.0
    """How long a pod may take to save after Kubernetes asks it to stop (eviction, drain)."""

    keep_job: Annotated[DurationS, Field(ge=30)] = 3600.0
    """Time after which Kubernetes deletes the ended Job and everything that belongs to it. The run
    directory stays as long as its claim."""
