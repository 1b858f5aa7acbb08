"""What the benchmarks share that compare isles' own loop with bare ones, chunk by chunk.

Chunks of isles' loop and of two bare loops, A and B, take turns in the same processes, so that
whatever else the machine does falls on all of them: isles A B isles B A isles …
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from isles.config.load import load_run_file
from isles.config.resolve import load_resolved, resolve
from isles.run.begin import begin_run
from isles.run.env import read_rank_env
from isles.run.paths import RunDir
from isles.run.records import read_rows

if TYPE_CHECKING:
    from isles.data.loader import Loader, StepData
    from isles.dist.split import RowSplit
    from isles.train.parts import Parts

SEQ_LENGTH, MICRO_BATCH = 128, 8
PROCESS_DEADLINE_S = 120.0

RUN_FILE = """\
name: {name}
output_dir: {inputs.folder}/runs
model: {{name_or_path: {inputs.model}, init: scratch}}
tokenizer: {{{inputs.tokenizer}}}
data:
  sources: [{{path: python-docs}}]
  seq_length: {seq_length}
  validation_fraction: 0
  cache_dir: {inputs.folder}/cache
training:
  max_steps: {max_steps}
  global_batch_size: {batch}
  micro_batch_size: {micro_batch}
  learning_rate: 1e-3
  lr_scheduler_type: cosine
  optimizer: adamw
  max_grad_norm: 1.0
  precision: 32-true
  logging_steps: 10
  eval_steps: null
checkpoint: {{every_steps: null, every_minutes: null}}
track: [jsonl, tensorboard]
clusters: [{{gpus_per_node: {world_size}, comm_timeout: 60s}}]
"""

EVEN_ROWS = "balance: even\n"
"""For chunks that are compared: a start that measures the ranks may give them unequal rows."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What isles and the bare loops train on; `model` and `tokenizer` as in a run file."""

    folder: Path
    model: str
    tokenizer: str
    tokens: Path | None = None

    def run_file(
        self,
        name: str,
        *,
        world_size: int = 1,
        max_steps: int = 1,
        micro_batch: int = MICRO_BATCH,
        more: str = "",
    ) -> Path:
        """A run file for isles; `more` is added to it."""
        path = self.folder / f"{name}.yaml"
        text = RUN_FILE.format(
            name=name,
            inputs=self,
            seq_length=SEQ_LENGTH,
            batch=micro_batch * world_size,
            micro_batch=micro_batch,
            world_size=world_size,
            max_steps=max_steps,
        )
        path.write_text(text + more, encoding="utf-8")
        return path


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured; a round is one chunk of isles and two bare ones."""

    rounds: int
    chunk_steps: int
    warmup_rounds: int = 2

    @property
    def max_steps(self) -> int:
        """Of a run of isles: one step more, at whose beginning the last chunk ends."""
        return (self.warmup_rounds + self.rounds) * self.chunk_steps + 1


@dataclass(frozen=True, slots=True)
class Turns:
    """What was measured in the ranks, as rank 0 saw it."""

    chunks: list[tuple[str, float, float]]
    """Who ran (isles, A or B), the seconds it took, and those of rank 0's CPU, in order."""

    rows: list[dict[str, Any]]
    """What isles recorded of its training steps."""

    losses: list[list[float]]
    """What A and B recorded at the same steps."""

    tokens: list[list[int]]
    """Trained tokens of each chunk of A and B, of loops that count them."""


# ---- This part runs in the ranks, and is the only one that imports torch. ----


class Bare(Protocol):
    """A bare loop."""

    losses: list[float]

    def run(self, steps: int) -> None:
        """Train for so many steps. All ranks must call this."""


