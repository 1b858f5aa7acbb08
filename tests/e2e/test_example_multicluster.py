"""The commands of the multi-cluster document, word for word, with real ranks and a real DHT."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from isles.run.checkpoints import list_checkpoints
from isles.run.paths import RunDir
from isles.run.records import read_record
from tests.deadline import DEADLINE_S, run_program
from tests.documents import ROOT
from tests.e2e.typed import run_typed, typed
from tests.each import each
from tests.ports import free_port
from tests.programs import write_program
from tests.runs import rows_of

EXAMPLE = ROOT / "examples" / "multicluster"
SCRIPT = EXAMPLE / "run_training.sh"
PEER = "/ip4/203.0.113.5/tcp/30001/p2p/QmXyz"
SMALL = "--seq-length 64"
"""The only change to the document's lines besides addresses: 1024 tokens take a CPU too long."""
OF_A_TURN = ("num_clusters", "weights", "inner_steps", "samples")
SMALLER = f"{SMALL} --set checkpoint.export_on_finish=false"


def blocks(heading: str) -> list[str]:
    """The shell blocks below a heading of the document, as they stand."""
    text = (ROOT / "tests" / "seeds" / "S0.md").read_text(encoding="utf-8")
    part = re.split(r"^#{2,3} ", text.partition(f" {heading}\n")[2], maxsplit=1, flags=re.M)[0]
    part = part.replace("/path/to/Distributed-Multicluster", ".")
    return re.findall(r"```bash\n(.*?)```", part, flags=re.S)


def with_flags(block: str, flags: str) -> str:
    """The block with further flags behind the last one of its command."""
    assert "train_fsdp.py" in block
    return f"{block.rstrip()} {flags}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example as a folder of its own, with the document's model beside it."""
    place = tmp_path_factory.mktemp("work") / "multicluster"
    shutil.copytree(EXAMPLE, place, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    assert run_program([sys.executable, "make_llama_2m.py"], place).returncode == 0
    assert (place.parent / "tests" / "models" / "llama-2m-fresh" / "model.safetensors").is_file()
    return place


@pytest.mark.long
def test_two_ranks_train_five_steps(folder: Path) -> None:
    """The document's first command: made-up tokens, and every figure of the document recorded."""
    (block,) = blocks("2. Basic Torch Distributed Training")
    (text,) = run_typed(folder, with_flags(block, SMALL))
    assert "a new run: runs/multicluster-1" in text
    assert "Traceback" not in text and "note:" not in text
    run_dir = RunDir(folder / "runs" / "multicluster-1")
    rows = rows_of(run_dir)
    assert [(row["step"], row["tokens"]) for row in rows] == [(n, 16 * 64 * n) for n in range(1, 6)]
    assert all(8 < row["loss"] < 10 for row in rows), "random tokens of 8192: ln 8192 is 9.01"
    assert rows[0]["learning_rate"] == 1e-2
    for name in ("tokens_per_second", "elapsed_s", "grad_norm"):
        assert all(row[name] > 0 for row in rows)
    resolved = yaml.safe_load(run_dir.resolved.read_text())
    assert resolved["derived"]["world_size"] == 2 and resolved["derived"]["grad_accum_steps"] == 2
    assert resolved["origins"]["training.learning_rate"] == "--lr"
    assert (read_record(run_dir.summary) or {})["steps"] == 5
    assert (run_dir.model / "model.safetensors").is_file()

    # By the names that the example's README gives for them.
    page = (EXAMPLE / "README.md").read_text(encoding="utf-8").partition("## Metrics")[2]
    there = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, flags=re.M)
    names = "Loss step lr Perplexity effective_step total_samples time_taken tokens_per_second"
    assert [name for name, _ in there] == [*names.split(), "outer_lr", "num_peers"]
    recorded = {*rows[0], *OF_A_TURN, "perplexity"}
    for name, here in there:
        if name != "outer_lr":
            assert recorded & set(re.findall(r"`(\w+)`", here)), name


