"""examples/finetune: the guide's command lines, and what they write."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S
from tests.finetune_example import (
    CONFIG,
    DEEPSPEED,
    DS_CONFIG,
    FSDP,
    FSDP_CONFIG,
    LAUNCHER,
    NODE,
    SLURM,
    TRAIN,
    USE_DEEPSPEED,
    USE_FSDP,
    Project,
)


@pytest.fixture
def project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Project:
    return Project(tmp_path / "project", monkeypatch, capfd)


def test_deepspeed_writes_what_the_guide_shows(project: Project) -> None:
    assert project.setup(f"deepspeed {DEEPSPEED}").code == 0
    assert project.read("ds_config") == DS_CONFIG


def test_deepspeed_for_every_stage(project: Project) -> None:
    for stage in (1, 2, 3):
        said = project.setup(
            f"deepspeed --zero_stage {stage} --fp16 --gradient_accumulation_steps 2"
        )
        assert said.code == 0, said.err
        found = project.read("ds_config")
        assert found["zero_optimization"]["stage"] == stage
        assert "offload_optimizer" not in found["zero_optimization"]
        assert found["fp16"]["enabled"] and "bf16" not in found
        assert found["gradient_accumulation_steps"] == 2
    assert project.setup("deepspeed --zero_stage 3 --offload_param").code == 0
    found = project.read("ds_config")
    assert found["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}
    said = project.setup("deepspeed --zero_stage 2 --offload_param")
    assert said.code == 1 and "use --zero_stage 3" in said.err
    assert project.setup("deepspeed --bf16 --fp16").code == 2
    assert project.setup("deepspeed --zero_stage 4").code == 2


def test_fsdp_writes_what_the_guide_shows_and_judges_every_key(project: Project) -> None:
    said = project.setup(f"fsdp {FSDP}")
    assert project.read("fsdp_config") == FSDP_CONFIG
    for key in FSDP_CONFIG:
        assert re.search(rf"^  {key}: (mapped|no longer needed): \S", said.out, re.M), key


def test_fsdp_settings_become_a_strategy(project: Project) -> None:
    project.write(CONFIG, fsdp_config=FSDP_CONFIG)
    run = project.show(CONFIG + USE_FSDP)
    assert run["strategy"] == {
        "kind": "fsdp",
        "transformer_layer_cls_to_wrap": FSDP_CONFIG["fsdp_transformer_layer_cls_to_wrap"],
        "sharding_strategy": "FULL_SHARD",
        "forward_prefetch": 0,
    }
    assert run["training"]["precision"] == "bf16-mixed"
    more = {
        "fsdp_mixed_precision": "NO",
        "fsdp_forward_prefetch": True,
        "fsdp_offload_params": True,
        "fsdp_activation_checkpointing": True,
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    }
    project.write(CONFIG, fsdp_config=FSDP_CONFIG | more)
    run = project.show(CONFIG + USE_FSDP)
    assert run["training"]["precision"] == "32-true"
    assert run["training"]["gradient_checkpointing"] == "full"
    assert run["strategy"]["cpu_offload"] and run["strategy"]["forward_prefetch"] == 1
    assert run["strategy"]["sharding_strategy"] == "SHARD_GRAD_OP"
    project.write(CONFIG + "  mixed_precision: bf16\n" + USE_FSDP)
    said = project.typed(TRAIN, "--config config.yaml --show")
    assert said.code == 1 and "bf16-mixed, and config/fsdp_config.json makes it 32" in said.err


def test_fsdp_settings_that_nothing_here_can_do_are_named(project: Project) -> None:
    odd = {
        "fsdp_cuda_graphs": True,
        "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
        "fsdp_backward_prefetch_policy": "NO_PREFETCH",
    }
    project.write(CONFIG + USE_FSDP, fsdp_config=FSDP_CONFIG | odd)
    said = project.typed(TRAIN, "--config config.yaml --show")
    assert said.code == 0, said.err
    assert re.findall(r"fsdp_config.json: (\w+): unsupported: \S", said.err) == [
        "fsdp_cuda_graphs",
        "fsdp_auto_wrap_policy",
        "fsdp_backward_prefetch_policy",
    ]
    wrong = {
        "fsdp_sharding_stratgy": "FULL_SHARD",
        "fsdp_cuda_graphs": 0,
        "fsdp_use_orig_params": "y",
    }
    project.write(CONFIG + USE_FSDP, fsdp_config=wrong)
    said = project.typed(TRAIN, "--config config.yaml --show")
    assert said.code == 1 and said.err.count("error: ") == 3, said.err
    assert "did you mean fsdp_sharding_strategy?" in said.err
    assert "fsdp_cuda_graphs: is 0" in said.err and 'fsdp_use_orig_params: is "y"' in said.err


def test_the_launcher_starts_the_ranks_of_one_node(project: Project) -> None:
    project.write(CONFIG + USE_DEEPSPEED)
    assert project.setup(f"deepspeed {DEEPSPEED}").code == 0
    assert project.setup(f"launcher {LAUNCHER} --use_deepspeed").code == 0
    script = project.folder / "scripts/run_training.sh"
    text = checked(script)
    assert "--nproc_per_node=4" in text
    assert "src/train.py --config config.yaml --deepspeed config/ds_config.json\n" in text
    project.write(CONFIG)
    said = project.setup(f"launcher {LAUNCHER}")
    assert said.out.startswith("replaced scripts/run_training.sh")
    assert "src/train.py --config config.yaml\n" in checked(script)
    said = project.setup(f"launcher {LAUNCHER} --master_addr 10.0.0.1")
    assert "--master_addr means nothing with one node" in said.err


def test_each_node_has_its_own_script(project: Project) -> None:
    project.write(CONFIG + USE_DEEPSPEED)
    project.setup(f"deepspeed {DEEPSPEED}")
    for node in (0, 1):
        assert project.setup(f"launcher {NODE.format(node)}").code == 0
        text = checked(project.folder / "scripts/run_training.sh")
        assert f'\nset -- "${{1:-{node}}}" #' in text
        for words in ("--nnodes=4", "--master_addr=192.168.1.100", "${MASTER_PORT:-29500}"):
            assert text.count(words) == 4
    said = project.setup(f"launcher {NODE.format(4)}")
    assert said.code == 1 and "counted from 0 to 3" in said.err
    said = project.setup(f"launcher {LAUNCHER} --num_nodes 2")
    assert said.code == 1 and "--master_addr" in said.err


def test_slurm_asks_for_one_task_a_node(project: Project) -> None:
    """A6-1: `srun deepspeed --num_gpus=8` in 8 tasks a node would start 64 ranks on 8 GPUs."""
    project.write(CONFIG + USE_DEEPSPEED)
    project.setup(f"deepspeed {DEEPSPEED}")
    said = project.setup(f"slurm {SLURM}")
    assert said.code == 0, said.err
    assert "sbatch scripts/slurm_job.sh" in said.out
    text = checked(project.folder / "scripts/slurm_job.sh")
    assert set(re.findall(r"^#SBATCH (.+)$", text, re.M)) == {
        "--job-name=llm_finetune",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gres=gpu:8",
        "--cpus-per-task=64",
        "--mem-per-gpu=32G",
        "--time=2-00:00:00",
        "--partition=gpu",
        "--output=slurm-%j.out",
        "--error=slurm-%j.out",
        "--open-mode=append",
        "--signal=B:USR1@300",
        "--requeue",
    }
    for line in (
        "module load cuda/12.2 || exit 1",
        "module load anaconda3 || exit 1",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        "export TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
        "export NCCL_DEBUG=WARN",
        "export NCCL_IB_DISABLE=0",
        "export NCCL_SOCKET_IFNAME='^lo,docker'",
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "    port=$((29500 + (SLURM_JOB_ID + i) % 100))",
        "    src/train.py --config config.yaml --deepspeed config/ds_config.json",
    ):
        assert f"\n{line}\n" in text, line
    assert "conda activate llm_finetuning" in text
    assert "--nnodes=4 --nproc_per_node=8 --node_rank=" in text


def test_slurm_options_of_another_cluster(project: Project) -> None:
    project.write(CONFIG)
    project.setup(
        "slurm --num_nodes 2 --num_gpus_per_node 2 --partition none --gres none --mem_per_gpu none "
        "--modules --conda_env none --account physics --nccl_debug INFO --cpus_per_task 3 "
        "--job_name mine --time_limit 2d --master_port 30000 --nccl_socket_ifname eth0 "
        "--nccl_ib_disable 1 --output job.sh"
    )
    text = checked(project.folder / "job.sh")
    for word in ("--partition", "--gres", "--mem-per-gpu", "module load", "conda", "--deepspeed"):
        assert word not in text, word
    for word in (
        "--account=physics",
        "NCCL_DEBUG=INFO",
        "NCCL_IB_DISABLE=1",
        "NCCL_SOCKET_IFNAME=eth0",
        "--cpus-per-task=6",
        "--job-name=mine",
        "--time=2-00:00:00",
        "port=$((30000 +",
    ):
        assert word in text, word


def checked(script: Path) -> str:
    """The text of a script, once bash has found no fault in its grammar."""
    subprocess.run(["bash", "-n", script], check=True, timeout=DEADLINE_S)
    assert script.stat().st_mode & 0o111
    return script.read_text()
