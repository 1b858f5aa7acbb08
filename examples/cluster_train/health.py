"""The health checks of one node: its configuration, its environment, its GPUs, its network."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from isles.config.load import load_run_file
from isles.config.yaml import parse_yaml
from isles.errors import CommunicationError, ConfigError, PreflightError, UserError
from isles.launch.gpus import find_gpus

CHECK_S = 300.0
SAY_EVERY_S = 10.0
LOOK_S = 0.2
CONNECT_S = 5.0
NCCL_FIXES = (
    "Check GPU compatibility",
    "Verify CUDA installation",
    "Try `BACKEND=gloo` for debugging",
)


@dataclass(frozen=True, slots=True)
class Node:
    """What was typed on this node.

    Args:
        config: the training configuration.
        nodes, rank: how many there are, and which this is.
        address, port: of node 0.
        log: the file that this node's lines go to.
    """

    config: Path
    nodes: int
    rank: int
    address: str
    port: int
    log: Path


class Output:
    """Lines for the terminal and for the node's log, from several threads."""

    def __init__(self, log: IO[str], name: str, level: str) -> None:
        """Level INFO leaves lines of DEBUG out."""
        self._stream, self._name, self._level = log, name, level
        self._lock = threading.Lock()

    def log(self, level: str, text: str) -> None:
        """One line of this script itself."""
        if level != "DEBUG" or self._level == "DEBUG":
            self.put(f"{datetime.now():%Y-%m-%d %H:%M:%S} [{level}] {self._name}: {text}")

    def issue(self, what: str, *fixes: str) -> None:
        """An error, and what can be done about it."""
        self.put(f"error: {what}{bullets(fixes)}")

    def put(self, text: str) -> None:
        """Text as it is."""
        with self._lock:
            for stream in (sys.stdout, self._stream):
                stream.write(text + "\n")
                stream.flush()


def bullets(lines: tuple[str, ...]) -> str:
    """What can be done, one line each, to stand behind an error."""
    return "\n  fix:" + "".join(f"\n  - {line}" for line in lines)


def check_node(node: Node, here: Path, timeout_s: float, output: Output) -> tuple[list[str], int]:
    """Checks 1 to 4.

    Args:
        node: what was typed.
        here: the folder of cluster_train.sh.
        timeout_s: longest wait for node 0.
        output: takes a line for each check.

    Returns:
        The words behind `python` that train, and how many processes there are on this node.

    Raises:
        UserError: a check has failed.
    """
    words, text = check_config(node.config, here)
    output.log("INFO", f"check 1/5 configuration: {text}")
    output.log("INFO", f"check 2/5 environment: {check_environment()}")
    nproc, text = check_gpus(output)
    output.log("INFO", f"check 3/5 GPUs and memory: {text}")
    text = check_network(node, timeout_s, output)
    output.log("INFO", f"check 4/5 network: {text}")
    return words, nproc


def check_config(config: Path, here: Path) -> tuple[list[str], str]:
    """What trains with this configuration, and whether that finds it right."""
    try:
        values = parse_yaml(config.read_text(encoding="utf-8"), str(config)).value
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"the configuration cannot be read: {error}",
            where=str(config),
            fix="give its path as the first word",
        ) from error
    if not isinstance(values, Mapping):
        raise ConfigError("it holds no keys", where=str(config), fix="see config/train_config.yaml")
    usual = "isles" if is_run_file(values) else "train_phase2.py"
    asked = os.environ.get("TRAIN_SCRIPT") or usual
    if asked == "isles":
        # A GPU's own backend is nccl: over gloo the trainer of isles computes on CPUs.
        added = ["clusters.0.device=cpu"] if os.environ["BACKEND"] == "gloo" else []
        load_run_file(config, added)
        return ["-m", "isles.train", str(config), *added], f"{config} is a run file of isles"
    script = here / asked
    if not script.is_file():
        raise ConfigError(
            "the training script is not there",
            where=str(script),
            fix="put it beside cluster_train.sh; TRAIN_SCRIPT=NAME names another",
        )
    read_by_script(config, here)
    return [str(script), "--config", str(config)], f"{config} is right, for {script.name}"


def is_run_file(values: Mapping[str, Any]) -> bool:
    """Whether a configuration has what a run file of isles must have."""
    model, training = values.get("model"), values.get("training")
    has_model = isinstance(model, Mapping) and "name_or_path" in model
    return has_model or (isinstance(training, Mapping) and "script" in training)


def read_by_script(config: Path, here: Path) -> None:
    """Let the training's own load_config judge, where there is one."""
    if not (here / "train" / "train_llm" / "train_llm_conf.py").is_file():
        return
    code = "import sys; from train.train_llm.train_llm_conf import load_config\n"
    code += "print(load_config(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(config.absolute())],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=CHECK_S,
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise ConfigError(
            said[-1].removeprefix("ValueError: "),
            where=str(config),
            fix=f"mend it; {here}/train/train_llm/train_llm_conf.py says what there may be",
        )


