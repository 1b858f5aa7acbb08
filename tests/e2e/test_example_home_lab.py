"""The guide for three machines at home, word for word, on three hosts with its addresses."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from isles.errors import ExitCode
from isles.run.checkpoints import list_checkpoints
from isles.run.paths import RunDir
from isles.run.records import read_record
from tests.chat_templates import GEMMA
from tests.data import chat_rows, write_rows
from tests.deadline import DEADLINE_S, run_program
from tests.documents import ROOT, blocks
from tests.lab.home import HOSTS, assert_nothing_left, sh, write_inputs
from tests.lab.hosts import Lab
from tests.runs import losses_of
from tests.small_models import small_model

pytestmark = pytest.mark.long

EXAMPLE = ROOT / "examples" / "home_lab"
BLOCKS = [block.text for block in blocks(ROOT / "tests/seeds/S4.md") if block.is_shell]
PROJECT = "Development/Projects/ai-ml-pipeline/ai-cluster"
ADDRESSES = ("192.168.1.100", "192.168.1.101", "192.168.1.102")
SIZES = {"vocab_size": 272, "max_position_embeddings": 1024}
SETTINGS = {
    "MODEL_NAME": '"/shared/tiny"',
    "DATASET_NAME": '"data/processed/words.jsonl"',
    "DATASET_CONFIG": "None",
}
"""What a reader edits in train_distributed.py: here, what there is without a network."""


def block(*words: str) -> str:
    """The one block of the guide that has all these words."""
    (found,) = [text for text in BLOCKS if all(word in text for word in words)]
    return found


def typed(text: str) -> list[str]:
    """What is typed in a shell of a host, to which `ssh` leads on the machine itself."""
    lines = [line for line in text.splitlines() if not line.startswith("ssh ")]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    names = f"PATH={path} OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1"
    return ["bash", "-ec", "\n".join([f"export {names}", *lines])]


def save(model: Any, folder: Path, **more: Any) -> None:
    """A tiny model with a tokenizer of bytes, as a repository of the hub holds it."""
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = {"eos_token": "<eos>", "bos_token": "<bos>", **more}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **words).save_pretrained(folder)


@pytest.fixture(scope="module")
def lab(lab: Lab) -> Lab:
    """Three hosts, as the guide's first four steps leave them; a1 is the main desktop."""
    write_inputs(lab.shared)
    save(small_model(**SIZES), lab.shared / "tiny")
    for host, address in zip(HOSTS, ADDRESSES, strict=True):
        set_up(lab, host, address)
    # The main desktop reaches all three by their addresses, itself too.
    mine = lab.root("a1") / "root/.ssh"
    for name in ("id_lab", "config", "known_hosts"):
        text = (lab.root("ctl") / "root/.ssh" / name).read_text()
        for number, address in enumerate(ADDRESSES, 1):
            text = text.replace(f"10.77.1.{number} ", f"10.77.1.{number},{address} ")
        (mine / name).touch(0o600)
        (mine / name).write_text(text)
    return lab


def set_up(lab: Lab, host: str, address: str) -> None:
    """Address, names, the project's folders and what lies in them.

    Settings are edited as the guide's reference tells, and the run file for what a CPU does
    quickly: QLoRA is in the last test.
    """
    names = "".join(f"{a} {h}\\n" for a, h in zip(ADDRESSES, HOSTS, strict=True))
    sh(lab, host, f"ip addr add {address}/24 dev eth0")
    sh(lab, host, f"printf '127.0.0.1 localhost\\n{names}' > /etc/hosts")
    done = lab.run(host, typed(block("mkdir -p")))
    assert done.returncode == 0, done.stderr
    scripts = lab.root(host) / "root" / PROJECT / "scripts"
    shutil.copytree(EXAMPLE, scripts, dirs_exist_ok=True)
    script, run_file = scripts / "train_distributed.py", scripts / "home_lab.yaml"
    text = script.read_text()
    for name, value in SETTINGS.items():
        text, num = re.subn(rf"^{name} = [^ ]*", f"{name} = {value}", text, flags=re.M)
        assert num == 1, name
    script.write_text(text)
    text = re.sub(r"^adapter:\n(  .*\n)+", "", run_file.read_text(), flags=re.M)
    run_file.write_text(text.replace("gradient_checkpointing: full", "precision: 32-true"))
    sh(lab, host, f"ln -s {PROJECT} ~/ai-cluster; mkdir ~/ai-cluster/data/processed")
    sh(lab, host, "head -100 /shared/words.jsonl > ~/ai-cluster/data/processed/words.jsonl")


def runs(lab: Lab, host: str) -> Path:
    """Where TensorBoard looks on a host."""
    return lab.root(host) / "root" / PROJECT / "logs" / "runs"


