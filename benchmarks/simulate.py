"""Whether `isles plan --simulate` is true: what slow_link.py and chaos.py run, and the same played.

    python benchmarks/simulate.py [--quick|--smoke] [--only slow_link|chaos] [--log FILE]

The simulation is given what a user can know before the run: the link's rate, the sizes that follow
from the model, and seconds of an inner step, measured by a short run of the clusters without any
averaging. Nothing is fitted to the run that it is compared with. Cores are those of this machine:
clusters that share them are told so (`machines` of the fleet file).

wall: seconds of the same inner steps (slow_link), or from the first average to the last (chaos).
compute share: the part of it in which ranks were in inner steps, by their own records. Where
chaos kills, freezes and cuts off, `incidents` has the same kinds, rounds and lengths; how long a
restart takes is measured by a run alone whose ranks are killed once.

slow_link needs root. With --smoke both are as their own smoke runs, chaos undisturbed, and no bar
holds. The last line is JSON; bars: 2 points of compute share, 10 % of the wall time.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import chaos
import slow_link
from chaos_clusters import FIRST_STEPS, RANKS, SHAPE, Cluster, Inputs, prepare
from chaos_faults import DEAD_AFTER_S, plan_faults
from common import make_parser, need, need_root, pick, print_figures
from slow_link_hosts import Bench, Shape
from tests.lab.hosts import hosts

from isles.config.sections.outer import CodecConfig
from isles.facts.models import load_shape
from isles.plan.simulate.engine import simulate
from isles.plan.simulate.fleet import FleetConfig, GroupConfig, IncidentConfig
from isles.plan.simulate.result import Result
from isles.plan.simulate.setting import SimulationSettings
from isles.plan.simulate.sizes import fragment_numbers, llama_sizes
from isles.run.records import read_rows

INNER = ("data_s", "forward_backward_s", "optimizer_s")
ALONE_STEPS, ALONE_WARM = 60, 15
RATE = 100.0
SMOKE_SHAPE = Shape(model="llama-2m", sync_every="12", fragments=2, delay=2)
DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Seen:
    """Seconds, and the part of them in inner steps; of a run, or of its simulation."""

    wall_s: float
    compute_share: float


def compare(name: str, real: Seen, played: Seen) -> dict[str, float]:
    """Print a row; the differences in points and percent."""
    points = 100 * abs(real.compute_share - played.compute_share)
    percent = 100 * abs(played.wall_s / real.wall_s - 1)
    print(
        f"{name:<22}{real.compute_share:>10.3f}{played.compute_share:>10.3f}{points:>9.1f}"
        f"{real.wall_s:>11.1f}{played.wall_s:>11.1f}{percent:>8.1f} %",
        flush=True,
    )
    return {"points": round(points, 2), "percent": round(percent, 2)}


# slow_link.py


def slow_link_logged(path: Path, steps: int) -> dict[str, dict[str, float]]:
    """The same from the table that slow_link.py has printed, of so many steps."""
    rows = {}
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) == 7 and words[0] in ("plain", "outer"):
            rows[words[0], words[1]] = float(words[2]), float(words[4])
    clusters = sorted(name for kind, name in rows if kind == "plain")
    step_s = {name: rows["plain", name][1] for name in clusters}
    played = play_slow_link(step_s, steps, Shape())
    found = {}
    for name in clusters:
        share, outer_s = rows["outer", name]
        part, wall_s = played[name]
        own = Seen(wall_s, part * rows["plain", name][0])
        found[name] = compare(f"slow_link {name}", Seen(steps * outer_s, share), own)
    return found


def slow_link_seen(shape: Shape, steps: int, others: int) -> dict[str, dict[str, float]]:
    """Two clusters behind 100 Mbit/s: so many steps, and others of each for itself."""
    warm, tail, clusters = slow_link.WARM, slow_link.TAIL, ("a1", "a2")
    runs = {}
    with (
        tempfile.TemporaryDirectory(prefix="isles-bench-") as folder,
        hosts(Path(folder), 3, 0) as lab,
    ):
        for cluster in clusters:
            lab.link(cluster, "rate", f"{RATE:g}")
        bench = Bench(lab, clusters, "a3", shape)
        runs["plain"] = slow_link.Run(bench.plain(warm + others + tail))
        runs["outer"] = slow_link.Run(bench.outer(warm + steps + tail))
    plain, outer = runs["plain"], runs["outer"]
    step_s = {name: plain.step_s(i, warm, warm + others) for i, name in enumerate(clusters)}
    played = play_slow_link(step_s, steps, shape)
    found = {}
    for i, cluster in enumerate(clusters):
        wall_s = outer.at(i, warm + steps) - outer.at(i, warm)
        real = Seen(wall_s, outer.compute_share(i, warm, warm + steps))
        share = plain.compute_share(i, warm, warm + others) * played[cluster][0]
        found[cluster] = compare(f"slow_link {cluster}", real, Seen(played[cluster][1], share))
    return found


def play_slow_link(
    step_s: dict[str, float], steps: int, shape: Shape
) -> dict[str, tuple[float, float]]:
    """Of each cluster the part of so many steps in which it computes, and their seconds."""
    groups = tuple(
        GroupConfig(name=name, step=each, latency=0.0005, uplink=12.5e6, downlink=12.5e6)
        for name, each in step_s.items()
    )
    marks = slow_link.WARM, slow_link.WARM + steps
    setting = SimulationSettings(
        name="slow_link",
        fragments=tuple(fragment_numbers(llama_sizes(load_shape(shape.model)), shape.fragments)),
        tokens_per_step=shape.rows * shape.seq_length,
        sync_every=int(shape.sync_every),
        codec=CodecConfig(kind="int8"),
        delay=shape.delay,
        max_steps=marks[1] + slow_link.TAIL,
        min_clusters=2,
        dead_after_s=60.0,
        deadline_s=300.0,
        save_every_steps=None,
        save_every_s=None,
    )
    played = simulate(FleetConfig(clusters=groups), setting, marks=marks)
    found = {}
    for name in step_s:
        (began, before), (ended, after) = (played.marks[name, mark] for mark in marks)
        found[name] = (after - before) / (ended - began), ended - began
    return found


# chaos.py


@dataclass(frozen=True, slots=True)
class Alone:
    """A cluster by itself on this machine: seconds of a step, the part of them that it computes,
    and seconds until its first step after a start, and after a kill of its ranks."""

    step_s: float
    share: float
    start_s: float
    restart_s: float


def run_alone(inputs: Inputs, folder: Path, name: str) -> Alone:
    """Train alone; its ranks are killed once."""
    path = inputs.run_file(folder, name, 10 * ALONE_STEPS)
    strategy = "fsdp" if name == "a" else "ddp"
    own = f"strategy: {{kind: {strategy}}}\n"
    own += f"clusters: [{{name: {name}, gpus_per_node: {RANKS[name]}, max_restarts: 3}}]\n"
    path.write_text(path.read_text() + own)
    cluster = Cluster(name, path, lambda: "")
    began = time.time()
    cluster.start()
    wait_for(cluster, lambda: len(cluster.steps_at()) > ALONE_STEPS)
    steps_before = len(cluster.steps_at())
    killed_at = time.time()
    cluster.send("ranks", signal.SIGKILL)
    wait_for(cluster, lambda: len(cluster.steps_at()) > steps_before + ALONE_WARM)
    restart_s = max(later - earlier for earlier, later in pairwise(cluster.steps_at()))
    cluster.send("all", signal.SIGKILL)
    cluster.poll()
    rows = sorted((r for (kind, _, _), r in cluster.rows.items() if kind == "train"), key=_at)
    rows = [row for row in rows if row["at"] < killed_at][ALONE_WARM:]
    seconds = rows[-1]["at"] - rows[0]["at"]
    inner_s = sum(row[key] for row in rows[1:] for key in INNER)
    first = min(cluster.steps_at())
    return Alone(seconds / (len(rows) - 1), inner_s / seconds, first - began, restart_s)


def _at(row: dict[str, Any]) -> float:
    return float(row["at"])


def wait_for(cluster: Cluster, condition: Any) -> None:
    """Until something is so, which a cluster has recorded."""
    end = time.monotonic() + DEADLINE_S
    cluster.read()
    while not condition():
        assert cluster.poll() in (None, 0) and time.monotonic() < end, cluster.log()
        time.sleep(0.1)
        cluster.read()


def hub_start_s(folder: Path) -> float:
    """Seconds from the start of a hub, alone, until it averages: it imports torch after opening."""
    began = time.monotonic()
    command = [sys.executable, "-m", "isles.outer.hub", str(folder), "--run", "start"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as hub:
        while not (folder / "join").exists():
            assert hub.poll() is None and time.monotonic() < began + DEADLINE_S
            time.sleep(0.02)
        opened_s = time.monotonic() - began
        hub.kill()
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import isles.outer.average"], check=True)
    return opened_s + time.monotonic() - began


def chaos_seen(
    names: Sequence[str], rounds: int, first_steps: int, plans: dict[str, chaos.Plan]
) -> dict[str, dict[str, float]]:
    """Clusters on the cores of this machine, once for each plan of faults."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="isles-simulate-") as scratch:
        folder = Path(scratch)
        inputs = prepare(folder / "inputs", first_steps)
        alone = {name: run_alone(inputs, folder / f"alone-{name}", name) for name in names}
        hub_s = hub_start_s(folder / "hub-alone")
        print(f"the hub alone: averages {hub_s:.1f} s after its start", flush=True)
        for name, each in alone.items():
            print(f"{name} alone: {each}", flush=True)
        for kind, plan in plans.items():
            chaos.train(inputs, folder / kind, rounds, plan, names=names)
            real = chaos_real(folder / kind, names)
            played = play_chaos(alone, rounds, plan, hub_s)
            found[kind] = compare(f"chaos {kind}", real, chaos_played(played, alone))
    return found


