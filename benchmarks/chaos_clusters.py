"""The clusters of `benchmarks/chaos.py`, each started as `isles train` starts a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import psutil
from chaos_wires import Wires
from common import environment

from isles.config.load import load_run_file
from isles.config.resolve import resolve
from isles.launch.local import added_variables, agent_command, local_fleet, start_agent
from isles.outer.bucket.chain import Chain
from isles.outer.hub.core import HubCore
from isles.outer.hub.journal import Journal
from isles.outer.hub.rules import Settings
from isles.run.begin import begin_run, new_attempt
from isles.run.join_line import JoinLine
from isles.run.objects import open_store
from isles.run.paths import RunDir
from isles.run.records import read_record, write_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.buckets import BUCKET, CREDENTIALS

START_S = 240.0
RUN, BUCKET_URL = "chaos", f"s3://{BUCKET}/runs"
LONGEST_S = 12.0
"""So long the first cluster waits for the others, which is less than its deadline."""
BATCHES = {"a": 12, "b": 8, "c": 6, "d": 6}
RANKS = {"a": 2, "b": 2, "c": 1, "d": 1}
_TEXT_BYTES = 3_000_000
FIRST_STEPS = 200
_VOCABULARY = 1024
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
_RUN_FILE = """\
name: {run}
output_dir: {folder}/runs
model: {{{model}}}
tokenizer: {{{tokenizer}}}
data:
  sources: [{{path: {inputs}/text.jsonl}}]
  seq_length: 64
  validation_fraction: 0.05
  cache_dir: {inputs}/cache
training:
  max_steps: {max_steps}
  global_batch_size: {batch}
  micro_batch_size: auto
  learning_rate: 4e-3
  warmup_steps: {warmup}
  precision: 32-true
  logging_steps: 1
  eval_steps: null
  eval_samples: 384
balance: even
checkpoint: {{every_steps: 15, every_minutes: null, keep: 2, export_on_finish: false}}
track: [jsonl]
"""
_OUTER = """\
strategy: {{kind: {strategy}}}
clusters: [{{name: {name}, gpus_per_node: {ranks}, max_restarts: 50}}]
outer: {{kind: diloco, {outer}}}
"""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What all clusters read.

    Args:
        folder: where the text is.
        model, tokenizer: as in a run file.
    """

    folder: Path
    model: str
    tokenizer: str

    def run_file(self, folder: Path, name: str, max_steps: int, outer: str = "") -> Path:
        """The run file of a cluster, or of a plain run."""
        folder.mkdir(parents=True, exist_ok=True)
        text = _RUN_FILE.format(
            run=RUN if outer else name,  # in a bucket clusters of one run meet
            folder=folder / name if outer else folder,
            inputs=self.folder,
            model=self.model,
            tokenizer=self.tokenizer,
            max_steps=max_steps,
            warmup=min(20, max_steps - 1),
            batch=BATCHES.get(name, 8),
        )
        if outer:
            strategy = "fsdp" if name == "a" else "ddp"
            text += _OUTER.format(strategy=strategy, name=name, ranks=RANKS[name], outer=outer)
        path = folder / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
        return path


def prepare(folder: Path, first_steps: int) -> Inputs:
    """Real text, and a model and a tokenizer that one short run trains.

    All begin with its weights: from scratch runs differ by several percent in their loss, even
    undisturbed, as the first averages of tiny models are rough.
    """
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(SHAPE))
    size = 0
    with (folder / "text.jsonl").open("w", encoding="utf-8") as stream:
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            size += stream.write(json.dumps({"text": text}) + "\n")
            if size > _TEXT_BYTES:
                break
    scratch = f"name_or_path: {folder}/model, init: scratch"
    inputs = Inputs(folder, scratch, f"train_vocab_size: {_VOCABULARY}")
    run_file = inputs.run_file(folder / "first", "first", first_steps)
    command = [sys.executable, "-m", "isles", "train", str(run_file)]
    command.append("checkpoint.export_on_finish=true")
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=START_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first = folder / "first/runs/first-1"
    return Inputs(folder, f"name_or_path: {first}/model", f"name_or_path: {first}/tokenizer")


