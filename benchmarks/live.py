"""What watching costs: a run that is sampled and looked at, and the browser that looks.

    python benchmarks/live.py [--quick|--smoke]

Steps. Three runs on two processes each take turns, two seconds at a time, while the others stand
still (SIGSTOP): one with telemetry and an open page, which a reader follows, and two without
(ISLES_TELEMETRY=off), A and B. Each ratio compares the mean step of a turn with that of the turn
right before or after it; what is printed is the median. B over A is what cannot be told apart.
Where that is more than the hundredth in question, processor time tells: what isles' own processes
beside the ranks (command, agent, dashboard) take, as a share of what the ranks take, watched less
not.

Page. A page in Chromium shows 64 nodes of 8 GPUs, made snapshots in which every number changes, one
each two seconds: milliseconds of its main thread for each, by the clock and by its processor time,
and bytes on the wire.

Agent. The share of one core that sampling this node with eight ranks takes, every two seconds.

The last line is JSON.
"""

from __future__ import annotations

import http.client
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))

import common
import psutil
from tests.browser import browser
from tests.made_watch import MadeWatch, made, served

from isles.agent.telemetry import EVERY_S as SAMPLE_EVERY_S
from isles.agent.telemetry import SampleFile, Telemetry
from isles.run.paths import RunDir
from isles.run.records import read_rows

T = TypeVar("T")

TURN_S = 2.0
SETTLE_S = 0.3
"""At the beginning of a turn, which a step that was cut by the last one falls into."""
NODES, GPUS, EVERY_S = 64, 8, 2.0