def chaos_real(folder: Path, names: Sequence[str]) -> Seen:
    """From the first average to the last one that all have."""
    # Each cluster's run has a folder of its own; see Inputs.run_file.
    rows = {
        name: list(read_rows(next((folder / name / "runs").glob("*-1")) / "metrics.jsonl"))
        for name in names
    }
    outer = [row for own in rows.values() for row in own if row["kind"] == "outer"]
    ends = [min(row["at"] for row in outer if row["outer_step"] == t) for t in (0, last_of(outer))]
    inner_s = sum(
        row[key]
        for own in rows.values()
        for row in own
        if row["kind"] == "train" and ends[0] < row["at"] <= ends[1]
        for key in INNER
    )
    wall_s = ends[1] - ends[0]
    return Seen(wall_s, inner_s / (wall_s * len(rows)))


def last_of(outer: Sequence[dict[str, Any]]) -> int:
    """The last outer step."""
    return max(int(row["outer_step"]) for row in outer)


def play_chaos(alone: dict[str, Alone], rounds: int, plan: chaos.Plan, hub_s: float) -> Result:
    """The same on a virtual clock."""
    groups = tuple(
        GroupConfig(name=name, step=each.step_s, latency=0.0005, machine="here", ranks=RANKS[name])
        for name, each in alone.items()
    )
    fleet = FleetConfig(
        clusters=groups,
        machines={"here": len(os.sched_getaffinity(0))},
        incidents=tuple(incidents_of(alone, rounds, plan, hub_s)),
    )
    setting = SimulationSettings(
        name="chaos",
        fragments=tuple(fragment_numbers(llama_sizes(SHAPE), chaos.FRAGMENTS)),
        tokens_per_step=512,
        sync_every=chaos.SYNC_EVERY,
        codec=CodecConfig(kind="int8"),
        delay=chaos.DELAY,
        max_steps=rounds * chaos.SYNC_EVERY,
        min_clusters=2,
        dead_after_s=DEAD_AFTER_S,
        deadline_s=chaos.DEADLINE_S,
        max_rate=80e3,
        save_every_steps=15,
        save_every_s=None,
    )
    return simulate(fleet, setting)


