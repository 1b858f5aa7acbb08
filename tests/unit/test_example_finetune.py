"""examples/finetune: the guide's command lines, what they write, and config.yaml as a run file."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.deadline import run_program
from tests.documents import ROOT, blocks
from tests.each import each

EXAMPLE = ROOT / "examples" / "finetune"
SETUP, TRAIN = "scripts/distributed_setup.py", "src/train.py"
GUIDE = blocks(ROOT / "tests" / "seeds" / "S1.md")
DS_CONFIG, FSDP_CONFIG = map(json.loads, [b.text for b in GUIDE if b.language == "json"][:2])
USE_DEEPSPEED, USE_FSDP = [block.text for block in GUIDE if block.language == "yaml"][:2]
CONFIG = """\
name: tiny
model: {name_or_path: llama-2m, init: scratch}
data: {sources: [{type: fake}], seq_length: 32}
training:
  max_steps: 4
"""
SHOW = "--config config.yaml --show "
DS, FS = "deepspeed_config: config/ds_config.json", "fsdp_config: config/fsdp_config.json"


def guide(*words: str) -> str:
    """What the guide types behind distributed_setup.py: its one line with these words."""
    lines = [line.partition(f"python {SETUP} ")[2] for block in GUIDE for line in block.lines]
    (found,) = {line for line in lines if line and all(word in line for word in words)}
    return found


def copy_programs(folder: Path) -> None:
    """The example's programs, into a folder that is to be a project."""
    for name in ("src", "scripts"):
        (folder / name).mkdir(parents=True)
        for path in (EXAMPLE / name).glob("*.py"):
            shutil.copy(path, folder / name)


class Project:
    """The current folder, with the example's programs, which run in this process."""

    def __init__(self, patch: pytest.MonkeyPatch, captured: pytest.CaptureFixture[str]) -> None:
        self.patch, self.captured = patch, captured

    def typed(self, program: str, words: str) -> Any:
        """Run a program with the words of a command line: its exit code, and what it said."""
        with self.patch.context() as patch:
            patch.syspath_prepend(Path("src").absolute())
            patch.setattr(sys, "argv", [program, *words.split()])
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(program, run_name="__main__")
        for name in [name for name in sys.modules if name.startswith("finetune_")]:
            del sys.modules[name]
        out, err = self.captured.readouterr()
        return SimpleNamespace(code=int(ended.value.code or 0), out=out, err=err)

    def setup(self, words: str) -> Any:
        return self.typed(SETUP, words)

    def write(self, config: str, **settings: dict[str, Any]) -> None:
        """Write config.yaml, and settings of that name as config/NAME.json."""
        Path("config.yaml").write_text(config)
        Path("config").mkdir(exist_ok=True)
        for name, data in settings.items():
            Path(f"config/{name}.json").write_text(json.dumps(data))

    def read(self, name: str) -> Any:
        return json.loads(Path(f"config/{name}.json").read_text())

    def script(self, name: str) -> str:
        """The text of an executable script, once bash has found no fault in its grammar."""
        path = Path(name)
        assert run_program(["bash", "-n", path]).returncode == 0 and path.stat().st_mode & 0o111
        return path.read_text()

    def show(self, config: str, words: str = "") -> Any:
        """The run file that a config.yaml stands for."""
        self.write(config)
        said = self.typed(TRAIN, SHOW + words)
        assert said.code == 0, said.err
        return yaml.safe_load(said.out)


