"""What clusters lose, and how long they stand still, while others are killed, frozen or cut off.

    python benchmarks/chaos.py [--quick|--smoke] [--rounds 40] [--seed 0] [--engine bucket]

Four clusters (two ranks under fsdp, two under ddp, two of one rank) train one small model, first
undisturbed, then while every few rounds something befalls one of them or their hub, at a
random instant. Each is a run as `isles train` starts it; all are on this machine, and what a
cluster says to the hub goes through a line of its own, which can be cut. With engine bucket the
lines lead to moto's S3 server, a stand-in for a provider's, which goes away and is not killed.

With --smoke two clusters of one rank train once, and the ranks of one are killed.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import common
from chaos_clusters import FIRST_STEPS, RANKS, Cluster, Inputs, Run, prepare, running
from chaos_faults import BLOWS, DEAD_AFTER_S, Blow, Fault, kill_hub, lose_bucket, pause, plan_faults

from isles.run.checkpoints import find_checkpoint
from isles.run.records import read_rows

FRAGMENTS, SYNC_EVERY, DELAY = 2, 20, 3
SMOKE_CLUSTERS, SMOKE_ROUNDS, SMOKE_PLAN = ("c", "d"), 6, [(1, "ranks killed", "c")]
DEADLINE_S = 20.0
BACK_S = 180.0
"""So long nothing at all may happen."""
SMOKE_FIRST_STEPS = 30
Plan = Sequence[tuple[int, str, str]]
"""Of each fault the round, the kind and the cluster."""
OUTER = (
    f"sync_every: {SYNC_EVERY}, fragments: {FRAGMENTS}, delay: {DELAY}, codec: int8, "
    f"min_clusters: 2, dead_after: {DEAD_AFTER_S}s, deadline: {DEADLINE_S}s, max_rate: 80kB"
)
RULES: dict[str, Any] = {"min_clusters": 2, "dead_after_s": DEAD_AFTER_S}
WAIT_KEYS = {
    "all": "all",
    "time_boxed": "{time_boxed: 2s}",
    "quorum": "{quorum: 2, grace: 1s}",
}
WAITS: dict[str, dict[str, Any]] = {
    "all": {"wait": "all"},
    "time_boxed": {"wait": "time_boxed", "time_box_s": 2.0},
    "quorum": {"wait": "quorum", "quorum": 2, "grace_s": 1.0},
}


@dataclass
class Watch:
    """Follows a run, and strikes."""

    run: Run
    rounds: int
    faults: list[Fault] = field(default_factory=list)

    def read(self) -> None:
        """Look at all clusters."""
        for cluster in self.run.clusters.values():
            cluster.read()

    @property
    def turn(self) -> int:
        """The last turn that the furthest cluster has applied; before the first -1."""
        turns = [c.turns()[-1]["outer_step"] for c in self.run.clusters.values() if c.turns()]
        return max(turns, default=-1)

    @property
    def round(self) -> int:
        """The round that the furthest cluster is in."""
        return self.turn // FRAGMENTS

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something, as long as any cluster still records anything."""
        known, end = 0, time.monotonic() + BACK_S
        while not condition():
            pause(0.2)
            self.read()
            if (rows := sum(len(c.rows) for c in self.run.clusters.values())) > known:
                known, end = rows, time.monotonic() + BACK_S
            assert time.monotonic() < end, f"{what}: in vain\n{self.words()}"

    def reach(self, goal: int) -> None:
        """Wait for a round."""
        self.wait(lambda: self.round >= goal or self.is_over(), f"round {goal}")

    def is_over(self) -> bool:
        """Whether all clusters have ended."""
        return all(cluster.poll() is not None for cluster in self.run.clusters.values())

    def strike(self, kind: str, blow: Blow, name: str, chance: random.Random) -> None:
        """Let something happen, and wait until whom it befell is back."""
        cluster = self.run.clusters[name]
        everyone = kind.startswith("hub")
        pause(chance.uniform(0.0, 1.5))
        is_away = everyone and self.run.is_bucket
        kind = "bucket away" if is_away else kind
        fault = Fault(kind, "-" if everyone else name, self.round, time.time())
        fault.note = blow(self.run, cluster, chance)
        self.read()
        lifted = self.turn
        victims = list(self.run.clusters.values()) if everyone else [cluster]
        self.wait(lambda: all(self.is_back(each, lifted) for each in victims), f"{kind} of {name}")
        fault.over_at = time.time()
        missed = [row for row in cluster.turns() if fault.at < row["at"] < fault.over_at]
        late = sum(name not in row["weights"] for row in missed)
        fault.note += f"; {late} turns without it" if late else ""
        self.faults.append(fault)
        print(f"  round {fault.round:>3}  {kind:<20} {fault.name}  {fault.note}", flush=True)

    def is_back(self, cluster: Cluster, since: int) -> bool:
        """Whether its updates are in averages of turns after `since`, and it is level with others.

        To the turn after `since` it may have contributed before it was struck; and who comes back
        applies turns once more that it was in.
        """
        if (code := cluster.poll()) is not None:
            text = f"{cluster.name} has ended: {code}"
            assert code == 0 or cluster.came_too_late, f"{text}\n{self.words()}"
            return True
        none: dict[str, Any] = {"outer_step": -1, "weights": {}}
        last = cluster.turns()[-1] if cluster.turns() else none
        return (
            last["outer_step"] > max(since + 1, self.turn - 2) and cluster.name in last["weights"]
        )

    def finish(self) -> None:
        """Wait until all have ended, as they should."""
        self.wait(self.is_over, "the end")
        self.read()
        for name, cluster in list(self.run.clusters.items()):
            if cluster.came_too_late:
                print(f"  {name} came back when all others had finished")
                del self.run.clusters[name]
        codes = {name: cluster.poll() for name, cluster in self.run.clusters.items()}
        assert not any(codes.values()), f"exit codes {codes}\n{self.words()}"

    def words(self) -> str:
        """What the clusters say."""
        return "\n\n".join(f"== {c.name}\n{c.log()}" for c in self.run.clusters.values())


