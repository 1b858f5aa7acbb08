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
from socketserver import BaseServer
from typing import TYPE_CHECKING, Any, cast

from isles.errors import UserError
from isles.monitor.live import model
from isles.monitor.live.model import RankRow, Snapshot
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
def running(server: BaseServer) -> Iterator[None]:
    """A server answers, in a thread."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join(DEADLINE_S)


@contextmanager
def served(*watches: MadeWatch, port: int = 0) -> Iterator[Dashboard]:
    """The page of made watches."""
    with Dashboard([cast("Watch", watch) for watch in watches], port) as server, running(server):
        yield server


def made(
    step: int = 1240,
    *,
    clusters: int = 2,
    nodes: int = 1,
    gpus: int = 3,
    faults: bool = True,
    name: str = "wide-3",
) -> Snapshot:
    """A run on clusters of nodes; every number differs from that of the step before.

    With faults a rank is a straggler, one is throttled, one dead, one silent, as far as there are
    so many.
    """
    dice = random.Random(step)
    cities = CITIES[:clusters] if clusters > 1 else ("",)
    hosts: list[model.HostRow] = []
    ranks: list[RankRow] = []
    links: list[model.LinkRow] = []
    for city in cities:
        names = [f"{city or 'node'}-{node + 1:02d}" for node in range(nodes)]
        for node, host in enumerate(names):
            place = {"cluster": city, "node": node, "host": host}
            hosts.append(_host(dice, place, gpus))
            if nodes > 1:
                links.append(_link(dice, city, host, names[(node + 1) % nodes], 12.4e9))
            own = range(node * gpus, (node + 1) * gpus)
            ranks += [_rank(dice, place, rank, step) for rank in own]
        if city:
            links.append(_link(dice, city, city, "hub", 118e6))
    notes = _break(ranks, links) if faults else []
    waiting = {"round": step // 50, "waits_for": cities[1:2], "due_s": 41}
    head = {"name": name, "path": f"/data/runs/{name}", "state": "running", "phase": "training"}
    head |= {"step": step, "total_steps": 4000, "left_s": (4000 - step) * 3.9}
    head |= {"loss": _loss(dice, step), "tokens": step * 524288, "goodput": 0.9713}
    head |= {"tokens_per_second": round(131e3 * len(ranks) / 6 * dice.uniform(0.97, 1.03))}
    head |= {"begun_at": time.time() - step * 4.05, "saved_step": step - step % 200}
    head |= {"saved_age_s": step % 200 * 3.9 + 2, "restarts": 1}
    head |= {"last_restart": f"{hosts[0].host} was lost"}
    return Snapshot(
        version="0.1.0",
        at=time.time(),
        run=model.Head(**head, **_drawn(dice, mfu=(0.41, 0.44, 4))),
        curve=tuple(_curve(step)),
        clusters=tuple(_cluster(dice, city, step, clusters) for city in cities if city),
        hub=model.HubRow(address="hub.example.org:7777", **waiting) if clusters > 1 else None,
        hosts=tuple(hosts),
        ranks=tuple(ranks),
        links=tuple(links),
        notes=tuple(notes),
    )


def _drawn(dice: random.Random, **ranges: tuple[float, float, int]) -> dict[str, Any]:
    """A number of each range, with so many digits."""
    return {name: round(dice.uniform(*ends), digits) for name, (*ends, digits) in ranges.items()}


def _usual_loss(step: int, seed: int = 0) -> float:
    return 2.1 + 0.1 * seed + 8 * math.exp(-step / (160 + 60 * seed))


def _loss(dice: random.Random, step: int) -> float:
    return round(_usual_loss(step) + dice.gauss(0, 0.02), 4)


def _rank(dice: random.Random, place: dict[str, Any], rank: int, step: int) -> RankRow:
    memory, peak = dice.uniform(58, 62), dice.uniform(66, 70)
    parts = _drawn(dice, data_s=(0.01, 0.06, 4), compute_s=(2.9, 3.1, 4))
    parts |= _drawn(dice, communication_s=(0.2, 0.4, 4), waiting_s=(0.6, 0.9, 4))
    about = {"device": "NVIDIA H100 80GB HBM3", "rank": rank, "pid": 4000 + rank, "step": step}
    about |= {"stage": "forward and backward", "rows": 32, "micro_batch": 8}
    about |= {"memory_bytes": int(memory * GIB), "peak_bytes": int(peak * GIB)}
    figures = _drawn(dice, stage_s=(0, 3, 2), use=(0.93, 1, 3), heard_s=(0, 2, 1))
    figures |= _drawn(dice, temperature_c=(58, 67, 0), power_w=(610, 690, 0))
    figures |= _drawn(dice, clock_mhz=(1830, 1980, 0))
    more = {"limit_bytes": int(79.6 * GIB), "parts": model.StepSeconds(**parts)}
    return RankRow(**place, **about, **figures, **more)


def _host(dice: random.Random, place: dict[str, Any], gpus: int) -> model.HostRow:
    node, rate = place["node"], (2e6, 60e6, 0) if place["cluster"] else (6e9, 8e9, 0)
    about = {"address": f"10.0.{node // 250}.{node % 250 + 1}", "state": "there"}
    about |= {"ranks": (node * gpus, node * gpus + gpus - 1), "skew_s": dice.gauss(0, 0.002)}
    about |= {"memory_bytes": int(dice.uniform(180, 240) * GIB)}
    about |= {"memory_total_bytes": int(1007.6 * GIB)}
    about |= {"disk_free_bytes": int(dice.uniform(2.1, 2.2) * 1e12)}
    figures = _drawn(dice, cpu=(0.15, 0.3, 3), heard_s=(0, 2, 1), net_in=rate, net_out=rate)
    return model.HostRow(**place, **about, **figures)


def _link(
    dice: random.Random, city: str, source: str, target: str, measured: float
) -> model.LinkRow:
    ends = {"cluster": city, "source": source, "target": target, "state": "ok"}
    used = {"used": round(measured * dice.uniform(0.3, 0.7)), "measured_by": "check"}
    figures = _drawn(dice, rtt_s=(0.00004, 0.00006, 6) if measured > 1e9 else (0.021, 0.024, 6))
    return model.LinkRow(**ends, **used, **figures, measured=measured)


def _cluster(dice: random.Random, city: str, step: int, clusters: int) -> model.ClusterRow:
    about = {"name": city, "launcher": "slurm" if city == "lyon" else "ssh", "state": "running"}
    about |= {"step": step, "total_steps": 4000, "loss": _loss(dice, step), "lag": 0}
    about |= {"outer_step": step // 50, "inner_steps": step % 50, "weight": 1 / clusters}
    about |= {"up_bytes": int(step * 1.31e7), "down_bytes": int(step * 1.29e7)}
    figures = _drawn(dice, sync_s=(8, 12, 2), hidden_share=(0.95, 1, 3), heard_s=(0, 2, 1))
    speed = _drawn(dice, tokens_per_second=(63e3, 67e3, 0))
    return model.ClusterRow(**about, **figures, **speed)


def _curve(step: int, seed: int = 0) -> list[model.Point]:
    every = max(1, step // 200)
    points = []
    for at in range(1, step + 1, every):
        loss = _usual_loss(at, seed) + random.Random(at * 7 + seed).gauss(0, 0.03)
        eval_loss = round(loss + 0.06, 4) if at // every % 20 == 19 else None
        about = {"tokens": at * 524288, "elapsed_s": round(at * (3.9 + seed), 1)}
        points.append(model.Point(step=at, loss=round(loss, 4), eval_loss=eval_loss, **about))
    return points


def _break(ranks: list[RankRow], links: list[model.LinkRow]) -> list[str]:
    """Mark some ranks; the notes that say so, the worst first."""
    gone = {"heard_s": 24.0, "use": 0.0}
    slow = {
        "parts": model.StepSeconds(data_s=0.05, compute_s=3.5, communication_s=0.4, waiting_s=0)
    }
    hot = {"throttle": "heat", "temperature_c": 91, "clock_mhz": 1120}
    notes = []
    for place, mark, note, changes in (
        (0.35, "dead", "it was killed by SIGKILL", gone),
        (0.55, "straggler", "the others wait for it: 0.9 s of each 4.0 s step", slow),
        (0.75, "throttled", "its GPU is throttled by heat", hot),
        (0.9, "silent", "nothing is heard of it for 24 s", gone),
    ):
        old = ranks[index := int(place * len(ranks))]
        if not old.mark:
            ranks[index] = old.model_copy(update={"mark": mark, "note": note, **changes})
            notes.append(f"rank {old.rank} on {old.host}: {note}")
    if links:
        slower = {"state": "slow: a tenth of what was measured"}
        links[-1] = links[-1].model_copy(update=slower)
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
