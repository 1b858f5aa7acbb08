"""The flags of examples/multicluster: every command of the document, and what each flag sets."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from isles.config.load import load_run_file
from isles.config.resolve import resolve
from isles.config.sections.run import RunConfig
from isles.errors import UserError
from tests.deadline import DEADLINE_S
from tests.each import each

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "multicluster"
PEER = "/ip4/203.0.113.5/tcp/30001/p2p/QmXyz"
HERE = "/ip4/127.0.0.1/tcp/30001/p2p/QmXyz"
HV = ("--hv.initial-peers", PEER)
NAMES = """
path-model per-device-train-batch-size total-batch-size lr warmup-steps total-steps max-steps
precision sharding-strategy attn-implementation torch-compile no-torch-compile
seq-length fake-data dataset-name-or-path c4-tiny num-workers
metric-logger-type project log-activations-steps ckpt.path ckpt.interval ckpt.topk ckpt.resume
hv.initial-peers hv.galaxy-size hv.world-rank hv.local-steps hv.outer-lr hv.host-maddrs
hv.announce-maddrs hv.all-reduce-strategy hv.matchmaking-time hv.averaging-timeout
hv.timeout-waiting-for-peers hv.hivemind-compression hv.skip-load-from-peers hv.fail-rank-drop
"""


def _module(name: str) -> ModuleType:
    """A file of the example, which finds its neighbours by name as under torchrun."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


flags = _module("multicluster_flags")
example = _module("train_fsdp")


def commands() -> list[list[str]]:
    """What stands behind train_fsdp.py in each command of the document."""
    text = (ROOT / "tests" / "seeds" / "S0.md").read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(r"^.*torchrun .* train_fsdp\.py (.*)$", text, flags=re.M)
    values = {"$PEER_ADDRESS": PEER, "$WORLD_RANK": "1"}
    return [[values.get(word, word) for word in shlex.split(line)] for line in found]


def config_of(*words: str, has_gpu: bool = True) -> RunConfig:
    """The run file that flags make, with all that isles makes of it."""
    content = example.run_file(flags.read_flags(words), has_gpu=has_gpu)
    config: RunConfig = load_run_file(Path("flags"), text=yaml.safe_dump(content)).config
    return config


def notes_of(*words: str) -> str:
    return "\n".join(example.notes(flags.read_flags(words)))


def with_underscores(word: str) -> str:
    return f"--{word[2:].replace('-', '_')}" if word.startswith("--") else word


def test_every_command_of_the_document_is_understood_with_dashes_and_underscores() -> None:
    lines = commands()
    assert len(lines) == 8
    for words in lines:
        config = config_of(*words)
        assert config == config_of(*map(with_underscores, words))
        assert notes_of(*words).count("\n") == 0
        if "1000" in words:
            continue
        assert config.data.sources[0].type == "fake" and config.training.max_steps == 5
        assert config.training.learning_rate == 1e-2 and not config.training.torch_compile
        assert config.training.micro_batch_size == 4 and config.training.global_batch_size == 16
        assert config.track == ("jsonl",) and config.training.precision == "fp16-mixed"
        assert config.model.name_or_path == "../tests/models/llama-2m-fresh"
    assert sum(config_of(*words).diloco is not None for words in lines) == 3


def test_dotted_flags_with_an_equals_sign_and_a_negative() -> None:
    given = flags.read_flags(["--hv.local_steps=7", "--hv.no_fail_rank_drop", "--lr=1e-3"])
    assert given["hv.local-steps"] == 7 and given["hv.fail-rank-drop"] is False
    assert given["lr"] == 1e-3 and given["hv.galaxy-size"] == 1 and "hv.galaxy-size" not in given


def test_the_advanced_command_reads_text_in_fp16_and_tells_wandb() -> None:
    (words,) = [words for words in commands() if "1000" in words]
    config = config_of(*words)
    training = config.training
    assert (training.max_steps, training.micro_batch_size, training.global_batch_size) == (
        1000,
        8,
        64,
    )
    assert training.precision == "fp16-mixed" and training.torch_compile
    assert config.data.seq_length == 1024 and config.data.streaming
    assert (config.data.sources[0].path, config.data.sources[0].subset) == ("allenai/c4", "en")
    (track,) = config.values()["track"]
    assert track["kind"] == "wandb" and track["mode"] is None, "WANDB_MODE decides"


