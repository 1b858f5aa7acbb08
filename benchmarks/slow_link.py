"""Two clusters over slow links: averaging with fragments and overlap, against DDP on the same link.

    python benchmarks/slow_link.py [--quick|--smoke] [--rate 100] [--steps 300] …

Needs root: clusters and hub are network namespaces of this machine (see tests/lab), and the
network interface of each cluster is shaped to RATE Mbit/s in either direction (tbf). The kernel's
netem, which delays, is not everywhere: `--delay MS` puts the second cluster behind a link in user
space, which takes CPU time from the clusters. A cluster is one rank with one CPU thread that trains
the shape llama-15m in fp32 on samples that are made up. Four runs, one after the other:

plain: both clusters at once, each for itself: what inner steps take where nothing travels.
outer: the same with a section `outer` (int8, 4 fragments, a delay), through a hub on a third
    host: isles' trainer; nothing but the join line is put there by hand.
alone: one of these clusters and the hub, so that on two cores one is left for what is done beside
    a step, as on any machine where a GPU computes.
ddp: the same trainer as one cluster of two ranks with strategy ddp, over the same two interfaces.

compute share: the part of the wall time in which a rank was in its inner steps, by its own records
(data, forward and backward, optimizer; not what it waited for communication), from the end of one
step to the end of another, whole rounds apart; starts and ends are no part of it. Where no core is
left, encoding, TLS and the hub take time from the steps: in `speed` is how long a step of `plain`
is beside one of `outer`, all in all, minutes apart.
beside: of `alone`: what the usual step computes while a fragment is on its way, over one shortly
before and after, the median over all fragments (`beside_from` and `beside_to`: its quartiles). What
rank 0 says to the hub takes the interpreter's lock now and then.
bytes: both directions of a cluster's interface, by its counters, for each inner step.

With --smoke `outer` and `ddp` train a smaller model for a few steps over faster links.

The last line is JSON: compute_share and ddp_compute_share are those of the slower cluster,
bytes_ratio is DDP's bytes over those of `outer`.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from common import make_parser, need, need_root, pick, print_figures
from slow_link_hosts import ALONE_STEPS, Bench, Records, Shape
from tests.lab.hosts import hosts

from isles.config.load import load_run_file
from isles.config.resolve import resolve
from isles.run.begin import begin_run

WARM, TAIL = 10, 6
"""Steps before the first that is looked at, and after the last."""


class Run:
    """Figures of a run that is over."""

    def __init__(self, records: Records) -> None:
        self.rows, self._seen = records.rows, records.seen

    def at(self, cluster: int, step: int) -> float:
        """When a step was over."""
        return float(self._row(cluster, step)["at"])

    def _row(self, cluster: int, step: int) -> dict[str, Any]:
        train = (row for row in self.rows[cluster] if row["kind"] == "train")
        return next(row for row in train if row["step"] == step)

    def compute_share(self, cluster: int, first: int, last: int) -> float:
        """Time in inner steps after `first`, up to and with `last`, over the time between."""
        inner_s = 0.0
        for step in range(first + 1, last + 1):
            row = self._row(cluster, step)
            inner_s += row["data_s"] + row["forward_backward_s"] + row["optimizer_s"]
        return inner_s / (self.at(cluster, last) - self.at(cluster, first))

    def inner_s(self, cluster: int, first: int, last: int) -> float:
        """The usual time that a step computes."""
        return float(statistics.median(self._inner_s(cluster, first, last).values()))

    def _inner_s(self, cluster: int, first: int, last: int) -> dict[int, float]:
        names = ("data_s", "forward_backward_s", "optimizer_s")
        rows = {step: self._row(cluster, step) for step in range(first + 1, last + 1)}
        return {step: sum(row[name] for name in names) for step, row in rows.items()}

    def beside(self, first: int, last: int) -> list[float]:
        """Seconds that a step computes while a fragment is on its way, over one while none is.

        A figure for each fragment: the usual step of its way, over the usual one of as long before
        and after; a machine that others share is not equally fast for longer.
        """
        steps = self._inner_s(0, first, last)
        spans = [
            (row["at"] - row["hidden_s"] - row["exposed_s"], row["at"])
            for row in self.rows[0]
            if row["kind"] == "outer"
        ]

        def usual_s(among: Sequence[tuple[float, float]]) -> float:
            own = [s for step, s in steps.items() if _is_in(self.at(0, step), among)]
            return float(statistics.median(own)) if own else math.nan

        found = []
        for begin, end in spans:
            took_s, others = end - begin, [span for span in spans if span != (begin, end)]
            near = [(begin - took_s, begin), (end, end + took_s)]
            if not any(low < end + took_s and begin - took_s < high for low, high in others):
                found.append(usual_s([(begin, end)]) / usual_s(near))
        return [ratio for ratio in found if math.isfinite(ratio)]

    def step_s(self, cluster: int, first: int, last: int) -> float:
        """Wall time of a step, whatever was done in it."""
        return (self.at(cluster, last) - self.at(cluster, first)) / (last - first)

    def moved(self, cluster: int, host: str, first: int, last: int) -> float:
        """Bytes through a cluster's interface between two steps."""
        ends = [self._counter(host, self.at(cluster, step)) for step in (first, last)]
        return ends[1] - ends[0]

    def _counter(self, host: str, at: float) -> float:
        for before, after in itertools.pairwise(self._seen):
            if before.at <= at <= after.at:
                part = (at - before.at) / max(1e-9, after.at - before.at)
                return before.moved[host] + part * (after.moved[host] - before.moved[host])
        raise RuntimeError(f"the counters of {host} were not read at {at}")

    def cpu_s(self, kind: str, first: int, last: int) -> float:
        """CPU seconds of processes of a kind between two steps of the first cluster."""
        begin, end = (self.at(0, step) for step in (first, last))
        inside = [seen for seen in self._seen if begin <= seen.at <= end]
        return inside[-1].cpu[kind] - inside[0].cpu[kind]

    def turns(self, cluster: int, first: int, last: int) -> list[dict[str, Any]]:
        """The turns that were taken in between two steps."""
        outer = (row for row in self.rows[cluster] if row["kind"] == "outer")
        return [row for row in outer if first < row["step"] <= last]


