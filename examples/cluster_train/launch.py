"""One node of cluster_train.sh: health checks, torchrun, and what its end means."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from health import Node, Output, check_node

from isles.errors import ExitCode, UserError

HERE = Path(__file__).parent
MARK = "check 5/5"
SAY_EVERY_S = 15.0
END_S = 45.0  # torchrun gives its ranks 30 s


def main() -> int:
    """Check this node, train, and say what came of it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="launch.py")
    parser.add_argument("config", type=Path)
    for name in ("nodes", "rank"):
        parser.add_argument(name, type=int)
    parser.add_argument("address")
    parser.add_argument("port", type=int)
    parser.add_argument("--log", type=Path, required=True)
    node = Node(**vars(parser.parse_args()))
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    with node.log.open("a", encoding="utf-8") as stream:
        output = Output(stream, f"node {node.rank}", os.environ["LOG_LEVEL"])
        try:
            return run(node, output)
        except UserError as error:
            output.put(f"error: {error}")
            return int(error.exit_code)


def run(node: Node, output: Output) -> int:
    """The checks that need no other rank, then the ranks."""
    name = socket.gethostname()
    output.log("INFO", f"node {node.rank} of {node.nodes} on {name}; the log is {node.log}")
    timeout_s = float(os.environ["START_TIMEOUT"])
    words, nproc = check_node(node, HERE, timeout_s, output)
    set_debugging(output)
    script = render(node, words, nproc, output)
    environ = {"MASTER_ADDR": node.address, "MASTER_PORT": str(node.port)}
    environ |= {"CHECK_TIMEOUT": str(timeout_s), "CHECK_CONFIG": str(node.config)}
    ranks = Ranks(["bash", str(script), str(node.rank)], {**os.environ, **environ}, output)
    status = ranks.wait(
        timeout_s, f"all ranks (nodes: {node.nodes}) to meet at {node.address}:{node.port}"
    )
    return conclude(node, ranks, status, timeout_s, output)


def set_debugging(output: Output) -> None:
    """NCCL's words: warnings, or all of them in debug mode. What was exported before wins."""
    is_debug = os.environ["LOG_LEVEL"] == "DEBUG"
    os.environ.setdefault("NCCL_DEBUG", "INFO" if is_debug else "WARN")
    if is_debug:
        # Not DETAIL: with torch 2.13 it was seen to end a rank on gloo with SIGSEGV.
        os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "INFO")
    if "NCCL_TREE_THRESHOLD" in os.environ:
        text = "NCCL_TREE_THRESHOLD is set: NCCL 2.5 and later have NCCL_ALGO in its place"
        output.log("WARNING", text)
    prefixes = ("NCCL_", "GLOO_", "TORCH_", "CUDA_VISIBLE")
    for key in sorted(key for key in os.environ if key.startswith(prefixes)):
        output.log("DEBUG", f"{key}={os.environ[key]}")


