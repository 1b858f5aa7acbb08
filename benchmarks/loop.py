"""Speed of isles' training loop and of its start, against a hand-written PyTorch loop.

    python benchmarks/loop.py [--quick]

Both train the same Llama (llama-2m with 2048 tokens of vocabulary, fp32) on the same prepared
tokens with the same optimizer, on the CPU, one thread per process. The other is `bare_loop.py`.

Speed: chunks of isles' own loop and of two bare loops, A and B, take turns in the same process, or
with DDP in the same two processes: isles A B isles B A isles … Each ratio is isles' tokens/s over
those of the bare chunk right before or right after it; the noise floor compares the two bare
chunks between two of isles. isles' chunk counts all that it does in a step: reading ahead in its
thread, records, trackers, its look at signals.

First step: whole processes in turn, from just before the process is started to the end of its
first step; for isles that is `isles train`, to the time in the row of step 1 in metrics.jsonl. Each
ratio is isles' seconds over bare's. Tokens and tokenizer have been prepared for both.

The last line is JSON; all figures are medians of ratios:
    ratio_1p, ratio_ddp2: isles' tokens/s over bare's, one process and two with DDP; higher is
        better.
    noise_floor, noise_floor_ddp2: bare against itself, as B's tokens/s over A's.
    first_step_ratio, first_step_ratio_ddp2: isles' seconds over bare's; lower is better.
"""

from __future__ import annotations

import argparse
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
from typing import TYPE_CHECKING, Any

import psutil

from isles.config.load import load_run_file
from isles.config.resolve import load_resolved, resolve
from isles.rundir.begin import begin_run
from isles.rundir.env import ATTEMPT, STORE, read_rank_env
from isles.rundir.paths import RunDir
from isles.rundir.records import read_rows

if TYPE_CHECKING:
    from bare_loop import BareLoop

    from isles.data.loader import Loader, StepData

HERE = Path(__file__).resolve().parent
SEQ_LENGTH, MICRO_BATCH = 128, 8  # as in the run file below
WARMUP_ROUNDS = 2
PROCESS_DEADLINE_S = 120.0
LABELS = {1: "1 process", 2: "DDP on 2"}

RUN_FILE = """\
name: {name}
output_dir: {inputs.folder}/runs
model: {{name_or_path: {inputs.model}, init: scratch}}
tokenizer: {{{inputs.tokenizer}}}
data:
  sources: [{{path: python-docs}}]
  seq_length: 128
  validation_fraction: 0
  cache_dir: {inputs.folder}/cache
training:
  max_steps: {max_steps}
  global_batch_size: {batch}
  micro_batch_size: 8
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


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured; a round is one chunk of isles and two bare ones."""

    rounds: int
    chunk_steps: int
    first_steps: int


FULL = Effort(rounds=30, chunk_steps=10, first_steps=5)
QUICK = Effort(rounds=8, chunk_steps=10, first_steps=3)


# ---- Speed: this part runs in the ranks, and is the only one that imports torch. ----