def check_environment() -> str:
    """Python, torch and torchrun."""
    torch = metadata.version("torch")
    if int(torch.partition(".")[0]) < 2:
        raise PreflightError(
            f"torch is {torch}, and 2.0 is the least",
            where=f"{socket.gethostname()}: {sys.executable}",
            fix="pip install --upgrade torch",
        )
    if shutil.which("torchrun", path=str(Path(sys.executable).parent)) is None:
        raise PreflightError(
            "torch is installed, and torchrun is not",
            where=f"{socket.gethostname()}: {Path(sys.executable).parent}",
            fix="pip install --force-reinstall torch",
        )
    name = os.environ.get("CONDA_DEFAULT_ENV") or os.environ.get("VIRTUAL_ENV") or sys.prefix
    return f"{name}: Python {sys.version.split()[0]}, torch {torch}"


def check_gpus(output: Output) -> tuple[int, str]:
    """How many processes this node has, once isles has looked at its GPUs and its memory."""
    found, host = find_gpus(), socket.gethostname()
    if found.warning:
        output.log("WARNING", found.warning)
    asked, is_nccl = os.environ.get("NPROC_PER_NODE"), os.environ["BACKEND"] == "nccl"
    if is_nccl and not found.gpus:
        raise PreflightError(
            f"NCCL initialization failed: it talks between GPUs, and {host} has none"
            + bullets(NCCL_FIXES)
        )
    nproc = int(asked) if asked else max(1, len(found.gpus))
    if is_nccl and nproc > len(found.gpus):
        raise PreflightError(
            f"NPROC_PER_NODE is {nproc}, and there are {len(found.gpus)} GPUs",
            where=host,
            fix="at most one process for each GPU; CUDA_VISIBLE_DEVICES may hide some",
        )
    for number, gpu in enumerate(found.gpus):
        memory = f"{gpu.memory_bytes / 2**30:.1f} GiB" if gpu.memory_bytes else "memory unknown"
        output.log("INFO", f"GPU {number}: {gpu.name}, {memory}")
    numbers = ask_isles(host, output)
    gpus = f"{len(found.gpus)} GPUs" if found.gpus else "no GPU"
    return nproc, f"{gpus}, ranks: {nproc}; {numbers}"


def ask_isles(host: str, output: Output) -> str:
    """`isles check` of this machine: a real kernel on each GPU, memory, disk, limits."""
    command = [sys.executable, "-m", "isles", "check", "--no-net", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_S, check=False)
    try:
        report = json.loads(done.stdout)
    except ValueError as error:
        raise PreflightError(
            f"isles check has ended with {done.returncode}: {done.stderr.strip()}", where=host
        ) from error
    errors = []
    for finding in report["findings"]:
        text = f"{finding['id']}: {finding['text']}"
        fix = f"; fix: {finding['fix']}" if finding["fix"] else ""
        levels = {"ok": "DEBUG", "warning": "WARNING", "error": "ERROR"}
        output.log(levels[finding["level"]], text + fix)
        errors += [text] if finding["level"] == "error" else []
    if errors:
        raise PreflightError("; ".join(errors), where=host, fix="each is said above, with its fix")
    count = report["summary"]
    return f"isles check: {count['ok']} ok, {count['warnings']} warnings"


def check_network(node: Node, timeout_s: float, output: Output) -> str:
    """Node 0: whether it can listen there. The others: whether node 0 answers."""
    at = f"{node.address}:{node.port}"
    try:
        address = socket.gethostbyname(node.address)
    except OSError as error:
        raise cannot_connect(at, f"{node.address} is no name that this machine knows") from error
    if node.nodes > 1 and address.startswith("127."):
        text = f"{node.address} is {address}, this machine alone: right if all nodes are on it"
        output.log("WARNING", text)
    if node.rank == 0:
        listen(address, node)
        return f"node 0 can listen at {at}"
    began = said_at = time.monotonic()
    while True:
        try:
            socket.create_connection((address, node.port), CONNECT_S).close()
            return f"node 0 answers at {at}"
        except OSError as error:
            why = error.strerror or str(error)
        now = time.monotonic()
        if now - began >= timeout_s:
            raise cannot_connect(at, f"{why}, for {timeout_s:.0f} s")
        if now - said_at >= SAY_EVERY_S:
            said_at = now
            output.log("INFO", f"waiting for node 0 at {at}: {why}")
        time.sleep(LOOK_S)


def listen(address: str, node: Node) -> None:
    """Whether torchrun will be able to listen.

    Raises:
        UserError: it will not.
    """
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, node.port))
            probe.listen()
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        what = f"node 0 cannot listen at {node.address}:{node.port}: {error.strerror}"
        fix = "give all nodes the address of node 0, as `ip -4 addr` on it shows"
        if is_taken:
            fix = f"give all nodes another port; who has it: ss -ltnp 'sport = :{node.port}'"
        raise CommunicationError(what, where=socket.gethostname(), fix=fix) from error


def cannot_connect(at: str, why: str) -> UserError:
    """Node 0 is not there."""
    fixes = (
        "Check firewall settings",
        "Verify master node is running",
        "Ensure correct IP address and port",
    )
    return CommunicationError(f"Cannot connect to master node at {at} ({why}){bullets(fixes)}")
