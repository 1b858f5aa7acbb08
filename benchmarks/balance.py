"""Wall time of a step on unequal processes, against the ideal and against even rows.

    python benchmarks/balance.py [--quick|--smoke] [--strategy ddp|fsdp]
    python benchmarks/balance.py --noise

Three processes on the CPU train together, the second slowed to a half and the third to a third;
nothing in the training code knows of it. They are equal devices, so that isles begins with even
rows (`balance: auto`), looks at the steps after ten of them and after fifty, and then the benchmark
begins.

In turns: some steps with isles' rows, some with even rows, and each rank for itself, all three at
once since they share the machine's cores and caches, on a model of its own without any
communication. The ideal is the work of a step divided by the sum of these three speeds. Each ratio
is of one round; the slowdown is on all the while.

Under ddp, where ranks meet once a step, a supervisor stops and continues the slow ones many times a
second (tests/slowdown.py). Under fsdp ranks meet at every block, and each meeting would wait for
whoever is stopped just then; there the slow ones really compute every block two and three times,
forward and backward. They compute all the while, so that on two cores there are two ranks, 1 : 2.

With `--noise` two equal ranks train for 20 steps, while another process keeps one core busy for
three seconds of every six, from before the first step on. The last line is JSON:
    rows: of the two ranks after 20 steps.
    rows_from_even: how many rows a rank is away from an even split; the bar is 1.

With `--smoke` two ranks train, 1 : 3, on short rows.

The last line is JSON, medians of the rounds, of the worst strategy that was measured:
    balanced_over_ideal: seconds of a step with isles' rows over the ideal; 1 is perfect.
    even_over_ideal: the same with even rows.
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
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from common import environment, make_parser, need, pick, print_figures

from isles.config.load import load_run_file
from isles.config.resolve import resolve
from isles.dist.split import even_split
from isles.run.begin import begin_run
from isles.run.paths import RunDir

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tests.slowdown import slowed  # noqa: E402

FACTORS = (1.0, 2.0, 3.0)
ROWS, LONGEST = 66, 512
DEADLINE_S = 900.0

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": LONGEST,
}

RUN_FILE = """\
name: {strategy}
output_dir: {folder}/runs
model: {{name_or_path: {folder}/model, init: scratch}}
data:
  sources: [{{type: fake}}]
  seq_length: {seq_length}
  validation_fraction: 0
training:
  max_steps: {max_steps}
  global_batch_size: {rows}
  learning_rate: 1e-3
  lr_scheduler_type: constant
  precision: 32-true
  logging_steps: 1000
  eval_steps: null
strategy: {{kind: {strategy}}}
checkpoint: {{every_steps: null, every_minutes: null}}
track: [jsonl]
clusters: [{{gpus_per_node: {world_size}, comm_timeout: 300s}}]
"""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    warmup_steps: int
    rounds: int
    chunk_steps: int
    factors: Sequence[float] = FACTORS
    """How many times as slow each rank is."""

    works: bool = False
    """Whether the slow ranks are slow by real work."""

    seq_length: int = LONGEST
    solo_s: float = 2.0
    """Seconds for which each rank computes for itself in a round."""


NOISE_S = 3.0
NOISE = f"""
import os, time
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
while True:
    end = time.monotonic() + {NOISE_S}
    while time.monotonic() < end:
        pass
    time.sleep({NOISE_S})