class Interleaved:
    """Stands where the loop's loader is, and lets the bare loops A and B run between its chunks.

    `barrier` is called before each chunk, so that the ranks begin it together.
    """

    def __init__(
        self, loader: Loader, bare: Sequence[Bare], chunk_steps: int, barrier: Callable[[], Any]
    ) -> None:
        self._loader, self._bare = loader, bare
        self._chunk_steps, self._barrier = chunk_steps, barrier
        self._calls, self._since = 0, (0.0, 0.0)
        self.chunks: list[tuple[str, float, float]] = []
        """As in Turns."""

    @property
    def split(self) -> RowSplit:
        """As the loader's."""
        return self._loader.split

    def step(self, samples_seen: int) -> StepData:
        """The loader's step; between two chunks the bare loops run first."""
        if self._calls % self._chunk_steps == 0:
            self._end_chunk()
        self._calls += 1
        return self._loader.step(samples_seen)

    def stream_state(self) -> Any:
        """As the loader's."""
        return self._loader.stream_state()

    def close(self) -> None:
        """Close the loader."""
        self._loader.close()

    def _end_chunk(self) -> None:
        if self._loader._ahead is not None:
            # What is read ahead is isles' work: it ends on isles' clock, not on bare's.
            wait([self._loader._ahead[1]], timeout=PROCESS_DEADLINE_S)
        if self._calls:
            self._end("isles")
        for name in ("AB", "BA")[self._calls // self._chunk_steps % 2]:
            self._begin()
            self._bare["AB".index(name)].run(self._chunk_steps)
            self._end(name)
        self._begin()

    def _begin(self) -> None:
        self._barrier()
        self._since = time.perf_counter(), time.process_time()

    def _end(self, name: str) -> None:
        wall, cpu = self._since
        self.chunks.append((name, time.perf_counter() - wall, time.process_time() - cpu))


def run_rank(
    run_dir: RunDir, chunk_steps: int, make_bare: Callable[[Parts], Sequence[Bare]]
) -> None:
    """Train as isles' worker does, with bare loops in between; rank 0 writes turns.json.

    Args:
        run_dir: the run directory.
        chunk_steps: see Effort.
        make_bare: the loops A and B.
    """
    import torch.distributed as dist

    from isles.dist.files import find_disks
    from isles.dist.world import join_world, leave_world
    from isles.train.build import build
    from isles.train.loop import train
    from isles.train.record import Recorder
    from isles.train.stop import StopSignals

    env = replace(read_rank_env(), store=run_dir.path / "store")
    resolved = load_resolved(run_dir.resolved.read_text(encoding="utf-8"))
    recorder = Recorder(run_dir, is_main=env.rank == 0, world_size=env.world_size)
    signals = StopSignals()
    timeout_s = resolved.config.clusters[0].comm_timeout
    world = join_world(env, device=resolved.device, timeout_s=timeout_s)
    disks = find_disks(world, run_dir.path)
    parts = build(resolved, run_dir, world, recorder, signals, None, disks, 1)
    bare = make_bare(parts)
    interleaved = Interleaved(parts.loader, bare, chunk_steps, dist.barrier)
    parts.loader = interleaved  # type: ignore[assignment]  # it stands in for the loader
    signals.training_begins()
    train(parts)
    parts.loader.close()
    parts.checkpoints.close()
    recorder.close()
    if env.rank == 0:
        rows = [row for row in read_rows(run_dir.metrics) if row["kind"] == "train"]
        losses = [loop.losses for loop in bare]
        tokens = [loop.tokens for loop in bare if hasattr(loop, "tokens")]
        result = {"chunks": interleaved.chunks, "rows": rows, "losses": losses, "tokens": tokens}
        (run_dir.path / "turns.json").write_text(json.dumps(result), encoding="utf-8")
    leave_world()


# ---- What follows starts processes and compares their figures. ----


def environment(**added: str) -> dict[str, str]:
    """For every process here: one thread, the loopback interface, no GPU, compiled modules."""
    fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    # With this set, isles would be compiled at every start, and the packages that bare imports not.
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, **fixed, **added}


def run_processes(
    commands: Sequence[Sequence[str]],
    environments: Sequence[dict[str, str]],
    deadline_s: float = PROCESS_DEADLINE_S,
) -> str:
    """Run processes side by side to their end; returns what the first one printed.

    Raises:
        RuntimeError: one failed, or they were not over in time; all have been ended then.
    """
    end = time.monotonic() + deadline_s
    processes = []
    with tempfile.TemporaryFile("w+") as output:
        try:
            for command, env in zip(commands, environments, strict=True):
                child = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
                processes.append(child)
            codes = [child.wait(max(0.0, end - time.monotonic())) for child in processes]
            problem = f"exit codes {codes}" if any(codes) else ""
        except subprocess.TimeoutExpired:
            problem = f"not over after {deadline_s:.0f} s"
        finally:
            end_processes(processes)
        output.seek(0)
        text = output.read()
    if problem:
        raise RuntimeError(f"{' '.join(commands[0])}: {problem}\n{text[-4000:]}")
    return text


