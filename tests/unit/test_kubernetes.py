"""What `launcher: kubernetes` makes: valid by the published schemas in every flavor, with the
rules by which pods come again; what is refused, in words."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from isles.errors import ConfigErrors, PreflightError, UserError
from isles.launch.base import StartOptions
from isles.launch.kubernetes.kubectl import Kubectl
from isles.launch.kubernetes.manifest import FILES, SECRET, KubernetesManifest, job_name
from isles.launch.kubernetes.start import resolve_pods, start_kubernetes
from isles.launch.render import render
from tests.deadline import run_program
from tests.documents import ROOT
from tests.each import each
from tests.programs import write_program
from tests.run_files import load

RUN = """\
name: My_Run.7
output_dir: {output_dir}
model: {{name_or_path: llama-2m, init: scratch}}
data: {{sources: [{{type: fake}}], seq_length: 32}}
training: {{max_steps: 20, global_batch_size: 16, micro_batch_size: 2}}
clusters:
  - nodes: 2
    gpus_per_node: 4
    max_restarts: 5
    environment: {{variables: {{HF_HOME: /runs/cache}}}}
    launcher:
      kind: kubernetes
      image: registry.example.org/isles:1
      volumes: {volumes}
      resources: {{cpu: "8", rdma/hca: "1"}}
      node_selector: {{gpu: a100}}
      tolerations: [{{key: nvidia.com/gpu}}, {{key: team, value: ours, effect: NoSchedule}}]
      pull_secret: registry
      save_within: 90s
"""
VOLUMES = "[{claim: runs, path: /runs}, {claim: sets, path: /data, read_only: true}]"
WHOLE = RUN.format(output_dir="/runs", volumes=VOLUMES)
# Of the schemas of Kubeflow's own package: which class an object is.
KUBEFLOW = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob",
            "TrainingRuntime": "TrainerV1alpha1TrainingRuntime"}  # fmt: skip


def manifest(tmp_path: Path, *overrides: str) -> KubernetesManifest:
    loaded = load(tmp_path, WHOLE, *overrides)
    return KubernetesManifest("isles-run-1a2b3c", loaded, resolve_pods(loaded), suspend=True)


def job_spec(item: dict[str, Any]) -> Any:
    spec = item["spec"]
    if item["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    return spec if item["kind"] == "Job" else spec["replicatedJobs"][0]["template"]["spec"]


@each("job", "jobset", "trainjob")
def test_all_objects_are_valid_and_hold_the_same_pods(flavor: str, *, tmp_path: Path) -> None:
    from kubeflow_trainer_api import models

    made = manifest(tmp_path, f"clusters.0.launcher.flavor={flavor}")
    objects = list(yaml.safe_load_all(made.text()))
    assert objects == made.objects(), "YAML says the same"
    jobs = [item for item in objects if item["kind"] in ("Job", "JobSet", "TrainingRuntime")]
    as_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
    inner = [{**as_job, "spec": job_spec(job)} for job in jobs if job["kind"] != "Job"]
    for item in [*objects, *inner, *([made.reader()] if flavor == "job" else [])]:
        if item["kind"] in KUBEFLOW:
            # What a model does not know it leaves out.
            model = getattr(models, KUBEFLOW[item["kind"]])
            assert model.from_dict(item).to_dict() == item
        else:
            kubernetes_validate.validate(item, "1.37", strict=True)
    assert len(jobs) == 1
    if flavor == "job":  # the oldest that knows all of it
        kubernetes_validate.validate(jobs[0], "1.31", strict=True)
    spec = job_spec(jobs[0])
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (5, "Failed")
    again, taken, failed = spec["podFailurePolicy"]["rules"]
    assert again == {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [85]}}
    assert taken["action"] == "Ignore" and taken["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert failed["action"] == "FailJob" and {1, 3, 127} <= set(failed["onExitCodes"]["values"])
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    assert container["resources"]["limits"] == {"cpu": "8", "rdma/hca": "1", "nvidia.com/gpu": "4"}
    assert pod["terminationGracePeriodSeconds"] == 90 and pod["restartPolicy"] == "Never"
    assert pod["tolerations"][0] == {"key": "nvidia.com/gpu", "operator": "Exists"}
    assert pod["tolerations"][1]["operator"] == "Equal"
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert {"/runs", "/data", FILES, SECRET, "/dev/shm"} == set(mounts)
    assert mounts["/data"]["readOnly"]
    assert "export HF_HOME=/runs/cache" in container["command"][-1]
    assert container["command"][-1].endswith("exec python3 -m isles.launch.kubernetes.pod")


def test_a_rendered_file_has_no_secret_and_one_owner(tmp_path: Path) -> None:
    text = render(load(tmp_path, WHOLE), "kubernetes").text
    kinds = [item["kind"] for item in yaml.safe_load_all(text)]
    assert kinds == ["Job", "ConfigMap", "Service"]
    assert "kubectl create secret generic isles-my-run-7-" in text and "suspend" not in text
    with pytest.raises(UserError, match="has no image"):
        render(load(tmp_path, WHOLE, "clusters.0.launcher={kind: local}"), "kubernetes")


@each(
    ("/runs", "[]", "would be in /runs of a pod, and is deleted with the pod: "),
    ("runs", VOLUMES, "would be in runs of a pod"),
    ("/data/runs", VOLUMES, "the writable volumes are /runs"),
    ("/runs", "[{claim: Runs, path: /runs}]", "claim"),
    ("/runs", "[{claim: runs, path: runs}]", "path"),
)
def test_a_run_directory_that_would_be_lost_is_refused(output_dir, volumes, says, *, tmp_path):
    with pytest.raises(ConfigErrors) as caught:
        load(tmp_path, RUN.format(output_dir=output_dir, volumes=volumes))
    assert says in str(caught.value) and "run.yaml:" in str(caught.value)


def test_what_kubectl_refuses_is_told_in_its_words_and_where_there_is_none(tmp_path, monkeypatch):
    made = manifest(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    options = StartOptions(tmp_path / "run.yaml", (), "auto", False, print, print)
    with pytest.raises(PreflightError, match="kubectl, which creates the pods, is not installed"):
        start_kubernetes(made.loaded, made.launcher, options)
    words = 'Error from server (Forbidden): jobs.batch is forbidden: User "me" cannot create'
    write_program(tmp_path / "kubectl", f"echo '{words}' >&2\nexit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(UserError, match='User "me" cannot create') as caught:
        Kubectl("lab", "team").create({"kind": "Job"})
    assert "--context=lab --namespace=team" in caught.value.where
    assert "ask the cluster's administrators" in caught.value.fix


def test_names_are_short_lower_case_and_unique() -> None:
    first, second = job_name("Ünïque__Run." + "x" * 60), job_name("-")
    assert len(f"{first}-node-0-1023") < 63 and first != job_name(first)
    assert first.startswith("isles-") and second.startswith("isles-run-")


def test_the_dockerfile_has_no_fault_that_hadolint_finds() -> None:
    program = Path(sys.executable).with_name("hadolint")
    done = run_program([program, ROOT / "examples" / "Dockerfile"])
    assert done.returncode == 0, done.stdout
