"""Step time of a pipeline over two unequal processes: an uneven cut, an even cut, and the ideal.

    python benchmarks/pipeline.py [--quick|--smoke]

Two processes on the CPU hold a model of eight blocks as a pipeline. The first really computes each
of its blocks three times, forward and backward; nothing in the training code knows of it. They are
equal devices, so that isles begins with an even cut (`balance: auto`). It measures the ranks by
their steps, and saves their speeds in the checkpoint. A second run resumes from this checkpoint,
and isles cuts the model by these speeds.

In both runs steps alternate with a measurement of each rank for itself, both at once since they
share the machine's caches: the whole model, on a copy of its own, without any communication. The
ideal is the work of a step divided by the sum of these two speeds.

The last line is JSON, medians of the rounds:
    uneven_of_ideal: the ideal time over the time of a step with the uneven cut; 1 is perfect, and
        the bar is 0.85.
    even_of_ideal: the same with the even cut.
    uneven_speedup: time of a step with the even cut over that with the uneven cut.
    layers: of the stages in the second run.
    bubble: share of the time that a perfect pipeline of this many micro-batches waits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from common import environment, make_parser, need, pick, print_figures

from isles.config.load import load_run_file
from isles.config.resolve import resolve
from isles.run.begin import begin_run
from isles.run.paths import RunDir

HERE = Path(__file__).resolve().parent

SLOW = 3
"""How often the first rank computes each block."""

ROWS, LENGTH = 24, 256
"""Rows of a step, each a micro-batch, and their tokens."""

DEADLINE_S = 900.0

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": LENGTH,
}

RUN_FILE = """\
name: {name}
output_dir: {folder}/runs
model: {{name_or_path: {folder}/model, init: scratch}}
data:
  sources: [{{type: fake}}]
  seq_length: {length}
  validation_fraction: 0
training:
  max_steps: {max_steps}
  global_batch_size: {rows}
  micro_batch_size: 1
  learning_rate: 1e-3
  lr_scheduler_type: constant
  precision: 32-true
  logging_steps: 1000
  eval_steps: null
strategy: {{kind: ddp, pp_size: 2}}
checkpoint: {{every_steps: null, every_minutes: null, async_save: false, export_on_finish: false}}
track: [jsonl]
clusters: [{{gpus_per_node: 2, comm_timeout: 300s}}]
"""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    warmup_steps: int
    rounds: int
    chunk_steps: int
    solo_s: float
    """Seconds for which each rank computes for itself in a round."""

    @property
    def steps(self) -> int:
        """Steps of a run. The last one only ends the last round."""
        return self.warmup_steps + self.rounds * self.chunk_steps + 1


FULL = Effort(warmup_steps=4, rounds=20, chunk_steps=3, solo_s=2.0)
QUICK = Effort(warmup_steps=4, rounds=8, chunk_steps=2, solo_s=1.5)
SMOKE = Effort(warmup_steps=3, rounds=2, chunk_steps=1, solo_s=3.0)
"""All of them train for the 10 s that isles needs to see the speeds of the ranks."""


def measure(folder: Path, name: str, effort: Effort, before: RunDir | None) -> RunDir:
    """One run, which resumes from another one's checkpoint or begins anew."""
    path = folder / f"{name}.yaml"
    steps = effort.steps * (1 if before is None else 2)
    values = {"length": LENGTH, "rows": ROWS, "max_steps": steps}
    path.write_text(RUN_FILE.format(folder=folder, name=name, **values), encoding="utf-8")
    loaded = load_run_file(path)
    run_dir = begin_run(resolve(loaded, num_gpus=0), loaded.text, "no").run_dir
    ask = json.dumps(astuple(effort))
    command = [sys.executable, str(HERE / "pipeline.py"), "--rank", str(run_dir.path), ask]
    command.append("" if before is None else str(before.path))
    with (run_dir.path / "benchmark.log").open("wb") as log:
        children = [
            subprocess.Popen(
                command,
                env=environment(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2"),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank in range(2)
        ]
        try:
            if max(child.wait(DEADLINE_S) for child in children):
                raise RuntimeError("a rank failed")
        except (RuntimeError, subprocess.TimeoutExpired):
            print((run_dir.path / "benchmark.log").read_text(errors="replace")[-4000:])
            raise
        finally:
            for child in children:
                with suppress(ProcessLookupError):
                    child.kill()
    return run_dir


def report(name: str, run_dir: RunDir) -> tuple[dict[str, Any], float, float]:
    """Print the figures of a run; its result, the share of the ideal, and the seconds of a step."""
    result = json.loads((run_dir.path / "rounds.json").read_text(encoding="utf-8"))
    rounds: Sequence[dict[str, Any]] = result["rounds"]
    ideals = [ROWS / sum(entry["speeds"]) for entry in rounds]
    seconds = [float(entry["step_s"]) for entry in rounds]
    shares = [ideal / own for ideal, own in zip(ideals, seconds, strict=True)]
    share, step_s = statistics.median(shares), statistics.median(seconds)
    speeds = [statistics.median(entry["speeds"][rank] for entry in rounds) for rank in (0, 1)]
    layers = "+".join(map(str, result["layers"]))
    alone = " ".join(f"{speed:.1f}" for speed in speeds)
    figures = f"{step_s:>9.3f}{statistics.median(ideals):>9.3f}{share:>9.3f}"
    print(f"{name:<8}{layers:<8}{figures}{min(shares):>9.3f}{max(shares):>9.3f}   {alone}")
    return result, share, step_s


def main() -> None:
    """Measure everything and print it."""
    parser = make_parser(__doc__, quick="fewer rounds")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)  # what this script starts
    options = parser.parse_args()
    need("torch", "transformers")
    if options.rank:
        from pipeline_ranks import run_rank

        folder, ask, before = options.rank
        found = RunDir(Path(before)) if before else None
        run_rank(RunDir(Path(folder)), Effort(*json.loads(ask)), found)
        return
    effort = pick(options, full=FULL, quick=QUICK, smoke=SMOKE)
    with tempfile.TemporaryDirectory(prefix="isles-pipeline-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        head = f"{'step s':>9}{'ideal s':>9}{'ideal/':>9}{'min':>9}{'max':>9}"
        print(f"{'cut':<8}{'layers':<8}{head}   rows/s alone", flush=True)
        first = measure(folder, "even", effort, None)
        _, even, even_s = report("even", first)
        second = measure(folder, "uneven", effort, first)
        result, uneven, uneven_s = report("uneven", second)
    print_figures(
        {
            "uneven_of_ideal": uneven,
            "even_of_ideal": even,
            "uneven_speedup": even_s / uneven_s,
            "layers": result["layers"],
            "bubble": 1 / (ROWS + 1),
        }
    )


if __name__ == "__main__":
    main()