@dataclass
class Cluster:
    """One cluster: its run directory, and the processes that run in it now."""

    name: str
    run_file: Path
    join_text: Callable[[], str]
    variables: Mapping[str, str] = field(default_factory=dict)
    run_dir: RunDir | None = None
    rows: dict[tuple[str, int, float], dict[str, Any]] = field(default_factory=dict)
    """All that it has ever recorded, also of steps that a restart has taken out again."""
    _place: tuple[int, int] = (0, 0)

    def start(self) -> None:
        """Type the command once more."""
        loaded = load_run_file(self.run_file)
        resolved = resolve(loaded, num_gpus=0)
        begun = begin_run(resolved, loaded.text, "auto")
        self.run_dir = begun.run_dir
        if line := self.join_text():
            self.run_dir.join_line.touch(mode=0o600)
            self.run_dir.join_line.write_text(line)
        attempt = new_attempt(self.run_dir, loaded.text)
        local_fleet(resolved, begun.resume_from).write(attempt)
        self._child = start_agent(
            attempt,
            agent_command(self.run_dir, attempt),
            {**environment(), **added_variables(resolved, environment()), **self.variables},
            world_size=resolved.world_size,
            device="cpu",
        )

    @property
    def directory(self) -> RunDir:
        """Where it runs."""
        assert self.run_dir is not None
        return self.run_dir

    def poll(self) -> int | None:
        """The exit code of the start that runs or ran last."""
        return self._child.poll()

    @property
    def came_too_late(self) -> bool:
        """Whether it has ended because all others had finished when it came back."""
        attempt = self.directory.last_attempt()
        error = None if attempt is None else read_record(attempt.rank_error(0))
        return error is not None and "have finished this run" in str(error["what"])

    def processes(self, what: str) -> list[psutil.Process]:
        """`all`, `ranks`, or the `last rank`."""
        assert self.run_dir is not None
        with suppress(psutil.NoSuchProcess):
            agent = psutil.Process(self._child.pid)
            family = [agent, *agent.children(recursive=True)]
            if what == "all":
                return family
            attempt = self.run_dir.last_attempt()
            assert attempt is not None
            records = [read_record(attempt.rank_record(rank)) for rank in range(RANKS[self.name])]
            pids = [record["pid"] for record in records if record]
            ranks = [each for each in family if each.pid in pids]
            return ranks[-1:] if what == "last rank" else ranks
        return []

    def send(self, what: str, number: signal.Signals) -> None:
        """A signal to some of its processes."""
        for process in self.processes(what):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def read(self) -> None:
        """Look at what it has recorded since."""
        if self.run_dir is None or not self.run_dir.metrics.exists():
            return
        with self.run_dir.metrics.open("rb") as stream:
            inode = os.fstat(stream.fileno()).st_ino
            # A restart writes the file anew, without the steps that it does again.
            stream.seek(self._place[1] if self._place[0] == inode else 0)
            data = stream.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._place = inode, stream.tell() - len(data) + len(whole)
        for line in whole.splitlines():
            row = json.loads(line)
            self.rows[(row["kind"], row.get("outer_step", row["step"]), row.get("at", 0.0))] = row

    def steps_at(self) -> list[float]:
        """When each inner step was done."""
        return sorted(at for kind, _, at in self.rows if kind == "train")

    def turns(self) -> list[dict[str, Any]]:
        """Each turn that was ever taken in, in the order of time."""
        found = [row for (kind, _, _), row in self.rows.items() if kind == "outer"]
        return sorted(found, key=lambda row: float(row["at"]))

    def log(self) -> str:
        """The end of what its newest start has said."""
        attempt = None if self.run_dir is None else self.run_dir.last_attempt()
        if attempt is None:
            return ""
        paths = [attempt.agent_log, attempt.rank_log(0)]
        return "\n".join(p.read_text(errors="replace")[-3000:] for p in paths if p.exists())


