"""Clusters in network namespaces for slow_link.py: their run files, processes and what was seen."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.lab.hosts import Lab

from isles.run.paths import RunDir
from isles.run.records import read_rows

PORT, DDP_PORT = 29655, 29656
ALONE_STEPS, ALONE = 192, {"sync_every": 48, "fragments": 4, "delay": 4}
"""Steps of `alone`, and its shape: fragments that follow one another sooner are more figures."""
DEADLINE_S = 1800.0
SCRIPT = Path(__file__).absolute().with_name("slow_link.py")

RUN_FILE = """\
name: {name}
output_dir: /shared/runs
model: {{name_or_path: {model}, init: scratch}}
data: {{sources: [{{type: fake}}], seq_length: {seq_length}, validation_fraction: 0}}
training:
  max_steps: {steps}
  global_batch_size: {batch}
  micro_batch_size: {rows}
  learning_rate: 1e-3
  precision: 32-true
  logging_steps: 1
  eval_steps: null
strategy: {{kind: ddp}}
balance: even
checkpoint: {{every_steps: null, every_minutes: null, export_on_finish: false}}
track: [jsonl]
clusters: [{{name: {cluster}, comm_timeout: 120s}}]
"""

OUTER = """\
outer: {{kind: diloco, sync_every: {sync_every}, codec: {codec}, fragments: {fragments},
  delay: {delay}, max_rate: {max_rate}, min_clusters: {num_clusters}, deadline: 300s}}
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a cluster trains, and its section `outer`.

    Args:
        rows: samples of a cluster's inner step.
        delay: inner steps.
        max_rate: as in the section.
    """

    model: str = "llama-15m"
    seq_length: int = 128
    rows: int = 4
    sync_every: str = "100"
    codec: str = "int8"
    fragments: int = 4
    delay: int = 8
    max_rate: str = "null"


@dataclass(slots=True)
class Seen:
    """What was read at one time."""

    at: float
    moved: dict[str, int]
    """By host: bytes that its interface has sent and received."""

    cpu: dict[str, float]
    """CPU seconds of ranks and the hub, all together."""


@dataclass(frozen=True, slots=True)
class Records:
    """What is left of a run that is over."""

    rows: list[list[dict[str, Any]]]
    """By cluster: the rows of its metrics."""
    seen: list[Seen]


class Watch:
    """Reads the interfaces' counters and the processes' CPU time again and again."""

    def __init__(self, lab: Lab, names: Sequence[str], kinds: dict[str, list[int]]) -> None:
        self._lab, self._names, self._kinds = lab, names, kinds
        self._over = threading.Event()
        self.seen: list[Seen] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.25):
            moved = {name: interface_bytes(self._lab, name) for name in self._names}
            cpu = {kind: sum(map(cpu_s, pids)) for kind, pids in self._kinds.items()}
            self.seen.append(Seen(time.time(), moved, cpu))

    def end(self) -> list[Seen]:
        """Stop; what was read."""
        self._over.set()
        self._thread.join()
        return self.seen


def interface_bytes(lab: Lab, host: str) -> int:
    """Bytes that a host has received and sent, headers and acknowledgments included."""
    text = Path(f"/proc/{lab.pid1(host)}/net/dev").read_text()
    fields = text.split("eth0:")[1].split()
    return int(fields[0]) + int(fields[8])


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, without its children; 0 where it has gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


class Bench:
    """The hosts, and what runs on them.

    Args:
        lab: the hosts.
        clusters: two of them.
        meeting: that of the hub.
        shape: see there.
    """

    def __init__(self, lab: Lab, clusters: Sequence[str], meeting: str, shape: Shape) -> None:
        self.lab, self.clusters, self.meeting, self.shape = lab, clusters, meeting, shape

    def write(self, name: str, cluster: str, steps: int, *, ranks: int = 1, more: str = "") -> Path:
        """A run file, as the hosts see it."""
        text = RUN_FILE.format(
            **asdict(self.shape),
            name=name,
            cluster=cluster,
            steps=steps,
            batch=self.shape.rows * ranks,
        )
        (self.lab.shared / f"{name}.yaml").write_text(text + more)
        return Path("/shared") / f"{name}.yaml"

    def plain(self, steps: int) -> Records:
        """Each cluster for itself."""
        names = [f"plain-{cluster}" for cluster in self.clusters]
        commands = []
        for name, cluster in zip(names, self.clusters, strict=True):
            run_file = self.write(name, cluster, steps)
            commands.append(python("-m", "isles", "train", str(run_file)))
        return self._run(names, commands)

    def ddp(self, steps: int) -> Records:
        """One cluster of two ranks."""
        run_file = self.write("ddp", "both", steps, ranks=2)
        commands = []
        for rank in range(len(self.clusters)):
            torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
            torchrun += [f"--node_rank={rank}", f"--master_addr={self.lab.address('a1')}"]
            torchrun += [f"--master_port={DDP_PORT}", "--rdzv_backend=static"]
            commands.append(python(*torchrun, "-m", "isles.train", str(run_file)))
        return self._run(["ddp"], commands)

    def outer(self, steps: int) -> Records:
        """Two clusters that average."""
        return self._outer("outer", self.clusters, steps)

    def alone(self, steps: int) -> Records:
        """One cluster whose average is its own."""
        return self._outer("alone", self.clusters[:1], steps, ALONE)

    def _outer(
        self, kind: str, clusters: Sequence[str], steps: int, shape: Mapping[str, int] | None = None
    ) -> Records:
        own = asdict(self.shape) | dict(shape or {})
        outer = OUTER.format(**own, num_clusters=len(clusters))
        files = [
            self.write(f"{kind}-{cluster}", cluster, steps, more=outer) for cluster in clusters
        ]
        with self._hub(kind, len(clusters)) as (line, server):
            commands = [python(str(SCRIPT), "--rank", str(file), str(line)) for file in files]
            names = [file.stem for file in files]
            return self._run(names, commands, server)

    @contextmanager
    def _hub(self, kind: str, min_clusters: int) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
        """A hub: its join line, as the hosts see it, and its process."""
        folder = f"hub-{kind}"
        address, state = self.lab.address(self.meeting), self.lab.shared / folder
        rules = {"min_clusters": min_clusters, "dead_after_s": 60.0}
        (self.lab.shared / "rules.json").write_text(json.dumps(rules))
        command = python("-m", "isles.outer.hub", f"/shared/{folder}", "--run", "slow")
        command += ["--listen", f"{address}:{PORT}", "--settings", "/shared/rules.json"]
        with self._processes([(self.meeting, command, "hub")]) as (server,):
            end = time.monotonic() + 60.0
            while not (state / "join").exists():
                self._check([server], ["hub"], end, "has not opened")
                time.sleep(0.05)
            yield Path("/shared", folder, "join"), server

    def _run(
        self,
        names: Sequence[str],
        commands: Sequence[list[str]],
        server: subprocess.Popen[bytes] | None = None,
    ) -> Records:
        """Start a command on each cluster, and wait for their end."""
        clusters = self.clusters[: len(commands)]
        logs = [f"{names[0]}-{cluster}" for cluster in clusters]
        todo = list(zip(clusters, commands, logs, strict=True))
        with self._processes(todo) as processes:
            kinds: dict[str, list[int]] = {"ranks": [], "hub": []}
            watch = Watch(self.lab, self.clusters, kinds)
            end = time.monotonic() + DEADLINE_S
            while any(process.poll() is None for process in processes):
                kinds |= _pids(processes, server)
                self._check(processes, logs, end, "is not over")
                time.sleep(1.0)
            self._check(processes, logs, end, "is not over")
            rows = [
                list(read_rows(RunDir(self.lab.shared / "runs" / f"{name}-1").metrics))
                for name in names
            ]
            return Records(rows, watch.end())

    @contextmanager
    def _processes(
        self, todo: Sequence[tuple[str, list[str], str]]
    ) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Commands in hosts, each with a log; they end with the block."""
        fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "HF_HUB_OFFLINE": "1"}
        fixed |= {"CUDA_VISIBLE_DEVICES": ""}
        with ExitStack() as stack:
            found = []
            for host, command, log in todo:
                into = stack.enter_context((self.lab.shared / f"{log}.log").open("wb"))
                argv = self.lab.argv(host, command, **fixed)
                child = subprocess.Popen(
                    argv,
                    env=self.lab.environ(),
                    stdin=subprocess.DEVNULL,
                    stdout=into,
                    stderr=subprocess.STDOUT,
                )
                stack.callback(_end, child)
                found.append(child)
            yield found

    def _check(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        logs: Sequence[str],
        end: float,
        what: str,
    ) -> None:
        """Nothing has failed, and there is time left."""
        for process, log in zip(processes, logs, strict=True):
            has_failed = process.poll() not in (None, 0)
            if has_failed or time.monotonic() > end:
                text = (self.lab.shared / f"{log}.log").read_text(errors="replace")[-4000:]
                how = f"exit code {process.returncode}" if has_failed else what
                raise RuntimeError(f"{log}: {how}\n{text}")


def _pids(
    processes: Sequence[subprocess.Popen[bytes]], server: subprocess.Popen[bytes] | None
) -> dict[str, list[int]]:
    """The processes by kind."""
    found: dict[str, list[int]] = {"ranks": [], "hub": []}
    for process in processes:
        for child in _family(process):
            found["ranks"].append(child.pid)
    if server is not None:
        found["hub"] = [child.pid for child in _family(server)]
    return found


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        parent = psutil.Process(process.pid)
        return [child for child in parent.children(recursive=True) if child.cmdline()]
    except psutil.NoSuchProcess:
        return []


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill it with all that it has started."""
    for descendant in _family(child):
        descendant.kill()
    child.kill()
    child.wait()


def python(*words: str) -> list[str]:
    """In the folder of the hosts' common files, as the interpreter that runs this."""
    return ["env", "-C", "/shared", sys.executable, *words]
