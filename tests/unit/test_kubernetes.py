"""What `launcher: kubernetes` makes: valid by the published schemas in every flavour, with the
rules by which pods come again; what is refused, in words."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from isles.config.load import load_run_file
from isles.errors import ConfigErrors, PreflightError, UserError
from isles.launch.base import StartOptions
from isles.launch.kubernetes.kubectl import Kubectl
from isles.launch.kubernetes.manifest import FILES, SECRET, Manifest, job_name
from isles.launch.kubernetes.start import resolve_pods, start_kubernetes
from isles.launch.render import render
from tests.deadline import run_program
from tests.each import each

REPO = Path(__file__).parent.parent.parent
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
# Of the schemas of Kubeflow's own package: which class an object is.
KUBEFLOW = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob",
            "TrainingRuntime": "TrainerV1alpha1TrainingRuntime"}  # fmt: skip


def manifest(tmp_path: Path, *overrides: str) -> Manifest:
    path = tmp_path / "run.yaml"
    path.write_text(RUN.format(output_dir="/runs", volumes=VOLUMES))
    loaded = load_run_file(path, overrides)
    return Manifest("isles-run-1a2b3c", loaded, resolve_pods(loaded), suspend=True)


def job_spec(item: dict[str, Any]) -> dict[str, Any]:
    match item["kind"]:
        case "Job":
            found = item["spec"]
        case "JobSet":
            found = item["spec"]["replicatedJobs"][0]["template"]["spec"]
        case _:
            found = item["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert isinstance(found, dict)
    return found


@each("flavour", ["job", "jobset", "trainjob"])
def test_all_objects_are_valid_and_hold_the_same_pods(tmp_path: Path, flavour: str) -> None:
    made = manifest(tmp_path, f"clusters.0.launcher.flavour={flavour}")
    objects = list(yaml.safe_load_all(made.text()))
    assert objects == made.objects(), "YAML says the same"
    jobs = [item for item in objects if item["kind"] in ("Job", "JobSet", "TrainingRuntime")]
    as_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
    inner = [{**as_job, "spec": job_spec(job)} for job in jobs if job["kind"] != "Job"]
    for item in [*objects, *inner, *([made.reader()] if flavour == "job" else [])]:
        if item["kind"] in KUBEFLOW:
            # What a model does not know it leaves out.
            model = getattr(importlib.import_module("kubeflow_trainer_api.models"),
                            KUBEFLOW[item["kind"]])  # fmt: skip
            assert model.from_dict(item).to_dict() == item
        else:
            kubernetes_validate.validate(item, "1.37", strict=True)
    assert len(jobs) == 1
    if flavour == "job":  # the oldest that knows all of it
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
    path = tmp_path / "run.yaml"
    path.write_text(RUN.format(output_dir="/runs", volumes=VOLUMES))
    text = render(load_run_file(path), "kubernetes").text
    kinds = [item["kind"] for item in yaml.safe_load_all(text)]
    assert kinds == ["Job", "ConfigMap", "Service"]
    assert "kubectl create secret generic isles-my-run-7-" in text and "suspend" not in text
    with pytest.raises(UserError, match="says no image"):
        render(load_run_file(path, ["clusters.0.launcher={kind: local}"]), "kubernetes")


@each(
    ("output_dir", "volumes", "says"),
    [
        ("/runs", "[]", "would be in /runs of a pod, and goes with it: no claim"),
        ("runs", VOLUMES, "would be in runs of a pod"),
        ("/data/runs", VOLUMES, "of volumes that pods can write to there is /runs"),
        ("/runs", "[{claim: Runs, path: /runs}]", "claim"),
        ("/runs", "[{claim: runs, path: runs}]", "path"),
    ],
)
def test_a_run_directory_that_would_be_lost_is_refused(
    tmp_path: Path, output_dir: str, volumes: str, says: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN.format(output_dir=output_dir, volumes=volumes))
    with pytest.raises(ConfigErrors) as caught:
        load_run_file(path)
    assert says in str(caught.value) and "run.yaml:" in str(caught.value)


def test_without_kubectl_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = manifest(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    options = StartOptions(tmp_path / "run.yaml", (), "auto", False, print, print)
    with pytest.raises(PreflightError, match="no program kubectl"):
        start_kubernetes(made.loaded, made.launcher, options)


def test_names_are_short_lower_case_and_unique() -> None:
    first, second = job_name("Ünïque__Run." + "x" * 60), job_name("-")
    assert len(f"{first}-node-0-1023") < 63 and first != job_name(first)
    assert first.startswith("isles-") and second.startswith("isles-run-")


def test_what_kubectl_refuses_is_told_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "kubectl"
    words = 'Error from server (Forbidden): jobs.batch is forbidden: User "me" cannot create'
    program.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(UserError, match='User "me" cannot create') as caught:
        Kubectl("lab", "team").create({"kind": "Job"})
    assert "--context=lab --namespace=team" in caught.value.where
    assert "ask who runs the cluster" in caught.value.fix


def test_the_dockerfile_has_no_fault_that_hadolint_finds() -> None:
    program = Path(sys.executable).with_name("hadolint")
    done = run_program([program, REPO / "examples" / "Dockerfile"])
    assert done.returncode == 0, done.stdout
    faulty = run_program([program, "-"], input="FROM debian\nRUN cd /tmp && apt-get install x\n")
    assert faulty.returncode == 1 and "DL3006" in faulty.stdout, "it finds what is wrong"
