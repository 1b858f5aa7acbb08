"""Made snapshots of a run, and stand-ins for its watch: one shows them when told to, one moves.

python -m tests.made_watch FOLDER        `isles top` of the one that moves, as `MovingWatch` says
"""

from __future__ import annotations

import math
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from isles.errors import UserError
from isles.monitor.live.model import (
    ClusterRow,
    Head,
    HostRow,
    HubRow,
    LinkRow,
    Parts,
    Point,
    RankRow,
    Snapshot,
)
from isles.monitor.live.server import Dashboard
from isles.monitor.live.top import run_top
from tests.deadline import DEADLINE_S

if TYPE_CHECKING:
    from isles.monitor.live.source import Watch

GIB = 2**30
CITIES = ("oslo", "lyon", "gent", "turin")


class MadeWatch:
    """Stands in for `isles.monitor.live.source.Watch`: its snapshots come from `show`."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self._changed = threading.Condition()
        self.latest = snapshot
        self.error = ""
        self.typed = "made-1"

    def show(self, snapshot: Snapshot) -> None:
        """From now on this is the newest one."""
        with self._changed:
            self.latest = snapshot
            self._changed.notify_all()

    def wait(self, after_at: float, timeout_s: float) -> Snapshot | None:
        """As that of Watch."""

        def newer() -> Snapshot | None:
            return self.latest if self.latest and self.latest.at > after_at else None

        with self._changed:
            return self._changed.wait_for(newer, timeout_s)


class MovingWatch:
    """The same for `isles top`: it shows a new step every 2 s.

    FOLDER/error: why its data is old, from then on. FOLDER/stopped is written where it is told to
    stop.
    """

    typed, stop_means = "made-1", "All its ranks save a checkpoint, and end."

    def __init__(self, folder: Path) -> None:
        self._folder, self._begun = folder, time.monotonic()
        self._last = made()
        self.said: list[str] = []

    @property
    def error(self) -> str:
        path = self._folder / "error"
        return path.read_text() if path.exists() else ""

    @property
    def latest(self) -> Snapshot:
        step = 1240 + int((time.monotonic() - self._begun) / 2)
        if self._last.run.step != step and not self.error:
            self._last = made(step)
        return self._last

    def stack(self, row: RankRow) -> str:
        if row.mark == "dead":
            raise UserError("rank 2 has not said within 20 s where it stands", fix="it is frozen")
        lines = [f'  File "train/loop.py", line {n}, in train' for n in range(1, 61)]
        return "\n".join([f"rank {row.rank} on {row.host}: step 1200, forward", *lines])

    def log_lines(self, row: RankRow, count: int) -> list[str]:
        return [f"\x1b[32mINFO\x1b[0m rank={row.rank} line={n}" for n in range(count)]

    def stop(self, now: bool) -> int:
        (self._folder / "stopped").write_text(f"now={now}")
        self.said.append("waiting: saves a checkpoint")
        return 0


@contextmanager
def served(*watches: MadeWatch, port: int = 0) -> Iterator[Dashboard]:
    """The page of made watches, served by a thread."""
    with Dashboard([cast("Watch", watch) for watch in watches], port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(DEADLINE_S)


def made(
    step: int = 1240,
    *,
    clusters: int = 2,
    nodes: int = 1,
    gpus: int = 3,
    faults: bool = True,
    name: str = "wide-3",
    device: str = "NVIDIA H100 80GB HBM3",
) -> Snapshot:
    """A run on clusters of nodes; every number differs from that of the step before.

    With faults a rank is a straggler, one is throttled, one dead, one silent, as far as there are
    so many.
    """
    dice = random.Random(step)
    cities = CITIES[:clusters] if clusters > 1 else ("",)
    ranks, hosts, links = [], [], []
    for city in cities:
        for node in range(nodes):
            host = f"{city or 'node'}-{node + 1:02d}"
            hosts.append(_host(dice, city, node, host, gpus))
            other = f"{city or 'node'}-{(node + 1) % nodes + 1:02d}"
            if nodes > 1:
                links.append(_link(dice, city, host, other, 12.4e9))
            ranks += [_rank(dice, city, node, host, gpus, i, step, device) for i in range(gpus)]
        if city:
            links.append(_link(dice, city, city, "hub", 118e6))
    notes: list[str] = []
    if faults:
        notes = _break(ranks, links)
    loss = 2.1 + 8 * math.exp(-step / 160)
    return Snapshot(
        version="0.1.0",
        at=time.time(),
        run=Head(
            name=name,
            path=f"/data/runs/{name}",
            state="running",
            phase="training",
            step=step,
            total_steps=4000,
            left_s=(4000 - step) * 3.9,
            loss=round(loss + dice.gauss(0, 0.02), 4),
            tokens=step * 524288,
            tokens_per_second=round(131e3 * len(ranks) / 6 * dice.uniform(0.97, 1.03)),
            mfu=round(dice.uniform(0.41, 0.44), 4) if device.startswith("NVIDIA") else None,
            goodput=0.9713,
            begun_at=time.time() - step * 4.05,
            saved_step=step - step % 200,
            saved_age_s=step % 200 * 3.9 + 2,
            restarts=1,
            last_restart="oslo-01 was lost" if clusters > 1 else "node-01 was lost",
        ),
        curve=tuple(_curve(step)),
        clusters=tuple(_cluster(dice, city, step, len(cities)) for city in cities if city),
        hub=HubRow(
            address="hub.example.org:7777", round=step // 50, waits_for=cities[1:2], due_s=41
        )
        if clusters > 1
        else None,
        hosts=tuple(hosts),
        ranks=tuple(ranks),
        links=tuple(links),
        notes=tuple(notes),
    )


def _rank(
    dice: random.Random, city: str, node: int, host: str, gpus: int, i: int, step: int, device: str
) -> RankRow:
    compute, memory = dice.uniform(2.9, 3.1), dice.uniform(58, 62)
    return RankRow(
        cluster=city,
        rank=node * gpus + i,
        node=node,
        host=host,
        device=device,
        rows=32,
        micro_batch=8,
        step=step,
        stage="forward and backward",
        stage_s=round(dice.uniform(0, 3), 2),
        use=round(dice.uniform(0.93, 1), 3),
        memory_bytes=int(memory * GIB),
        peak_bytes=int((memory + dice.uniform(4, 8)) * GIB),
        limit_bytes=int(79.6 * GIB),
        temperature_c=round(dice.uniform(58, 67)),
        power_w=round(dice.uniform(610, 690)),
        clock_mhz=round(dice.uniform(1830, 1980)),
        parts=Parts(
            data_s=round(dice.uniform(0.01, 0.06), 4),
            compute_s=round(compute, 4),
            communication_s=round(dice.uniform(0.2, 0.4), 4),
            waiting_s=round(dice.uniform(0.6, 0.9), 4),
        ),
        heard_s=round(dice.uniform(0, 2), 1),
        pid=4000 + i,
    )


def _host(dice: random.Random, city: str, node: int, host: str, gpus: int) -> HostRow:
    return HostRow(
        cluster=city,
        node=node,
        host=host,
        address=f"10.0.{node // 250}.{node % 250 + 1}",
        ranks=(node * gpus, node * gpus + gpus - 1),
        state="there",
        cpu=round(dice.uniform(0.15, 0.3), 3),
        memory_bytes=int(dice.uniform(180, 240) * GIB),
        memory_total_bytes=int(1007.6 * GIB),
        disk_free_bytes=int(dice.uniform(2.1, 2.2) * 1e12),
        net_in=dice.uniform(6e9, 8e9) if not city else dice.uniform(2e6, 60e6),
        net_out=dice.uniform(6e9, 8e9) if not city else dice.uniform(2e6, 60e6),
        skew_s=round(dice.gauss(0, 0.002), 4),
        heard_s=round(dice.uniform(0, 2), 1),
    )


def _link(dice: random.Random, city: str, source: str, target: str, measured: float) -> LinkRow:
    return LinkRow(
        cluster=city,
        source=source,
        target=target,
        measured=measured,
        measured_by="check",
        rtt_s=round(
            dice.uniform(0.00004, 0.00006) if measured > 1e9 else dice.uniform(0.021, 0.024), 6
        ),
        used=round(measured * dice.uniform(0.3, 0.7)),
        state="ok",
    )


def _cluster(dice: random.Random, city: str, step: int, clusters: int) -> ClusterRow:
    return ClusterRow(
        name=city,
        launcher="slurm" if city == "lyon" else "ssh",
        state="running",
        step=step,
        total_steps=4000,
        loss=round(2.1 + 8 * math.exp(-step / 160) + dice.gauss(0, 0.02), 4),
        tokens_per_second=round(65e3 * dice.uniform(0.97, 1.03)),
        outer_step=step // 50,
        inner_steps=step % 50,
        weight=1 / clusters,
        up_bytes=int(step * 1.31e7),
        down_bytes=int(step * 1.29e7),
        sync_s=round(dice.uniform(8, 12), 2),
        hidden_share=round(dice.uniform(0.95, 1), 3),
        lag=0,
        heard_s=round(dice.uniform(0, 2), 1),
    )


def _curve(step: int, seed: int = 0) -> list[Point]:
    every = max(1, step // 200)
    points = []
    for at in range(1, step + 1, every):
        noise = random.Random(at * 7 + seed).gauss(0, 0.03)
        loss = 2.1 + 0.1 * seed + 8 * math.exp(-at / (160 + 60 * seed)) + noise
        has_eval = at // every % 20 == 19
        points.append(
            Point(
                step=at,
                loss=round(loss, 4),
                tokens=at * 524288,
                elapsed_s=round(at * (3.9 + seed), 1),
                eval_loss=round(loss + 0.06, 4) if has_eval else None,
            )
        )
    return points


def _break(ranks: list[RankRow], links: list[LinkRow]) -> list[str]:
    """Mark some ranks; the notes that say so, the worst first."""
    notes = []
    marks = {
        0.35: ("dead", "it was killed by SIGKILL"),
        0.55: ("straggler", "the others wait for it: 0.9 s of each 4.0 s step"),
        0.75: ("throttled", "its card is slowed down by heat"),
        0.9: ("silent", "nothing is heard of it for 24 s"),
    }
    for place, (mark, note) in marks.items():
        index = int(place * len(ranks))
        old = ranks[index]
        if old.mark:
            continue
        changed: dict[str, object] = {"mark": mark, "note": note}
        if mark == "straggler":
            changed["parts"] = Parts(data_s=0.05, compute_s=3.5, communication_s=0.4, waiting_s=0)
        if mark == "throttled":
            changed |= {"throttle": "heat", "temperature_c": 91, "clock_mhz": 1120}
        if mark in ("dead", "silent"):
            changed |= {"heard_s": 24.0, "use": 0.0}
        ranks[index] = old.model_copy(update=changed)
        notes.append(f"rank {old.rank} on {old.host}: {note}")
    if links:
        last = links[-1]
        links[-1] = last.model_copy(update={"state": "slow: a tenth of what was measured"})
    return notes


def other(step: int, seed: int, name: str) -> Snapshot:
    """A run to compare with."""
    plain = made(step, clusters=1, faults=False, name=name)
    curve = _curve(step, seed)
    state = {"state": "finished", "loss": curve[-1].loss, "phase": ""}
    return plain.model_copy(
        update={"curve": tuple(curve), "run": plain.run.model_copy(update=state)}
    )


if __name__ == "__main__":
    sys.exit(run_top(cast("Watch", MovingWatch(Path(sys.argv[1])))))
