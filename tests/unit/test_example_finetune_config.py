"""examples/finetune: config.yaml as a run file, and ranks under every launcher."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.each import each
from tests.finetune_example import (
    CONFIG,
    DEEPSPEED,
    DS_CONFIG,
    EXAMPLE,
    TRAIN,
    USE_DEEPSPEED,
    Project,
)


@pytest.fixture
def project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Project:
    return Project(tmp_path / "project", monkeypatch, capfd)


def test_config_yaml_becomes_a_run_file(project: Project) -> None:
    """S1-20 … S1-22, S1-99, S1-102, S1-113."""
    project.write(CONFIG, ds_config=DS_CONFIG)
    more = '  micro_batch_size: 2\n  gradient_checkpointing: true\n  mixed_precision: "bf16"\n'
    run = project.show(CONFIG + more + 'report_to: "tensorboard"\n' + USE_DEEPSPEED)
    assert run["strategy"] == {"kind": "deepspeed", "config_file": "config/ds_config.json"}
    assert run["training"] == {
        "max_steps": 4,
        "micro_batch_size": 2,
        "gradient_checkpointing": "full",
        "precision": "bf16-mixed",
        "max_grad_norm": 0.3,
        "global_batch_size": 2 * 16,
    }
    assert run["track"] == ["jsonl", "tensorboard"]
    assert not {"report_to", "distributed"} & run.keys()


@each(
    ("said", "key", "value"),
    [
        ('  mixed_precision: "no"\n', "precision", "32-true"),
        ("  mixed_precision: no\n", "precision", "32-true"),
        ("  mixed_precision: fp16\n", "precision", "fp16-mixed"),
        ("  gradient_checkpointing: false\n", "gradient_checkpointing", "none"),
        ("  gradient_checkpointing: selective\n", "gradient_checkpointing", "selective"),
    ],
)
def test_training_in_the_words_of_the_guide(
    project: Project, said: str, key: str, value: str
) -> None:
    assert project.show(CONFIG + said)["training"][key] == value


@pytest.mark.parametrize(
    ("said", "track"),
    [
        ("none", ["jsonl"]),
        ("wandb", ["jsonl", "wandb"]),
        ("[tensorboard, mlflow]", ["jsonl", "tensorboard", "mlflow"]),
        ("all", ["jsonl", "tensorboard", "wandb", "mlflow"]),
    ],
)
def test_report_to(project: Project, said: str, track: list[str]) -> None:
    assert project.show(CONFIG + f"  report_to: {said}\n")["track"] == track


def test_the_batch_counts_the_ranks(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    steps = "distributed: {gradient_accumulation_steps: 3}\n"
    micro = "  micro_batch_size: 2\n"
    assert project.show(CONFIG + micro + steps)["training"]["global_batch_size"] == 6
    ssh = "clusters: [{launcher: {kind: ssh, hosts: [a, b]}, gpus_per_node: 4}]\n"
    assert project.show(CONFIG + micro + steps + ssh)["training"]["global_batch_size"] == 48
    for name, value in {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    assert project.show(CONFIG + micro + steps)["training"]["global_batch_size"] == 24
    tensor = "strategy: {kind: ddp, tp_size: 2}\n"
    assert project.show(CONFIG + micro + steps + tensor)["training"]["global_batch_size"] == 12
    # The JSON says how often, where config.yaml does not; nothing of it is lost on the trainer.
    project.write(CONFIG, ds_config=DS_CONFIG)
    run = project.show(CONFIG + micro, "--deepspeed config/ds_config.json")
    assert run["training"]["global_batch_size"] == 2 * 16 * 4
    assert run["training"]["precision"] == "bf16-mixed"


DS, FS = "deepspeed_config: config/ds_config.json", "fsdp_config: config/fsdp_config.json"


@each(
    ("said", "words", "where", "what"),
    [
        (f"distributed: {{use_deepspeed: true, {DS}, use_fsdp: true}}", "", 6, "are both true"),
        (f"distributed:\n  use_fsdp: true\n  {FS}", "--deepspeed x.json", 7, "is true, and the"),
        ("distributed:\n  use_deepspeed: false", "--deepspeed x.json", 7, "is false, and the"),
        ("distributed:\n  use_deepspeed: true", "", 7, "no deepspeed_config is named"),
        ("distributed:\n  use_deepspeed: 1", "", 7, "true or false"),
        ("distributed:\n  use_deepsped: true", "", 7, "did you mean use_deepspeed?"),
        ("distributed:\n  gradient_accumulation_steps: 0", "", 7, "a number from 1"),
        ("distributed: {use_fsdp: true}\nstrategy: {kind: ddp}", "", 7, "delete one of them"),
        (f"distributed:\n  use_fsdp: true\n  {FS}", "", 8, "there is no FSDP file"),
        (f"distributed:\n  use_deepspeed: true\n  {DS}x", "", 8, "there is no DeepSpeed file"),
        ("  mixed_precision: fp8", "", 6, 'write "no", "fp16" or "bf16"'),
        ("  mixed_precision: fp16\n  precision: 32-true", "", 7, "makes it fp16-mixed"),
        ("  mixed_precision: [bf16]", "", 6, 'write "no", "fp16" or "bf16"'),
        ("report_to: comet", "", 6, "'comet'"),
        ("report_to: [{kind: wandb}]", "", 6, "write one or more of"),
        ("report_to: []", "", 6, "write one or more of"),
        ("report_to: wandb\ntrack: [jsonl]", "", 7, "keep track"),
        ("distributed: []", "", 6, "not a section"),
        # What isles itself finds stands where it was written, not where it was carried to.
        ("  learning_rate: -1\n  mixed_precision: bf16", "", 6, "training.learning_rate"),
        ("  lr: 1", "", 6, "here it is called training.learning_rate"),
        (
            f"distributed:\n  use_deepspeed: true\n  {DS}\n  gradient_accumulation_steps: 4",
            "",
            9,
            "let them agree",
        ),
        (f"  mixed_precision: fp16\ndistributed: {{use_deepspeed: true, {DS}}}", "", 6, "bf16"),
        ("  max_grad_norm: 1.0\ndistributed: {use_deepspeed: true, " + DS + "}", "", 6, "0.3"),
    ],
)
def test_what_cannot_be_is_said_with_its_line(
    project: Project, said: str, words: str, where: int, what: str
) -> None:
    project.write(CONFIG + said + "\n", ds_config=DS_CONFIG)
    found = project.typed(TRAIN, f"--config config.yaml --show {words}")
    assert found.code == 1 and what in found.err, found.err
    assert f"config.yaml:{where} " in found.err, found.err
    assert "Traceback" not in found.err


SRUN = {
    "SLURM_STEP_NUM_TASKS": "32",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "8(x4)",
    "SLURM_PROCID": "17",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}
DS_LAUNCHER = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_SIZE": "8"}


def place(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLE / "src"))
    return runpy.run_path(str(EXAMPLE / "src/finetune_ranks.py"))["find_place"](environ)


def test_ranks_under_every_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = place(monkeypatch, {})
    assert (alone.world_size, alone.rank, alone.variables) == (None, 0, {})
    found = place(monkeypatch, DS_LAUNCHER)
    assert (found.world_size, found.rank, found.variables) == (8, 1, {"LOCAL_WORLD_SIZE": "8"})
    meeting = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    found = place(monkeypatch, SRUN | meeting)
    assert found.variables == {
        "RANK": "17",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "32",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": "2",
    }
    uneven = {"SLURM_STEP_TASKS_PER_NODE": "8(x2),4"}
    found = place(monkeypatch, SRUN | meeting | uneven)
    assert found.variables["LOCAL_WORLD_SIZE"] == "4"
    torchrun = {"RANK": "9", "WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8"}
    one_task = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}
    assert place(monkeypatch, SRUN | one_task | torchrun).world_size == 32


@pytest.mark.parametrize(
    ("environ", "what"),
    [
        (SRUN | DS_LAUNCHER, "64 processes for 8 GPUs"),
        (
            SRUN | DS_LAUNCHER | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)"},
            "8 ranks only: 4 runs, not one",
        ),
        (SRUN, "MASTER_ADDR and MASTER_PORT not set"),
    ],
)
def test_the_guides_own_job_script_is_refused(
    monkeypatch: pytest.MonkeyPatch, project: Project, environ: dict[str, str], what: str
) -> None:
    """A6-1: launchers that srun starts in every task, and that all start the same ranks."""
    for name, value in {**environ, "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    found = project.typed(TRAIN, "--config config.yaml --deepspeed config/ds_config.json")
    assert found.code == 2 and what in found.err and "fix: " in found.err, found.err


def test_the_config_that_is_shipped_is_whole(project: Project) -> None:
    project.setup(f"deepspeed {DEEPSPEED}")
    run = project.show((EXAMPLE / "config.yaml").read_text())
    assert run["strategy"]["kind"] == "deepspeed"
    assert run["training"]["max_grad_norm"] == 0.3
