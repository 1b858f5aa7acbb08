"""The flags of examples/multicluster: every command of the document, and what each flag sets."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from isles.config.load import load_run_file
from isles.config.resolve import resolve
from isles.config.sections.run import RunConfig
from isles.errors import UserError
from tests.deadline import run_program
from tests.documents import ROOT
from tests.each import each

EXAMPLE = ROOT / "examples" / "multicluster"
DOCUMENT = (ROOT / "tests" / "seeds" / "S0.md").read_text(encoding="utf-8")
PEER = "/ip4/203.0.113.5/tcp/30001/p2p/QmXyz"
HERE = "/ip4/127.0.0.1/tcp/30001/p2p/QmXyz"
HV = f"--hv.initial-peers {PEER}"


# As torchrun does it: a file of the example finds its neighbors by name.
sys.path.append(str(EXAMPLE))
flags = importlib.import_module("multicluster_flags")
example = importlib.import_module("train_fsdp")
sys.path.remove(str(EXAMPLE))


def commands() -> list[str]:
    """What stands behind train_fsdp.py in each command of the document."""
    text = DOCUMENT.replace("\\\n", " ").replace("$PEER_ADDRESS", PEER).replace("$WORLD_RANK", "1")
    return re.findall(r"^.*torchrun .* train_fsdp\.py (.*)$", text, flags=re.M)


def config_of(line: str, *, has_gpu: bool = True) -> RunConfig:
    """The run file that flags make, with all that isles makes of it."""
    content = example.run_file(flags.read_flags(shlex.split(line)), has_gpu=has_gpu)
    return load_run_file(Path("flags"), text=yaml.safe_dump(content)).config


def notes_of(line: str) -> str:
    return "\n".join(example.notes(flags.read_flags(line.split())))


def test_every_command_of_the_document_is_understood_with_dashes_and_underscores():
    lines, name = commands(), re.compile(r"(?<= |=)--[\w.-]+|^--[\w.-]+")
    assert len(lines) == 8
    for line in lines:
        config = config_of(line)
        assert config == config_of(name.sub(lambda m: f"--{m[0][2:].replace('-', '_')}", line))
        assert notes_of(line).count("\n") == 0
        if "1000" in line.split():
            continue
        assert config.data.sources[0].type == "fake" and config.training.max_steps == 5
        assert config.training.learning_rate == 1e-2 and not config.training.torch_compile
        assert config.training.micro_batch_size == 4 and config.training.global_batch_size == 16
        assert config.track == ("jsonl",) and config.training.precision == "fp16-mixed"
        assert config.model.name_or_path == "../tests/models/llama-2m-fresh"
    assert sum(config_of(line).diloco is not None for line in lines) == 3


def test_dotted_flags_with_an_equals_sign_and_a_negative():
    given = flags.read_flags(["--hv.local_steps=7", "--hv.no_fail_rank_drop", "--lr=1e-3"])
    assert given["hv.local-steps"] == 7 and given["hv.fail-rank-drop"] is False
    assert given["lr"] == 1e-3 and given["hv.galaxy-size"] == 1 and "hv.galaxy-size" not in given


def test_the_advanced_command_reads_text_in_fp16_and_tells_wandb():
    (line,) = [line for line in commands() if "1000" in line.split()]
    config = config_of(line)
    training, (source,) = config.training, config.data.sources
    assert (training.max_steps, training.micro_batch_size) == (1000, 8)
    assert training.global_batch_size == 64 and training.torch_compile
    assert training.precision == "fp16-mixed"
    assert config.data.seq_length == 1024 and config.data.streaming
    assert (source.path, source.subset) == ("allenai/c4", "en")
    (track,) = config.values()["track"]
    assert track["kind"] == "wandb" and track["mode"] is None, "WANDB_MODE decides"


# Flags, and what they make of the run file.
KEYS = """
HV => {training.max_steps: 88000, training.warmup_steps: 1000, training.micro_batch_size: 32}
HV => {training.global_batch_size: 512, training.learning_rate: 4.0e-4, training.weight_decay: 0.1}
HV => {training.adam_beta1: 0.9, training.adam_beta2: 0.95, training.max_grad_norm: 1.0}
HV => {training.optimizer: adamw, training.lr_scheduler_type: cosine, training.torch_compile: true}
HV => {model.attn_implementation: sdpa, model.name_or_path: PrimeIntellect/llama-150m-fresh}
HV => {strategy.sharding_strategy: NO_SHARD, checkpoint.every_steps: null}
HV => {diloco.sync_every: 500, diloco.lr: 0.7, diloco.momentum: 0.9, diloco.codec: none}
HV => {diloco.deadline: 600, diloco.wait: all, diloco.min_clusters: 1}
HV => {diloco.hivemind.host_maddrs: [/ip4/0.0.0.0/tcp/0]}
 => {name: multicluster}
