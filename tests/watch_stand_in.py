"""A stand-in for what `isles top` shows: a run that is made up and moves, in a terminal of its own.

    python -m tests.watch_stand_in FOLDER RANKS

FOLDER/error: why its data is old, from then on. FOLDER/stopped is written where it is told to stop.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

from isles.errors import UserError
from isles.monitor.live.model import (
    ClusterRow,
    Head,
    HostRow,
    HubRow,
    LinkRow,
    Mark,
    Parts,
    Point,
    RankRow,
    Snapshot,
)
from isles.monitor.live.top import run_top

GIB = 2**30
MARKS: dict[int, tuple[Mark, str]] = {
    1: ("straggler", "the others wait for it: 0.55 s of each 1.42 s step"),
    4: ("throttled", "its card is slowed down by heat: 91 °C, 280 W, 1080 MHz"),
    5: ("dead", "its process was ended by signal 9 (SIGKILL)"),
}


class WatchStandIn:
    """Has the methods of `isles.monitor.live.source.Watch`."""

    typed, stop_means = "made-up-1", "All its ranks save a checkpoint, and end."

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._folder, self._num_ranks = folder, num_ranks
        self._last: Snapshot | None = None
        self._begun = time.monotonic()
        self.said: list[str] = []

    @property
    def error(self) -> str:
        path = self._folder / "error"
        return path.read_text() if path.exists() else ""

    @property
    def latest(self) -> Snapshot | None:
        """A new one every 2 s."""
        if not self.error:
            number = int((time.monotonic() - self._begun) / 2)
            if self._last is None or self._last.run.step != 1200 + number:
                self._last = made_up(number, self._num_ranks)
        return self._last

    def stack(self, row: RankRow) -> str:
        if row.rank == 5:
            raise UserError("rank 5 has not said within 20 s where it stands", fix="it is frozen")
        lines = [f'  File "train/loop.py", line {n}, in train' for n in range(1, 61)]
        return "\n".join([f"rank {row.rank} on {row.host}: step 1200, forward", *lines])

    def log_lines(self, row: RankRow, count: int) -> list[str]:
        return [f"\x1b[32mINFO\x1b[0m rank={row.rank} line={n}" for n in range(count)]

    def stop(self, now: bool) -> int:
        (self._folder / "stopped").write_text(f"now={now}")
        self.said.append("waiting: saves a checkpoint")
        return 0


def made_up(number: int, num_ranks: int) -> Snapshot:
    """The run after some steps: two clusters, three hosts, some ranks marked."""
    step = 1200 + number
    ranks = tuple(_rank(rank, step, num_ranks) for rank in range(num_ranks))
    hosts = sorted({(row.cluster, row.node, row.host) for row in ranks})
    return Snapshot(
        at=time.time(),
        run=Head(
            name="made-up-1",
            state="running",
            phase="training",
            step=step,
            total_steps=5000,
            left_s=5400 - number,
            loss=2.3412,
            tokens_per_second=41_234,
            mfu=0.381,
            goodput=0.972,
            saved_step=1000,
            saved_age_s=284 + 2 * number,
            restarts=1,
            last_restart="rank 5 on b1 was ended by signal 9 (SIGKILL)",
        ),
        curve=tuple(
            Point(step=s, loss=2.2 + 6 * math.exp(-s / 200) + 0.1 * math.sin(s / 9))
            for s in range(1, step, 5)
        ),
        clusters=tuple(
            ClusterRow(
                name=name,
                launcher="ssh",
                state="running",
                step=step,
                total_steps=5000,
                loss=2.34,
                tokens_per_second=20_617.0,
                outer_step=12,
                inner_steps=37,
                weight=weight,
                up_bytes=12_000_000,
                down_bytes=24_000_000,
                sync_s=3.2,
                hidden_share=0.94,
                lag=0,
                heard_s=1.0,
            )
            for name, weight in (("berlin", 0.66), ("oslo", 0.34))
        ),
        hub=HubRow(address="10.0.0.1:4433", round=12, waits_for=("oslo",), due_s=21.0),
        hosts=tuple(
            HostRow(
                cluster=cluster,
                node=node,
                host=host,
                address=f"10.0.0.{node + 1}",
                ranks=(2 * node, 2 * node + 1),
                state="there",
                cpu=0.31,
                memory_bytes=97 * GIB,
                memory_total_bytes=512 * GIB,
                disk_free_bytes=820 * GIB,
                net_in=1.2e8,
                net_out=1.3e8,
                skew_s=0.002,
                heard_s=1.0,
            )
            for cluster, node, host in hosts
        ),
        ranks=ranks,
        links=(
            LinkRow(
                cluster="berlin",
                source="a1",
                target="a2",
                measured=1.17e9,
                measured_by="check",
                rtt_s=2e-4,
                used=6.2e8,
                state="ok",
            ),
            LinkRow(cluster="oslo", source="b1", target="the hub", used=2e6, state="ok"),
        ),
        notes=tuple(
            f"rank {row.rank} of {row.cluster} on {row.host}: {row.note}"
            for row in sorted(ranks, key=lambda row: row.mark != "dead")
            if row.mark
        ),
    )


def _rank(rank: int, step: int, num_ranks: int) -> RankRow:
    mark, note = MARKS.get(rank, ("", ""))
    share = 1.0 if mark == "straggler" else 0.6 + 0.01 * (step % 3)
    return RankRow(
        cluster="berlin" if rank < 2 * (num_ranks // 3) else "oslo",
        rank=rank,
        node=rank // 2,
        host=("a1", "a2", "b1")[rank // 2] if num_ranks == 6 else f"gpu-node-{rank // 8:04d}",
        device="NVIDIA H100 80GB HBM3",
        rows=8,
        micro_batch=2,
        step=step,
        stage="forward and backward",
        stage_s=0.4,
        use=0.0 if mark == "dead" else 0.97 - 0.05 * (rank % 4),
        memory_bytes=int(61.2 * GIB),
        peak_bytes=int(70.1 * GIB),
        limit_bytes=int(79.6 * GIB),
        temperature_c=91 if mark == "throttled" else 61 + rank % 16,
        power_w=280 if mark == "throttled" else 412 + rank % 7,
        clock_mhz=1080 if mark == "throttled" else 1980,
        throttle="heat" if mark == "throttled" else "",
        parts=Parts(
            data_s=0.03,
            compute_s=0.9 * share,
            communication_s=0.1 + 0.39 - 0.9 * (share - 0.6),
            waiting_s=0.37 - 0.9 * (share - 0.6),
        ),
        heard_s=42.0 if mark == "dead" else 1.0,
        pid=4100 + rank,
        mark=mark,
        note=note,
    )


if __name__ == "__main__":
    sys.exit(run_top(WatchStandIn(Path(sys.argv[1]), int(sys.argv[2]))))  # type: ignore[arg-type]