"""

FULL = Effort(warmup_steps=55, rounds=20, chunk_steps=3)
QUICK = Effort(warmup_steps=52, rounds=5, chunk_steps=3)
SMOKE = Effort(12, 1, 1, factors=(1.0, 3.0), seq_length=32, solo_s=0.5)


def wait_for(*files: Path, children: Sequence[subprocess.Popen[bytes]] = ()) -> None:
    """Wait until files are there.

    Raises:
        RuntimeError: a child ended first, or they did not come.
    """
    end = time.monotonic() + DEADLINE_S
    while not all(file.exists() for file in files):
        if time.monotonic() > end or any(child.poll() is not None for child in children):
            raise RuntimeError(f"{[str(file) for file in files if not file.exists()]} did not come")
        time.sleep(0.01)


def measure(folder: Path, strategy: str, effort: Effort) -> dict[str, Any]:
    """Rounds of one strategy."""
    if strategy == "fsdp":
        # Ranks that compute all the time need a core each, or they slow one another.
        cores = len(os.sched_getaffinity(0))
        effort = replace(effort, works=True, factors=effort.factors[: max(2, cores)])
    factors, world_size = effort.factors, len(effort.factors)
    max_steps = effort.warmup_steps + 2 * effort.rounds * (effort.chunk_steps + 1)
    max_steps += bool(effort.rounds)
    path = folder / f"{strategy}.yaml"
    values = {"rows": ROWS, "seq_length": effort.seq_length, "max_steps": max_steps}
    values["world_size"] = world_size
    path.write_text(RUN_FILE.format(folder=folder, strategy=strategy, **values), encoding="utf-8")
    loaded = load_run_file(path)
    run_dir = begin_run(resolve(loaded, num_gpus=0), loaded.text, "no").run_dir
    ask = json.dumps(astuple(effort))
    command = [sys.executable, str(HERE / "balance.py"), "--rank", str(run_dir.path), ask]
    log = (run_dir.path / "benchmark.log").open("wb")
    children = [
        subprocess.Popen(
            command,
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size)),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank in range(world_size)
    ]
    stopped = dict(zip([child.pid for child in children], factors, strict=True))
    is_stopped = max(factors) > 1 and not effort.works
    try:
        ready = (run_dir.path / f"ready-{rank}" for rank in range(world_size))
        wait_for(*ready, children=children)
        with slowed(stopped) if is_stopped else nullcontext():
            (run_dir.path / "go").touch()
            codes = [child.wait(DEADLINE_S) for child in children]
        if any(codes):
            raise RuntimeError(f"exit codes {codes}")
    except (RuntimeError, subprocess.TimeoutExpired):
        print((run_dir.path / "benchmark.log").read_text(errors="replace")[-4000:])
        raise
    finally:
        log.close()
        for child in children:
            with suppress(ProcessLookupError):
                child.kill()
    print((run_dir.path / "benchmark.log").read_text(errors="replace")[-3000:], file=sys.stderr)
    return dict(json.loads((run_dir.path / "rounds.json").read_text(encoding="utf-8")))


def report(strategy: str, result: dict[str, Any]) -> tuple[float, float]:
    """Print the figures of a strategy; its two ratios."""
    rounds = [entry for entry in result["rounds"] if {"balanced", "even"} <= entry.keys()]
    ideals = [ROWS / sum(entry["speeds"]) for entry in rounds]
    ratios = {}
    for name in ("balanced", "even"):
        seconds = [float(entry[name]) for entry in rounds]
        over = [own / ideal for own, ideal in zip(seconds, ideals, strict=True)]
        ratios[name] = statistics.median(over)
        dealt = result["rows"]
        if name == "even":
            dealt = even_split(ROWS, len(dealt), 8, in_step=True).rows
        rows = " ".join(map(str, dealt))
        figures = f"{statistics.median(seconds):>9.3f}{ratios[name]:>9.3f}"
        print(f"{strategy:<6}{name:<10}{rows:<12}{figures}{min(over):>9.3f}{max(over):>9.3f}")
    ranks = range(len(result["rows"]))
    speeds = [statistics.median(entry["speeds"][rank] for entry in rounds) for rank in ranks]
    alone = " ".join(f"{speed:.1f}" for speed in speeds)
    print(f"{strategy:<6}{'ideal':<22}{statistics.median(ideals):>9.3f}   rows/s: {alone}")
    return ratios["balanced"], ratios["even"]


def noise(folder: Path) -> dict[str, Any]:
    """Rows of two equal ranks after 20 steps beside other work."""
    other = subprocess.Popen([sys.executable, "-c", NOISE])
    try:
        rows = measure(folder, "ddp", Effort(20, 0, 0, (1.0, 1.0)))["rows"]
    finally:
        other.kill()
        other.wait()
    even = even_split(ROWS, 2, 1, in_step=False).rows
    away = max(abs(own - one) for own, one in zip(rows, even, strict=True))
    return {"rows": rows, "rows_from_even": away}


def main() -> None:
    """Measure everything and print it."""
    parser = make_parser(__doc__, quick="fewer and shorter rounds")
    parser.add_argument("--strategy", action="append", help="ddp (without it) or fsdp")
    parser.add_argument("--noise", action="store_true", help="equal ranks beside other work")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)  # what this script starts
    options = parser.parse_args()
    need("torch", "transformers")
    if options.rank:
        from balance_ranks import run_rank

        run_rank(RunDir(Path(options.rank[0])), Effort(*json.loads(options.rank[1])))
        return
    effort = pick(options, full=FULL, quick=QUICK, smoke=SMOKE)
    figures = {}
    with tempfile.TemporaryDirectory(prefix="isles-balance-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        if options.noise:
            print_figures(noise(folder))
            return
        head = f"{'step s':>9}{'/ideal':>9}{'min':>9}{'max':>9}"
        print(f"{'':<16}{'rows':<12}{head}", flush=True)
        for strategy in options.strategy or ("ddp",):
            figures[strategy] = report(strategy, measure(folder, strategy, effort))
    balanced, even = (max(pair[index] for pair in figures.values()) for index in (0, 1))
    print_figures({"balanced_over_ideal": balanced, "even_over_ideal": even})


if __name__ == "__main__":
    main()