def render(node: Node, words: list[str], nproc: int, output: Output) -> Path:
    """Write this start as a run file of isles, and have isles write the torchrun lines for it."""
    from json import dumps

    device = "cuda" if os.environ["BACKEND"] == "nccl" else "cpu"
    cluster = {"nodes": node.nodes, "gpus_per_node": nproc, "device": device}
    training = {"script": str(HERE / "rank_check.py"), "script_args": words}
    run_file, script = node.log.with_suffix(".yaml"), node.log.with_suffix(".sh")
    # JSON is YAML.
    content = {"name": "cluster-train", "training": training, "clusters": [cluster]}
    run_file.write_text(dumps(content, indent=2) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "isles", "render", str(run_file), "--to", "torchrun"]
    command += ["--output", str(script), "--force"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise UserError(f"isles render has ended with {done.returncode}: {done.stderr.strip()}")
    output.log("INFO", f"starting {nproc} x {shlex.join(words)}; the command is in {script}")
    for line in script.read_text(encoding="utf-8").splitlines():
        output.log("DEBUG", line)
    return script


class Ranks:
    """torchrun on this node, with all that it and its ranks print."""

    def __init__(self, command: list[str], environ: dict[str, str], output: Output) -> None:
        """Start it."""
        self.output = output
        self.has_met = threading.Event()
        self.seen: set[str] = set()
        self.signal = 0
        self.process: subprocess.Popen[str] | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self.stop)
        # A session of its own: Ctrl+C is handed on once, and not to each rank besides.
        self.process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self.read, args=(self.process,), daemon=True)
        self.reader.start()
        if self.signal:  # it came while this was being started
            self.kill(signal.SIGTERM)

    def read(self, process: subprocess.Popen[str]) -> None:
        """Pass on every line, and remember what it means."""
        assert process.stdout is not None
        for line in process.stdout:
            self.output.put(line.rstrip("\n"))
            if MARK in line:
                self.has_met.set()
            for text in ("NCCL initialization failed", "CUDA out of memory", "nodes differ"):
                if text in line:
                    self.seen.add(text)

    def stop(self, number: int, _frame: Any) -> None:
        """Hand a signal on; a second one ends all at once."""
        again, self.signal = bool(self.signal), number
        self.kill(signal.SIGKILL if again else signal.SIGTERM)

    def kill(self, number: int) -> None:
        """Signal torchrun, which tells its ranks; SIGKILL goes to all of them."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            elif self.process.poll() is None:
                self.process.send_signal(number)

    def wait(self, timeout_s: float, whom: str) -> int | None:
        """Until torchrun ends; None: the ranks did not meet in time, and were ended."""
        began = said_at = time.monotonic()
        asked_at: float | None = None
        is_late = False
        assert self.process is not None
        while (status := self.process.poll()) is None:
            now = time.monotonic()
            if not self.has_met.is_set() and now - said_at >= SAY_EVERY_S:
                said_at = now
                left_s = max(0.0, timeout_s - (now - began))
                self.output.log("INFO", f"waiting for {whom} ({left_s:.0f} s left)")
            if not self.has_met.is_set() and now - began > timeout_s and not is_late:
                is_late = True
                self.kill(signal.SIGTERM)
            asked_at = now if asked_at is None and (is_late or self.signal) else asked_at
            if asked_at is not None and now - asked_at > END_S:
                self.kill(signal.SIGKILL)
            self.reader.join(0.2)
            if not self.reader.is_alive():
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(1.0)
        self.reader.join(5.0)
        return None if is_late else status


def conclude(node: Node, ranks: Ranks, status: int | None, timeout_s: float, output: Output) -> int:
    """Say how it ended, with what can be done about it; returns the exit code."""
    if ranks.signal:
        output.log("INFO", f"ended by {signal.Signals(ranks.signal).name}")
        return 128 + ranks.signal
    if status == 0:
        output.log("INFO", "training has finished")
        return 0
    if "NCCL initialization failed" in ranks.seen or "nodes differ" in ranks.seen:
        return int(ExitCode.PREFLIGHT)  # the rank has said what to do
    if "CUDA out of memory" in ranks.seen:
        output.issue("CUDA out of memory", *OUT_OF_MEMORY)
        return int(ExitCode.OUT_OF_MEMORY)
    if status is None or not ranks.has_met.is_set():
        at = f"{node.address}:{node.port}"
        when = f"within {timeout_s:.0f} s" if status is None else f"(torchrun ended with {status})"
        output.issue(
            f"the ranks of {node.nodes} nodes have not met at {at} {when}",
            "start the same command on every node, each with its own node_rank",
            "see the lines above, and the logs of the other nodes",
            "open all ports between the nodes: gloo and NCCL use more than the master port",
        )
        return int(ExitCode.COMMUNICATION)
    output.issue(
        f"training has ended with exit code {status}",
        f"see the lines above, or {node.log}",
        "LOG_LEVEL=DEBUG says more",
    )
    return int(ExitCode.TRAINING)


OUT_OF_MEMORY = (
    "Reduce batch size in config",
    "Use gradient accumulation",
    "Enable mixed precision training",
)

if __name__ == "__main__":
    sys.exit(main())