def train(
    inputs: Inputs,
    folder: Path,
    rounds: int,
    plan: Plan,
    *,
    names: Sequence[str] = tuple(RANKS),
    engine: str = "hub",
    wait: str = "all",
) -> dict[str, Any]:
    """Train once; what became of it."""
    outer, is_hub = OUTER, engine == "hub"
    if not is_hub:
        outer += f", wait: {WAIT_KEYS[wait]}"
    rules = RULES | WAITS[wait] if is_hub else None
    with running(inputs, folder, names, rounds * SYNC_EVERY, outer, rules) as run:
        watch, chance = Watch(run, rounds), random.Random(f"hub {plan}")
        began = time.monotonic()
        watch.reach(0)
        for place, kind, name in plan:
            watch.reach(place)
            if watch.round < rounds - 2:
                watch.strike(
                    kind, BLOWS.get(kind, kill_hub if is_hub else lose_bucket), name, chance
                )
        watch.finish()
        print(f"  {rounds} rounds in {time.monotonic() - began:.0f} s", flush=True)
        return judge(run, run.last_events(), watch)


def judge(run: Run, events: Sequence[dict[str, Any]], watch: Watch) -> dict[str, Any]:
    """Compare what clusters and hub have on record."""
    digests: dict[int, set[str]] = {}
    for cluster in run.clusters.values():
        for row in cluster.turns():
            digests.setdefault(row["outer_step"], set()).add(row["digest"])
    ends: dict[int, dict[str, str]] = {}
    for cluster in run.clusters.values():
        version = int(find_checkpoint(cluster.directory, None).manifest["outer"]["version"])
        ends.setdefault(version, {})[cluster.name] = weights_of(cluster)
    # Who comes back at the very end trains on when the others have left.
    last = max(ends.values(), key=len)
    if len(ends) > 1:
        print(f"  {', '.join(last)} ended together, the others after other turns")
    for event in events:
        if event["kind"] in ("diverged", "refused", "outlier"):
            print(f"  the hub says of {event['member']}: {event['kind']} {event['what']}")
    clusters = run.clusters.values()
    return {
        "diverged": sum(len(found) > 1 for found in digests.values())
        + sum(len(set(found.values())) > 1 for found in ends.values()),
        "turns": len(digests),
        "lost": sum(lost_steps(cluster) for cluster in clusters),
        "done_again": sum(len(c.steps_at()) - len(train_rows(c)) for c in clusters),
        "loss": statistics.mean(final_loss(run.clusters[name]) for name in last),
        "gaps": {cluster.name: gaps_of(cluster) for cluster in clusters},
        "faults": watch.faults,
    }


def weights_of(cluster: Cluster) -> str:
    """A digest of the weights that it has ended with."""
    import torch

    from isles.checkpoint.load import load_tensors
    from isles.checkpoint.tensors import TensorReader

    folder = find_checkpoint(cluster.directory, None).path
    state = {
        name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for name, entry in sorted(TensorReader(folder).index().tensors.items())
        if name.startswith("model.")
    }
    load_tensors(state, folder, alone=True)
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in state.values())).hexdigest()


def train_rows(cluster: Cluster) -> list[dict[str, Any]]:
    """The inner steps that led to the weights at the end: none that a restart has done again."""
    return [row for row in read_rows(cluster.directory.metrics) if row["kind"] == "train"]


