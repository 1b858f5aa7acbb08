"""Train on the machines of a home lab: the settings below, put into a run file, and isles.

    torchrun --nnodes=3 --nproc_per_node=1 … --node_rank=0 train_distributed.py    on each machine
    python train_distributed.py                                                    this one alone
    python train_distributed.py --hosts user@192.168.1.100 user@192.168.1.101      from here, by ssh

In a folder `scripts` it works in the folder above it, beside `data`, `checkpoints` and `logs`;
elsewhere in the folder in which it is called. `key=value` replaces a value of the run file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from isles.launch.gpus import find_gpus
from isles.launch.manual import interface_of
from isles.run.env import RankEnv, read_rank_env

# Edit these for your needs
MODEL_NAME = "meta-llama/Llama-2-7b-hf"  # a Hugging Face id, or a folder
DATASET_NAME = "wikitext"  # a Hugging Face id, a folder, or files such as data/processed/*.jsonl
DATASET_CONFIG = (
    "wikitext-2-raw-v1"  # which part of a Hugging Face dataset; None where it has no parts
)
EPOCHS = 3
LEARNING_RATE = 2e-4
BATCH_SIZE = 1  # per GPU
GRADIENT_ACCUMULATION = 8  # so many micro-batches a step, on each GPU in the mean

HERE = Path(__file__).resolve().parent
RUN_FILE = HERE / "home_lab.yaml"
PROJECT = HERE.parent if HERE.name == "scripts" else Path.cwd()


def main() -> int:
    """Train as one rank of a torchrun, on this machine, or on all hosts; returns the exit code."""
    parser = argparse.ArgumentParser(description="Options of isles train are passed on to it.")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="values of the run file")
    parser.add_argument("--hosts", nargs="+", metavar="HOST", help="train on these, over ssh")
    parser.add_argument("--check", action="store_true", help="isles check, in place of training")
    options, more = parser.parse_known_args()
    os.chdir(PROJECT)
    env = read_rank_env()
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if under_torchrun and (options.hosts or options.check):
        return fail("--hosts and --check go with python, not with torchrun", "leave them out")
    ranks = env.world_size if under_torchrun else len(options.hosts or [PROJECT])
    values = [*settings(ranks), *clusters(options.hosts or ()), *options.settings, *more]
    if under_torchrun:
        return train_as_rank(env, values)
    verb = "check" if options.check else "train"
    command = [sys.executable, "-m", "isles", verb, str(RUN_FILE), *values]
    process = subprocess.Popen(command)
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:
            continue  # isles has it too: it saves, or with a second one stops
    link_checkpoints()
    return code


def settings(num_ranks: int) -> list[str]:
    """The constants above, as values of the run file."""
    source = {"path": DATASET_NAME, **({"subset": DATASET_CONFIG} if DATASET_CONFIG else {})}
    return [
        f"model.name_or_path={as_yaml(MODEL_NAME)}",
        f"data.sources=[{as_yaml(source)}]",
        f"training.num_train_epochs={EPOCHS}",
        f"training.learning_rate={LEARNING_RATE}",
        f"training.micro_batch_size={BATCH_SIZE}",
        f"training.global_batch_size={BATCH_SIZE * GRADIENT_ACCUMULATION * num_ranks}",
    ]


def clusters(hosts: Sequence[str]) -> list[str]:
    """The section for these hosts: the project's files are copied to all of them."""
    if not hosts:
        return []
    home, conda = Path.home(), os.environ.get("CONDA_DEFAULT_ENV")
    cluster = {
        "launcher": {"kind": "ssh", "hosts": list(hosts)},
        "gpus_per_node": 1,
        "workdir": f"~/{PROJECT.relative_to(home)}"
        if PROJECT.is_relative_to(home)
        else str(PROJECT),
        "sync": {
            "paths": ["."],
            "exclude": [".git", "__pycache__", ".venv", "checkpoints", "logs"],
        },
        **({"environment": {"conda": conda}} if conda else {}),
    }
    return [f"clusters=[{as_yaml(cluster)}]"]


def as_yaml(value: object) -> str:
    """A value as the command line of isles takes it."""
    return json.dumps(value, ensure_ascii=False)


def train_as_rank(env: RankEnv, values: Sequence[str]) -> int:
    """Be the rank that torchrun has started."""
    gpus = find_gpus().gpus
    gpu = gpus[env.local_rank].name if env.local_rank < len(gpus) else "none, the CPU computes"
    lines = (
        "=== Distributed Setup ===",
        f"Rank: {env.rank}/{env.world_size}",
        f"Local Rank: {env.local_rank}",
        f"World Size: {env.world_size}",
        f"Backend: {'NCCL' if gpus else 'gloo'}",
        f"GPU: {gpu}",
    )
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
    say_if_node_rank_means_nothing(os.environ["GROUP_RANK"])
    if env.local_world_size < env.world_size and (issue := meet_the_others()):
        return fail(*issue)
    from isles.train.__main__ import main as train

    sys.argv[1:] = [str(RUN_FILE), *values]
    code = train()
    if env.local_rank == 0:
        link_checkpoints()
    return code


def say_if_node_rank_means_nothing(given: str) -> None:
    """With --rdzv_backend=c10d torchrun counts the machines as they come."""
    try:
        words = " ".join(psutil.Process(os.getppid()).cmdline())
    except psutil.Error:
        return  # it cannot be seen from here
    typed = re.search(r" --node[_-]rank[= ](\d+)", words)
    if typed and typed[1] != given:
        sys.stderr.write(
            f"--node_rank={typed[1]} means nothing with --rdzv_backend=c10d, and this machine is "
            f"number {given}; it counts with --rdzv_backend=static --master_addr=ADDRESS\n"
        )


def meet_the_others() -> tuple[str, str] | None:
    """Choose the network interface that leads to rank 0's host; what is wrong where none does."""
    name = os.environ["MASTER_ADDR"]
    static = "or use torchrun --rdzv_backend=static --master_addr=ADDRESS --master_port=29500"
    try:
        address = socket.gethostbyname(name)
    except OSError:
        what = f"rank 0 is on {name}, and no address is known for that name"
        return what, f"a line `ADDRESS {name}` in /etc/hosts of every machine, {static}"
    if address.startswith("127."):
        if os.environ["GROUP_RANK"] == "0":
            return None  # its own name; the others have found it
        what = f"rank 0 is on {name}, which is {address} here: this machine itself"
        return what, f"a line `ADDRESS {name}` in /etc/hosts in its place, {static}"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((address, 9))  # sends nothing; asks for the way
        interface = interface_of(route.getsockname()[0])
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    return None


def link_checkpoints() -> None:
    """Let `checkpoints/RUN` lead to the checkpoints of each run in `logs/runs`."""
    for saved in Path("logs/runs").glob("*/checkpoints"):
        link = Path("checkpoints") / saved.parent.name
        link.parent.mkdir(exist_ok=True)
        if not link.is_symlink() and not link.exists():
            link.symlink_to(os.path.relpath(saved, link.parent))


def fail(what: str, fix: str) -> int:
    """Print a failure as isles does; its exit code."""
    sys.stderr.write(f"error: {socket.gethostname()}: {what}\n  fix: {fix}\n")
    return 1


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # As isles ends a rank: a thread that waits for a dead disk must not keep the process.
    os._exit(exit_code)