@pytest.fixture
def project(tmp_path, monkeypatch, capfd):
    copy_programs(tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return Project(monkeypatch, capfd)


def test_deepspeed_writes_what_the_guide_shows(project):
    assert project.setup(guide("deepspeed --zero")).code == 0
    assert project.read("ds_config") == DS_CONFIG


def test_deepspeed_for_every_stage(project):
    for stage, more in ((1, ""), (2, ""), (3, " --offload_param")):
        words = f"deepspeed --zero_stage {stage} --fp16 --gradient_accumulation_steps 2{more}"
        assert project.setup(words).code == 0
        found = project.read("ds_config")
        assert found["zero_optimization"]["stage"] == stage
        assert "offload_optimizer" not in found["zero_optimization"]
        assert found["fp16"]["enabled"] and "bf16" not in found
        assert found["gradient_accumulation_steps"] == 2
    assert found["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}
    said = project.setup("deepspeed --zero_stage 2 --offload_param")
    assert said.code == 1 and "use --zero_stage 3" in said.err
    assert project.setup("deepspeed --bf16 --fp16").code == 2


def test_fsdp_writes_what_the_guide_shows_and_judges_every_key(project):
    said = project.setup(guide("fsdp --sharding"))
    assert project.read("fsdp_config") == FSDP_CONFIG
    for key in FSDP_CONFIG:
        assert re.search(rf"^  {key}: (mapped|no longer needed): \S", said.out, re.M), key


def test_fsdp_settings_become_a_strategy(project):
    project.write(CONFIG, fsdp_config=FSDP_CONFIG)
    run = project.show(CONFIG + USE_FSDP)
    assert run["training"]["precision"] == "bf16-mixed"
    assert run["strategy"] == {
        "kind": "fsdp",
        "transformer_layer_cls_to_wrap": FSDP_CONFIG["fsdp_transformer_layer_cls_to_wrap"],
        "sharding_strategy": "FULL_SHARD",
        "forward_prefetch": 0,
    }
    true = ("forward_prefetch", "offload_params", "activation_checkpointing")
    other = {f"fsdp_{name}": True for name in true}
    other |= {"fsdp_mixed_precision": "NO", "fsdp_sharding_strategy": "SHARD_GRAD_OP"}
    project.write(CONFIG, fsdp_config=FSDP_CONFIG | other)
    run = project.show(CONFIG + USE_FSDP)
    training, strategy = run["training"], run["strategy"]
    assert (training["precision"], training["gradient_checkpointing"]) == ("32-true", "full")
    assert strategy["cpu_offload"] and strategy["forward_prefetch"] == 1
    assert strategy["sharding_strategy"] == "SHARD_GRAD_OP"


def test_fsdp_settings_that_nothing_here_can_do_are_named(project):
    odd = {"fsdp_cuda_graphs": True, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}
    project.write(CONFIG + USE_FSDP, fsdp_config=FSDP_CONFIG | odd)
    said = project.typed(TRAIN, SHOW)
    assert said.code == 0, said.err
    assert re.findall(r"fsdp_config.json: (\w+): unsupported: \S", said.err) == [*odd]
    wrong = {"fsdp_sharding_stratgy": "FULL_SHARD", "fsdp_cuda_graphs": 0}
    project.write(CONFIG + USE_FSDP, fsdp_config=wrong)
    said = project.typed(TRAIN, SHOW)
    assert said.code == 1 and said.err.count("error: ") == 2, said.err
    assert "did you mean fsdp_sharding_strategy?" in said.err
    assert "fsdp_cuda_graphs: is 0" in said.err


def test_the_launcher_starts_the_ranks_of_one_node(project):
    project.write(CONFIG + USE_DEEPSPEED)
    for words in ("deepspeed --zero", "launcher --config config.yaml --num_gpus_per_node 4 --use"):
        assert project.setup(guide(words)).code == 0
    text = project.script("scripts/run_training.sh")
    assert "--nproc_per_node=4" in text
    assert "src/train.py --config config.yaml --deepspeed config/ds_config.json\n" in text
    project.write(CONFIG)
    line = "launcher --config config.yaml --num_gpus_per_node 4"
    said = project.setup(line)
    assert said.out.startswith("replaced scripts/run_training.sh")
    assert "src/train.py --config config.yaml\n" in project.script("scripts/run_training.sh")
    said = project.setup(f"{line} --master_addr 10.0.0.1")
    assert "--master_addr means nothing with one node" in said.err
    said = project.setup(f"{line} --num_nodes 2")
    assert said.code == 1 and "--master_addr" in said.err


def test_each_node_has_its_own_script(project):
    project.write(CONFIG + USE_DEEPSPEED)
    project.setup(guide("deepspeed --zero"))
    for node in (0, 1):
        assert project.setup(guide(f"--node_rank {node}")).code == 0
        text = project.script("scripts/run_training.sh")
        assert f'\nset -- "${{1:-{node}}}" #' in text
        for words in ("--nnodes=4", "--master_addr=192.168.1.100", "${MASTER_PORT:-29500}"):
            assert text.count(words) == 4
    said = project.setup(guide("--node_rank 1").replace("--node_rank 1", "--node_rank 4"))
    assert said.code == 1 and "counted from 0 to 3" in said.err


def test_slurm_asks_for_one_task_a_node(project):
    """A6-1: `srun deepspeed --num_gpus=8` in 8 tasks a node would start 64 ranks on 8 GPUs."""
    project.write(CONFIG + USE_DEEPSPEED)
    project.setup(guide("deepspeed --zero"))
    said = project.setup(guide("slurm"))
    assert said.code == 0, said.err
    assert "sbatch scripts/slurm_job.sh" in said.out
    text = project.script("scripts/slurm_job.sh")
    shown = next(block.text for block in GUIDE if "#SBATCH" in block.text)
    differs = {"--ntasks-per-node=8", "--cpus-per-task=8", "--time=48:00:00"}
    asked = set(re.findall(r"^#SBATCH (.+)$", text, re.M))
    assert asked == set(re.findall(r"^#SBATCH (.+)$", shown, re.M)) - differs | {
        *("--ntasks-per-node=1", "--cpus-per-task=64", "--time=48:00:00"),
        *("--open-mode=append", "--signal=B:USR1@300", "--requeue"),
    }
    for line in (
        "module load cuda/12.2 || exit 1",
        "module load anaconda3 || exit 1",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        "export TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
        "export NCCL_DEBUG=WARN",
        "export NCCL_IB_DISABLE=0",
        "export NCCL_SOCKET_IFNAME='^lo,docker'",
        "    port=$((29500 + (SLURM_JOB_ID + i) % 100))",
        "    src/train.py --config config.yaml --deepspeed config/ds_config.json",
    ):
        assert f"\n{line}\n" in text, line
    assert "conda activate llm_finetuning" in text
    assert "--nnodes=4 --nproc_per_node=8 --node_rank=" in text


def test_slurm_options_of_another_cluster(project):
    project.write(CONFIG)
    project.setup(
        "slurm --num_nodes 2 --num_gpus_per_node 2 --partition none --gres none --mem_per_gpu none "
        "--modules --conda_env none --account physics --nccl_debug INFO --cpus_per_task 3 "
        "--job_name mine --time_limit 2d --master_port 30000 --nccl_socket_ifname eth0 "
        "--nccl_ib_disable 1 --output job.sh"
    )
    text = project.script("job.sh")
    absent = "--partition --gres --mem-per-gpu module conda --deepspeed"
    wanted = "--account=physics NCCL_DEBUG=INFO NCCL_IB_DISABLE=1 NCCL_SOCKET_IFNAME=eth0 "
    wanted += "--cpus-per-task=6 --job-name=mine --time=48:00:00 port=$((30000"
    assert [word for word in absent.split() if word in text] == []
    assert [word for word in wanted.split() if word not in text] == []


def test_config_yaml_becomes_a_run_file(project):
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
    run = project.show((EXAMPLE / "config.yaml").read_text())
    assert run["strategy"]["kind"] == "deepspeed" and run["training"]["max_grad_norm"] == 0.3


@each(
    ('  mixed_precision: "no"\n', "precision", "32-true"),
    ("  mixed_precision: fp16\n", "precision", "fp16-mixed"),
    ("  gradient_checkpointing: false\n", "gradient_checkpointing", "none"),
    ("  report_to: all\n", "track", ["jsonl", "tensorboard", "wandb", "mlflow"]),
)
def test_training_in_the_words_of_the_guide(said, key, value, *, project):
    run = project.show(CONFIG + said)
    assert (run if key == "track" else run["training"])[key] == value


def test_the_batch_counts_the_ranks(project, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    micro = f"{CONFIG}  micro_batch_size: 2\n"
    steps = f"{micro}distributed: {{gradient_accumulation_steps: 3}}\n"

    def batch(config: str, words: str = "") -> object:
        return project.show(config, words)["training"]["global_batch_size"]

    assert batch(steps) == 6
    ssh = "clusters: [{launcher: {kind: ssh, hosts: [a, b]}, gpus_per_node: 4}]\n"
    assert batch(steps + ssh) == 48
    for name, value in {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    assert batch(steps) == 24
    assert batch(steps + "strategy: {kind: ddp, tp_size: 2}\n") == 12
    # The JSON says how often, where config.yaml does not.
    project.write(CONFIG, ds_config=DS_CONFIG)
    assert batch(micro, "--deepspeed config/ds_config.json") == 2 * 16 * 4


@each(
    (f"distributed: {{use_deepspeed: true, {DS}, use_fsdp: true}}", 6, "are both true"),
    ("distributed:\n  use_deepspeed: true", 7, "no deepspeed_config is named"),
    ("distributed:\n  use_deepsped: true", 7, "did you mean use_deepspeed?"),
    ("distributed:\n  gradient_accumulation_steps: 0", 7, "a number from 1"),
    ("distributed: {use_fsdp: true}\nstrategy: {kind: ddp}", 7, "delete one of them"),
    (f"distributed:\n  use_fsdp: true\n  {FS}", 8, "there is no FSDP file"),
    ("  mixed_precision: fp8", 6, 'write "no", "fp16" or "bf16"'),
    ("  mixed_precision: fp16\n  precision: 32-true", 7, "makes it fp16-mixed"),
    ("report_to: comet", 6, "'comet'"),
    # What isles itself finds has the line where it was written, not where it was carried to.
    ("  learning_rate: -1\n  mixed_precision: bf16", 6, "training.learning_rate"),
    (f"  mixed_precision: fp16\ndistributed: {{use_deepspeed: true, {DS}}}", 6, "bf16"),
)
def test_what_cannot_be_is_said_with_its_line(said, where, what, *, project):
    project.write(CONFIG + said + "\n", ds_config=DS_CONFIG)
    found = project.typed(TRAIN, SHOW)
    assert found.code == 1 and what in found.err, found.err
    assert f"config.yaml:{where} " in found.err and "Traceback" not in found.err, found.err


SRUN = {"SLURM_STEP_NUM_TASKS": "32", "SLURM_STEP_NUM_NODES": "4", "SLURM_PROCID": "17"}
SRUN |= {"SLURM_STEP_TASKS_PER_NODE": "8(x4)", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"}
DS_LAUNCHER = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_SIZE": "8"}
ONE_TASK = {"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}


def test_ranks_under_every_launcher(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE / "src"))
    find_place = runpy.run_path(str(EXAMPLE / "src/finetune_ranks.py"))["find_place"]
    alone, spread = find_place({}), find_place(DS_LAUNCHER)
    assert (alone.world_size, alone.rank, alone.variables) == (None, 0, {})
    assert (spread.world_size, spread.rank, spread.variables) == (8, 1, {"LOCAL_WORLD_SIZE": "8"})
    tasks = SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert find_place(tasks).variables == dict(zip(names, ("17", "1", "32", "8", "2"), strict=True))
    uneven = find_place(tasks | {"SLURM_STEP_TASKS_PER_NODE": "8(x2),4"})
    assert uneven.variables["LOCAL_WORLD_SIZE"] == "4"
    torchrun = {"RANK": "9", "WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8"}
    assert find_place(SRUN | ONE_TASK | {"SLURM_STEP_NUM_TASKS": "4"} | torchrun).world_size == 32


@each(
    (SRUN | DS_LAUNCHER, "64 processes for 8 GPUs"),
    (SRUN | DS_LAUNCHER | ONE_TASK, "8 ranks only: 4 runs, not one"),
    (SRUN, "MASTER_ADDR and MASTER_PORT not set"),
)
def test_the_guides_own_job_script_is_refused(environ, what, *, monkeypatch, project):
    """A6-1: launchers that srun starts in every task, and that all start the same ranks."""
    for name, value in {**environ, "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    found = project.typed(TRAIN, "--config config.yaml --deepspeed config/ds_config.json")
    assert found.code == 2 and what in found.err and "fix: " in found.err, found.err