def _is_in(at: float, spans: Sequence[tuple[float, float]]) -> bool:
    return any(begin < at <= end for begin, end in spans)


def train_in_cluster(run_file: Path, join: Path) -> int:
    """Train as one rank, in a new run directory that has the join line."""
    from isles.cli import main as isles

    loaded = load_run_file(run_file)
    run_dir = begin_run(resolve(loaded, num_gpus=0), loaded.text, "no").run_dir
    run_dir.join_line.touch(mode=0o600)
    run_dir.join_line.write_text(join.read_text())
    return isles(["train", str(run_file), "--resume", str(run_dir.path)])


def report(
    runs: dict[str, Run], clusters: Sequence[str], spans: dict[str, tuple[int, int]]
) -> dict[str, float]:
    """Print the table; returns the figures. `plain` and `alone` may be missing."""
    columns = "compute_share", "inner_s", "step_s", "speed", "bytes_per_step"
    print(f"{'':<16}" + "".join(f"{name:>16}" for name in columns), flush=True)
    plain = [math.nan] * len(clusters)
    if "plain" in runs:
        plain = [runs["plain"].step_s(i, *spans["plain"]) for i in range(len(clusters))]
    found: dict[str, list[dict[str, float]]] = {}
    for kind, run in runs.items():
        if kind == "alone":
            continue
        found[kind] = []
        for i, host in enumerate(clusters):
            own = min(i, len(run.rows) - 1)  # one run, or one for each cluster
            step_s = run.step_s(own, *spans[kind])
            figures = {
                "compute_share": run.compute_share(own, *spans[kind]),
                "inner_s": run.inner_s(own, *spans[kind]),
                "step_s": step_s,
                "speed": plain[i] / step_s,
                "bytes_per_step": run.moved(own, host, *spans[kind])
                / (spans[kind][1] - spans[kind][0]),
            }
            found[kind].append(figures)
            numbers = "".join(f"{figures[name]:>16.4f}" for name in columns[:-1])
            print(f"{kind + ' ' + host:<16}{numbers}{figures['bytes_per_step']:>16.0f}")
    ratios, beside = list[float](), dict[str, float]()
    if "alone" in runs:
        ratios = runs["alone"].beside(*spans["alone"])
    if len(ratios) > 1:  # else a fragment takes so long that the next begins soon
        names = "beside_from", "beside", "beside_to"
        beside = dict(zip(names, statistics.quantiles(ratios), strict=True))
    worst = {kind: min(each["compute_share"] for each in found[kind]) for kind in found}
    if "plain" in runs:
        beside |= {
            "plain_compute_share": worst["plain"],
            "speed": min(each["speed"] for each in found["outer"]),
            "ddp_speed": min(each["speed"] for each in found["ddp"]),
        }
    return {
        "compute_share": worst["outer"],
        "ddp_compute_share": worst["ddp"],
        "bytes_ratio": _sum(found["ddp"], "bytes_per_step")
        / _sum(found["outer"], "bytes_per_step"),
        **beside,
        **outer_figures(runs["outer"], *spans["outer"]),
    }