def test_the_defaults_are_those_of_opendiloco() -> None:
    config = config_of(*HV)
    training, outer = config.training, config.diloco
    assert outer is not None and (outer.sync_every, outer.lr, outer.momentum) == (500, 0.7, 0.9)
    assert (outer.deadline, outer.wait, outer.codec, outer.min_clusters) == (600, "all", "none", 1)
    assert (training.max_steps, training.warmup_steps) == (88_000, 1000)
    assert (training.micro_batch_size, training.global_batch_size) == (32, 512)
    assert (training.learning_rate, training.weight_decay) == (4e-4, 0.1)
    assert (training.adam_beta1, training.adam_beta2, training.max_grad_norm) == (0.9, 0.95, 1.0)
    assert (training.optimizer, training.lr_scheduler_type) == ("adamw", "cosine")
    assert training.torch_compile and config.model.attn_implementation == "sdpa"
    assert config.strategy.model_dump()["sharding_strategy"] == "NO_SHARD"
    assert config.model.name_or_path == "PrimeIntellect/llama-150m-fresh"


def test_precision_has_three_values_and_a_cpu_another_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for value in ("fp16-mixed", "bf16-mixed", "32-true"):
        assert config_of("--precision", value, has_gpu=False).training.precision == value
    assert config_of().training.precision == "fp16-mixed"
    assert config_of(has_gpu=False).training.precision == "32-true"
    with pytest.raises(SystemExit) as ended:
        flags.read_flags(["--precision", "bf16-true"])
    said = capsys.readouterr().err
    assert ended.value.code == 1 and "bf16-true" in said and "fix: " in said
    assert all(value in said for value in ("fp16-mixed", "bf16-mixed", "32-true"))


def test_a_fault_of_the_command_line_is_said_by_one_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        flags.read_flags(["--max-stps", "5"])
    assert ended.value.code == 1 and capsys.readouterr().err == ""


def test_help_has_every_flag_with_its_default_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, train_fsdp\n"
        "sys.argv = ['train_fsdp.py', '--help']\n"
        "try: train_fsdp.main()\n"
        "finally: print('HEAVY', 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=EXAMPLE,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0 and "HEAVY False" in done.stdout, done.stderr
    said = " ".join(done.stdout.split())
    names = [*NAMES.split(), "nproc_per_node", "nnodes"]
    assert [name for name in names if f"--{name}" not in said] == []
    for name, flag in flags.FLAGS.items():
        part = said.split(f" --{name}", 1)[1].split(" --", 2)
        assert (
            flag.default == []
            or "Default: " in " --".join(part)
            or name in ("log-activations-steps",)
        ), name
    assert "Nesterov momentum 0.9. Default: 0.7." in said
    assert re.search(r"waits for the others; then it trains on. Default: 600", said)


def test_what_a_run_reads() -> None:
    tiny = config_of("--c4-tiny").data
    assert (tiny.sources[0].path, tiny.sources[0].subset) == ("PrimeIntellect/c4-tiny", "en")
    assert not tiny.streaming
    assert not config_of("--dataset-name-or-path", "texts/*.txt").data.streaming
    other = config_of("--dataset-name-or-path", "someone/else").data
    assert other.streaming and other.sources[0].subset is None
    # Samples of a worker that has gone are dealt again, so nothing is read as a stream.
    assert not config_of("--dataset-name-or-path", "someone/else", *HV).data.streaming
    assert "300 GB" in notes_of(*HV)


def test_how_long_and_how_sharded() -> None:
    assert config_of("--total-steps", "500").training.max_steps == 500
    both = ("--total-steps", "500", "--max-steps", "40")
    assert config_of(*both).training.max_steps == 40 and "--total-steps 500" in notes_of(*both)
    assert config_of("--max-steps", "40").training.warmup_steps == 4
    assert config_of("--max-steps", "40", "--warmup-steps", "9").training.warmup_steps == 9
    for name in ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        section = config_of("--sharding-strategy", name, *HV).strategy.model_dump()
        assert section["sharding_strategy"] == name.removeprefix("_")
    assert config_of("--attn-implementation", "eager").model.attn_implementation == "eager"
    track = config_of("--project", "mine").values()["track"]
    assert track[0]["project"] == "mine"


def test_checkpoints() -> None:
    words = ("--ckpt.path", "out", "--ckpt.interval", "50", "--ckpt.topk", "7")
    config = config_of(*words)
    assert (config.output_dir, config.checkpoint.every_steps, config.checkpoint.keep) == (
        "out",
        50,
        7,
    )
    assert config_of().checkpoint.every_steps is None
    asked = ("", "--ckpt.resume", "--ckpt.resume true", "--ckpt.resume=runs/a-1", "--resume no")
    resumes = [example.resume_of(flags.read_flags(words.split())) for words in asked]
    assert resumes == ["no", "auto", "auto", "runs/a-1", "no"]


def outer_of(*words: str) -> Any:
    outer = config_of(*words, "--hv.galaxy-size", "2").diloco
    assert outer is not None and outer.hivemind is not None and outer.min_clusters == 2
    return outer