@pytest.mark.long
def test_two_nodes_train_on_text(folder: Path, words: Path) -> None:
    """The command for several nodes, on text, with the tokenizer in the model's folder."""
    export, node = blocks("5. Multi-Node Training")[0].split("# On master node")
    master, worker = node.split("# On worker node")
    assert master.split() == worker.split(), "the same command on both"
    place = export.replace("<master_node_ip>", "127.0.0.1").replace("29500", str(free_port()))
    text = f"--no-fake-data --dataset_name_or_path {words} --precision bf16-mixed --num-workers 4"
    text += f" --metric-logger-type wandb --ckpt.path two-nodes --ckpt.interval 2 {SMALLER}"
    line = with_flags(master.replace("--nproc_per_node=2", "--nproc_per_node=1"), text)
    texts = run_typed(folder, *[f"export WANDB_MODE=disabled\n{place}{line}"] * 2)
    said = "\n".join(texts)
    assert said.count("note: --num-workers 4: Does nothing") == 1, "rank 0 says it, on its node"
    (run,) = (folder / "two-nodes").iterdir()
    rows = rows_of(RunDir(run))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(0 < row["loss"] < 12 for row in rows)
    assert [info.step for info in list_checkpoints(RunDir(run))] == [2, 4, 5]


@pytest.fixture(scope="module")
def peer(folder: Path) -> Iterator[str]:
    """The document's DHT, on the loopback; the address that it prints."""
    (block,) = [b for b in blocks("3. Multi-Machine Hivemind Training") if "hivemind-dht" in b]
    there = f"/ip4/127.0.0.1/tcp/{free_port()}"
    block = block.replace("/ip4/0.0.0.0/tcp/30001", there)
    with typed(folder, f"exec {block.partition(chr(10))[2].strip()}") as (shell,):
        address = rf"--initial_peers ({there}/p2p/\w+)"
        found = shell.until(lambda: re.search(address, shell.text))
        assert (folder / "fixed_private_key.pem").is_file()
        yield found[1]
        shell.process.terminate()
        assert shell.end() == 0, shell.text


@pytest.mark.long
def test_one_worker_of_two_ranks_over_hivemind(folder: Path, peer: str) -> None:
    """Its ranks share the weights, which is what the document's trainer cannot do there."""
    (block,) = blocks("2. Basic Hivemind Training")
    block = re.sub(r"/ip4/127\.0\.0\.1/tcp/30001/p2p/\w+", peer, block)
    (text,) = run_typed(folder, with_flags(block, f"{SMALLER} --sharding-strategy FULL_SHARD"))
    assert "note:" not in text, "all addresses are on the loopback"
    run_dir = RunDir(folder / "runs" / "multicluster-worker-0-1")
    assert [row["step"] for row in rows_of(run_dir)] == [1, 2, 3, 4, 5]
    rows = rows_of(run_dir, "outer")
    assert [row["step"] for row in rows] == [2, 4, 5]
    assert all(row["weights"].keys() == {"worker-0"} for row in rows)
    assert all(name in row for row in rows for name in OF_A_TURN)
    status = read_record(run_dir.status) or {}
    assert status["world_size"] == 2 and status["outer"]["outer_step"] == 3


@pytest.mark.long
def test_a_coordinator_and_two_workers(folder: Path, peer: str) -> None:
    """Three machines of the document as three groups of processes; a rank for each worker."""
    found = [b for b in blocks("3. Multi-Machine Hivemind Training") if "train_fsdp.py" in b]
    lines = []
    for block in found:
        there = block.replace("/ip4/MACHINE1_IP/tcp/30001/p2p/PEER_ID", peer)
        alone = there.replace("--nproc_per_node=2", "--nproc_per_node=1")
        lines.append(with_flags(alone, f"{SMALLER} --ckpt.path three"))
    assert len(lines) == 2 and all(f"export PEER_ADDRESS={peer}" in line for line in lines)
    run_typed(folder, *lines)
    turns = []
    for rank in range(2):
        run_dir = RunDir(folder / "three" / f"multicluster-worker-{rank}-1")
        assert [row["step"] for row in rows_of(run_dir)] == [1, 2, 3, 4, 5]
        turns.append(rows_of(run_dir, "outer"))
    for one, other in zip(*turns, strict=True):
        assert one["num_clusters"] == 2
        assert one["weights"] == other["weights"]
        assert one["weights"].keys() == {"worker-0", "worker-1"}
        assert one["digest"] == other["digest"], "the same weights, bit for bit"
    assert [row["step"] for row in turns[0]] == [2, 4, 5]
    first, second = ([tuple(span) for row in rows for span in row["samples"]] for rows in turns)
    assert not set(first) & set(second), "no sample is trained on twice"


