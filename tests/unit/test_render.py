"""`isles render`: scripts word for word, and JSON files that mean what the run file says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isles.config.files import deepspeed_issues
from isles.config.interop.deepspeed import deepspeed_settings
from isles.config.load import load_run_file
from isles.errors import ConfigError, ConfigErrors
from isles.launch.render import Kind, RenderedFile, render
from tests.deadline import run_program
from tests.each import each
from tests.golden import check_golden

RUN = """\
name: tiny
model: {name_or_path: llama-2m, init: scratch}
data: {sources: [{type: fake}], seq_length: 32}
training: {max_steps: 20, global_batch_size: 16, micro_batch_size: 2, warmup_steps: 4}
"""

HOME = """\
clusters:
  - launcher: {kind: ssh, hosts: [me@192.168.1.100, {ssh: me@laptop, gpus: 1}]}
    gpus_per_node: 3
    workdir: /home/me/train
    environment: {venv: venv}
"""


def rendered(tmp_path: Path, to: Kind, *overrides: str, more: str = "") -> RenderedFile:
    path = tmp_path / "run.yaml"
    path.write_text(RUN + more)
    return render(load_run_file(path, overrides), to, overrides=overrides)


def test_torchrun_on_hosts_of_different_sizes(tmp_path: Path) -> None:
    text = rendered(tmp_path, "torchrun", "training.max_steps=9", more=HOME).text
    check_golden("torchrun-hosts.sh", text.replace(str(tmp_path), "."))


def test_torchrun_on_one_node(tmp_path: Path) -> None:
    here = ("clusters.0.gpus_per_node=2", "clusters.0.device=cpu")
    text = rendered(tmp_path, "torchrun", *here).text
    with pytest.raises(ConfigErrors, match="global_batch_size 16"):  # rows that do not divide
        rendered(tmp_path, "torchrun", "clusters.0.gpus_per_node=32", "clusters.0.device=cuda")
    assert "--nnodes=1 --nproc_per_node=2 --node_rank=0" in text
    assert f"-m isles.train {tmp_path}/run.yaml {' '.join(here)}" in text
    assert "case" not in text


def test_torchrun_of_unknown_nodes_asks_for_the_address(tmp_path: Path) -> None:
    text = rendered(tmp_path, "torchrun", "clusters.0.nodes=2", "clusters.0.gpus_per_node=8").text
    (tmp_path / "script.sh").write_text(text)
    done = run_program(["bash", tmp_path / "script.sh", "0"], env={"PATH": "/usr/bin:/bin"})
    assert done.returncode != 0
    assert "MASTER_ADDR: set it to the address" in done.stderr


def test_job_scripts_of_a_run_file_without_a_queue(tmp_path: Path) -> None:
    gpus = ("clusters.0.nodes=2", "clusters.0.gpus_per_node=8", "clusters.0.device=cuda")
    sbatch, pbs = (rendered(tmp_path, to, *gpus).text for to in ("sbatch", "pbs"))
    assert "#SBATCH --nodes=2\n" in sbatch
    assert "#SBATCH --gres=gpu:8\n" in sbatch
    assert "#PBS -l select=2:ncpus=8:ngpus=8:mpiprocs=1\n" in pbs
    for text in (sbatch, pbs):
        assert "the run file's launcher is local" in text
        assert run_program(["bash", "-n"], input=text).returncode == 0
        assert "isles.agent" not in text  # nothing of isles but its trainer


def test_what_the_one_queue_says_is_taken_over_for_the_other(tmp_path: Path) -> None:
    slurm = "{kind: slurm, partition: gpu, account: physics, time: 2h}"
    more = f"clusters: [{{launcher: {slurm}, gpus_per_node: 4}}]\n"
    text = rendered(tmp_path, "pbs", more=more).text
    assert "#PBS -A physics\n" in text
    assert "#PBS -l walltime=02:00:00\n" in text
    assert "the run file's launcher is slurm" in text
    # A queue gives equal nodes.
    with pytest.raises(ConfigError, match="3, 1 ranks") as caught:
        rendered(tmp_path, "pbs", more=HOME)
    assert "run.yaml:6 clusters.0.launcher.hosts" in caught.value.where


def test_ray_bundles_of_different_sizes_are_the_ranks_of_the_nodes(tmp_path: Path) -> None:
    launcher = "{kind: ray, bundles: [{gpus: 2}, {gpus: 4}]}"
    more = f"clusters: [{{launcher: {launcher}, nodes: 2, gpus_per_node: 1, device: cuda}}]\n"
    with pytest.raises(ConfigError, match="2, 4 ranks"):
        rendered(tmp_path, "sbatch", more=more)


PLAIN = "{kind: deepspeed}"


@each(
    (PLAIN,),
    ("{kind: deepspeed, zero_stage: 1, overlap_comm: false, allgather_bucket_size: 1001}",),
    ("{kind: deepspeed, zero_stage: 3, offload_param: cpu, offload_optimizer: cpu}",),
    ("{kind: deepspeed, zero_stage: 3, offload_param: nvme, nvme_path: /fast}",),
    (PLAIN, "training.precision=fp16-mixed", "training.lr_scheduler_type=linear"),
    (PLAIN, "training.precision=32-true", "training.max_grad_norm=null"),
    (PLAIN, "training.optimizer=sgd", "training.lr_scheduler_type=constant"),
    (PLAIN, "training.lr_scheduler_type=wsd", "training.micro_batch_size=auto"),
    (PLAIN, "training.lr_scheduler_type=linear", "training.min_lr_ratio=0.1"),
    (PLAIN, "training.max_steps=null", "training.num_train_epochs=2"),
)
def test_a_run_with_the_rendered_file_is_the_same_run(strategy, *training, tmp_path):
    overrides = (f"strategy={strategy}", "clusters.0.gpus_per_node=2", *training)
    found = rendered(tmp_path, "deepspeed-json", *overrides, "clusters.0.device=cpu")
    (tmp_path / "ds.json").write_text(found.text)
    path = tmp_path / "run.yaml"
    plain = load_run_file(path, overrides).config
    for given in (strategy[:-1] + ", config_file: FILE}", "{kind: deepspeed, config_file: FILE}"):
        text = given.replace("FILE", str(tmp_path / "ds.json"))
        loaded = load_run_file(path, (f"strategy={text}", *overrides[1:]))
        assert deepspeed_issues(loaded) == []
        found, same = (deepspeed_settings(c, c.strategy) for c in (loaded.config, plain))
        assert found == same


def test_the_json_of_deepspeed_counts_with_all_ranks(tmp_path: Path) -> None:
    two = ("clusters.0.gpus_per_node=2", "clusters.0.nodes=2", "clusters.0.device=cpu")
    data = json.loads(rendered(tmp_path, "deepspeed-json", "strategy={kind: deepspeed}", *two).text)
    # 16 rows = 2 in a micro-batch x 2 accumulated x 4 ranks
    assert data["train_batch_size"] == 16
    assert data["train_micro_batch_size_per_gpu"] == 2
    assert data["gradient_accumulation_steps"] == 2


def test_the_trainer_takes_the_fsdp_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import TrainingArguments

    # The Trainer leaves its wishes to Accelerate there.
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "")
    for strategy, reshards, offloads, layer in (
        ("{kind: fsdp}", True, False, None),
        ("{kind: fsdp, sharding_strategy: SHARD_GRAD_OP}", False, False, None),
        ("{kind: fsdp, cpu_offload: true}", True, True, None),
        ("{kind: fsdp, transformer_layer_cls_to_wrap: [A]}", True, False, "A"),
    ):
        text = rendered(tmp_path, "fsdp-json", f"strategy={strategy}").text
        (tmp_path / "fsdp.json").write_text(text)
        given = {"fsdp": True, "fsdp_config": str(tmp_path / "fsdp.json"), "use_cpu": True}
        plugin = TrainingArguments(output_dir=str(tmp_path), **given).fsdp_plugin_args
        assert plugin["fsdp_version"] == 2
        assert plugin["reshard_after_forward"] is reshards
        assert plugin.get("cpu_offload", False) is offloads
        assert plugin.get("transformer_cls_names_to_wrap") == layer


@each(
    ("deepspeed-json", "{kind: fsdp}", "the strategy fsdp"),
    ("deepspeed-json", "{kind: auto}", "the strategy auto"),
    ("fsdp-json", "{kind: ddp}", "the strategy ddp"),
    ("fsdp-json", "{kind: fsdp, tp_size: 2}", "tp_size 2 has no equivalent"),
    ("fsdp-json", "{kind: fsdp, sharding_strategy: HYBRID_SHARD}", "has no equivalent"),
)
def test_what_a_file_cannot_say_is_refused(to: Kind, strategy: str, words: str, *, tmp_path):
    overrides = (f"strategy={strategy}", "clusters.0.gpus_per_node=2", "clusters.0.device=cpu")
    with pytest.raises(ConfigError, match=words) as caught:
        rendered(tmp_path, to, *overrides)
    assert caught.value.where.startswith("command line strategy")
    assert caught.value.fix
