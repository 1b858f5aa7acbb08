"""Speed of isles under each strategy, against a hand-written loop under the same strategy.

    python benchmarks/strategies.py [--quick|--smoke] [--only STRATEGY …]

Two ranks on the CPU, one thread each, train the same Llama (llama-2m with 2048 tokens of
vocabulary, fp32) on the same prepared tokens with the same optimizer. The strategies are ddp, fsdp
(FULL_SHARD, block by block) and DeepSpeed's ZeRO stages 1 to 3; the other loop is
`bare_strategies.py`.

Chunks of isles' own loop and of two bare loops, A and B, take turns in the same two processes:
isles A B isles B A isles … Each ratio is isles' tokens/s over those of the bare chunk right before
or right after it; the noise floor compares the two bare chunks between two of isles.

In the first chunk all three train on the same rows; their losses there must agree, so that it is
the same mathematics that is timed. Later the bare loops read random rows of the same tokens.

The line before the last is JSON too: the noise floors, B's tokens/s over A's. The last line has the
median ratio of each strategy, isles over bare; higher is better. With --smoke this is fsdp,
unless others are asked for.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common import (
    EVEN_ROWS,
    SEQ_LENGTH,
    Effort,
    Inputs,
    Turns,
    make_parser,
    need,
    pick,
    prepare,
    print_figures,
    print_header,
    print_speeds,
    take_turns,
)

from isles.run.paths import RunDir

if TYPE_CHECKING:
    from bare_strategies import StrategyLoop

    from isles.train.parts import Parts

HERE = Path(__file__).resolve().parent
MICRO_BATCH = 4
WORLD_SIZE = 2
CHUNK_STEPS = 10  # as often as isles records: a record falls into each chunk
SAME_LOSS = 1e-4

SECTIONS = {
    "ddp": "strategy: {kind: ddp}\n",
    "fsdp": "strategy: {kind: fsdp, sharding_strategy: FULL_SHARD}\n",
    "zero1": "strategy: {kind: deepspeed, zero_stage: 1}\n",
    "zero2": "strategy: {kind: deepspeed, zero_stage: 2}\n",
    "zero3": "strategy: {kind: deepspeed, zero_stage: 3}\n",
}

FULL = Effort(rounds=30, chunk_steps=CHUNK_STEPS)
QUICK = Effort(rounds=4, chunk_steps=CHUNK_STEPS, warmup_rounds=1)
SMOKE = Effort(rounds=1, chunk_steps=CHUNK_STEPS, warmup_rounds=0)


def make_bare(parts: Parts, strategy: str, model: Path, tokens: Path) -> Sequence[StrategyLoop]:
    """The bare loops, with isles' first weights and first rows; this runs in the ranks."""
    from bare_loop import Settings, make_model
    from bare_strategies import StrategyLoop

    from isles.models.build import fill_model

    first, cursor = [], 0
    for _ in range(CHUNK_STEPS):
        data = parts.loader.step(cursor)
        (batch,) = data.micro_batches
        first.append((batch.input_ids_BT, batch.targets_BT))
        cursor = data.next_sample
    assert parts.total_steps is not None
    settings = Settings(SEQ_LENGTH, MICRO_BATCH, max_steps=parts.total_steps)
    world, loops = parts.world, []
    for _ in "AB":
        twin = make_model(model)
        fill_model(twin, parts.config.model, seed=parts.config.seed)
        loops.append(
            StrategyLoop(strategy, twin, tokens, settings, world.rank, world.world_size, first)
        )
    return loops


def check_same(strategy: str, turns: Turns) -> str:
    """The losses of the first chunk, where all have the same rows.

    Raises:
        SystemExit: they differ.
    """
    ours = [float(row["loss"]) for row in turns.rows[:2]]
    (first, mean), others = ours, [losses[:2] for losses in turns.losses]
    for other in others:
        if not all(math.isclose(a, b, rel_tol=SAME_LOSS) for a, b in zip(ours, other, strict=True)):
            sys.exit(f"{strategy}: not the same mathematics: losses {ours} of isles, {other} bare")
    steps = f"step 1 and mean of steps 2 to {CHUNK_STEPS}"
    bare = ", ".join(f"{a:.5f} {b:.5f}" for a, b in others)
    return f"losses of {steps}: isles {first:.5f} {mean:.5f}; bare {bare}"


def report(ready: Inputs, strategy: str, effort: Effort) -> tuple[float, float]:
    """Measure and print; the median ratio, and that of bare against itself."""
    run_file = ready.run_file(
        strategy,
        world_size=WORLD_SIZE,
        max_steps=effort.max_steps,
        micro_batch=MICRO_BATCH,
        more=SECTIONS[strategy] + EVEN_ROWS,
    )
    what = (strategy, ready.model, str(ready.tokens))
    turns = take_turns(HERE / "strategies.py", run_file, WORLD_SIZE, effort, *what)
    figures = print_speeds(strategy, turns, effort, MICRO_BATCH * SEQ_LENGTH * WORLD_SIZE)
    print(f"{strategy}, {check_same(strategy, turns)}", flush=True)
    return figures


def main() -> None:
    """Measure every strategy and print it."""
    parser = make_parser(__doc__, quick="fewer rounds")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS))
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)  # what this script starts
    options = parser.parse_args()
    strategies = options.only or (["fsdp"] if options.smoke else list(SECTIONS))
    need("torch", "transformers")
    if not {"ddp", "fsdp"}.issuperset(strategies):
        need("deepspeed")
    if options.rank:
        from ranks import run_rank

        run_dir, _, strategy, model, tokens = options.rank
        run_rank(
            RunDir(Path(run_dir)),
            CHUNK_STEPS,
            lambda parts: make_bare(parts, strategy, Path(model), Path(tokens)),
        )
        return
    effort = pick(options, full=FULL, quick=QUICK, smoke=SMOKE)
    ratios, floors = {}, {}
    with tempfile.TemporaryDirectory(prefix="isles-strategies-") as folder:
        ready = prepare(Path(folder))
        print_header()
        for strategy in strategies:
            ratio, floor = report(ready, strategy, effort)
            ratios[strategy], floors[f"noise_floor_{strategy}"] = ratio, floor
    print_figures(floors)
    print_figures(ratios)


if __name__ == "__main__":
    main()
