"""Runs in containers: a real rootless podman on this machine; on the pretend hosts stand-ins for
apptainer, and for pyxis before a real Slurm."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from isles.errors import ExitCode
from isles.run.paths import RunDir
from isles.run.process import ProcessId
from isles.run.records import read_record
from tests.deadline import run_program
from tests.e2e.typed import Command
from tests.lab.home import assert_nothing_left, has_done, isles, outcome_of, sh, until, write_run
from tests.lab.hosts import Lab
from tests.lab.slurm import slurm
from tests.runs import losses_of

NUM_HOSTS = 2
LAB = Path(__file__).parents[1] / "lab" / "containers"
ROOT = Path(__file__).parents[2]
USER = 64042
IMAGE = "localhost/empty:1"


class Boxer:
    """A user of this machine who has rootless podman, and an image of empty folders: Python and
    torch are this machine's own, bound into it."""

    def __init__(self, folder: Path) -> None:
        self.work, self._state = folder / "work", folder / "state"
        self.work.mkdir()
        self._state.mkdir()
        folder.chmod(0o755)
        os.chown(self.work, USER, USER)

    def words(self, *command: str) -> list[str]:
        """A command line that runs a command as this user."""
        return [str(LAB / "as_user.sh"), str(self._state), sys.executable, str(ROOT), *command]

    def run(self, text: str) -> str:
        """Run lines of bash in the folder of the run; they must succeed."""
        done = run_program(self.words("bash", "-ec", f"cd {self.work}\n{text}"))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def train(self, *words: str) -> Command:
        """`isles train run.yaml`, on its way."""
        program = self.words("env", "PYTHONDONTWRITEBYTECODE=1", sys.executable, "-m", "isles")
        return Command("train", "run.yaml", *words, cwd=self.work, program=program)

    def processes(self) -> list[str]:
        """What still runs as this user, but for podman's own keeper of the namespace."""
        done = run_program(["ps", "-o", "stat=,args=", "-u", str(USER)])
        lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
        return [words for state, words in lines if state[0] != "Z" and words != "podman"]


@pytest.fixture(scope="module")
def boxer() -> Iterator[Boxer]:
    if os.getuid() != 0 or shutil.which("podman") is None:
        pytest.skip("it takes root, and podman, crun and uidmap")
    # Not in pytest's folder, which each start of pytest closes to other users.
    folder = Path(tempfile.mkdtemp(prefix="isles-boxer-", dir="/tmp"))
    boxer = Boxer(folder)
    boxer.run(
        "mkdir empty && cd empty && mkdir usr etc proc sys dev tmp run root\n"
        "for name in bin sbin lib lib64; do ln -s usr/$name $name; done\n"
        f"tar -c . | podman import - {IMAGE}"
    )
    base = Path(sys.base_prefix)
    binds = ["/usr:/usr:ro", f"{ROOT}:{ROOT}:ro", f"{sys.prefix}:{sys.prefix}:ro"]
    binds += [] if base.is_relative_to("/usr") else [f"{base}:{base}:ro"]
    container = {"image": IMAGE, "python": sys.executable, "binds": binds}
    environment = {"container": container, "variables": {"OMP_NUM_THREADS": "1"}}
    run = {
        "name": "boxed",
        "model": {"name_or_path": "llama-2m", "init": "scratch"},
        "data": {"sources": [{"type": "fake"}], "seq_length": 32},
        "training": {"max_steps": 12, "global_batch_size": 4, "logging_steps": 1},
        "checkpoint": {"export_on_finish": False},
        "track": ["jsonl"],
        "strategy": {"kind": "ddp"},
        "clusters": [{"device": "cpu", "gpus_per_node": 2, "environment": environment}],
    }
    (boxer.work / "run.yaml").write_text(yaml.safe_dump(run))
    yield boxer
    boxer.run("podman system migrate")  # ends its keeper of the namespace
    shutil.rmtree(folder)


@pytest.mark.long
def test_a_run_in_rootless_podman_stops_and_goes_on(boxer: Boxer) -> None:
    run_dir = RunDir(boxer.work / "runs" / "boxed-1")
    command, attempt = boxer.train("training.max_steps=100000"), run_dir.attempt(1)
    try:
        command.until(lambda: has_done(attempt, 2))
        # The records speak of processes of this machine, inside and outside.
        agent = ProcessId.from_record(read_record(attempt.launch) or {})
        rank = ProcessId.from_record(read_record(attempt.rank_record(1)) or {})
        assert agent is not None and rank is not None and agent.is_alive() and rank.is_alive()
        seen = Path(f"/proc/{rank.pid}/environ").read_bytes().split(b"\0")
        assert b"OMP_NUM_THREADS=1" in seen and f"ISLES_CONTAINER={agent.pid} " in str(seen)
        os.kill(agent.pid, 15)
        command.end()
    finally:
        command.kill()
    outcome = outcome_of(attempt)
    assert (outcome["state"], outcome["exit_code"]) == ("stopped", ExitCode.REQUEUE), outcome
    step = outcome["step"]
    assert boxer.processes() == []
    command = boxer.train(f"training.max_steps={step + 3}", "--resume", "runs/boxed-1")
    assert command.end() == 0, command.text
    assert f"step {step}" in command.text
    assert outcome_of(run_dir.attempt(2))["state"] == "finished"
    assert len(losses_of(run_dir)) == step + 3
    assert boxer.processes() == []