def test_the_three_torchrun_lines(lab: Lab) -> None:
    """Each typed on its machine: who is rank 0 is torchrun's choice, all else is the guide's."""
    lines = [block("torchrun \\", f"--node_rank={node} ") for node in range(3)]
    processes = [lab.popen(host, typed(text)) for host, text in zip(HOSTS, lines, strict=True)]
    said = [process.communicate(timeout=DEADLINE_S)[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    place = r"^=== Distributed Setup ===\nRank: (\d)/3\nLocal Rank: 0\nWorld Size: 3\n"
    place += r"Backend: gloo\n"
    ranks = [found for text in said for found in re.findall(place, text, re.M)]
    assert sorted(ranks) == ["0", "1", "2"]
    for node, (rank, text) in enumerate(zip(ranks, said, strict=True)):
        note = f"--node_rank={node} means nothing with --rdzv_backend=c10d"
        assert (note in text) == (rank != str(node))
    head = HOSTS[ranks.index("0")]
    run_dir = RunDir(runs(lab, head) / "home-lab-1")
    assert (read_record(run_dir.attempt(1).outcome) or {})["state"] == "finished"
    assert (read_record(run_dir.attempt(1).launch) or {})["world_size"] == 3
    losses = losses_of(run_dir)
    assert losses[-1] < losses[0]
    # Where the guide says that things are.
    assert list(runs(lab, head).rglob("events.out.tfevents.*"))
    names = sh(lab, head, f"ls ~/{PROJECT}/checkpoints/home-lab-1").split()
    assert names == [checkpoint.path.name for checkpoint in list_checkpoints(run_dir)]
    for other in set(HOSTS) - {head}:
        # What rank 0 made is beside where a run of that host's own would be.
        assert not (runs(lab, other) / "home-lab-1").exists()
        assert list(runs(lab, other).glob(".of-*/home-lab-1"))


def test_a_name_that_nobody_knows_is_said_at_once(lab: Lab) -> None:
    """The host of rank 0 publishes its name; where that leads nowhere, no rank waits for it."""
    scripts = f"cd ~/{PROJECT}/scripts; export RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 "
    scripts += "GROUP_RANK=1 TORCHELASTIC_RUN_ID=100 MASTER_PORT=29500 "
    for name, what in (("desk.lan", "no address is known"), ("localhost", "this machine itself")):
        done = lab.run("a2", typed(f"{scripts} MASTER_ADDR={name}; python train_distributed.py"))
        assert done.returncode == ExitCode.USER, done.stderr
        assert f"rank 0 is on {name}" in done.stderr and what in done.stderr
        assert "--rdzv_backend=static" in done.stderr and "Traceback" not in done.stderr


def test_the_single_test(lab: Lab) -> None:
    """As the cheat sheet has it."""
    (command,) = [text.splitlines()[1:3] for text in BLOCKS if "train_single_test.py" in text]
    done = lab.run("a3", typed("\n".join(command)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("CUDA: False\n")
    assert re.search(r"^train\.smoke +ok", done.stdout, re.M), done.stdout


def test_the_launcher_checks_and_then_starts(lab: Lab) -> None:
    """Over ssh, on one host, as each costs its time; checkpoints lie where the guide has them."""
    there = "root@192.168.1.100 -- name=launched training.num_train_epochs=1"
    done = lab.run("a1", typed(f"cd ~/{PROJECT}/scripts; ./launch_cluster.sh {there}"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "root@192.168.1.100: no errors" in done.stdout
    assert "launched-1 is finished" in done.stdout
    assert sh(lab, "a1", f"ls ~/{PROJECT}/checkpoints/launched-1").startswith("step-")
    assert_nothing_left(lab)


def test_gemma_in_four_bits_from_the_run_file(tmp_path: Path) -> None:
    """gemma_qlora.yaml as it is, but for the model, the hosts and the length."""
    layers = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
    marks = {"additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]}
    gemma = small_model("gemma2", **SIZES, **layers, tie_word_embeddings=True)
    save(gemma, tmp_path / "gemma", chat_template=GEMMA, **marks)
    data = tmp_path / "data" / "processed"
    data.mkdir(parents=True)
    said = {f"What comes after {n}?": str(n + 1) for n in range(60)}
    write_rows(data / "count.jsonl", chat_rows(said))
    values = ("model.name_or_path=gemma", "clusters=[{gpus_per_node: 1, device: cpu}]")
    values += ("training.max_steps=3", "training.num_train_epochs=null", "data.seq_length=128")
    values += ("training.warmup_steps=0",)
    command = [sys.executable, "-m", "isles.train", EXAMPLE / "gemma_qlora.yaml", *values]
    done = run_program(command, tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = RunDir(tmp_path / "runs" / "gemma-qlora-1")
    outcome = read_record(run_dir.attempt(1).outcome) or {}
    assert (outcome["state"], outcome["step"]) == ("finished", 3)
    adapter = json.loads((run_dir.model / "adapter_config.json").read_text())
    assert adapter["peft_type"] == "LORA" and adapter["r"] == 16
    # What was trained is the adapter alone; of the frozen matrices nothing is saved.
    (checkpoint,) = list_checkpoints(run_dir)
    assert sum(path.stat().st_size for path in checkpoint.path.rglob("*.safetensors")) < 2**20
