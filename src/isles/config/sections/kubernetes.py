"""The section `launcher` of kind kubernetes: the pods of a cluster, as its Job asks for them."""

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
    one of access mode ReadWriteMany."""

    path: Folder
    """Where the pods see it."""

    sub_path: Text | None = None
    """Folder of the volume that is mounted. null: the whole volume."""

    read_only: bool = False
    """Whether the pods can only read it, such as a data set."""


class TolerationConfig(Section):
    """A taint of nodes on which the pods may run all the same."""

    key: Label
    """The taint's key."""

    value: Text | None = None
    """The taint's value. null: any."""

    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect. null: all of them."""


class KubernetesLauncherConfig(Section):
    """Pods of a Kubernetes cluster, made by the user's own kubectl: an agent in each."""

    kind: Literal["kubernetes"] = "kubernetes"
    """Kubernetes."""

    image: Text
    """Container image with bash, Python, torch and this version of isles."""

    volumes: Annotated[tuple[VolumeConfig, ...], Field(strict=False)] = ()
    """Claims that the pods mount. `output_dir` must be on one that is not read_only: all else that
    a pod writes is gone when it ends."""

    flavour: Literal["job", "jobset", "trainjob"] = "job"
    """job: an Indexed Job, which every cluster knows. jobset: a JobSet. trainjob: a TrainJob of
    Kubeflow Trainer. The pods are the same."""

    context: Text | None = None
    """Context of kubectl. null: the current one."""

    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] | None = None
    """Namespace. null: that of the context."""

    gpu_resource: Label = "nvidia.com/gpu"
    """Resource of which each pod asks for gpus_per_node, where the ranks compute on GPUs."""

    resources: dict[Label, Text] = Field(default={})
    """Further resources of each pod, as requests and limits: `{cpu: "16", memory: 128Gi}`."""

    node_selector: dict[Label, Text] = Field(default={})
    """Labels that the nodes must have."""

    tolerations: Annotated[tuple[TolerationConfig, ...], Field(strict=False)] = ()
    """Taints that the pods tolerate."""

    pull_secret: Text | None = None
    """Secret with which the image is pulled."""

    service_account: Text | None = None
    """Service account of the pods, which get no token of it. null: the namespace's default."""

    pending_timeout: Annotated[DurationS, Field(ge=10)] = 600.0
    """Longest wait for the pods to run, at the start and after one was lost: for a place on a node
    and for the image. It comes on top of start_timeout."""

    save_within: Annotated[DurationS, Field(ge=10)] = 300.0
    """How long a pod that is told to end (an eviction, a drain) may take to save."""

    keep_job: Annotated[DurationS, Field(ge=30)] = 3600.0
    """How long the ended Job stays before Kubernetes deletes it with all that belongs to it. The
    run directory stays for as long as its claim does."""