def lost_steps(cluster: Cluster) -> int:
    """Inner steps that led to its weights at the end, and that are in no average.

    Each step must be in one average of each fragment.
    """
    steps = int(find_checkpoint(cluster.directory, None).manifest["outer"]["steps"])
    turns = {
        r["outer_step"]: r for r in read_rows(cluster.directory.metrics) if r["kind"] == "outer"
    }
    counted = [0] * FRAGMENTS
    for row in turns.values():
        if cluster.name in row["weights"]:
            counted[row["fragment"]] += row["inner_steps"]
    return max(abs(steps - number) for number in counted)


def final_loss(cluster: Cluster) -> float:
    """On the validation text, with the weights that it has ended with."""
    rows = [row for (kind, _, _), row in cluster.rows.items() if kind == "eval"]
    return float(max(rows, key=lambda row: float(row["at"]))["loss"])


def gaps_of(cluster: Cluster) -> list[tuple[float, float]]:
    """From each inner step to the next one, once it has taken part in a turn."""
    first = cluster.turns()[0]["at"]
    return [(a, b) for a, b in pairwise(cluster.steps_at()) if a > first]


def find_delays(disturbed: dict[str, Any], usual: dict[str, float]) -> None:
    """How long others than the struck one stood still, at each fault."""
    for fault in disturbed["faults"]:
        for name, gaps in disturbed["gaps"].items():
            if name == fault.name:
                continue
            within = [b - a for a, b in gaps if a < fault.over_at and b > fault.at]
            delay_s = max(within, default=0.0) - usual[name]
            if delay_s > fault.delay_s:
                fault.delay_s, fault.who = delay_s, name


def measure(inputs: Inputs, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Undisturbed and disturbed; prints a table."""
    print("undisturbed", flush=True)
    how = {"engine": options.engine, "wait": options.wait}
    calm = train(inputs, folder / "calm", options.rounds, [], **how)
    plan = plan_faults(options.rounds, options.seed)
    print(f"with {len(plan)} faults", flush=True)
    wild = train(inputs, folder / "wild", options.rounds, plan, **how)
    usual = {name: max(b - a for a, b in gaps) for name, gaps in calm["gaps"].items()}
    find_delays(wild, usual)
    print(f"\n{'round':>5}  {'fault':<22}{'of':<4}{'others waited':<18}what happened")
    for fault in wild["faults"]:
        waited = f"{fault.delay_s:.1f} s ({fault.who})" if fault.who else "-"
        print(f"{fault.round:>5}  {fault.kind:<22}{fault.name:<4}{waited:<18}{fault.note}")
    print(
        f"\n{wild['turns']} turns; longest step to step undisturbed {max(usual.values()):.1f} s; "
        f"{wild['done_again']} steps done again by killed clusters; loss {calm['loss']:.4f} "
        f"undisturbed, {wild['loss']:.4f} with faults\n",
        flush=True,
    )
    return {
        "faults": len(wild["faults"]),
        "diverged": wild["diverged"] + calm["diverged"],
        "inner_steps_lost": wild["lost"] + calm["lost"],
        "loss_ratio": round(wild["loss"] / calm["loss"], 4),
        "longest_delay_s": round(max((f.delay_s for f in wild["faults"]), default=0.0), 1),
    }


def smoke(inputs: Inputs, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Two clusters, one fault, and nothing to compare with."""
    how = {"engine": options.engine, "wait": options.wait}
    found = train(inputs, folder / "wild", SMOKE_ROUNDS, SMOKE_PLAN, names=SMOKE_CLUSTERS, **how)
    return {
        "faults": len(found["faults"]),
        "turns": found["turns"],
        "diverged": found["diverged"],
        "inner_steps_lost": found["lost"],
    }


def main() -> None:
    """Measure, print tables, and one line of JSON at the end."""
    parser = common.make_parser(__doc__, quick="14 rounds")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--wait", choices=list(WAITS), default="all", help="whom a turn waits for")
    parser.add_argument("--engine", choices=["hub", "bucket"], default="hub")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep all files there")
    options = parser.parse_args()
    common.need(
        "torch", "transformers", *(("s3fs", "moto", "boto3") if options.engine == "bucket" else ())
    )
    if options.quick:
        options.rounds = 14
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        folder = options.folder or Path(scratch)
        inputs = prepare(folder / "inputs", SMOKE_FIRST_STEPS if options.smoke else FIRST_STEPS)
        found = (smoke if options.smoke else measure)(inputs, folder, options)
    common.print_figures({**found, "deadline_s": DEADLINE_S})


if __name__ == "__main__":
    main()