def _sum(figures: Sequence[dict[str, float]], name: str) -> float:
    return sum(each[name] for each in figures)


def outer_figures(run: Run, first: int, last: int) -> dict[str, float]:
    """What the outer steps have cost, on average over the clusters."""
    turns = [run.turns(i, first, last) for i in range(len(run.rows))]
    every = list(itertools.chain(*turns))
    steps = last - first
    print(f"\n{len(turns[0])} turns in {steps} steps of the first cluster:")
    print("  turn  mode     MB up   s up   MB down s down  exposed s  hidden s")
    for row in turns[0]:
        up, down = row["sent_bytes"] / 1e6, row["received_bytes"] / 1e6
        print(
            f"{row['outer_step']:>6}  {row['mode']:<8}{up:>6.1f}{row['send_s']:>7.2f}{down:>10.1f}"
            f"{row['receive_s']:>7.2f}{row['exposed_s']:>11.3f}{row['hidden_s']:>10.2f}"
        )
    cpu = {kind: run.cpu_s(kind, first, last) for kind in ("ranks", "hub")}
    print(f"CPU seconds: {', '.join(f'{kind} {spent:.1f}' for kind, spent in cpu.items())}")
    exposed_s, hidden_s = (sum(row[name] for row in every) for name in ("exposed_s", "hidden_s"))
    return {
        "exposed_s": exposed_s / len(turns),
        "hidden_s": hidden_s / len(turns),
        "hub_cpu_s": cpu["hub"],
    }


def main() -> None:
    """Measure, print a table, and one line of JSON at the end."""
    parser = make_parser(__doc__, quick="one round, few steps of the others")
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s of each cluster")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way, to one cluster")
    parser.add_argument("--rounds", type=int, default=3, help="that are measured")
    for field in fields(Shape):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default)
    parser.add_argument("--rank", nargs=2, metavar=("RUN_FILE", "JOIN_FILE"), help="internal")
    options = parser.parse_args()
    need("torch", "transformers")
    if options.rank:
        sys.exit(train_in_cluster(*map(Path, options.rank)))
    need_root()
    shape = Shape(**{field.name: getattr(options, field.name) for field in fields(Shape)})
    rate = options.rate
    if options.smoke:
        shape = replace(shape, model="llama-2m", sync_every="12", fragments=2, delay=2)
        rate = 10 * options.rate
    rounds = pick(options, full=options.rounds, quick=1, smoke=1)
    round_steps = 100 if shape.sync_every == "auto" else int(shape.sync_every)
    others, ddp_steps = pick(options, full=(60, 20), quick=(20, 6), smoke=(0, 4))
    todo = [
        ("plain", others, WARM),
        ("outer", rounds * round_steps, WARM),
        ("alone", ALONE_STEPS, WARM),
        ("ddp", ddp_steps, 2),
    ]
    if options.smoke:
        todo = [each for each in todo if each[0] in ("outer", "ddp")]
    begun = time.monotonic()
    clusters = ("a1", "b1") if options.delay_ms else ("a1", "a2")
    with (
        tempfile.TemporaryDirectory(prefix="isles-bench-") as folder,
        hosts(Path(folder), 2 if options.delay_ms else 3, 1 if options.delay_ms else 0) as lab,
    ):
        if options.delay_ms:
            lab.link("wan", "set", json.dumps({"delay_ms": options.delay_ms}))
        for cluster in clusters:
            lab.link(cluster, "rate", f"{rate:g}")
        bench = Bench(lab, clusters, "a2" if options.delay_ms else "a3", shape)
        runs, spans = {}, {}
        for kind, steps, warm in todo:
            spans[kind] = warm, warm + steps
            runs[kind] = Run(getattr(bench, kind)(warm + steps + TAIL))
            print(f"{kind} is over after {time.monotonic() - begun:.0f} s", flush=True)
        print_figures(report(runs, clusters, spans))


if __name__ == "__main__":
    main()