def incidents_of(
    alone: dict[str, Alone], rounds: int, plan: chaos.Plan, hub_s: float
) -> list[IncidentConfig]:
    """What chaos.py does, with the lengths that its random numbers give."""
    chance, found = random.Random(f"hub {list(plan)}"), []
    for place, kind, name in plan:
        if place >= rounds - 2:
            continue
        after = chance.uniform(0.0, 1.5)
        which, lasts = "frozen", 0.0
        match kind:
            case "machine killed":
                which = "killed"
                lasts = chance.uniform(2.0, 2 * DEAD_AFTER_S) + alone[name].start_s
            case "ranks killed":
                which, lasts = "killed", alone[name].restart_s
            case "line cut":
                which, lasts = "cut", chance.uniform(1.5, 3.0) * DEAD_AFTER_S
            case "line silent":
                which, lasts = "cut", chance.uniform(0.5, 2.0) * DEAD_AFTER_S
            case "cluster frozen":
                lasts = chance.uniform(0.3 * DEAD_AFTER_S, 0.8 * DEAD_AFTER_S)
            case "cluster frozen long":
                lasts = chance.uniform(2 * DEAD_AFTER_S, 3 * DEAD_AFTER_S)
            case "one rank frozen":
                which, lasts = "stuck", chance.uniform(DEAD_AFTER_S, 2 * DEAD_AFTER_S)
            case _:
                which, lasts = "hub", chance.uniform(1.0, 6.0) + hub_s
        cluster = None if which == "hub" else name
        found.append(
            IncidentConfig.model_validate(
                {"cluster": cluster, "kind": which, "round": place, "after": after, "lasts": lasts}
            )
        )
    return found


