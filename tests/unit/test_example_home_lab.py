"""examples/home_lab and the pages around it: the guide's settings, its lines, and every finding."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from isles.config.load import load_run_file
from isles.config.resolve import resolve
from isles.errors import ExitCode
from tests.deadline import run_program
from tests.documents import ROOT
from tests.programs import write_program

EXAMPLE = ROOT / "examples" / "home_lab"
GUIDE = (ROOT / "tests" / "seeds" / "S4.md").read_text(encoding="utf-8")
PAGE = (EXAMPLE / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """train_distributed.py as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delenv("CONDA_DEFAULT_ENV", raising=False)
    monkeypatch.delitem(sys.modules, "train_distributed", raising=False)
    return importlib.import_module("train_distributed")


def test_the_settings_are_those_of_the_guide(script: ModuleType) -> None:
    (block,) = re.findall(r"^```python\n(# Edit these.*?)^```", GUIDE, re.M | re.S)
    wanted = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(block).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert len(wanted) == 6
    assert {name: getattr(script, name) for name in wanted} == wanted


def test_each_setting_reaches_the_run(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load_run_file(EXAMPLE / "home_lab.yaml").config
    same = load_run_file(EXAMPLE / "home_lab.yaml", script.settings(3)).config
    assert same == plain  # the file says what the script does
    values = {"MODEL_NAME": "a/b", "DATASET_NAME": "data/x y: *.jsonl", "DATASET_CONFIG": None}
    values |= {"EPOCHS": 7, "LEARNING_RATE": 1e-5, "BATCH_SIZE": 2, "GRADIENT_ACCUMULATION": 16}
    for name, value in values.items():
        monkeypatch.setattr(script, name, value)
    config = load_run_file(EXAMPLE / "home_lab.yaml", script.settings(4)).config
    assert config.model.name_or_path == "a/b"
    assert [(s.path, s.subset) for s in config.data.sources] == [("data/x y: *.jsonl", None)]
    training = config.training
    assert (training.num_train_epochs, training.learning_rate) == (7, 1e-5)
    assert (training.micro_batch_size, training.global_batch_size) == (2, 2 * 16 * 4)


def test_hosts_become_a_cluster(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ("user@192.168.1.100", "user@192.168.1.101", "user@192.168.1.102")
    monkeypatch.setattr(script, "PROJECT", Path.home() / "some where/ai-cluster")
    monkeypatch.setenv("CONDA_DEFAULT_ENV", "dist-train")
    values = [*script.settings(3), *script.clusters(hosts)]
    resolved = resolve(load_run_file(EXAMPLE / "home_lab.yaml", values), num_gpus=0)
    (cluster,) = resolved.config.clusters
    assert (cluster.launcher.kind, tuple(cluster.launcher.hosts)) == ("ssh", hosts)
    assert cluster.workdir == "~/some where/ai-cluster"
    assert cluster.environment.conda == "dist-train" and resolved.world_size == 3


def test_without_torchrun_it_is_isles_train(tmp_path: Path) -> None:
    """On this machine alone; under torchrun the hosts are torchrun's matter."""

    def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, EXAMPLE / "train_distributed.py", *words]
        return run_program(command, tmp_path, {**os.environ, "HF_HUB_OFFLINE": "1", **more})

    done = run("--dry-run", "name=alone")
    assert done.returncode == 0, done.stderr
    assert f"isles.agent {tmp_path}/logs/runs/alone-1" in done.stdout
    assert re.search(r"global_batch_size: 8 +# command line", done.stdout)
    done = run("--hosts", "a", TORCHELASTIC_RUN_ID="100")
    assert done.returncode == ExitCode.USER and "not with torchrun" in done.stderr


def test_gemma_on_three_unequal_cards() -> None:
    resolved = resolve(load_run_file(EXAMPLE / "gemma_qlora.yaml"), num_gpus=0)
    config = resolved.config
    assert resolved.world_size == 3
    assert config.adapter.type == "qlora" and config.model.name_or_path.startswith("google/gemma")
    # What makes unequal cards equal in time, each with the rows that fit on it.
    assert (config.balance, config.training.micro_batch_size) == ("auto", "auto")
    assert config.training.gradient_checkpointing == "full"


def launch(tmp_path: Path, *args: str, check: int = 0) -> tuple[int, list[str], str]:
    """Run launch_cluster.sh with a Python that only writes down what it was asked to run."""
    lines = f'echo "$@" >> {tmp_path}/calls\n[ "$2" != --check ] || exit {check}'
    write_program(tmp_path / "python", lines)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = run_program([EXAMPLE / "launch_cluster.sh", *args], env=environ)
    calls = (tmp_path / "calls").read_text().replace(f"{EXAMPLE}/train_distributed.py ", "")
    return done.returncode, calls.splitlines(), done.stderr


def test_the_launcher_takes_the_three_machines_of_the_guide(tmp_path: Path) -> None:
    values = "training.num_train_epochs=1"
    code, calls, _ = launch(tmp_path, "--", values, "--dry-run")
    three = "--hosts 192.168.1.100 192.168.1.101 192.168.1.102"
    assert (code, calls) == (0, [f"--check {values} {three}", f"{values} --dry-run {three}"])
    code, calls, said = launch(tmp_path, "a@one", "a@two", check=2)
    assert (code, calls[2:]) == (2, ["--check --hosts a@one a@two"])
    assert "not started" in said


def test_the_page_has_the_lines_of_the_guide() -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```", GUIDE, re.M | re.S)
    (torchrun,) = [text for text in blocks if "torchrun \\" in text and "--node_rank=0 " in text]
    assert torchrun in PAGE
    for line in (
        'ssh-keygen -t ed25519 -f ~/.ssh/id_ed25519 -N ""',
        "ssh-copy-id -i ~/.ssh/id_ed25519.pub user@192.168.1.101",
        'ssh user@192.168.1.101 "echo OK"',
        "conda create -n dist-train python=3.11 -y",
        "mkdir -p ~/Development/Projects/ai-ml-pipeline/ai-cluster/{scripts,data,checkpoints,logs}",
        "tensorboard --logdir ~/Development/Projects/ai-ml-pipeline/ai-cluster/logs/runs/",
        "python train_single_test.py",
    ):
        assert any(line in text for text in blocks), line
        assert line in PAGE, line
