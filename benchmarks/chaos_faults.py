"""What befalls the clusters of `benchmarks/chaos.py`."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from chaos_clusters import Cluster, Run

DEAD_AFTER_S = 4.0
TRANSFER_BYTES = 20_000


@dataclass
class Fault:
    """Something that befell a cluster, or all.

    Args:
        kind: what.
        name: of the cluster; `-`: the hub.
        round: in which it came.
        at, over_at: when it came, and when those whom it befell were back (unix time).
        delay_s: how long another cluster stood still beyond what is usual.
        who: which one.
        note: what became of it.
    """

    kind: str
    name: str
    round: int
    at: float
    over_at: float = 0.0
    delay_s: float = 0.0
    who: str = ""
    note: str = ""


def pause(seconds: float) -> None:
    """Let time pass."""
    time.sleep(seconds)


def kill_ranks(run: Run, cluster: Cluster, chance: random.Random) -> str:
    """kill -9 of all ranks: their agent starts them again from the last checkpoint."""
    cluster.send("ranks", signal.SIGKILL)
    return "started again by the agent"


def kill_machine(run: Run, cluster: Cluster, chance: random.Random) -> str:
    """kill -9 of all that the cluster has; some seconds later its command is typed again."""
    cluster.send("all", signal.SIGKILL)
    away_s = chance.uniform(2.0, 2 * DEAD_AFTER_S)
    pause(away_s)
    cluster.start()
    return f"command typed again after {away_s:.0f} s"


def freezing(what: str, shortest_s: float, longest_s: float) -> Blow:
    """SIGSTOP to some of a cluster's processes; later they go on."""

    def freeze(run: Run, cluster: Cluster, chance: random.Random) -> str:
        away_s = chance.uniform(shortest_s, longest_s)
        frozen = cluster.processes(what)
        for process in frozen:
            process.send_signal(signal.SIGSTOP)
        pause(away_s)
        for process in frozen:
            process.send_signal(signal.SIGCONT)
        return f"for {away_s:.1f} s"

    return freeze


def cut(run: Run, cluster: Cluster, chance: random.Random) -> str:
    """Its connections are reset in the middle of a transfer, for longer than a cluster may."""
    run.wires.wait_for_transfer(cluster.name, TRANSFER_BYTES, 3.0)
    away_s = chance.uniform(1.5, 3.0) * DEAD_AFTER_S
    run.wires.cut(cluster.name)
    pause(away_s)
    run.wires.mend(cluster.name)
    return f"for {away_s:.1f} s"


def silence(run: Run, cluster: Cluster, chance: random.Random) -> str:
    """Its line swallows everything, as a network does that is gone, for less or more than that."""
    away_s = chance.uniform(0.5, 2.0) * DEAD_AFTER_S
    run.wires.silence(cluster.name)
    pause(away_s)
    run.wires.mend(cluster.name)
    return f"for {away_s:.1f} s"


def kill_hub(run: Run, cluster: Cluster, chance: random.Random) -> str:
    """kill -9 of the hub in the middle of a turn; it is started again on its state."""
    run.wires.wait_for_transfer(cluster.name, TRANSFER_BYTES, 3.0)
    run.kill_hub()
    away_s = chance.uniform(1.0, 6.0)
    pause(away_s)
    run.serve()
    return f"back after {away_s:.1f} s"


def lose_bucket(run: Run, cluster: Cluster, chance: random.Random) -> str:
    """Nobody reaches the bucket, from the middle of a turn on; then it is there again."""
    run.wires.wait_for_transfer(cluster.name, TRANSFER_BYTES, 3.0)
    for name in run.clusters:
        run.wires.cut(name)
    away_s = chance.uniform(1.0, 6.0)
    pause(away_s)
    for name in run.clusters:
        run.wires.mend(name)
    return f"bucket back after {away_s:.1f} s"


Blow = Callable[[Run, Cluster, random.Random], str]
BLOWS: dict[str, Blow] = {
    "machine killed": kill_machine,
    "ranks killed": kill_ranks,
    "line cut": cut,
    "cluster frozen": freezing("all", 0.3 * DEAD_AFTER_S, 0.8 * DEAD_AFTER_S),
    "line silent": silence,
    "cluster frozen long": freezing("all", 2 * DEAD_AFTER_S, 3 * DEAD_AFTER_S),
    "one rank frozen": freezing("last rank", DEAD_AFTER_S, 2 * DEAD_AFTER_S),
}


def plan_faults(rounds: int, seed: int) -> list[tuple[int, str, str]]:
    """Round, kind and cluster of each fault: all kinds in turn, the hub twice."""
    chance = random.Random(seed)
    places = range(2, rounds - 6, 1 if rounds < 20 else 2)
    kinds = [list(BLOWS)[index % len(BLOWS)] for index in range(len(places))]
    for index in (len(kinds) // 3, 2 * len(kinds) // 3 + 1):
        kinds[index] = "hub killed"
    return [
        (place, kind, chance.choice("ab" if kind == "one rank frozen" else "abcd"))
        for place, kind in zip(places, kinds, strict=True)
    ]