def chaos_played(played: Result, alone: dict[str, Alone]) -> Seen:
    """From the first average to the last; a step is partly records and checkpoints."""
    wall_s = played.commits[-1] - played.commits[0]
    shares = [group.shares["compute"] * alone[group.name].share for group in played.groups]
    return Seen(wall_s, sum(shares) / len(shares))


def main() -> None:
    """Run and play, print a table, and one line of JSON at the end."""
    parser = make_parser(__doc__, quick="one round, and 14 of chaos.py")
    parser.add_argument("--only", choices=["slow_link", "chaos"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="what slow_link.py has printed, not run again")
    options = parser.parse_args()
    need("torch", "transformers")
    if options.only != "chaos" and not options.log:
        need_root()
    print(
        f"{'':<22}{'compute share':>20}{'points':>9}{'wall s':>22}{'apart':>10}\n"
        f"{'':<22}{'run':>10}{'played':>10}{'':>9}{'run':>11}{'played':>11}",
        flush=True,
    )
    found: dict[str, dict[str, float]] = {}
    if options.only != "chaos":
        shape = SMOKE_SHAPE if options.smoke else Shape()
        steps, others = pick(options, full=(300, 60), quick=(100, 20), smoke=(24, 12))
        logged = options.log and slow_link_logged(options.log, steps)
        rows = logged or slow_link_seen(shape, steps, others)
        found |= {f"slow_link_{name}": row for name, row in rows.items()}
    if options.only != "slow_link":
        names = chaos.SMOKE_CLUSTERS if options.smoke else tuple(RANKS)
        rounds = pick(options, full=40, quick=14, smoke=chaos.SMOKE_ROUNDS)
        plans: dict[str, chaos.Plan] = {"calm": []}
        if not options.smoke:
            plans["faults"] = plan_faults(rounds, options.seed)
        first_steps = chaos.SMOKE_FIRST_STEPS if options.smoke else FIRST_STEPS
        rows = chaos_seen(names, rounds, first_steps, plans)
        found |= {f"chaos_{name}": row for name, row in rows.items()}
    worst = {
        "most_points": max(row["points"] for row in found.values()),
        "most_percent": max(row["percent"] for row in found.values()),
    }
    print_figures({**found, **worst})


if __name__ == "__main__":
    main()