def test_an_image_without_isles_or_that_is_not_there(boxer: Boxer) -> None:
    cases = {
        ("python=/opt/python",): f"the image {IMAGE} does not contain this Python",
        ("image=localhost/none:1",): "the image localhost/none:1 is not on this host",
        ("image=./none.sif", "runtime=podman"): "image not found",
    }
    for keys, words in cases.items():
        given = [f"clusters.0.environment.container.{key}" for key in keys]
        command = boxer.train("name=never", *given)
        assert command.end() == ExitCode.PREFLIGHT, command.text
        assert words in command.text and "fix: " in command.text
        assert "Traceback" not in command.text
    assert not list((boxer.work / "runs").glob("never*"))


def test_a_runtime_that_is_killed_takes_the_run_with_it(boxer: Boxer) -> None:
    attempt = RunDir(boxer.work / "runs" / "killed-1").attempt(1)
    command = boxer.train("name=killed", "training.max_steps=100000")
    try:
        command.until(lambda: has_done(attempt, 1))
        os.kill(int((read_record(attempt.launch) or {})["pid"]), 9)
        until(lambda: boxer.processes() in ([], [" ".join(command.process.args)]), "it is over")
        assert command.end() == ExitCode.TRAINING
        assert boxer.run("podman ps --all --quiet") == ""
    finally:
        command.kill()


def test_a_check_looks_inside(boxer: Boxer) -> None:
    def levels(*words: str) -> dict[str, str]:
        check = shlex.join([sys.executable, "-m", "isles", "check", "run.yaml", "--json", *words])
        found = json.loads(boxer.run(f"{check} || true"))["findings"]
        return {finding["id"]: finding["level"] for finding in found}

    inside = levels()
    assert inside["version.torch"] == inside["files.output"] == "ok"
    assert "error" not in inside.values(), inside
    missing = levels(_of("localhost/none:1"))
    assert [name for name in missing if missing[name] == "error"] == ["container.image"]


# On the pretend hosts, in stand-ins.


@pytest.fixture(scope="module")
def images(lab: Lab) -> Lab:
    """apptainer's stand-in on all hosts, and two images: one with isles, one without."""
    for host in ("ctl", "a1", "a2"):
        sh(lab, host, f"install -m 755 {LAB}/apptainer /usr/local/bin/ && mkdir -p /images")
        sh(lab, host, f"echo {Path(sys.executable).parent} >/images/ghcr.io_me_train_1.2")
    (lab.shared / "train.sif").write_text(f"{Path(sys.executable).parent}\n")
    (lab.shared / "bare.sif").write_text("/usr/bin\n")
    return lab


def boxed(lab: Lab, name: str, launcher: dict[str, Any], image: str) -> RunDir:
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment = {"container": image, "variables": variables}
    shape = {"nodes": 2, "gpus_per_node": 1, "device": "cpu", "environment": environment}
    write_run(lab, name, launcher=launcher, **shape)
    return RunDir(lab.shared / "runs" / f"{name}-1")


def assert_in_container(run_dir: RunDir, lab: Lab) -> None:
    """Both ranks have trained in a container, and their records are those of the hosts."""
    assert outcome_of(run_dir.attempt(1))["state"] == "finished"
    for rank, host in enumerate(("a1", "a2")):
        record = read_record(run_dir.attempt(1).rank_record(rank)) or {}
        assert record["host"] == host
    assert_nothing_left(lab)


@pytest.mark.long
def test_apptainer_over_ssh(images: Lab) -> None:
    lab, launcher = images, {"kind": "ssh", "hosts": ["a1", "a2"]}
    run_dir = boxed(lab, "apart", launcher, "train.sif")
    text = isles(lab, "train", "apart.yaml", _of("bare.sif"), expected=2)
    assert "the image bare.sif does not contain isles" in text and "host a1" in text
    assert not run_dir.path.exists()
    isles(lab, "train", "apart.yaml")
    assert_in_container(run_dir, lab)
    assert "in the container train.sif" in run_dir.attempt(1).agent_log.read_text()


@pytest.mark.long
def test_apptainer_and_pyxis_in_slurm(images: Lab) -> None:
    lab = images
    with slurm(lab):
        launcher = {"kind": "slurm", "gres": "none", "time": "10m"}
        run_dir = boxed(lab, "sif", launcher, "train.sif")
        text = isles(lab, "train", "sif.yaml", "name=bare", _of("bare.sif"), expected=2)
        assert "the image bare.sif does not contain isles" in text
        isles(lab, "train", "sif.yaml")
        assert_in_container(run_dir, lab)
        for host in ("ctl", "a1", "a2"):
            sh(lab, host, f"cp {LAB}/srun {LAB}/apptainer /usr/local/bin/ && srun --help | head -1")
        run_dir = boxed(lab, "oci", launcher, "ghcr.io/me/train:1.2")
        text = isles(lab, "train", "oci.yaml")
        assert "is not checked before the start" in text
        assert_in_container(run_dir, lab)
        node = run_dir.attempt(1).path / "node-1.log"
        assert "in the container" not in node.read_text(), "srun has entered it"
        for host in ("a1", "a2"):
            sh(lab, host, "echo /usr/bin >/images/ghcr.io_me_train_1.2")
        text = isles(lab, "train", "oci.yaml", "name=none", expected=2)
        assert "does not contain isles" in text


def _of(image: str) -> str:
    return f"clusters.0.environment.container={image}"