--c4-tiny => {data.sources.0.path: PrimeIntellect/c4-tiny, data.sources.0.subset: en}
--c4-tiny => {data.streaming: false}
--dataset-name-or-path texts/*.txt => {data.streaming: false}
--dataset-name-or-path a/b => {data.streaming: true, data.sources.0.subset: null}
HV --dataset-name-or-path a/b => {data.streaming: false}
--total-steps 500 => {training.max_steps: 500}
--total-steps 500 --max-steps 40 => {training.max_steps: 40, training.warmup_steps: 4}
--max-steps 40 --warmup-steps 9 => {training.warmup_steps: 9}
--sharding-strategy FULL_SHARD => {strategy.sharding_strategy: FULL_SHARD}
--sharding-strategy _HYBRID_SHARD_ZERO2 => {strategy.sharding_strategy: HYBRID_SHARD_ZERO2}
--attn-implementation eager => {model.attn_implementation: eager}
--ckpt.path out --ckpt.interval 50 => {output_dir: out, checkpoint.every_steps: 50}
--ckpt.topk 7 => {checkpoint.keep: 7}
--hv.initial-peers HERE => {diloco.hivemind.host_maddrs: [/ip4/127.0.0.1/tcp/0]}
HV --hv.host-maddrs /ip4/10.0.0.1/tcp/7 => {diloco.hivemind.host_maddrs: [/ip4/10.0.0.1/tcp/7]}
HV --hv.announce-maddrs /ip4/1.1.1.1/tcp => {diloco.hivemind.announce_maddrs.0: /ip4/1.1.1.1/tcp}
HV --hv.galaxy-size 2 => {diloco.min_clusters: 2}
HV --hv.timeout-waiting-for-peers 30 --hv.averaging-timeout 12.5 => {diloco.deadline: 42.5}
HV --hv.all-reduce-strategy NO_WAIT => {diloco.wait.time_boxed: 15}
HV --hv.all-reduce-strategy NO_WAIT --hv.matchmaking-time 9 => {diloco.wait.time_boxed: 9}
HV --hv.hivemind-compression scaled-fp16 => {diloco.codec: bf16}
HV --hv.hivemind-compression blockwise8bit => {diloco.codec: int8}
HV --hv.outer-lr 0.5 => {diloco.lr: 0.5}
HV --hv.world-rank 3 => {clusters.0.name: worker-3}
"""


@each(*KEYS.strip("\n").splitlines())
def test_each_flag_sets_its_key(row: str):
    line, _, text = row.partition(" => ")
    config = config_of(line.replace("HV", HV).replace("HERE", HERE))
    for key, expected in yaml.safe_load(text).items():
        found: object = config
        for part in key.split("."):
            found = found[int(part)] if isinstance(found, tuple) else getattr(found, part)
        assert (list(found) if isinstance(found, tuple) else found) == expected, key


def test_precision_has_three_values_and_a_cpu_another_default(capsys, monkeypatch):
    values = ("fp16-mixed", "bf16-mixed", "32-true")
    for value in values:
        assert config_of(f"--precision {value}", has_gpu=False).training.precision == value
    assert config_of("", has_gpu=False).training.precision == "32-true"
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            flags.read_flags(["--precision", "bf16-true"])
        said = capsys.readouterr().err
        assert ended.value.code == 1 and ("bf16-true" in said) == (rank == "0"), "said by one rank"
        assert rank == "1" or all(word in said for word in (*values, "fix: "))


def test_help_has_every_flag_with_its_default_and_imports_nothing_heavy():
    code = (
        "import sys, train_fsdp\n"
        "sys.argv = ['train_fsdp.py', '--help']\n"
        "try: train_fsdp.main()\n"
        "finally: print('HEAVY', 'torch' in sys.modules)\n"
    )
    done = run_program([sys.executable, "-c", code], EXAMPLE)
    assert done.returncode == 0 and "HEAVY False" in done.stdout, done.stderr
    said = " ".join(done.stdout.split())
    assert all(f"--{name}" in said for name in ("no-torch-compile", "nproc_per_node", "nnodes"))
    for name, flag in flags.FLAGS.items():
        part = " --".join(said.split(f" --{name}", 1)[1].split(" --", 2))
        assert flag.default == [] or "Default: " in part or name == "log-activations-steps", name
    assert "Nesterov momentum 0.9. Default: 0.7." in said


def test_what_is_resumed():
    asked = ("", "--ckpt.resume", "--ckpt.resume true", "--ckpt.resume=runs/a-1", "--resume no")
    resumes = [example.resume_of(flags.read_flags(line.split())) for line in asked]
    assert resumes == ["no", "auto", "auto", "runs/a-1", "no"]


def test_what_a_worker_is_called(monkeypatch):
    monkeypatch.setenv("WORLD_RANK", "1")
    config = config_of(HV)
    assert (config.clusters[0].name, config.name) == ("worker-1", "multicluster-worker-1")
    assert config_of(f"{HV} --hv.world-rank 3").clusters[0].name == "worker-3"
    monkeypatch.delenv("WORLD_RANK")
    assert config_of(HV).clusters[0].name.startswith("worker-")


def test_a_flag_that_does_nothing_says_so():
    for line in (
        "--num-workers 2",
        "--log-activations-steps 5",
        "--hv.skip-load-from-peers",
        "--hv.matchmaking-time 9",
        "--project p --metric-logger-type dummy",
        "--dataset-name-or-path a/b --fake-data",
        "--dataset-name-or-path a/b --c4-tiny",
        "--total-steps 500 --max-steps 40",
    ):
        flag = line.split()[0]
        said = [text for text in notes_of(line).splitlines() if flag in text]
        assert len(said) == 1 and "oes nothing" in said[0], said
    assert notes_of("") == ""


def test_what_a_user_should_know():
    assert "300 GB" in notes_of(HV) and "secret_file" in notes_of(f"{HV} --fake-data")
    assert notes_of(f"{HV} --fake-data --set outer.hivemind.secret_file=s") == ""
    assert notes_of(f"--hv.initial-peers {HERE} --fake-data") == ""
    assert "travel as bf16" in notes_of(f"{HV} --hv.hivemind-compression scaled-fp16")


def test_faults_name_the_flag():
    for line, text in (
        ("--total-batch-size 30 --per-device-train-batch-size 4", "--total-batch-size "),
        ("--lr -1", "--lr training.learning_rate"),
        (f"--max-steps 5 {HV}", "--hv.local-steps outer.sync_every: sync_every 500 is more than"),
        ("--hv.initial-peers 10.0.0.1:30001", "--hv.initial-peers"),
        ("--path-model ../no-such-model", "make_llama_2m.py"),
        ("--set training.lr=3", "command line"),
    ):
        with pytest.raises(UserError, match=re.escape(text)):
            loaded = example.load(flags.read_flags([*line.split(), "--fake-data"]))
            resolve(loaded, num_gpus=0, world_size=2)