@dataclass
class Run:
    """A hub and its clusters."""

    folder: Path
    clusters: dict[str, Cluster]
    wires: Wires
    is_bucket: bool = False
    port: int = 0
    _server: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] | None = None

    def serve(self) -> None:
        """Start the hub, or start it again on its state."""
        command = [sys.executable, "-m", "isles.outer.hub", str(self.folder / "state")]
        command += ["--run", "chaos", "--settings", str(self.folder / "settings.json")]
        if self.port:
            command += ["--listen", f"127.0.0.1:{self.port}"]
        before = 0 if self._log is None else self._log.tell()
        self._log = self._log or (self.folder / "hub.log").open("wb")
        self._server = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        end = time.monotonic() + START_S
        while b"is open" not in (text := (self.folder / "hub.log").read_bytes()[before:]):
            assert self._server.poll() is None and time.monotonic() < end, text.decode()
            time.sleep(0.05)
        self.port = JoinLine.read(self.folder / "state" / "join").port
        self.wires.goal = self.port

    def serve_bucket(self) -> None:
        """Start the S3 server, in which all lies in memory."""
        self._log = (self.folder / "hub.log").open("wb")
        command = [sys.executable, "-m", "tests.buckets", str(self.folder)]
        self._server = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, cwd=Path(__file__).parents[1]
        )
        end = time.monotonic() + START_S
        while not (place := self.folder / "port").exists():
            text = (self.folder / "hub.log").read_text()
            assert self._server.poll() is None and time.monotonic() < end, text
            time.sleep(0.05)
        self.port = self.wires.goal = (read_record(place) or {})["port"]
        os.environ.update(CREDENTIALS, AWS_ENDPOINT_URL=f"http://127.0.0.1:{self.port}")
        import boto3

        boto3.client("s3").create_bucket(Bucket=BUCKET)

    def last_events(self) -> list[dict[str, Any]]:
        """What the hub has noted, or who shared the bucket; of that only the last ones."""
        if not self.is_bucket:
            self.kill_hub()
            journal = Journal(self.folder / "state" / "hub.sqlite")
            found = [dict(row) for row in journal.rows("SELECT * FROM events")]
            journal.close()
            self._server = None
            return found
        memory = Journal(Path(":memory:"))
        core = HubCore(self.folder / "state", Settings(), time.monotonic, memory)
        Chain(open_store(f"{BUCKET_URL}/{RUN}", "this benchmark"), core).open()
        spans = memory.rows("SELECT * FROM blocks ORDER BY start")
        assert all(a["stop"] <= b["start"] for a, b in pairwise(spans)), "a sample twice"
        return [dict(row) for row in memory.rows("SELECT * FROM events")]

    def let_in(self) -> None:
        """Once all clusters are ready to join, let them, so that each run begins alike."""
        first: float | None = None
        end = time.monotonic() + START_S
        while True:
            phases = [self._phase(cluster) for cluster in self.clusters.values()]
            if first is None and "joining" in phases:
                first = time.monotonic()
            waited_s = 0.0 if first is None else time.monotonic() - first
            if phases.count("joining") == len(phases) or waited_s > LONGEST_S:
                break
            assert time.monotonic() < end, f"the clusters are not ready: {phases}"
            time.sleep(0.05)
        for name in self.clusters:
            self.wires.mend(name)

    def _phase(self, cluster: Cluster) -> str:
        record = read_record(cluster.directory.status)
        return "" if record is None else str(record["phase"])

    def kill_hub(self) -> None:
        """kill -9, and wait until it is gone."""
        assert self._server is not None
        self._server.kill()
        self._server.wait(START_S)

    def end(self) -> None:
        """End all processes."""
        for cluster in self.clusters.values():
            if cluster.run_dir is not None:
                cluster.send("all", signal.SIGKILL)
        if self._server is not None:
            self.kill_hub()


@contextmanager
def running(
    inputs: Inputs,
    folder: Path,
    names: Sequence[str],
    max_steps: int,
    outer: str,
    rules: Mapping[str, Any] | None,
) -> Iterator[Run]:
    """A hub and clusters of these names, for as long as the block lasts; without rules a bucket."""
    wires, state = Wires(), folder / "state"
    run = Run(folder, {}, wires, is_bucket=rules is None)
    folder.mkdir(parents=True)
    try:
        if rules is None:
            outer += f", engine: bucket, url: '{BUCKET_URL}'"
            run.serve_bucket()
        else:
            write_record(folder / "settings.json", dict(rules))
            run.serve()
        for name in names:
            port = wires.add(name)

            def text(port: int = port) -> str:
                if run.is_bucket:
                    return ""
                line = (state / "join").read_text()
                return line.replace(f":{run.port}/", f":{port}/")

            run_file = inputs.run_file(folder, name, max_steps, outer)
            there = {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
            run.clusters[name] = Cluster(name, run_file, text, there if run.is_bucket else {})
            run.wires.silence(name)
            run.clusters[name].start()
        run.let_in()
        yield run
    finally:
        run.end()
