"""What the watchdog costs: CPU time, not wall-clock time, so that other work does not disturb it.

    python benchmarks/watchdog.py

Two rows. A step puts down five times where it is: microseconds of the main thread for each step,
less those of an empty loop, the least of seven rounds. Beside it two threads of each rank look at
the clock and give signs of life over a store: milliseconds of CPU time for each second in which
the main thread does nothing at all, with a real watchdog and a real store. The last line is JSON.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from isles.config.sections.run import RunConfig
from isles.run.env import read_rank_env
from isles.run.paths import RunDir
from isles.train.hang import StepClock, Watchdog
from isles.train.heartbeat import Heartbeats, serve_on_loopback
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
    """Milliseconds of the watchdog's threads for each second."""
    run_dir = RunDir(folder)
    server, address = serve_on_loopback()
    heartbeats = Heartbeats(address, "benchmark", rank=0, world_size=1, store_rank=0, server=server)
    config = RunConfig.model_validate({"training": {"script": "none.py"}})
    clock = StepClock()
    recorder = Recorder(run_dir, is_main=False, world_size=1)
    watch = Watchdog(
        config,
        run_dir.attempt(1),
        heartbeats,
        recorder,
        clock,
        read_rank_env({}),
        ["here"],
        is_gpu=False,
        saving_moved_at=time.monotonic,
    )
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
        figures["threads_ms_per_s"] = idle_ms(Path(folder))
    print(f"both threads, each second       {figures['threads_ms_per_s']:.2f} ms of one core")
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
