"""What the watchdog costs: CPU time, not wall-clock time, so that other work does not disturb it.

    python benchmarks/watchdog.py

Two rows. A step puts down five times where it is: microseconds of the main thread for each step,
less those of an empty loop, the least of seven rounds. Beside it a thread of each rank looks at the
clock, and whether another rank asks in their store: milliseconds of CPU time for each second in
which the main thread does nothing at all, with a store over TCP. The last line is JSON.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from isles.config.sections.run import RunConfig
from isles.run.env import read_rank_env
from isles.run.paths import RunDir
from isles.train.clock import StepClock
from isles.train.hang import Watchdog
from isles.train.record import Recorder

STEPS, ROUNDS = 100_000, 7
IDLE_S = 20.0


def step_us() -> float:
    """Microseconds of a step."""
    clock, found, empty = StepClock(), [], []
    for _ in range(ROUNDS):
        began = time.process_time()
        for step in range(STEPS):
            clock.step(step)
            for stage in ("data loading", "forward and backward", "optimizer step", "agreeing"):
                clock.at(stage)
        found.append(time.process_time() - began)
        began = time.process_time()
        for _ in range(STEPS):
            pass
        empty.append(time.process_time() - began)
    return (min(found) - min(empty)) / STEPS * 1e6


def idle_ms(folder: Path) -> float:
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
    time.sleep(IDLE_S)
    took_s = time.process_time() - began
    watch.close()
    return took_s / IDLE_S * 1e3


def main() -> None:
    """Measure and print."""
    figures = {"step_us": step_us()}
    print(f"the main thread, each step      {figures['step_us']:.2f} microseconds")
    with tempfile.TemporaryDirectory() as folder:
        figures["thread_ms_per_s"] = idle_ms(Path(folder))
    print(f"its thread, each second         {figures['thread_ms_per_s']:.2f} ms of one core")
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