def test_how_workers_find_one_another() -> None:
    outer = outer_of("--hv.initial-peers", PEER, HERE, "--hv.initial_peers", PEER)
    assert outer.hivemind.initial_peers == (PEER, HERE, PEER)
    assert outer.hivemind.host_maddrs == ("/ip4/0.0.0.0/tcp/0",)
    assert "secret_file" in notes_of(*HV, "--fake-data")
    assert outer_of("--hv.initial-peers", HERE).hivemind.host_maddrs == ("/ip4/127.0.0.1/tcp/0",)
    assert notes_of("--hv.initial-peers", HERE, "--fake-data") == ""
    given = (
        "--hv.host-maddrs",
        "/ip4/10.0.0.1/tcp/7",
        "--hv.announce-maddrs",
        "/ip4/1.1.1.1/tcp/7",
    )
    found = outer_of(*given).hivemind
    assert (found.host_maddrs, found.announce_maddrs) == ((given[1],), (given[3],))
    assert notes_of(*HV, "--fake-data", "--set", "outer.hivemind.secret_file=s") == ""


def test_how_workers_wait_and_what_they_send() -> None:
    times = ("--hv.timeout-waiting-for-peers", "30", "--hv.averaging-timeout", "12.5")
    assert outer_of(*times).deadline == 42.5
    no_wait = ("--hv.all-reduce-strategy", "NO_WAIT")
    assert outer_of(*no_wait).wait.time_boxed == 15
    assert outer_of(*no_wait, "--hv.matchmaking-time", "9").wait.time_boxed == 9
    assert outer_of("--hv.all-reduce-strategy", "WAIT_FOR_ALL").wait == "all"
    assert "--hv.matchmaking-time does nothing" in notes_of("--hv.matchmaking-time", "9")
    sent = {"fp16": "bf16", "scaled-fp16": "bf16", "uniform8bit": "int8"}
    sent |= {"quantile8bit": "int8", "blockwise8bit": "int8"}
    for name, codec in sent.items():
        words = ("--hv.hivemind-compression", name)
        assert outer_of(*words).codec == codec and f"travel as {codec}" in notes_of(*words)
    assert outer_of("--hv.outer-lr", "0.5").lr == 0.5


def test_what_a_worker_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_of(*HV, "--hv.world-rank", "3").clusters[0].name == "worker-3"
    monkeypatch.setenv("WORLD_RANK", "1")
    config = config_of(*HV)
    assert (config.clusters[0].name, config.name) == ("worker-1", "multicluster-worker-1")
    assert config_of(*HV, "--hv.world-rank", "3").clusters[0].name == "worker-3"
    monkeypatch.delenv("WORLD_RANK")
    assert config_of(*HV).clusters[0].name.startswith("worker-")
    assert config_of().name == "multicluster"


@each(
    "words",
    [
        ("--num-workers", "2"),
        ("--log-activations-steps", "5"),
        ("--hv.skip-load-from-peers",),
        ("--hv.fail-rank-drop",),
        ("--project", "p", "--metric-logger-type", "dummy"),
        ("--dataset-name-or-path", "a/b", "--fake-data"),
        ("--c4-tiny", "--fake-data"),
        ("--dataset-name-or-path", "a/b", "--c4-tiny"),
    ],
)
def test_a_flag_that_does_nothing_says_so(words: tuple[str, ...]) -> None:
    said = [line for line in notes_of(*words).splitlines() if words[0] in line]
    assert len(said) == 1 and "oes nothing" in said[0], said
    assert words[0] not in notes_of()


def fault_of(*words: str, ranks: int = 2) -> str:
    """What the user reads of a fault."""
    with pytest.raises(UserError) as raised:
        loaded = example.load(flags.read_flags(words))
        resolve(loaded, num_gpus=0, world_size=ranks)
    return str(raised.value)


def test_faults_name_the_flag() -> None:
    fake = ("--fake-data", "--path-model", "hub/id")
    said = fault_of("--total-batch-size", "30", "--per-device-train-batch-size", "4", *fake)
    assert said.startswith("--total-batch-size ") and "30 is not a multiple" in said
    assert "--lr training.learning_rate" in fault_of("--lr", "-1", *fake)
    said = fault_of("--max-steps", "5", *HV, *fake)
    assert said.startswith("--hv.local-steps outer.sync_every: sync_every 500 is more than")
    assert "--hv.initial-peers" in fault_of("--hv.initial-peers", "10.0.0.1:30001", *fake)
    assert "there is no folder" in fault_of("--path-model", "../no-such-model", "--fake-data")
    assert "make_llama_2m.py" in fault_of("--path-model", "../no-such-model", "--fake-data")
    assert "command line" in fault_of("--set", "training.lr=3", *fake)


def test_every_value_names_its_flag(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    words = ("--path-model", str(tmp_path / "model"), "--lr", "0.5", "--set", "seed=4")
    loaded = example.load(flags.read_flags([*words, "--fake-data"]))
    assert loaded.origins["training.learning_rate"] == "--lr"
    assert loaded.origins["training.max_steps"] in ("--max-steps", "--total-steps")
    assert loaded.origins["seed"] == "command line" and loaded.config.seed == 4
