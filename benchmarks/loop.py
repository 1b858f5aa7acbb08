"""Speed of isles' training loop and of its start, against a hand-written PyTorch loop.

    python benchmarks/loop.py [--quick|--smoke]

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
With --smoke all are of one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common import (
    EVEN_ROWS,
    MICRO_BATCH,
    SEQ_LENGTH,
    Effort,
    Inputs,
    environment,
    make_parser,
    need,
    pick,
    prepare,
    print_figures,
    print_header,
    print_row,
    print_speeds,
    run_processes,
    take_turns,
    train_with_isles,
)

from isles.run.paths import RunDir
from isles.run.records import read_rows

if TYPE_CHECKING:
    from bare_loop import BareLoop

    from isles.train.parts import Parts

HERE = Path(__file__).resolve().parent
LABELS = {1: "1 process", 2: "DDP on 2"}
SHORT, LATER = {1: "1p", 2: "ddp2"}, {1: "", 2: "_ddp2"}

FULL = Effort(rounds=30, chunk_steps=10)
QUICK = Effort(rounds=8, chunk_steps=10)
SMOKE = Effort(rounds=2, chunk_steps=2, warmup_rounds=0)


def make_bare(parts: Parts, model: Path, tokens: Path) -> Sequence[BareLoop]:
    """The bare loops, with isles' weights; this runs in the ranks."""
    from bare_loop import BareLoop, Settings, make_model

    assert parts.total_steps is not None
    settings = Settings(SEQ_LENGTH, MICRO_BATCH, max_steps=parts.total_steps)
    world, loops = parts.world, []
    for _ in "AB":
        twin = make_model(model)
        twin.load_state_dict(parts.engine.model.state_dict())
        loops.append(BareLoop(twin, tokens, settings, world.rank, world.world_size))
    return loops


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


def report_speed(ready: Inputs, world_size: int, effort: Effort) -> tuple[float, float]:
    """Measure and print; the median ratio, and that of bare against itself."""
    name, label = f"speed{world_size}", LABELS[world_size]
    run_file = ready.run_file(
        name, world_size=world_size, max_steps=effort.max_steps, more=EVEN_ROWS
    )
    what = (ready.model, str(ready.tokens))
    turns = take_turns(HERE / "loop.py", run_file, world_size, effort, *what)
    step_tokens = MICRO_BATCH * SEQ_LENGTH * world_size
    ratio, floor = print_speeds(label, turns, effort, step_tokens)
    ours, bare = float(turns.rows[-1]["loss"]), [losses[-1] for losses in turns.losses]
    print(f"{label}, last losses: isles {ours:.2f}, bare {bare[0]:.2f} and {bare[1]:.2f}")
    return ratio, floor


def main() -> None:
    """Measure everything and print it."""
    parser = make_parser(__doc__, quick="fewer and shorter rounds")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)  # what this script starts
    options = parser.parse_args()
    need("torch", "transformers")
    if options.rank:
        from ranks import run_rank

        run_dir, chunk_steps, model, tokens = options.rank
        run_rank(
            RunDir(Path(run_dir)),
            int(chunk_steps),
            lambda parts: make_bare(parts, Path(model), Path(tokens)),
        )
        return
    effort = pick(options, full=FULL, quick=QUICK, smoke=SMOKE)
    first_steps = pick(options, full=5, quick=3, smoke=1)
    sizes = (1,) if options.smoke else (1, 2)
    figures = {}
    with tempfile.TemporaryDirectory(prefix="isles-loop-") as folder:
        ready = prepare(Path(folder))
        if not options.smoke:
            # Warms every file that the measured runs read.
            train_with_isles(ready.run_file("again"))
        print_header()
        for world_size in sizes:
            ratio, floor = report_speed(ready, world_size, effort)
            figures[f"ratio_{SHORT[world_size]}"] = ratio
            figures["noise_floor" + LATER[world_size]] = floor
        for world_size in sizes:
            ratio = report_first_step(ready, world_size, first_steps)
            figures["first_step_ratio" + LATER[world_size]] = ratio
    print_figures(figures)


if __name__ == "__main__":
    main()