FAKE_TORCHRUN = """echo "GPUS=$CUDA_VISIBLE_DEVICES" "$@"
case "$*" in
*--fail*"world-rank 1") exit 7 ;;
*--fail*) exec sleep 300 ;;
esac
"""
FAKE_DHT = """echo $$ >dht.pid
echo "use --initial_peers /ip4/127.0.0.1/tcp/4711/p2p/QmFake" >&2
exec sleep 300
"""


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """torchrun and hivemind-dht that tell what they were given."""
    write_program(tmp_path / "bin" / "hivemind-dht", FAKE_DHT)
    return write_program(tmp_path / "bin" / "torchrun", FAKE_TORCHRUN).parent


def script(bin_folder: Path, *words: str, **gpus: str) -> tuple[int, str, list[str]]:
    """Run run_training.sh; its exit code, what it said of faults, and the workers' logs."""
    environ = {"PATH": f"{bin_folder}:/usr/bin:/bin", **gpus}
    done = run_program(["bash", SCRIPT, *words], bin_folder.parent, environ)
    logs = [path.read_text() for path in sorted(bin_folder.parent.glob("worker-*.log"))]
    return done.returncode, done.stderr, logs


def test_the_script_gives_each_worker_its_rank_and_its_gpus(bin_folder: Path) -> None:
    assert os.access(SCRIPT, os.X_OK)
    code, said, logs = script(
        bin_folder, "2", "2", PEER, "--lr", "1", CUDA_VISIBLE_DEVICES="4,5,6,7"
    )
    assert (code, said, len(logs)) == (0, "", 2)
    for rank, (log, gpus) in enumerate(zip(logs, ("4,5", "6,7"), strict=True)):
        assert log.startswith(f"GPUS={gpus} --standalone --nproc_per_node=2 {EXAMPLE}")
        assert f"--lr 1 --hv.initial-peers {PEER} --hv.galaxy-size 2 --hv.world-rank {rank}" in log
    assert script(bin_folder, "2", "1", PEER)[2][1].startswith("GPUS=1 ")
    none = script(bin_folder, "2", "1", PEER, CUDA_VISIBLE_DEVICES="")
    assert none[2][1].startswith("GPUS= ")


def test_the_script_starts_and_ends_a_first_peer(bin_folder: Path) -> None:
    (bin_folder.parent / "dht.log").write_text("--initial_peers /ip4/127.0.0.1/tcp/1/p2p/QmOld\n")
    code, said, logs = script(bin_folder, "2", "1", "auto")
    assert (code, said) == (0, "")
    assert all("--hv.initial-peers /ip4/127.0.0.1/tcp/4711/p2p/QmFake" in log for log in logs)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((bin_folder.parent / "dht.pid").read_text())).wait(DEADLINE_S)


@pytest.mark.long
def test_the_script_stops_the_others_when_a_worker_fails(bin_folder: Path) -> None:
    code, said, _ = script(bin_folder, "2", "1", PEER, "--fail")
    assert code == 7 and "a worker has ended with 7" in said and "worker-*.log" in said


@each(
    ((), "0 arguments"),
    (("0", "1", "auto"), "'0' is not a number of workers"),
    (("2", "1", "10.0.0.1"), "'10.0.0.1' is neither auto nor"),
    (("2", "2", PEER), "2 x 2 GPUs, and CUDA_VISIBLE_DEVICES is 4,5,6"),
)
def test_the_script_says_what_is_wrong(words, wanted, *, bin_folder):
    code, said, logs = script(bin_folder, *words, CUDA_VISIBLE_DEVICES="4,5,6")
    assert code == 1 and wanted in said and "fix: " in said and logs == []
