"""Containers without one: scripts, command lines, what is seen inside, and why none is entered."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from isles.config.load import load_run_file
from isles.errors import ConfigErrors, PreflightError
from isles.launch.container import enter
from isles.launch.container.failure import MARK, explain
from isles.launch.render import Kind, render
from isles.run.env import CONTAINER
from tests.each import each
from tests.golden import check_golden
from tests.programs import write_program
from tests.slurm_job import RUN

OCI = "ghcr.io/me/train:1.2"
HAS_PYXIS = "echo '      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH'"


def run_file(tmp_path: Path, container: str, *overrides: str) -> Any:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    chosen = f"clusters.0.environment={{modules: [apptainer], container: {container}}}"
    return load_run_file(path, [chosen, *overrides])


PLAIN = enter.Container(OCI, "auto", "python3", (), (), (), (), "local", "cpu")


@each(
    ("slurm-apptainer.sh", "sbatch", "images/train.sif"),
    ("slurm-pyxis.sh", "sbatch", f"{{image: {OCI}, runtime: pyxis, binds: [/scratch]}}"),
    ("pbs-apptainer.sh", "pbs", OCI),
)
def test_rendered_scripts_word_for_word(golden: str, to: Kind, container: str, *, tmp_path):
    loaded = run_file(tmp_path, container, "clusters.0.workdir=/home/me/train")
    check_golden(golden, render(loaded, to).text.replace(str(tmp_path), "."))


@each(
    ("a.sif", "slurm", "apptainer srun", "apptainer"),
    ("a.sif", "local", "podman singularity", "singularity"),
    (OCI, "slurm", "apptainer pyxis", "srun"),
    (OCI, "pbs", "apptainer podman", "apptainer"),
    (OCI, "local", "apptainer podman", "podman"),
    ("/images/folder", "local", "podman", "podman"),
    (OCI, "local", "", "podman or apptainer or singularity not found"),
    ("a.sif", "pbs", "podman", "apptainer or singularity not found"),
)
def test_the_runtime_of_a_node(row: tuple[str, ...], *, tmp_path, monkeypatch):
    image, launcher, programs, expected = row
    for name in programs.split():
        is_pyxis = name == "pyxis"
        write_program(tmp_path / ("srun" if is_pyxis else name), HAS_PYXIS * is_pyxis)
    monkeypatch.setenv("PATH", str(tmp_path))
    container = replace(PLAIN, image=image, launcher=launcher)
    if " " not in expected:
        assert enter.find_runtime(container)[1] == expected
        return
    with pytest.raises(PreflightError, match=expected) as caught:
        enter.find_runtime(container)
    assert caught.value.id == "container.runtime" and caught.value.fix


def test_no_value_of_a_variable_stands_on_a_command_line(tmp_path, monkeypatch):
    secret = {"HF_TOKEN": "hf_secretsecret", "NCCL_DEBUG": "INFO", "VIRTUAL_ENV": "/home/me/venv"}
    secret |= {"PATH": str(tmp_path), "PYTHONPATH": "/home/me/lib", "HOME": str(tmp_path)}
    for name, value in secret.items():
        monkeypatch.setenv(name, value)
    for runtime in ("podman", "apptainer"):
        write_program(tmp_path / runtime, "true")
        found = enter.entry(replace(PLAIN, runtime=runtime), ["-m", "isles.agent"], [tmp_path])
        assert not any("secret" in word for word in found.words)
        assert found.environ["HF_TOKEN"] == secret["HF_TOKEN"]
        assert found.environ[CONTAINER].startswith(f"{os.getpid()} ")
        assert found.environ["PYTHONNOUSERSITE"] == "1"
        assert found.words[-3:] == ["python3", "-m", "isles.agent"]
        if runtime == "apptainer":  # it passes on what it has
            assert "PYTHONPATH" not in found.environ and "VIRTUAL_ENV" not in found.environ
        else:
            named = [name for word, name in pairwise(found.words) if word == "--env"]
            assert {"HF_TOKEN", "NCCL_DEBUG", CONTAINER} <= set(named)
            assert not {"PATH", "PYTHONPATH", "VIRTUAL_ENV"} & set(named)
    # One of the run file goes inside whatever it is.
    environ = {"PYTHONPATH": "/a", "LD_PRELOAD": "/b", "BASH_FUNC_x%%": "()", "RANK": "0"}
    inside = enter.names_inside(replace(PLAIN, variables=("PYTHONPATH",)), environ)
    assert inside == ["PYTHONPATH", "RANK"]


def test_what_is_seen_inside(tmp_path: Path) -> None:
    there = {name: tmp_path / name for name in ("work", "far", "hub", "models/one", "scratch", "x")}
    for folder in there.values():
        folder.mkdir(parents=True)
    (there["work"] / "data").symlink_to(there["far"])
    paths = ("data", "../models/*/a.jsonl", "sshleifer/tiny", f"{tmp_path}/none", "/usr/lib", "/")
    container = replace(PLAIN, binds=("../x", "/a:/b:ro"), paths=paths)
    environ = {"XDG_CACHE_HOME": "cache", "HF_HOME": "hf", "HF_DATASETS_CACHE": "sets"}
    environ = {name: str(tmp_path / folder) for name, folder in environ.items()}
    environ["TMPDIR"] = str(there["scratch"])
    seen = enter.mounts_of(container, [there["work"], there["work"] / "runs"], environ)
    same = [str(tmp_path / n) for n in ("cache/isles", "far", "hf", "models", "scratch", "sets")]
    expected = [f"{path}:{path}" for path in sorted([*same, str(there["work"]), "/usr/lib"])]
    other = str(there["work"] / "../x")
    assert seen == [*expected, f"{other}:{other}", "/a:/b:ro"]


def test_gpus_by_what_the_node_has(tmp_path: Path) -> None:
    container = replace(PLAIN, runtime="podman", device="auto")
    assert enter.gpu_makers(container, tmp_path) == []
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "kfd").touch()
    assert enter.gpu_makers(container, tmp_path) == ["nvidia", "amd"]
    words = enter.command_line(container, "podman", "podman", [], [], [], "/w", ["nvidia"])
    assert "nvidia.com/gpu=all" in words and "/dev/kfd" not in words
    words = enter.command_line(container, "apptainer", "apptainer", [], [], [], "/w", ["amd"])
    assert "--rocm" in words and "--nv" not in words


def test_a_step_of_pyxis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(tmp_path / "srun", HAS_PYXIS)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = run_file(tmp_path, OCI).config
    container = enter.Container.of(enter.container_record(config.clusters[0], config) or {})
    options = enter.step_options(container, str(tmp_path / "srun"), [tmp_path])
    assert options is not None and "--container-image=ghcr.io#me/train:1.2" in options
    assert f"--container-workdir={tmp_path}" in options
    write_program(tmp_path / "srun", "true")
    assert enter.step_options(container, str(tmp_path / "srun"), [tmp_path]) is None


# What the programs have written, the first three seen of podman 4.3.1.
SAID = {
    "Error: localhost/none:2: image not known": "container.image",
    "/usr/bin/python3: Error while finding module specification for 'isles.agent' "
    "(ModuleNotFoundError: No module named 'isles')": "isles.installed",
    "Error: crun: executable file `/opt/py` not found in $PATH: No such file": "python.runs",
    "python3: No module named isles.launch.container": "version.isles",
    "Error: cannot find UID/GID for user me: no subuid ranges found for user": "container.runtime",
    "Error: setting up CDI devices: unresolvable CDI devices nvidia.com/gpu": "container.runtime",
    "FATAL:   could not open image /x.sif: no such file or directory": "container.image",
    "srun: unrecognized option '--container-image=x'": "container.runtime",
}


def test_why_a_container_is_not_entered() -> None:
    for said, expected in SAID.items():
        found = explain(f"a login's greeting\n{MARK} {OCI} (by podman)\n{said}\n")
        assert found is not None and found.id == expected and found.fix, said
        assert explain(said) is None, "it is not about a container"
    assert explain(f"{MARK} {OCI} (by podman)\nKilled\n") is None


def test_rules_between_a_container_and_its_launcher(tmp_path: Path) -> None:
    pyxis, podman = (f"{{image: {OCI}, runtime: {name}}}" for name in ("pyxis", "podman"))
    pbs = "clusters.0.launcher={kind: pbs, time: 1h}"
    here = f"clusters.0={{nodes: 2, gpus_per_node: 1, environment: {{container: {OCI}}}}}"
    for container, override, words in (
        (pyxis, pbs, "pyxis is a part of Slurm"),
        (podman, pbs, "podman's containers would not end with the job"),
        (OCI, here, "a container is one node"),
    ):
        with pytest.raises(ConfigErrors, match=words):
            run_file(tmp_path, container, override)
