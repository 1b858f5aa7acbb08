"""What the watchdog costs: CPU time, not wall-clock time, so that other work does not disturb it.

    python benchmarks/watchdog.py [--smoke]

Two rows. A step puts down five times where it is: microseconds of the main thread for each step,
less those of an empty loop, the least of seven rounds. Beside it a thread of each rank looks at the
clock, and whether another rank asks in their store: milliseconds of CPU time for each second in
which the main thread does nothing at all, with a store over TCP. The last line is JSON.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from common import make_parser, print_figures
from torch._C._distributed_c10d import TCPStore

from isles.config.sections.run import RunConfig
from isles.run.env import read_rank_env
from isles.run.paths import RunDir
from isles.train.clock import StepClock
from isles.train.hang import Watchdog
from isles.train.record import Recorder

ROUNDS = 7


def step_us(steps: int) -> float:
    """Microseconds of a step."""
    clock, found, empty = StepClock(), [], []
    for _ in range(ROUNDS):
        began = time.process_time()
        for step in range(steps):
            clock.step(step)
            for stage in ("data loading", "forward and backward", "optimizer step", "agreeing"):
                clock.at(stage)
        found.append(time.process_time() - began)
        began = time.process_time()
        for _ in range(steps):
            pass
        empty.append(time.process_time() - began)
    return (min(found) - min(empty)) / steps * 1e6


def idle_ms(folder: Path, idle_s: float) -> float:
    """Milliseconds of the watchdog's thread for each second."""
    run_dir = RunDir(folder)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    config = RunConfig.model_validate({"training": {"script": "none.py"}})
    clock = StepClock()
    recorder = Recorder(run_dir, is_main=False, world_size=1)
    watch = Watchdog(
        config,
        run_dir.attempt(1),
        read_rank_env({}),
        ["here"],
        clock,
        lambda: TCPStore("127.0.0.1", server.port, is_master=False),
        recorder,
        is_gpu=False,
        saving_moved_at=time.monotonic,
    )
    watch.start()
    clock.step(1)
    began = time.process_time()
    time.sleep(idle_s)
    took_s = time.process_time() - began
    watch.close()
    return took_s / idle_s * 1e3


def main() -> None:
    """Measure and print."""
    options = make_parser(__doc__).parse_args()
    steps, idle_s = (5_000, 1.0) if options.smoke else (100_000, 20.0)
    figures = {"step_us": step_us(steps)}
    print(f"the main thread, each step      {figures['step_us']:.2f} microseconds")
    with tempfile.TemporaryDirectory() as folder:
        figures["thread_ms_per_s"] = idle_ms(Path(folder), idle_s)
    print(f"its thread, each second         {figures['thread_ms_per_s']:.2f} ms of one core")
    print_figures(figures, digits=3)


if __name__ == "__main__":
    main()