class Interleaved:
    """Stands where the loop's loader is, and lets the bare loops A and B run between its chunks.

    `barrier` is called before each chunk, so that the ranks begin it together.
    """

    def __init__(
        self, loader: Loader, bare: Sequence[BareLoop], chunk_steps: int, barrier: Callable[[], Any]
    ) -> None:
        self._loader, self._bare = loader, bare
        self._chunk_steps, self._barrier = chunk_steps, barrier
        self._calls, self._since = 0, 0.0
        self.chunks: list[tuple[str, float]] = []
        """Who ran, and the seconds it took, in order."""

    def step(self, samples_seen: int) -> StepData:
        """The loader's step; between two chunks the bare loops run first."""
        if self._calls % self._chunk_steps == 0:
            self._end_chunk()
        self._calls += 1
        return self._loader.step(samples_seen)

    def close(self) -> None:
        """Close the loader."""
        self._loader.close()

    def _end_chunk(self) -> None:
        if self._loader._ahead is not None:
            # What is read ahead is isles' work: it ends on isles' clock, not on bare's.
            wait([self._loader._ahead[1]], timeout=PROCESS_DEADLINE_S)
        if self._calls:
            self.chunks.append(("isles", time.perf_counter() - self._since))
        for name in ("AB", "BA")[self._calls // self._chunk_steps % 2]:
            self._barrier()
            began = time.perf_counter()
            self._bare["AB".index(name)].run(self._chunk_steps)
            self.chunks.append((name, time.perf_counter() - began))
        self._barrier()
        self._since = time.perf_counter()


def run_rank(run_dir: RunDir, model: Path, tokens: Path, chunk_steps: int) -> None:
    """Train as isles' worker does, with bare loops in between; rank 0 writes chunks.json."""
    import torch.distributed as dist
    from bare_loop import BareLoop, Settings, make_model

    from isles.dist.world import join_world, leave_world
    from isles.train.build import build
    from isles.train.loop import train
    from isles.train.record import Recorder
    from isles.train.stop import StopSignals

    env = read_rank_env()
    resolved = load_resolved(run_dir.resolved.read_text(encoding="utf-8"))
    recorder = Recorder(run_dir, is_main=env.rank == 0, world_size=env.world_size)
    signals = StopSignals()
    timeout_s = resolved.config.clusters[0].comm_timeout
    world = join_world(env, device=resolved.device, timeout_s=timeout_s)
    parts = build(resolved, run_dir, world, recorder, signals, None)
    assert parts.total_steps is not None
    settings = Settings(SEQ_LENGTH, MICRO_BATCH, max_steps=parts.total_steps + chunk_steps)
    bare = []
    for _ in "AB":
        twin = make_model(model)
        twin.load_state_dict(parts.engine.model.state_dict())
        bare.append(BareLoop(twin, tokens, settings, env.rank, env.world_size))
    interleaved = Interleaved(parts.loader, bare, chunk_steps, dist.barrier)
    parts.loader = interleaved  # type: ignore[assignment]  # it stands in for the loader
    signals.training_begins()
    train(parts)
    parts.loader.close()
    parts.checkpoints.close()
    recorder.close()
    if env.rank == 0:
        losses = [float(read_rows(run_dir.metrics)[-1]["loss"]), *(loop.loss for loop in bare)]
        result = {"chunks": interleaved.chunks, "losses": losses}
        (run_dir.path / "chunks.json").write_text(json.dumps(result), encoding="utf-8")
    leave_world()


# ---- What follows starts processes and compares their figures. ----


@dataclass(frozen=True, slots=True)
class Inputs:
    """What both train on; `model` and `tokenizer` as in a run file."""

    folder: Path
    model: str
    tokenizer: str
    tokens: Path | None = None

    def run_file(self, name: str, *, world_size: int = 1, max_steps: int = 1) -> Path:
        """A run file for isles."""
        path = self.folder / f"{name}.yaml"
        batch = MICRO_BATCH * world_size
        text = RUN_FILE.format(
            name=name, inputs=self, batch=batch, world_size=world_size, max_steps=max_steps
        )
        path.write_text(text, encoding="utf-8")
        return path


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
    ready = Inputs(folder, str(first.model), f"name_or_path: {first.tokenizer}")
    train_with_isles(ready.run_file("again"))  # warms every file that the measured runs read
    tokens = max((folder / "cache").rglob("tokens.bin"), key=lambda path: path.stat().st_mtime)
    manifest = json.loads(tokens.with_name("manifest.json").read_text(encoding="utf-8"))
    assert manifest["dtype"].endswith(("uint16", "u2")), manifest["dtype"]
    return replace(ready, tokens=tokens)


def measure_speed(ready: Inputs, world_size: int, effort: Effort) -> dict[str, Any]:
    """What rank 0 has measured of isles and the bare loops."""
    # One step more, at whose beginning the last chunk ends.
    max_steps = (WARMUP_ROUNDS + effort.rounds) * effort.chunk_steps + 1
    run_file = ready.run_file(f"speed{world_size}", world_size=world_size, max_steps=max_steps)
    loaded = load_run_file(run_file)
    run_dir = begin_run(resolve(loaded, num_gpus=0), loaded.text, "no").run_dir
    what = (run_dir.path, ready.model, ready.tokens, effort.chunk_steps)
    command = [sys.executable, str(HERE / "loop.py"), "--rank", *map(str, what)]
    common = {"WORLD_SIZE": str(world_size), STORE: str(run_dir.path / "store"), ATTEMPT: "0"}
    environments = [
        environment(RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(world_size)
    ]
    run_processes([command] * world_size, environments, deadline_s=60 + 2.0 * max_steps)
    return dict(json.loads((run_dir.path / "chunks.json").read_text(encoding="utf-8")))


def ratios_of(chunks: Sequence[tuple[str, float]]) -> tuple[list[float], list[float]]:
    """Ratios of speed, without the first rounds: isles over each neighbour, and B over A."""
    kept = chunks[3 * WARMUP_ROUNDS :]
    isles, noise = [], []
    for (name, seconds), (next_name, next_seconds) in pairwise(kept):
        if "isles" not in (name, next_name):
            by_name = {name: seconds, next_name: next_seconds}
            noise.append(by_name["A"] / by_name["B"])
        elif name == "isles":
            isles.append(next_seconds / seconds)
        else:
            isles.append(seconds / next_seconds)
    return isles, noise


def first_step_bare(ready: Inputs, world_size: int) -> float:
    """Seconds from the start of the bare script to the end of its first step."""
    runner = [sys.executable]
    if world_size > 1:
        runner += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    script = [str(HERE / "bare_loop.py"), ready.model, str(ready.tokens)]
    began = time.time()
    text = run_processes([[*runner, *script]], [environment()])
    last = next(line for line in reversed(text.splitlines()) if line.startswith("{"))
    return float(json.loads(last)["at"]) - began


def first_step_isles(ready: Inputs, world_size: int) -> float:
    """Seconds from the start of `isles train` to the end of its first step."""
    run_file = ready.run_file(f"first{world_size}", world_size=world_size)
    began = time.time()
    run_dir = train_with_isles(run_file)
    row = next(row for row in read_rows(run_dir.metrics) if row["step"] == 1)
    return float(row["at"]) - began


def report_first_step(ready: Inputs, world_size: int, pairs: int) -> float:
    """Measure and print; the median ratio. The two take turns at coming first."""
    seconds: dict[str, list[float]] = {"isles": [], "bare": []}
    for pair in range(pairs):
        for name in ("bare", "isles") if pair % 2 == 0 else ("isles", "bare"):
            start = first_step_bare if name == "bare" else first_step_isles
            seconds[name].append(start(ready, world_size))
    return print_row(
        f"{LABELS[world_size]}, seconds to first step",
        statistics.median(seconds["isles"]),
        statistics.median(seconds["bare"]),
        [ours / theirs for ours, theirs in zip(seconds["isles"], seconds["bare"], strict=True)],
    )


def print_row(name: str, isles: float, bare: float, ratios: Sequence[float]) -> float:
    """One line of the table; returns the median ratio."""
    middle = statistics.median(ratios)
    numbers = f"{isles:>10.2f}{bare:>10.2f}{middle:>9.3f}{min(ratios):>9.3f}{max(ratios):>9.3f}"
    print(f"{name:<36}{numbers}{len(ratios):>5}", flush=True)
    return middle


def report_speed(ready: Inputs, world_size: int, effort: Effort) -> tuple[float, float]:
    """Measure and print; the median ratio, and that of bare against itself."""
    result = measure_speed(ready, world_size, effort)
    isles, noise = ratios_of(result["chunks"])
    tokens = effort.chunk_steps * MICRO_BATCH * SEQ_LENGTH * world_size
    kept = result["chunks"][3 * WARMUP_ROUNDS :]
    speed = {
        name: tokens / statistics.median(seconds for who, seconds in kept if who == name)
        for name in ("isles", "A", "B")
    }
    label = LABELS[world_size]
    ratio = print_row(f"{label}, tokens/s", speed["isles"], speed["A"], isles)
    floor = print_row(f"{label}, bare B against A", speed["B"], speed["A"], noise)
    ours, *bare = result["losses"]
    print(f"{label}, last losses: isles {ours:.2f}, bare {bare[0]:.2f} and {bare[1]:.2f}")
    return ratio, floor


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)  # what this script starts
    options = parser.parse_args()
    if options.rank:
        run_dir, model, tokens, chunk_steps = options.rank
        run_rank(RunDir(Path(run_dir)), Path(model), Path(tokens), int(chunk_steps))
        return
    effort = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(prefix="isles-loop-") as folder:
        ready = prepare(Path(folder))
        print(
            f"{'':<36}{'isles':>10}{'bare':>10}{'ratio':>9}{'min':>9}{'max':>9}{'n':>5}", flush=True
        )
        ratio_1p, noise_1p = report_speed(ready, 1, effort)
        ratio_ddp2, noise_ddp2 = report_speed(ready, 2, effort)
        first_1p = report_first_step(ready, 1, effort.first_steps)
        first_ddp2 = report_first_step(ready, 2, effort.first_steps)
    figures = {"ratio_1p": ratio_1p, "ratio_ddp2": ratio_ddp2, "noise_floor": noise_1p}
    figures |= {"first_step_ratio": first_1p, "first_step_ratio_ddp2": first_ddp2}
    figures |= {"noise_floor_ddp2": noise_ddp2}
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