class Run:
    """A run that trains without end, in turns."""

    def __init__(self, run_file: Path, *, is_watched: bool) -> None:
        words = ["train", str(run_file), "--resume", "no", "training.logging_steps=1"]
        more = {} if is_watched else {"ISLES_TELEMETRY": "off"}
        self._processes = [_isles(*words, **more)]
        folder, name = run_file.parent / "runs", run_file.stem
        self.run_dir = RunDir(_until(lambda: next(folder.glob(f"{name}-[0-9]*"), None)))
        _until(self.rows)
        if is_watched:
            self._processes.append(_isles("dashboard", str(self.run_dir.path)))
            self._follow(self._processes[-1])

    def _follow(self, dashboard: subprocess.Popen[str]) -> None:
        assert dashboard.stdout is not None
        link = urlsplit(dashboard.stdout.readline().split()[-1])
        path = f"/events?{link.query}"
        threading.Thread(target=_read, args=(link.netloc, path, []), daemon=True).start()

    def rows(self, begin: float = 0.0, end: float = math.inf) -> list[float]:
        """Seconds of the steps that have ended in a span of time."""
        rows = (row for row in read_rows(self.run_dir.metrics) if row["kind"] == "train")
        return [row["step_time_s"] for row in rows if begin < row["at"] < end]

    def send(self, number: int) -> None:
        """A signal to all its processes."""
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                for one in (*parent.children(recursive=True), parent):
                    with suppress(psutil.NoSuchProcess):
                        one.send_signal(number)

    def share_of_others(self, seconds: float) -> float:
        """Processor time of all its processes but the two ranks, over that of the ranks."""
        self.send(signal.SIGCONT)
        before = self._processor_s()
        time.sleep(seconds)
        after = self._processor_s()
        self.send(signal.SIGSTOP)
        *others, first, second = sorted(after[pid] - before.get(pid, 0.0) for pid in after)
        return sum(others) / (first + second)

    def _processor_s(self) -> dict[int, float]:
        found = {}
        for process in self._processes:
            parent = psutil.Process(process.pid)
            for one in (parent, *parent.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    times = one.cpu_times()
                    found[one.pid] = times.user + times.system
        return found

    def turn(self) -> tuple[float, float]:
        """Let it train for a while; the span, without its beginning."""
        begun = time.time()
        self.send(signal.SIGCONT)
        time.sleep(TURN_S)
        self.send(signal.SIGSTOP)
        return begun + SETTLE_S, time.time()


def _isles(*words: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "isles", *words],
        env=common.environment(**more),
        stdout=subprocess.PIPE if words[0] == "dashboard" else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _read(address: str, path: str, sizes: list[tuple[float, int]]) -> None:
    # What a page does on the wire; when how many bytes came.
    connection = http.client.HTTPConnection(address)
    connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
    answer = connection.getresponse()
    with suppress(OSError, http.client.HTTPException):
        while data := answer.read1(1 << 16):
            sizes.append((time.monotonic(), len(data)))


def _until(look: Callable[[], T | None]) -> T:
    end = time.monotonic() + common.PROCESS_DEADLINE_S
    while not (found := look()):
        assert time.monotonic() < end, "a run has not begun"
        time.sleep(0.1)
    return found


def steps(folder: Path, rounds: int, processor_s: float) -> dict[str, float]:
    """Ratio of a step that is watched to one that is not, and of two that are not."""
    inputs = common.prepare(folder)
    spans: list[tuple[str, tuple[float, float]]] = []
    with ExitStack() as stack:
        runs = {}
        for name in ("watched", "a", "b"):
            file = inputs.run_file(name, world_size=2, max_steps=1_000_000)
            runs[name] = Run(file, is_watched=name == "watched")
            stack.callback(runs[name].send, signal.SIGKILL)
            runs[name].send(signal.SIGSTOP)
        for number in range(rounds + 1):
            for name in ("watched", *(("a", "b") if number % 2 else ("b", "a"))):
                spans.append((name, runs[name].turn()))
        shares = {name: runs[name].share_of_others(processor_s) for name in ("watched", "a")}
        for run in runs.values():  # what is not written yet
            run.send(signal.SIGCONT)
        time.sleep(TURN_S)
        turns = [(name, statistics.mean(runs[name].rows(*span))) for name, span in spans[3:]]
    watched, floor = [], []
    for (name, seconds), (next_name, next_seconds) in pairwise(turns):
        if "watched" not in (name, next_name):
            floor.append(seconds / next_seconds if name == "b" else next_seconds / seconds)
        else:
            watched.append(seconds / next_seconds if name == "watched" else next_seconds / seconds)
    for label, ratios in (("watched over not", watched), ("b over a, both not", floor)):
        middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
        print(f"{label:<28}{middle:8.4f}   {low:.3f} to {high:.3f}, n {len(ratios)}", flush=True)
    more = shares["watched"] - shares["a"]
    print(f"{'processor time, of ranks':<28}{more:8.4f}", flush=True)
    return {
        "step_cpu_share": more,
        "step_ratio": statistics.median(watched),
        "step_noise_floor": statistics.median(floor),
        "step_ms": 1e3 * statistics.median(seconds for name, seconds in turns if name == "a"),
    }


@contextmanager
def _counted(address: str, path: str) -> Iterator[list[tuple[float, int]]]:
    sizes: list[tuple[float, int]] = []
    threading.Thread(target=_read, args=(address, path, sizes), daemon=True).start()
    yield sizes


def page(updates: int) -> dict[str, float]:
    """Milliseconds of the browser for each update, and bytes each second."""
    snapshots = [made(100 + k, clusters=1, nodes=NODES, gpus=GPUS) for k in range(updates + 3)]
    found: dict[str, list[float]] = {"wall": [], "cpu": []}
    for domain, key in (("timeTicks", "wall"), ("threadTicks", "cpu")):
        watch = MadeWatch(snapshots[0])
        with browser() as tab, served(watch) as server:
            tab.call("Network.disable")  # else each event is told to the DevTools too
            tab.call("Performance.disable")
            tab.call("Performance.enable", timeDomain=domain)
            tab.size(1600, 1000)
            tab.open(server.link)
            tab.until(f"document.querySelectorAll('#ranks tbody tr').length === {NODES * GPUS}")
            link = urlsplit(server.link)
            with _counted(link.netloc, f"/events?{link.query}") as sizes:
                for number, snapshot in enumerate(snapshots[1:]):
                    before, begun = tab.metrics()["TaskDuration"], time.monotonic()
                    watch.show(snapshot.model_copy(update={"at": time.time()}))
                    rest_s = begun + EVERY_S - time.monotonic()
                    tab.evaluate(f"new Promise((done) => setTimeout(done, {1e3 * rest_s}))")
                    if number >= 2:
                        found[key].append(1e3 * (tab.metrics()["TaskDuration"] - before))
                span_s = EVERY_S * (len(snapshots) - 1)
                first_at = sizes[0][0]
                rate = sum(size for at, size in sizes if at > first_at + 1) / span_s / 1e3
            assert tab.errors == [], tab.errors
    result = {"page_kb_per_s": rate}
    for key, values in found.items():
        result[f"page_{key}_ms"] = statistics.median(values)
        result[f"page_{key}_p95_ms"] = _p95(values)
        middle, high = result[f"page_{key}_ms"], result[f"page_{key}_p95_ms"]
        print(f"an update, {key:<4} ms          {middle:8.1f}   p95 {high:.1f}, n {len(values)}")
    print(f"on the wire, kB/s           {rate:8.1f}", flush=True)
    return result


def agent(samples: int) -> dict[str, float]:
    """What the sampler costs the processor; GPUs, where there are any, are read too."""
    rank = {"pid": psutil.Process().pid, "alive": True, "exit": None, "at": 1.0, "gpu": None}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        file = SampleFile(path / "node-0.jsonl")
        telemetry = Telemetry(
            path, path / "none.jsonl", None, 8, lambda: dict.fromkeys(range(8), rank)
        )
        telemetry.begin()
        costs = []
        for _ in range(samples):
            begun = time.thread_time()
            file.append(telemetry.sample())
            costs.append(time.thread_time() - begun)
    share = statistics.median(costs) / SAMPLE_EVERY_S
    print(f"the agent's sampling, of a core {share:7.2%}", flush=True)
    return {"agent_core_share": share}


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, round(0.95 * len(values)))]


def main() -> None:
    """Measure and print."""
    parser = common.make_parser(__doc__, quick="three minutes")
    parser.add_argument("--only", choices=("steps", "page", "agent"))
    options = parser.parse_args()
    common.need("torch", "transformers")
    result: dict[str, float] = {}
    if options.only in (None, "agent"):
        result |= agent(3 if options.smoke else 100)
    if options.only in (None, "steps"):
        with tempfile.TemporaryDirectory() as folder:
            rounds = common.pick(options, full=40, quick=12, smoke=2)
            result |= steps(Path(folder), rounds, processor_s=2.0 if options.smoke else 20.0)
    if options.only in (None, "page"):
        result |= page(common.pick(options, full=60, quick=10, smoke=2))
    common.print_figures(result)


if __name__ == "__main__":
    main()
