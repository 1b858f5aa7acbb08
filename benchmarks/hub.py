"""How fast a hub takes, averages and gives contributions, and how much memory it needs.

python benchmarks/hub.py [--smoke] [--clusters 3] [--mebibytes 64] [--codec int8] [--turns 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import torch

from isles.outer.client.api import HubApi
from isles.outer.codec import parse_codec
from isles.outer.messages import Join
from isles.run.join_line import JoinLine

PIECE = 1 << 20
DEADLINE_S = 300.0


def main() -> None:
    """Measure, print a table, and one line of JSON at the end."""
    parser = common.make_parser(__doc__)
    parser.add_argument("--clusters", type=int, default=3)
    parser.add_argument("--mebibytes", type=int, default=64, help="of a contribution")
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    if options.smoke:
        options.clusters, options.mebibytes, options.turns = 2, 1, 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = {"min_clusters": options.clusters, "dead_after_s": 600}
        (folder / "settings.json").write_text(json.dumps(settings))
        command = [sys.executable, "-m", "isles.outer.hub", str(folder / "state")]
        command += ["--run", "benchmark", "--settings", str(folder / "settings.json")]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            result = asyncio.run(_measure(options, folder, server.pid))
        finally:
            server.terminate()
            server.wait(DEADLINE_S)
    for key, value in result.items():
        print(f"{key:28} {value}")
    common.print_figures(result)


async def _measure(
    options: argparse.Namespace, folder: Path, pid: int
) -> dict[str, str | int | float]:
    line_file = folder / "state" / "join"
    end = time.monotonic() + DEADLINE_S
    while not line_file.exists():
        assert time.monotonic() < end, (folder / "log").read_text()
        await asyncio.sleep(0.05)
    line = JoinLine.read(line_file)
    codec = parse_codec(options.codec)
    count = max(1, options.mebibytes * 2**20 // codec.size(PIECE))
    files = [_write(folder, codec.text, rank, count) for rank in range(options.clusters)]
    size_bytes = files[0].stat().st_size
    clients = [HubApi(line, f"{rank:032x}") for rank in range(options.clusters)]
    seconds: dict[str, float] = {}
    for client in clients:
        await client.__aenter__()
    for rank, client in enumerate(clients):
        join = Join(
            id=client.id,
            name=f"cluster-{rank}",
            identity={},
            codec=codec.text,
            pieces=[[PIECE] * count],
            version=0,
            outer_params=["0" * 64],
        )
        await client.join(join, DEADLINE_S)
    before = _peak_bytes(pid)
    for outer_step in range(options.turns):
        start = time.monotonic()
        await asyncio.gather(
            *(
                client.contribute(
                    outer_step, file, tokens=1, steps=1, samples=[], deadline_s=DEADLINE_S
                )
                for client, file in zip(clients, files, strict=True)
            )
        )
        sent = time.monotonic()
        answer = await clients[0].wait_round(outer_step, DEADLINE_S)
        averaged = time.monotonic()
        await asyncio.gather(
            *(
                client.fetch_average(answer, folder / f"average-{rank}", DEADLINE_S)
                for rank, client in enumerate(clients)
            )
        )
        done = time.monotonic()
        now = {
            "upload": sent - start,
            "average": averaged - sent,
            "download": done - averaged,
            "turn": done - start,
        }
        for key, value in now.items():
            seconds[key] = min(value, seconds.get(key, value))
        for client in clients:
            await client.applied(outer_step, f"{outer_step:064x}", DEADLINE_S)
    for client in clients:
        await client.__aexit__(None, None, None)
    up = options.clusters * size_bytes / 1e6
    down = options.clusters * answer.size_bytes / 1e6
    return {
        "clusters": options.clusters,
        "codec": codec.text,
        "contribution_mb": round(size_bytes / 1e6, 1),
        "upload_mb_per_s": round(up / seconds["upload"]),
        "average_s": round(seconds["average"], 2),
        "average_mb_per_s": round(up / seconds["average"]),
        "download_mb_per_s": round(down / seconds["download"]),
        "whole_turn_s": round(seconds["turn"], 2),
        "server_peak_before_mb": round(before / 1e6),
        "server_peak_grew_mb": round((_peak_bytes(pid) - before) / 1e6),
        "cores": os.cpu_count() or 0,
    }


def _write(folder: Path, codec: str, rank: int, count: int) -> Path:
    """A contribution: one piece of random numbers, as often as it takes."""
    own = parse_codec(codec)
    values = torch.randn(PIECE, generator=torch.Generator().manual_seed(rank))
    encoded = torch.empty(own.size(PIECE), dtype=torch.uint8)
    own.encode(values, encoded)
    path = folder / f"part-{rank}"
    path.write_bytes(encoded.numpy().tobytes() * count)
    return path


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    main()