def end_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill what still runs, with all that it has started."""
    for child in processes:
        if child.poll() is None:
            for descendant in psutil.Process(child.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    descendant.kill()
            child.kill()
            child.wait(PROCESS_DEADLINE_S)


def train_with_isles(run_file: Path) -> RunDir:
    """`isles train`, to its end."""
    train = [sys.executable, "-m", "isles", "train", str(run_file), "--resume", "no"]
    run_processes([train], [environment()])
    runs = (run_file.parent / "runs").glob(f"{run_file.stem}-*")
    return RunDir(max(runs, key=lambda path: int(path.name.rpartition("-")[2])))


def prepare(folder: Path) -> Inputs:
    """Train a tokenizer and prepare the tokens with one short run of isles."""
    fresh = Inputs(folder, model="llama-2m", tokenizer="train_vocab_size: 2048")
    first = train_with_isles(fresh.run_file("prepare"))
    tokens = max((folder / "cache").rglob("tokens.bin"), key=lambda path: path.stat().st_mtime)
    manifest = json.loads(tokens.with_name("manifest.json").read_text(encoding="utf-8"))
    assert manifest["dtype"].endswith(("uint16", "u2")), manifest["dtype"]
    return Inputs(folder, str(first.model), f"name_or_path: {first.tokenizer}", tokens)


def take_turns(
    script: Path,
    run_file: Path,
    world_size: int,
    effort: Effort,
    *arguments: str,
    step_deadline_s: float = 2.0,
) -> Turns:
    """What the ranks of a run measure: each is `script --rank RUN_DIR CHUNK_STEPS ARGUMENTS`."""
    loaded = load_run_file(run_file)
    run_dir = begin_run(resolve(loaded, num_gpus=0), loaded.text, "no").run_dir
    command = [sys.executable, str(script), "--rank", str(run_dir.path), str(effort.chunk_steps)]
    environments = [
        environment(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        for rank in range(world_size)
    ]
    deadline_s = 60 + step_deadline_s * effort.max_steps
    run_processes([[*command, *arguments]] * world_size, environments, deadline_s)
    return Turns(**json.loads((run_dir.path / "turns.json").read_text(encoding="utf-8")))


def ratios_of(chunks: Sequence[tuple[str, float]]) -> tuple[list[float], list[float]]:
    """Ratios of speed: isles over each neighbour, and B over A."""
    isles, noise = [], []
    for (name, seconds), (next_name, next_seconds) in pairwise(chunks):
        if "isles" not in (name, next_name):
            by_name = {name: seconds, next_name: next_seconds}
            noise.append(by_name["A"] / by_name["B"])
        elif name == "isles":
            isles.append(next_seconds / seconds)
        else:
            isles.append(seconds / next_seconds)
    return isles, noise


def print_header() -> None:
    """The names of the table's columns."""
    names = f"{'isles':>10}{'bare':>10}{'ratio':>9}{'min':>9}{'max':>9}{'n':>5}"
    print(f"{'':<36}{names}", flush=True)


def print_row(name: str, isles: float, bare: float, ratios: Sequence[float]) -> float:
    """One line of the table; returns the median ratio."""
    middle = statistics.median(ratios)
    numbers = f"{isles:>10.2f}{bare:>10.2f}{middle:>9.3f}{min(ratios):>9.3f}{max(ratios):>9.3f}"
    print(f"{name:<36}{numbers}{len(ratios):>5}", flush=True)
    return middle


def print_speeds(label: str, turns: Turns, effort: Effort, step_tokens: int) -> tuple[float, float]:
    """Lines of the table; the median ratio of speeds, and that of bare against itself.

    Tokens per second of CPU time say less, as nothing waits in them, but hold up on a busy machine.
    """
    kept = turns.chunks[3 * effort.warmup_rounds :]
    figures, chunk_tokens = [], effort.chunk_steps * step_tokens
    for unit, column in (("s", 1), ("CPU s", 2)):
        chunks = [(chunk[0], float(chunk[column])) for chunk in kept]
        isles, noise = ratios_of(chunks)
        speed = {
            name: chunk_tokens / statistics.median(spent for who, spent in chunks if who == name)
            for name in ("isles", "A", "B")
        }
        ratio = print_row(f"{label}, tokens/{unit}", speed["isles"], speed["A"], isles)
        floor = print_row(f"{label}, bare B against A", speed["B"], speed["A"], noise)
        figures.append((ratio, floor))
    return figures[0]
