"""examples/finetune: what the guide's command lines write really trains."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from isles.run.paths import RunDir
from isles.run.records import read_record
from tests.deadline import run_program
from tests.e2e.typed import run_typed
from tests.lab.home import QUOTED_PYTHON, sh, write_inputs
from tests.lab.hosts import Lab
from tests.lab.slurm import slurm, wait_for_job
from tests.ports import free_port
from tests.runs import losses_of
from tests.unit.test_example_finetune import SETUP, USE_DEEPSPEED, USE_FSDP, copy_programs, guide

pytestmark = pytest.mark.long

NUM_HOSTS = 2
ACCUMULATED = 4
CONFIG = """\
name: tiny
model: {name_or_path: ./tiny, init: scratch}
tokenizer: {train_vocab_size: 300}
data: {sources: [{path: words.jsonl}], seq_length: 32, packing: false, validation_fraction: 0}
training:
  {max_steps: 3, micro_batch_size: 2, learning_rate: 0.01, max_grad_norm: 0.3,
   mixed_precision: bf16, gradient_checkpointing: true, logging_steps: 1, eval_steps: null}
report_to: tensorboard
balance: even
checkpoint: {every_steps: null, every_minutes: null, export_on_finish: false}
"""
ZERO_2 = f"{guide('deepspeed --zero')} --gradient_accumulation_steps {ACCUMULATED}"
DISTRIBUTED = {
    "deepspeed": USE_DEEPSPEED.replace("16", str(ACCUMULATED)),
    "fsdp": f"{USE_FSDP}  gradient_accumulation_steps: {ACCUMULATED}\n",
}


def make_project(folder: Path, strategy: str) -> None:
    """A project with the example's programs, a tiny model, a text, and a config.yaml for it."""
    copy_programs(folder)
    write_inputs(folder)
    (folder / "config.yaml").write_text(CONFIG + DISTRIBUTED[strategy])


def setup(folder: Path, words: str) -> None:
    """`python scripts/distributed_setup.py` with these words."""
    done = run_program([sys.executable, SETUP, *words.split()], folder)
    assert done.returncode == 0, done.stderr


def trained(folder: Path, strategy: str) -> list[float]:
    """The losses of a run on two ranks, once it has been found to be what was asked for."""
    run_dir = RunDir(folder / "runs" / "tiny-1")
    attempt = run_dir.attempt(1)
    assert (read_record(attempt.outcome) or {})["state"] == "finished"
    assert (read_record(attempt.launch) or {})["world_size"] == 2
    resolved = yaml.safe_load(run_dir.resolved.read_text())
    assert resolved["derived"]["strategy"] == strategy
    assert resolved["config"]["training"]["global_batch_size"] == 2 * ACCUMULATED * 2
    assert list((run_dir.path / "logs" / "runs").glob("**/events.*")), "no curves for TensorBoard"
    losses = losses_of(run_dir)
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.05
    return losses


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses under FSDP, started as the guide starts it on one machine: S1-46, S1-47."""
    folder = tmp_path_factory.mktemp("fsdp") / "project"
    make_project(folder, "fsdp")
    setup(folder, guide("fsdp --sharding"))
    port = free_port()
    setup(folder, f"launcher --config config.yaml --num_gpus_per_node 2 --master_port {port}")
    run_typed(folder, "bash scripts/run_training.sh")
    return trained(folder, "fsdp")


def test_a_script_for_each_of_two_nodes_trains(tmp_path: Path, sharded: list[float]) -> None:
    """S1-41 … S1-48, with DeepSpeed; the same mathematics as FSDP on one node."""
    folder = tmp_path / "project"
    make_project(folder, "deepspeed")
    setup(folder, ZERO_2)
    port = free_port()
    for node in (0, 1):
        setup(
            folder,
            "launcher --config config.yaml --num_nodes 2 --num_gpus_per_node 1 --use_deepspeed "
            f"--master_addr 127.0.0.1 --master_port {port} --node_rank {node}",
        )
        # Two machines would have a folder each.
        (folder / "scripts/run_training.sh").rename(folder / f"node-{node}.sh")
    run_typed(folder, "bash node-1.sh", "bash node-0.sh")
    assert trained(folder, "deepspeed") == pytest.approx(sharded, abs=0.03)


def test_a_fault_is_told_once_by_two_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    make_project(folder, "fsdp")
    (folder / "config.yaml").write_text((CONFIG + DISTRIBUTED["fsdp"]).replace("bf16", "bf8"))
    words = ("--standalone", "--nproc_per_node=2", "src/train.py", "--config", "config.yaml")
    done = run_program([sys.executable, "-m", "torch.distributed.run", *words], folder)
    assert done.returncode == 1
    for what in ("mixed_precision is 'bf8'", "there is no FSDP file"):
        assert done.stderr.count(what) == 1, done.stderr


def test_the_job_script_trains_by_sbatch(lab: Lab, sharded: list[float]) -> None:
    """S1-67 … S1-95: two nodes, one task and one rank on each."""
    folder = lab.shared / "project"
    make_project(folder, "deepspeed")
    words = "slurm --config config.yaml --num_nodes 2 --num_gpus_per_node 1 --use_deepspeed "
    words += "--time_limit 00:20:00 --partition main --gres none --mem_per_gpu none "
    words += "--cpus_per_task 1 --modules --conda_env none"
    line = "cd /shared/project && OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "
    for written in (ZERO_2, words):
        sh(lab, "ctl", f"{line} {QUOTED_PYTHON} {SETUP} {written}")
    with slurm(lab):
        job_id = sh(lab, "ctl", f"{line} sbatch --parsable scripts/slurm_job.sh").strip()
        log = folder / f"slurm-{job_id}.out"
        assert wait_for_job(lab, job_id) == "COMPLETED", log.read_text()
    assert trained(folder, "deepspeed") == pytest.approx(sharded, abs=0.03)
    attempt = RunDir(folder / "runs" / "tiny-1").attempt(1)
    ranks = [read_record(attempt.rank_record(rank)) or {} for rank in (0, 1)]
    assert [record["host"] for record in ranks] == ["a1", "a2"]
